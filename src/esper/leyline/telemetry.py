"""Events that a run records. Emitters build them; nissa's hub numbers them and passes them to outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol


class TelemetryEventType(StrEnum):
    RUN_STARTED = "run_started"
    RUN_ENDED = "run_ended"
    BATCH_COMPLETED = "batch_completed"
    PPO_UPDATE = "ppo_update"
    ACTION_DISTRIBUTION = "action_distribution"
    MASK_HIT_RATES = "mask_hit_rates"
    SEED_LIFECYCLE = "seed_lifecycle"
    ATTRIBUTION = "attribution"
    CF_UNAVAILABLE = "cf_unavailable"
    LAST_ACTION = "last_action"
    REWARD_SUMMARY = "reward_summary"
    THROUGHPUT = "throughput"
    EPISODE_OUTCOME = "episode_outcome"
    ROLLBACK = "rollback"
    ALERT = "alert"
    CHECKPOINT = "checkpoint"


STEP_TABLES: Mapping[TelemetryEventType, str] = MappingProxyType(
    {
        TelemetryEventType.LAST_ACTION: "steps",
        TelemetryEventType.REWARD_SUMMARY: "rewards",
        TelemetryEventType.THROUGHPUT: "throughput",
    }
)
"""Step events, which every env emits at every step, and the table that holds each. From level normal on they
are rows of the table; at level debug they are lines of the log as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryEvent:
    """One event. The hub adds sequence number and time; the emitter adds the env."""

    event_type: TelemetryEventType
    data: Mapping[str, Any] = field(default_factory=dict)
    round_idx: int | None = None
    env_id: int | None = None
    device: str | None = None
    epoch: int | None = None
    slot_id: str | None = None
    seed_id: str | None = None


class OutputBackend(Protocol):
    """Receives events. `emit` is called once per event, in order, from the training thread.

    An output whose attribute `wants_step_events` is true receives step events at level normal as well."""

    def emit(self, seq: int, event: TelemetryEvent) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...
