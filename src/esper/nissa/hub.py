"""The hub: hands every event to every output, at once and in order. It never drops or delays an event, and
changes nothing but that it stamps the round under way on events that name none.

The level decides what is recorded, before a number is given out, so the numbers that an output sees have no
gap:

    0 off      nothing
    1 minimal  what happened to the run: start, end, rounds, updates, actions, outcomes, rollbacks, alerts,
    checkpoints
    2 normal   all of the log; step events go only to outputs with `wants_step_events = True`, and take no
    number
    3 debug    step events join the log: numbered, to every output

A step event outside the log arrives with the number of the log's next event, its position. An event numbered
c thus cuts both alike: what was emitted before it has at most c, what came after has more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Self

from esper.leyline import STEP_TABLES, EsperError, OutputBackend, TelemetryEvent, TelemetryEventType, allowed

OFF, MINIMAL, NORMAL, DEBUG = LEVELS = range(4)

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
    {
        kind: DEBUG if kind in STEP_TABLES else MINIMAL if kind in _MINIMAL_EVENTS else NORMAL
        for kind in TelemetryEventType
    }
)
"""The lowest level at which an event enters the numbered log."""


class TelemetryError(EsperError):
    """An event could not be recorded, or what was recorded cannot be read."""


class TelemetryHub:
    """Synchronous fan-out for one run, used from one thread. Events that come while there is no output take
    no number."""

    def __init__(self, outputs: Iterable[OutputBackend] = (), *, level: int = NORMAL) -> None:
        """`level` and `round_idx` may be changed later."""
        if level not in LEVELS:
            raise TelemetryError(f"hub: level is {level!r}; {allowed(LEVELS)} (off, minimal, normal, debug)")
        self.level = level
        self.next_seq = 0
        self.round_idx: int | None = None
        self._outputs: list[OutputBackend] = []
        self._step_outputs: list[OutputBackend] = []
        for output in outputs:
            self.add_output(output)

    def add_output(self, output: OutputBackend) -> None:
        """Add an output behind the others; it sees only what comes after."""
        self._outputs.append(output)
        if getattr(output, "wants_step_events", False):
            self._step_outputs.append(output)

    @contextmanager
    def attached(self, *outputs: OutputBackend) -> Iterator[Self]:
        """Outputs for the duration of one run, closed when it ends, however it ends. Numbers go on where
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
        """Record an event. If an output fails, the others still get it, then TelemetryError names the failed
        one."""
        seq, kind = self.next_seq, event.event_type
        if self.level >= LOG_LEVEL[kind]:
            outputs = self._outputs
            self.next_seq += bool(outputs)
        elif kind in STEP_TABLES and self.level >= NORMAL:
            outputs = self._step_outputs
        else:
            return
        if event.round_idx is None and self.round_idx is not None:
            event = replace(event, round_idx=self.round_idx)
        _each(outputs, lambda output: output.emit(seq, event), f"event {seq} ({kind.value}) was not recorded")

    def flush(self) -> None:
        """Put everything emitted so far where a kill cannot take it away."""
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
    """The process's hub; at first without outputs. The trainer and tests may pass hubs explicitly instead."""
    return TelemetryHub()
