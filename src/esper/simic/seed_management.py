"""Helpers of the training loop: advance a seed, resolve its slot, run updates, react to anomalies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING

from esper.leyline import (
    EsperError,
    SeedStage,
    SlotConfig,
    SlotIdError,
    TelemetryEventType,
    allowed,
    check_number,
)
from esper.simic.agent.ppo_metrics import PPOUpdateMetrics, aggregate
from esper.simic.telemetry.emitters import emit_event
from esper.simic.telemetry.telemetry_config import TelemetryConfig, TelemetryLevel

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from esper.kasmina import MorphogeneticModel, NetworkRow
    from esper.nissa import TelemetryHub
    from esper.simic.agent.normalization import RunningMeanStd
    from esper.simic.agent.ppo import PPOAgent
    from esper.simic.telemetry.anomaly_detector import AnomalyReport


def advance_active_seed(model: MorphogeneticModel | NetworkRow, slot_id: str) -> bool:
    """Advance a seed by one stage; a holding seed is fossilized. False if its gate is shut."""
    reports = model.reports()
    if slot_id not in reports:
        raise SlotIdError(f"slot {slot_id!r} holds no seed; {allowed(reports or ['none'])}")
    holding = reports[slot_id].stage is SeedStage.HOLDING
    return (model.fossilize(slot_id) if holding else model.advance(slot_id)).done


def resolve_target_slot(
    slot_idx: int, *, enabled_slots: Sequence[str], slot_config: SlotConfig
) -> tuple[str, int]:
    """The slot id at an index of the enabled slots, and its position in the network's order of slots."""
    if not 0 <= slot_idx < len(enabled_slots):
        raise SlotIdError(f"slot index {slot_idx} is out of range; {allowed(range(len(enabled_slots)))}")
    slot_id = enabled_slots[slot_idx]
    return slot_id, slot_config.index_for_slot_id(slot_id)


def calculate_entropy_anneal_steps(
    total_episodes: int, batches_per_episode: int, epochs_per_batch: int, anneal_fraction: float
) -> int:
    """Number of steps until the entropy weight reaches its end value: a fraction of all steps, rounded up."""
    for name, value in (
        ("total_episodes", total_episodes),
        ("batches_per_episode", batches_per_episode),
        ("epochs_per_batch", epochs_per_batch),
    ):
        check_number("entropy annealing", name, value, integer=True)
    if not 0.0 <= anneal_fraction <= 1.0:
        raise EsperError(f"entropy annealing: anneal_fraction is {anneal_fraction}, must lie in [0, 1]")
    # The decimal as written, not its binary approximation: 7 % of 100 steps are 7, not 8.
    return math.ceil(total_episodes * batches_per_episode * epochs_per_batch * Fraction(str(anneal_fraction)))


def aggregate_ppo_metrics(update_metrics: list[PPOUpdateMetrics]) -> PPOUpdateMetrics:
    """Combine the metrics of several updates, each field by its own reducer."""
    return aggregate(update_metrics)


def run_ppo_updates(
    agent: PPOAgent,
    ppo_updates_per_batch: int,
    raw_states: Sequence[npt.ArrayLike | Tensor],
    obs_normalizer: RunningMeanStd | None,
    use_amp: bool,
    *,
    imitate: bool = False,
) -> PPOUpdateMetrics:
    """Update the agent `ppo_updates_per_batch` times from the stored rollout, then empty it.

    `raw_states` (batches [N, …]) only update `obs_normalizer`, if there is one: the feature table normalises
    observations. `use_amp` must agree with the agent's own precision."""
    check_number("run_ppo_updates", "ppo_updates_per_batch", ppo_updates_per_batch, low=1, integer=True)
    if use_amp is not agent.config.bf16:
        raise EsperError(
            f"run_ppo_updates: use_amp is {use_amp}, but the agent acts with bf16={agent.config.bf16}; "
            "acting and learning must agree"
        )
    steps = agent.buffer.length
    updates = []
    for _ in range(ppo_updates_per_batch):
        agent.buffer.length = steps  # an update empties the buffer, but its rows are still there
        updates.append(agent.update(imitate=True) if imitate else agent.update())
    if obs_normalizer is not None:
        for states in raw_states:
            obs_normalizer.update(states)
    return aggregate_ppo_metrics(updates)


def handle_telemetry_escalation(
    anomaly_report: AnomalyReport, telemetry_config: TelemetryConfig
) -> TelemetryLevel:
    """The telemetry level of the round after the reported one."""
    return telemetry_config.level_in(anomaly_report.round_idx + 1, anomaly_report.last_anomaly)


def emit_anomaly_diagnostics(
    hub: TelemetryHub, anomaly_report: AnomalyReport, batch_idx: int, epoch_idx: int
) -> None:
    """Emit one event for each alert of the round."""
    for alert in anomaly_report.raised:
        emit_event(hub, TelemetryEventType.ALERT, asdict(alert), round_idx=batch_idx, epoch=epoch_idx)


__all__ = [  # noqa: RUF022  the order is a contract
    "advance_active_seed",
    "resolve_target_slot",
    "calculate_entropy_anneal_steps",
    "aggregate_ppo_metrics",
    "run_ppo_updates",
    "handle_telemetry_escalation",
    "emit_anomaly_diagnostics",
]
