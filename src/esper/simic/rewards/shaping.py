"""Φ, the potential of shaped rewards: an estimate of J if growth ended now. It is a function of the state
alone, so paying its discounted change does not alter the optimal policy. In `escrow` a contribution counts
once it has lasted: Φ takes the lowest one of a window of epochs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from esper.leyline import LIVE_STAGES, ObjectiveConfig, SeedStage, SeedStateReport, objective
from esper.simic.contracts import EnvMeasure


def potential(now: EnvMeasure, prices: ObjectiveConfig, *, live_share: float, unproven: float = 0.0) -> float:
    """Weighted mean of two J: of the fossils alone, and of the network if all its blended seeds became
    permanent. The second has weight `live_share` and is reduced by `unproven` points. Seeds without a
    measurement do not count yet. Only seeds that are gone, or being ramped down, count as wasted."""
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
    """This epoch's accuracy, measured before the action, minus the leave-one-out contributions of the seeds
    that the action removed. Exact for one seed. For several seeds in one epoch it is an estimate, which may
    leave the range."""
    here = {r.slot_id for r in counted} | {
        slot for slot, r in now.reports.items() if r.stage is SeedStage.FOSSILIZED
    }
    gone = sum(c for slot, c in now.contributions.items() if slot not in here)
    return min(max(now.accuracy - gone, 0.0), 100.0)


def roll_windows(windows: Mapping[str, list[float]], now: EnvMeasure, size: int) -> dict[str, list[float]]:
    """Each live seed's last `size` contributions after this epoch's measurement, newest last."""
    seeds = {
        r.seed_id: now.contributions[r.slot_id] for r in staying_seeds(now) if r.slot_id in now.contributions
    }
    return {
        seed_id: [*windows.get(seed_id, []), contribution][-size:] for seed_id, contribution in seeds.items()
    }


def unproven_points(windows: Mapping[str, list[float]]) -> float:
    """Sum over seeds of this epoch's contribution minus the lowest one of its window."""
    return sum(window[-1] - min(window) for window in windows.values())
