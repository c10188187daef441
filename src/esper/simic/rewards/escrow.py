"""Escrow: a contribution counts once it has lasted. Each live seed has a window of its last contributions,
and Φ counts the lowest of them."""

from __future__ import annotations

from collections.abc import Mapping

from esper.simic.contracts import EnvMeasure
from esper.simic.rewards.shaping import staying_seeds


def roll_windows(windows: Mapping[str, list[float]], now: EnvMeasure, size: int) -> dict[str, list[float]]:
    """The windows after this epoch's measurement; a seed that is gone has none."""
    seeds = {
        r.seed_id: now.contributions[r.slot_id] for r in staying_seeds(now) if r.slot_id in now.contributions
    }
    return {
        seed_id: [*windows.get(seed_id, []), contribution][-size:] for seed_id, contribution in seeds.items()
    }


def unproven_points(windows: Mapping[str, list[float]]) -> float:
    """By how much this epoch's contributions exceed the lowest of their windows."""
    return sum(window[-1] - min(window) for window in windows.values())
