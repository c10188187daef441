"""An output that tests can look into."""

from __future__ import annotations

from esper.leyline import TelemetryEvent
from esper.simic.training import vectorized


class MemoryOutput:
    """Keeps (seq, event) pairs in order."""

    def __init__(self, *, wants_step_events: bool = False) -> None:
        self.wants_step_events = wants_step_events
        self.events: list[tuple[int, TelemetryEvent]] = []

    def emit(self, seq: int, event: TelemetryEvent) -> None:
        self.events.append((seq, event))

    def flush(self) -> None: ...

    def close(self) -> None: ...


class StopAfter(MemoryOutput):
    """Requests a stop at the first event of an epoch of a round."""

    def __init__(self, round_idx: int, epoch: int) -> None:
        super().__init__(wants_step_events=True)
        self.wanted = round_idx, epoch

    def emit(self, seq: int, event: TelemetryEvent) -> None:
        if (event.round_idx, event.epoch) == self.wanted:
            vectorized.request_stop()
