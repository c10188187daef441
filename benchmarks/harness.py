"""What every part of `make bench` uses: table rows, datasets, and interleaved timing.

Both sides of a ratio are timed in turn, so that a noisy machine disturbs both alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from esper.runtime.data import DataError, get_dataset, load_dataset

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a ratio with its goal, a time for information (goal None), or a row that could
    not be measured (value None, with the reason)."""

    name: str
    value: float | None
    goal: float | None = None
    skipped: str = ""
    at_least: bool = False
    """The goal is the smallest value that holds; otherwise the largest."""

    @property
    def held(self) -> bool:
        if self.goal is None or self.value is None:
            return True
        return self.value >= self.goal if self.at_least else self.value <= self.goal


class Datasets:
    """The datasets that rows ask for. A missing one is fetched once, if that is allowed."""

    def __init__(self, *, fetch: bool, say: Callable[[str], None]) -> None:
        self.fetch = fetch
        self.say = say
        self._why_missing: dict[str, str | None] = {}

    def why_missing(self, name: str) -> str | None:
        """None if the dataset can be loaded; otherwise the reason why rows that need it are skipped."""
        if name not in self._why_missing:
            self._why_missing[name] = self._provide(name)
        return self._why_missing[name]

    def _provide(self, name: str) -> str | None:
        try:
            load_dataset(name)
            return None
        except DataError as error:
            reason = str(error)
        if self.fetch:
            self.say(f"{name} is not on this machine; fetching it as `esper data get {name}` does")
            try:
                self.say(f"{name} is now in {get_dataset(name, report=self._report)}")
                return None
            except DataError as error:
                reason = str(error)
        return " ".join(reason.split())

    def _report(self, message: str, done: float | None) -> None:
        """Prints the steps of a fetch, not its progress."""
        if done is None:
            self.say(message)


def _time(work: Work, repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - start) / repeats


def interleave(
    ours: Work, other: Work, *, rounds: int = 75, seconds: float = 0.012
) -> tuple[float, float, float]:
    """Median of the ratios ours/other over rounds, and the median processor time of each in seconds.

    Each side is repeated until it fills about `seconds` per round; the two alternate in which goes first.
    Many short rounds: a processor whose clock or neighbours change disturbs few of the pairs.
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
