"""Terms of rewards: functions of one step of one env. Each returns an amount in units of J (1 is all of the
accuracy). A reward mode is a list of terms; see engine.py."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from msgspec import Meta

from esper.leyline import (
    BLENDED_STAGES,
    LIVE_STAGES,
    LifecycleKind,
    LifecycleOp,
    LifecycleRecord,
    LossRewardConfig,
    ObjectiveConfig,
    RentConfig,
    RewardConfig,
    SeedStage,
    objective,
)
from esper.simic.contracts import EnvMeasure, RewardInputs
from esper.simic.rewards.shaping import potential, roll_windows, staying_seeds, unproven_points

Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
LOSS_DISCOUNT = 1.0
"""The loss family pays undiscounted changes: then the sign of a step's reward is the sign of its
improvement, however small."""


@dataclass(slots=True)
class EnvMemory:
    """What one env remembers from step to step: plain values only, so that a checkpoint can store them."""

    epoch: int = 0
    open: bool = False
    """Whether the next step continues a segment."""
    levels: dict[str, Finite] = field(default_factory=dict)
    """By term: the last value of the quantity whose changes the term pays."""
    windows: dict[str, list[Finite]] = field(default_factory=dict)
    """By seed: its last contributions, newest last (`escrow`)."""
    boosts: dict[str, list[Finite]] = field(default_factory=dict)
    """By seed: the strongest help from other seeds, and the epoch of it (`hindsight`)."""
    drips: dict[str, Finite] = field(default_factory=dict)
    """By fossil: amount per epoch, before the factor tanh(contribution) (`drip`)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one env as the terms see it. Terms read everything and write only to the memory."""

    inputs: RewardInputs
    memory: EnvMemory
    config: RewardConfig
    loss: LossRewardConfig
    objective: ObjectiveConfig
    gamma: float

    @property
    def after(self) -> EnvMeasure:
        return self.inputs.after

    def pruned_points(self) -> float:
        """This epoch's contribution of the seed that an executed PRUNE acted on; 0 if there is none, or if
        the seed was not measured."""
        outcome = self.inputs.outcome
        if outcome.effective_op is not LifecycleOp.PRUNE:
            return 0.0
        return self.after.contributions.get(outcome.spec.slot_id, 0.0)

    def new_fossil(self) -> LifecycleRecord | None:
        """The seed that became permanent in this step, by an action or by the clock. There is at most one,
        and its contribution was measured in this epoch, because G5 demands it."""
        records = self.inputs.outcome.records
        return next((r for r in records if r.kind is LifecycleKind.FOSSILIZED), None)

    def change(self, name: str, level: float, discount: float) -> float:
        """discount · level − last level. With the discount of the rewards, a segment that begins and ends at
        level 0 pays 0 in total."""
        old = self.memory.levels.get(name, 0.0)
        self.memory.levels[name] = level
        return discount * level - old


class RentAndShock(NamedTuple):
    """Parameters that pay rent, and the squared change of alpha weighted by seed size."""

    effective_params: float
    shock: float


def compute_rent_and_shock_inputs(
    before: EnvMeasure | None, after: EnvMeasure, config: RentConfig, *, min_age: int = 0
) -> RentAndShock:
    """Each blended seed of at least `min_age` epochs counts with weight alpha, plus a fixed charge for its
    slot. A change of alpha is squared, so that a slow ramp costs less than a jump."""
    blended = [
        r for r in after.reports.values() if r.stage in BLENDED_STAGES and r.metrics.epochs_total >= min_age
    ]
    effective = sum(config.slot_rent_ratio * after.host_params + r.alpha * r.metrics.params for r in blended)
    alphas = {r.seed_id: r.alpha for r in after.reports.values()}
    old = () if before is None else before.reports.values()
    shock = sum((alphas.get(r.seed_id, 0.0) - r.alpha) ** 2 * r.metrics.params for r in old)
    return RentAndShock(effective, shock / max(after.host_params, config.host_params_floor))


def rent_per_epoch(step: Step, weight: float, *, min_age: int = 0) -> float:
    """One epoch's share of the rent of an episode at this size."""
    rent = step.config.rent
    params = compute_rent_and_shock_inputs(
        step.inputs.before, step.after, rent, min_age=min_age
    ).effective_params
    cost = weight * math.log1p(params / max(step.after.host_params, rent.host_params_floor))
    return min(cost, rent.max_rent) / step.inputs.max_epochs


