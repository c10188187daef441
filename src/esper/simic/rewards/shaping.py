"""Φ: what J would come to if growth ended here. It is a function of the state alone, so paying its discounted
change leaves the best policy where it was."""

from __future__ import annotations

from collections.abc import Iterable

from esper.leyline import LIVE_STAGES, ObjectiveConfig, SeedStage, SeedStateReport, objective
from esper.simic.contracts import EnvMeasure


def potential(now: EnvMeasure, prices: ObjectiveConfig, *, live_share: float, unproven: float = 0.0) -> float:
    """A mean of two J: of the fossils alone, and of the network if all its blended seeds were made permanent,
    the latter weighted by `live_share` and less `unproven` points. Seeds that have not been measured count
    for nothing yet; only those that are gone, or on their way out, count as wasted."""
    staying = staying_seeds(now)
    counted = [r for r in staying if r.slot_id in now.contributions]
    wasted = now.germinated - now.fossilized - len(staying)
    committed = _value(now, prices, now.committed_accuracy, now.committed_params, wasted)
    if not counted:
        return committed
    params = now.committed_params + sum(r.metrics.params for r in counted)
    present = _value(now, prices, _present_accuracy(now, counted), params, wasted)
    return (1.0 - live_share) * committed + live_share * (present - unproven / 100.0)


def staying_seeds(now: EnvMeasure) -> list[SeedStateReport]:
    """Live seeds, without those that a prune is ramping down."""
    return [
        r
        for r in now.reports.values()
        if r.stage in LIVE_STAGES and not (r.stage is SeedStage.BLENDING and r.alpha_target == 0.0)
    ]


def _value(now: EnvMeasure, prices: ObjectiveConfig, accuracy: float, params: int, wasted: int) -> float:
    # Rollbacks are paid where they happen.
    return objective(
        prices,
        committed_accuracy=accuracy / 100.0,
        added_params=params,
        host_params=now.host_params,
        wasted_seeds=wasted,
        rollbacks=0,
    )


def _present_accuracy(now: EnvMeasure, counted: Iterable[SeedStateReport]) -> float:
    """This epoch's accuracy was measured before the action; without the seeds that it removed, by
    leave-one-out. That is exact for one seed; for several that go in one epoch it is an estimate, which may
    leave the range."""
    here = {r.slot_id for r in counted} | {
        slot for slot, r in now.reports.items() if r.stage is SeedStage.FOSSILIZED
    }
    gone = sum(c for slot, c in now.contributions.items() if slot not in here)
    return min(max(now.accuracy - gone, 0.0), 100.0)
