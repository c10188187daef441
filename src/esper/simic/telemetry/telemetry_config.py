"""How much a run records. The level decides what is written down, never what is measured: sensors are control
input."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from esper.leyline import EsperError, allowed, check_number


class TelemetryLevel(IntEnum):
    """The hub's levels by name."""

    OFF = 0
    MINIMAL = 1
    NORMAL = 2
    DEBUG = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """The level of a run, and for how long an anomaly raises it."""

    level: TelemetryLevel = TelemetryLevel.NORMAL
    escalation_rounds: int = 3
    """Rounds recorded at level debug after a round with an anomaly; 0: an anomaly changes nothing."""

    def __post_init__(self) -> None:
        if not isinstance(self.level, TelemetryLevel):
            names = (f"TelemetryLevel.{level.name}" for level in TelemetryLevel)
            raise EsperError(f"telemetry: level is {self.level!r}; {allowed(names)}")
        check_number("telemetry", "escalation_rounds", self.escalation_rounds, integer=True)

    def level_in(self, round_idx: int, last_anomaly: int | None) -> TelemetryLevel:
        """The level of a round, given the last round before it that had an anomaly. Level off stays off."""
        if self.level is TelemetryLevel.OFF or last_anomaly is None:
            return self.level
        return TelemetryLevel.DEBUG if 0 < round_idx - last_anomaly <= self.escalation_rounds else self.level