def compute_scaffold_hindsight_credit(
    boost: float, improvement: float, *, delay: int, weight: float, gamma: float
) -> float:
    """Credit, when a seed becomes permanent, for help from other seeds `delay` epochs ago. 0 unless both
    `boost` and `improvement` (in points) are positive; at most `weight`."""
    if boost <= 0.0 or improvement <= 0.0:
        return 0.0
    return weight * math.tanh(0.1 * boost * improvement) * gamma**delay


# -- terms that follow J -------------------------------------------------------------------------------------


def _objective(step: Step) -> float:
    """J at the last epoch, without rollbacks: each rollback was charged when it happened."""
    now = step.after
    if not step.inputs.is_last:
        return 0.0
    return objective(
        step.objective,
        committed_accuracy=now.committed_accuracy / 100.0,
        added_params=now.committed_params,
        host_params=now.host_params,
        wasted_seeds=now.germinated - now.fossilized,
        rollbacks=0,
    )


def _potential(step: Step, unproven: float = 0.0) -> float:
    """γΦ(s′) − Φ(s). Φ is 0 before the first step of a segment and after the last epoch."""
    config = step.config
    level = 0.0
    if not step.inputs.is_last:
        level = config.potential_weight * potential(
            step.after, step.objective, live_share=config.live_share, unproven=unproven
        )
    return step.change("potential", level, step.gamma)


def _escrow(step: Step) -> float:
    """`potential` with the lowest contribution of each seed's window."""
    memory = step.memory
    memory.windows = roll_windows(memory.windows, step.after, step.config.escrow_window)
    return _potential(step, unproven_points(memory.windows))


# -- terms of the other modes --------------------------------------------------------------------------------


def _progress(step: Step) -> float:
    """Change of the committed accuracy."""
    return step.change(
        "progress", step.config.progress_weight * step.after.committed_accuracy / 100.0, step.gamma
    )


def _contribution(step: Step) -> float:
    """Change of the live seeds' total contribution. It is paid back when a seed is pruned, and when it
    becomes permanent: from then on `progress` counts it."""
    now = step.after
    points = sum(now.contributions.get(r.slot_id, 0.0) for r in staying_seeds(now))
    return step.change("contribution", step.config.contribution_weight * points / 100.0, step.gamma)


def _rent(step: Step) -> float:
    """Price of the network's size, each seed weighted by its alpha."""
    return -rent_per_epoch(step, step.config.rent.rent_weight)


def _alpha_shock(step: Step) -> float:
    """Price of abrupt changes of alpha."""
    rent = step.config.rent
    shock = compute_rent_and_shock_inputs(step.inputs.before, step.after, rent).shock
    return -min(rent.shock_coef * shock, rent.max_shock)


def _occupancy(step: Step) -> float:
    """Price of each seed beyond `free_slots`, permanent or not."""
    seeds = sum(
        r.stage in LIVE_STAGES or r.stage is SeedStage.FOSSILIZED for r in step.after.reports.values()
    )
    return -step.config.occupancy_cost * max(seeds - step.config.free_slots, 0) / step.inputs.max_epochs


def _intervention(step: Step) -> float:
    """Cost of an executed action. Fossilizing is free: J rewards it later, and a price now could make holding
    the better choice."""
    config = step.config
    return -{
        LifecycleOp.GERMINATE: config.germinate_cost,
        LifecycleOp.PRUNE: config.prune_cost,
        LifecycleOp.SET_ALPHA_TARGET: config.set_alpha_target_cost,
    }.get(step.inputs.outcome.effective_op, 0.0)


def _fossilize(step: Step) -> float:
    """Bonus when a seed that contributes becomes permanent, penalty for one that does harm."""
    fossil = step.new_fossil()
    if fossil is None:
        return 0.0
    return step.config.fossilize_bonus * math.tanh(step.after.contributions[fossil.slot_id])


