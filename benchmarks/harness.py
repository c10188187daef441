"""Interleaved timing: both sides of a ratio run in turn, so that a noisy machine disturbs both alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a ratio with its goal, or a time for information (goal None)."""

    name: str
    value: float
    goal: float | None = None

    @property
    def held(self) -> bool:
        return self.goal is None or self.value <= self.goal


def _time(work: Work, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def interleave(
    ours: Work, other: Work, *, rounds: int = 15, seconds: float = 0.05
) -> tuple[float, float, float]:
    """Median of the ratios ours/other over rounds, and the median time of each in seconds.

    Each side is repeated until it fills about `seconds` per round; the two alternate in which goes first.
    """
    repeats = [max(1, round(seconds / max(_time(work, 2), 1e-6))) for work in (ours, other)]
    pairs = []
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            if i % 2:
                b = _time(other, repeats[1])
                a = _time(ours, repeats[0])
            else:
                a = _time(ours, repeats[0])
                b = _time(other, repeats[1])
            pairs.append((a, b))
    finally:
        gc.enable()
    return (
        statistics.median(a / b for a, b in pairs),
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
    )
