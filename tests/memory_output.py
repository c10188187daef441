"""An output that tests can look into."""

from __future__ import annotations

from esper.leyline import TelemetryEvent


class MemoryOutput:
    """Keeps (seq, event) pairs in order."""

    def __init__(self, *, wants_step_events: bool = False) -> None:
        self.wants_step_events = wants_step_events
        self.events: list[tuple[int, TelemetryEvent]] = []

    def emit(self, seq: int, event: TelemetryEvent) -> None:
        self.events.append((seq, event))

    def flush(self) -> None: ...

    def close(self) -> None: ...
