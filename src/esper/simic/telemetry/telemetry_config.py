"""How much a run records. The level decides what is recorded, never what is measured, because sensors are
input of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from esper.leyline import EsperError, allowed, check_number
from esper.nissa import hub


class TelemetryLevel(IntEnum):
    """The levels of the hub, which defines what each one records."""

    OFF = hub.OFF
    MINIMAL = hub.MINIMAL
    NORMAL = hub.NORMAL
    DEBUG = hub.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """The level of a run, and how long an anomaly raises it."""

    level: TelemetryLevel = TelemetryLevel.NORMAL
    """How much is recorded: off (nothing), minimal (rounds, updates, outcomes), normal (also lifecycle,
    attribution and steps) or debug (also gradients of the policy's layers and of seeds)."""
    escalation_rounds: int = 3
    """Number of rounds recorded at level debug after a round with an anomaly; 0 disables this."""

    def __post_init__(self) -> None:
        if not isinstance(self.level, TelemetryLevel):
            names = (f"TelemetryLevel.{level.name}" for level in TelemetryLevel)
            raise EsperError(f"telemetry: level is {self.level!r}; {allowed(names)}")
        check_number("telemetry", "escalation_rounds", self.escalation_rounds, integer=True)

    def level_in(self, round_idx: int, last_anomaly: int | None) -> TelemetryLevel:
        """The level of a round, given the last earlier round that had an anomaly. Level off stays off."""
        if self.level is TelemetryLevel.OFF or last_anomaly is None:
            return self.level
        raised = 0 < round_idx - last_anomaly <= self.escalation_rounds
        return TelemetryLevel.DEBUG if raised else self.level