def _fossilize_in_part(step: Step) -> float:
    """`fossilize` with a part of it deferred: `drip` pays that in equal shares until the episode ends."""
    inputs, fossil = step.inputs, step.new_fossil()
    if fossil is None or inputs.is_last:
        return _fossilize(step)
    dripping = step.config.drip_fraction
    share = dripping * step.config.fossilize_bonus / (inputs.max_epochs - inputs.epoch)
    step.memory.drips[fossil.seed_id] = share
    return (1.0 - dripping) * _fossilize(step)


def _drip(step: Step) -> float:
    """This epoch's shares of deferred bonuses, each times tanh of what the fossil contributes now."""
    now, drips = step.after, step.memory.drips
    slots = {r.seed_id: slot for slot, r in now.reports.items() if r.stage is SeedStage.FOSSILIZED}
    step.memory.drips = {seed_id: share for seed_id, share in drips.items() if seed_id in slots}
    return sum(
        share * math.tanh(now.contributions[slots[seed_id]]) for seed_id, share in step.memory.drips.items()
    )


def _prune(step: Step) -> float:
    """Bonus for pruning a seed that does harm, penalty for one that contributes; 0 for one not yet
    measured."""
    points = step.pruned_points()
    return math.tanh(-points) * (step.config.prune_penalty if points > 0.0 else step.config.prune_bonus)


def _hindsight(step: Step) -> float:
    """Credit for the strongest help that a seed had from others, paid when the seed becomes permanent: then a
    scaffold can be worth its waste price."""
    now, epoch, memory = step.after, step.inputs.epoch, step.memory
    present = {r.seed_id: r for r in now.reports.values()}
    memory.boosts = {seed_id: boost for seed_id, boost in memory.boosts.items() if seed_id in present}
    for seed_id, report in present.items():
        # Without company nothing was measured this epoch, and the report repeats an old figure.
        measured = report.slot_id in now.contributions and len(now.contributions) > 1
        boost = report.metrics.boost_received or 0.0
        old, since = memory.boosts.get(seed_id, (0.0, epoch))
        if measured and boost > 0.0 and boost >= old * step.gamma ** (epoch - since):
            memory.boosts[seed_id] = [boost, epoch]
    fossil = step.new_fossil()
    if fossil is None:
        return 0.0
    boost, since = memory.boosts.pop(fossil.seed_id, (0.0, epoch))
    points = now.contributions[fossil.slot_id]
    return compute_scaffold_hindsight_credit(
        boost, points, delay=int(epoch - since), weight=step.config.hindsight_weight, gamma=step.gamma
    )


# -- terms of the loss family --------------------------------------------------------------------------------
# A loss counts as exp(−loss): the geometric mean of the probability of the right answer. It is bounded, so
# nothing needs clipping and no swing of the loss can be exploited.


def _loss_improvement(step: Step) -> float:
    """Change of exp(−loss): improvements are paid, regressions charged."""
    level = step.loss.improvement_weight * _quality(step.after.loss)
    return step.change("loss_improvement", level, LOSS_DISCOUNT)


def _loss_rent(step: Step) -> float:
    """Price of the network's size; young seeds are free."""
    return -rent_per_epoch(step, step.loss.rent_weight, min_age=step.loss.grace_epochs)


def _terminal(step: Step) -> float:
    """exp(−loss) of the fossils alone, at the last epoch."""
    return step.loss.terminal_weight * _quality(step.after.committed_loss) if step.inputs.is_last else 0.0


def _quality(loss: float) -> float:
    """exp(−loss); 0 for a network whose loss is not a number."""
    return 0.0 if math.isnan(loss) else math.exp(-loss)


Term = Callable[[Step], float]
TERMS: dict[str, Term] = {
    "objective": _objective,
    "potential": _potential,
    "escrow": _escrow,
    "progress": _progress,
    "contribution": _contribution,
    "rent": _rent,
    "alpha_shock": _alpha_shock,
    "occupancy": _occupancy,
    "intervention": _intervention,
    "fossilize": _fossilize,
    "fossilize_in_part": _fossilize_in_part,
    "drip": _drip,
    "prune": _prune,
    "hindsight": _hindsight,
}
"""Built-in terms of the contribution family by name."""
LOSS_TERMS: dict[str, Term] = {
    "loss_improvement": _loss_improvement,
    "rent": _loss_rent,
    "terminal": _terminal,
}
