"""The hub passes every event to every output, synchronously and in order. It never drops or delays an event.
It changes one thing only: an event that names no round gets the current one.

The level decides what is recorded, before a sequence number is assigned, so the numbers that an output sees
have no gap:

    0 off      nothing
    1 minimal  the run itself: start, end, rounds, updates, actions, outcomes, rollbacks, alerts, checkpoints
    2 normal   also lifecycle, attribution and masks; step events go only to outputs that want them
               (`wants_step_events = True`) and take no number
    3 debug    also step events, numbered, to every output

A step event outside the log gets the number of the log's next event as its position. Truncating at seq c
therefore truncates log and tables consistently: rows emitted before event c have a position of at most c,
later ones a larger one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Final, Self

from esper.leyline import STEP_TABLES, EsperError, OutputBackend, TelemetryEvent, TelemetryEventType, allowed

OFF: Final = 0
MINIMAL: Final = 1
NORMAL: Final = 2
DEBUG: Final = 3
LEVELS: Final = {"off": OFF, "minimal": MINIMAL, "normal": NORMAL, "debug": DEBUG}

_MINIMAL_EVENTS = frozenset(
    {
        TelemetryEventType.RUN_STARTED,
        TelemetryEventType.RUN_ENDED,
        TelemetryEventType.BATCH_COMPLETED,
        TelemetryEventType.PPO_UPDATE,
        TelemetryEventType.ACTION_DISTRIBUTION,
        TelemetryEventType.EPISODE_OUTCOME,
        TelemetryEventType.ROLLBACK,
        TelemetryEventType.ALERT,
        TelemetryEventType.CHECKPOINT,
    }
)
LOG_LEVEL: Mapping[TelemetryEventType, int] = MappingProxyType(
    dict.fromkeys(TelemetryEventType, NORMAL)
    | dict.fromkeys(_MINIMAL_EVENTS, MINIMAL)
    | dict.fromkeys(STEP_TABLES, DEBUG)
)
"""The lowest level at which an event of each type enters the numbered log."""


class TelemetryError(EsperError):
    """An event could not be recorded, or a recorded run cannot be read."""


class TelemetryHub:
    """Synchronous fan-out for one run, used from one thread. Events emitted while there is no output take no
    number."""

    def __init__(self, outputs: Iterable[OutputBackend] = (), *, level: int = NORMAL) -> None:
        """`level` and `round_idx` may be changed later."""
        if level not in LEVELS.values():
            raise TelemetryError(f"hub: level is {level!r}; {allowed(LEVELS.values())} ({', '.join(LEVELS)})")
        self.level = level
        self.next_seq = 0
        self.round_idx: int | None = None
        self._outputs: list[OutputBackend] = []
        self._step_outputs: list[OutputBackend] = []
        for output in outputs:
            self.add_output(output)

    def add_output(self, output: OutputBackend) -> None:
        """Add an output after the others. It gets the events emitted from now on."""
        self._outputs.append(output)
        if getattr(output, "wants_step_events", False):
            self._step_outputs.append(output)

    @contextmanager
    def attached(self, *outputs: OutputBackend) -> Iterator[Self]:
        """Attach outputs for one run, and close them when it ends or fails. Sequence numbers continue where
        their log ends."""
        self.next_seq = max(
            (output.next_seq for output in outputs if hasattr(output, "next_seq")), default=self.next_seq
        )
        try:
            for output in outputs:
                self.add_output(output)
            yield self
        finally:
            self.round_idx = None
            for group in (self._outputs, self._step_outputs):
                group[:] = [output for output in group if not any(output is leaving for leaving in outputs)]
            _each(outputs, lambda output: output.close(), "close failed")

    def emit(self, event: TelemetryEvent) -> None:
        """Record an event. If an output fails, the others still get the event, then a TelemetryError names
        the failed output."""
        seq, kind = self.next_seq, event.event_type
        if self.level >= LOG_LEVEL[kind]:
            outputs = self._outputs
            if outputs:
                self.next_seq += 1
        elif kind in STEP_TABLES and self.level >= NORMAL:
            outputs = self._step_outputs
        else:
            return
        if event.round_idx is None and self.round_idx is not None:
            event = replace(event, round_idx=self.round_idx)
        _each(outputs, lambda output: output.emit(seq, event), f"event {seq} ({kind.value}) was not recorded")

    def flush(self) -> None:
        """Write everything emitted so far to disk, where it survives a kill."""
        _each(self._outputs, lambda output: output.flush(), "flush failed")


def _each(outputs: Iterable[OutputBackend], call: Callable[[OutputBackend], None], failure: str) -> None:
    failed: list[tuple[OutputBackend, Exception]] = []
    for output in outputs:
        try:
            call(output)
        except Exception as error:  # noqa: BLE001
            failed.append((output, error))
    if failed:
        reasons = "; ".join(f"{output!r}: {type(error).__name__}: {error}" for output, error in failed)
        raise TelemetryError(f"{failure}: {reasons}") from failed[0][1]


@cache
def get_hub() -> TelemetryHub:
    """The hub of this process, at first without outputs. A hub can also be passed explicitly instead."""
    return TelemetryHub()
