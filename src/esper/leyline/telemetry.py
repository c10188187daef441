"""Events: what a run records about itself. Emitters build them, Nissa's hub orders and stores them."""

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
"""Step events, and the table that each fills. Emitted for every env at every step: rows of a table at level
normal, lines of the event log only at level debug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryEvent:
    """One thing that happened. The hub adds sequence number and time; env context is stamped by the
    emitter."""

    event_type: TelemetryEventType
    data: Mapping[str, Any] = field(default_factory=dict)
    round_idx: int | None = None
    env_id: int | None = None
    device: str | None = None
    epoch: int | None = None
    slot_id: str | None = None
    seed_id: str | None = None


class OutputBackend(Protocol):
    """A place where events go. `emit` is called in order, once per event, from the training thread.

    An output with a true attribute `wants_step_events` also receives step events at level normal."""

    def emit(self, seq: int, event: TelemetryEvent) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...
