"""The loss family, for tasks where accuracy says little. A loss counts as exp(−loss): the probability that
the network gives to the right answer, as a geometric mean. It is bounded, so nothing needs clipping and no
swing of the loss can be farmed."""

from __future__ import annotations

import math

from esper.simic.rewards.telemetry import RewardComponentsTelemetry
from esper.simic.rewards.terms import Step, rent_per_epoch

LEVEL_DISCOUNT = 1.0
"""The sign of a step's reward is the sign of its improvement, however small."""


def compute_loss_reward(step: Step) -> RewardComponentsTelemetry:
    """Every improvement of the loss is paid, every regression charged, size pays rent, and the committed
    network counts at the end."""
    prices, now = step.loss, step.after
    return RewardComponentsTelemetry(
        loss_improvement=step.change(
            "loss_improvement", prices.improvement_weight * quality(now.loss), LEVEL_DISCOUNT
        ),
        rent=-rent_per_epoch(step, prices.rent_weight, min_age=prices.grace_epochs),
        terminal=prices.terminal_weight * quality(now.committed_loss) if step.inputs.is_last else 0.0,
    )


def quality(loss: float) -> float:
    """exp(−loss); 0 for a network whose loss is not a number."""
    return 0.0 if math.isnan(loss) else math.exp(-loss)
