"""What a term may look at: one step, what its env remembers, and the prices. And the sums that several terms
share."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, NamedTuple

from esper.leyline import (
    BLENDED_STAGES,
    LifecycleOp,
    LossRewardConfig,
    ObjectiveConfig,
    RentConfig,
    RewardConfig,
    StructureError,
)
from esper.simic.contracts import EnvMeasure, RewardInputs


@dataclass(slots=True)
class EnvMemory:
    """What one env carries from step to step: plain values only, so that a checkpoint can hold them."""

    epoch: int = 0
    open: bool = False
    """The segment has paid a step, and the next one continues it."""
    levels: dict[str, float] = field(default_factory=dict)
    """By term: the level at which its last step left a quantity whose changes are paid."""
    windows: dict[str, list[float]] = field(default_factory=dict)
    """By seed: its last contributions, newest last."""
    boosts: dict[str, list[float]] = field(default_factory=dict)
    """By seed: the strongest help that it had from others, and the epoch of that."""
    drips: dict[str, float] = field(default_factory=dict)
    """By fossil: what it pays per epoch for each unit of its bonus."""

    @classmethod
    def from_state(cls, state: Any) -> EnvMemory:
        """The inverse of `asdict`, strict."""
        kinds = {f.name: type(getattr(cls(), f.name)) for f in fields(cls)}
        if not isinstance(state, dict) or {name: type(value) for name, value in state.items()} != kinds:
            raise StructureError(
                f"reward memory: {state!r}, must have the fields "
                + ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
            )
        memory = cls(**deepcopy(state))
        lists = (*memory.windows.values(), *memory.boosts.values())
        if not all(isinstance(numbers, list) for numbers in lists) or not all(
            type(x) in (int, float) and math.isfinite(x)
            for x in (*memory.levels.values(), *memory.drips.values(), *chain.from_iterable(lists))
        ):
            raise StructureError(f"reward memory: {state!r}, must hold finite numbers")
        return memory


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one env in the eyes of the terms. Terms read everything and write only to the memory."""

    inputs: RewardInputs
    memory: EnvMemory
    config: RewardConfig
    loss: LossRewardConfig
    objective: ObjectiveConfig
    gamma: float

    @property
    def after(self) -> EnvMeasure:
        return self.inputs.after

    def acted(self, op: LifecycleOp) -> float | None:
        """This epoch's contribution of the seed that an executed `op` was about; None if it was not that, or
        not measured."""
        outcome = self.inputs.outcome
        return self.after.contributions.get(outcome.spec.slot_id) if outcome.effective_op is op else None

    def change(self, name: str, level: float, discount: float) -> float:
        """What a step pays for moving a level. Discounted like the rewards, a segment that begins and ends at
        0 pays nothing, whatever lies between."""
        old = self.memory.levels.get(name, 0.0)
        self.memory.levels[name] = level
        return discount * level - old


class RentAndShock(NamedTuple):
    """Parameters that pay rent, and the squared change of alpha weighted by size."""

    effective_params: float
    shock: float


def compute_rent_and_shock_inputs(
    before: EnvMeasure | None, after: EnvMeasure, config: RentConfig, *, min_age: int = 0
) -> RentAndShock:
    """Each blended seed of at least `min_age` epochs counts by its alpha, and its slot by a standing charge.
    A change of alpha counts by its square, so that a slow ramp shocks less than a jump."""
    blended = [
        r for r in after.reports.values() if r.stage in BLENDED_STAGES and r.metrics.epochs_total >= min_age
    ]
    effective = sum(config.slot_rent_ratio * after.host_params + r.alpha * r.metrics.params for r in blended)
    alphas = {r.seed_id: r.alpha for r in after.reports.values()}
    old = () if before is None else before.reports.values()
    shock = sum((alphas.get(r.seed_id, 0.0) - r.alpha) ** 2 * r.metrics.params for r in old)
    return RentAndShock(effective, shock / max(after.host_params, config.host_params_floor))


def rent_per_epoch(step: Step, weight: float, *, min_age: int = 0) -> float:
    """One epoch's part of what an episode at this size costs."""
    rent = step.config.rent
    params = compute_rent_and_shock_inputs(
        step.inputs.before, step.after, rent, min_age=min_age
    ).effective_params
    cost = weight * math.log1p(params / max(step.after.host_params, rent.host_params_floor))
    return min(cost, rent.max_rent) / step.inputs.max_epochs


def compute_scaffold_hindsight_credit(
    boost: float, improvement: float, *, delay: int, weight: float, gamma: float
) -> float:
    """Credit, when a seed is made permanent, for the help that it had `delay` epochs ago: 0 unless it was
    helped and improves the network (both in points), never more than `weight`."""
    if boost <= 0.0 or improvement <= 0.0:
        return 0.0
    return weight * math.tanh(0.1 * boost * improvement) * gamma**delay
