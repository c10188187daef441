"""The anomaly detector: listens to a run's events and reports, round by round, which alert rules are at
fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from esper.leyline import TelemetryEvent, TelemetryEventType
from esper.nissa.alerts import Alert, AlertEngine, event_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyReport:
    """Result of the alert rules for one round."""

    round_idx: int
    raised: tuple[Alert, ...] = ()
    """Alerts raised in this round."""
    last_anomaly: int | None = None
    """The last round, up to this one, that raised an alert or ended with a rule at fault; None if there was
    none."""


class AnomalyDetector:
    """An output of the hub. It depends on recorded events alone, so replaying the log of a run restores its
    state."""

    def __init__(self) -> None:
        self.engine = AlertEngine()
        self.report = AnomalyReport(round_idx=-1)
        """Report of the last finished round."""
        self._raised: list[Alert] = []

    def replay(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Observe the events so far of a run that is resumed."""
        for event in log:
            self._observe(event)

    def emit(self, seq: int, event: TelemetryEvent) -> None:
        self._observe(event)

    def _observe(self, event: TelemetryEvent | Mapping[str, Any]) -> None:
        kind, data, nonfinite = event_parts(event)
        self._raised += self.engine.observe(kind, data, nonfinite)
        if kind is TelemetryEventType.BATCH_COMPLETED:
            round_idx = data["round_idx"]
            last = round_idx if self.engine.active or self._raised else self.report.last_anomaly
            self.report = AnomalyReport(round_idx=round_idx, raised=tuple(self._raised), last_anomaly=last)
            self._raised = []

    def flush(self) -> None: ...

    def close(self) -> None: ...


__all__ = ["AnomalyDetector", "AnomalyReport"]
