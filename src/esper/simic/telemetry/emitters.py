"""Functions that format and emit events. They never change training state; only
`compute_grad_norm_surrogate` waits for a device.

Payloads are described in leyline.metrics. The hub adds the round to events that name none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from esper.leyline import (
    ALPHA_SPEED_EPOCHS,
    ALPHA_TARGET_VALUES,
    HEAD_NAMES,
    METRICS,
    OP_NAMES,
    PHASES,
    RELEVANCE,
    TEMPO_EPOCHS,
    AlphaCurveAction,
    EpisodeOutcome,
    EsperError,
    GerminationStyle,
    SeedStateReport,
    TelemetryEvent,
    TelemetryEventType,
    allowed,
    blueprint_id,
)
from esper.simic.telemetry.debug_telemetry import LayerGradientStats
from esper.simic.telemetry.telemetry_config import TelemetryConfig, TelemetryLevel

if TYPE_CHECKING:
    from esper.nissa import TelemetryHub
    from esper.simic.agent.ppo_metrics import PPOUpdateMetrics
    from esper.simic.attribution import CoalitionTable
    from esper.simic.contracts import ActionOutcome
    from esper.simic.rewards import RewardComponentsTelemetry

DEAD_SHARE = 0.9
"""A layer is dead if a larger share of its gradient than this is zero."""
_VALUES: Mapping[str, Sequence[str | int | float]] = {
    "style": [style.name for style in GerminationStyle],
    "tempo": TEMPO_EPOCHS,
    "alpha_target": ALPHA_TARGET_VALUES,
    "alpha_speed": ALPHA_SPEED_EPOCHS,
    "alpha_curve": [curve.name for curve in AlphaCurveAction],
}
"""Values that the indices of parameter heads stand for; those of blueprints are in the registry."""


def emit_event(hub: TelemetryHub, kind: TelemetryEventType, data: Mapping[str, Any], **context: Any) -> None:
    """Emit a payload unchanged; `context` holds further fields of the event."""
    hub.emit(TelemetryEvent(event_type=kind, data=data, **context))


def emit_with_env_context(hub: TelemetryHub, event: TelemetryEvent, env_id: int, device: str) -> None:
    """Add the env to an event and emit it."""
    hub.emit(replace(event, env_id=env_id, device=device))


def emit_batch_completed(
    hub: TelemetryHub,
    batch_idx: int,
    episodes_completed: int,
    avg_reward: float,
    avg_accuracy: float,
    avg_val_accuracy: float,
    learning_rate: float | None,
    entropy_coef: float | None,
    seed_stage: str | None,
    active_slot: str | None,
    telemetry_level: TelemetryLevel,
    *,
    rounds: int | None = None,
    avg_committed_accuracy: float | None = None,
    avg_objective: float | None = None,
    avg_added_params: float | None = None,
    rollbacks: int | None = None,
    env_steps: int | None = None,
    baseline_accuracy: float | None = None,
    seconds: float | None = None,
    phase_seconds: Mapping[str, float] | None = None,
    objective_by_task: Mapping[str, float] | None = None,
    accuracy_by_task: Mapping[str, float] | None = None,
    baseline_by_task: Mapping[str, float] | None = None,
    plan_gain: float | None = None,
    explored_gain: float | None = None,
    value_error: float | None = None,
) -> None:
    """End a round, after all its other events. `baseline_accuracy` is the mean of earlier rounds. With
    `baseline_by_task` every task is compared with its own."""
    phases = phase_seconds or {}
    if unknown := phases.keys() - set(PHASES):
        raise EsperError(f"phases {sorted(unknown)} are unknown; {allowed(PHASES)}")
    limit = METRICS["batch_completed.accuracy_drop"].high
    assert limit is not None
    drops = {
        task: check_performance_degradation((accuracy_by_task or {})[task], baseline, limit)[1]
        for task, baseline in (baseline_by_task or {}).items()
    }
    drop, degraded = None, None
    if drops:
        drop = max(drops.values())
        degraded = drop > limit
    elif baseline_accuracy is not None:
        degraded, drop = check_performance_degradation(avg_accuracy, baseline_accuracy, limit)
    emit_event(
        hub,
        TelemetryEventType.BATCH_COMPLETED,
        {
            "round_idx": batch_idx,
            "rounds": rounds,
            "episodes_completed": episodes_completed,
            "avg_reward": avg_reward,
            "avg_accuracy": avg_accuracy,
            "avg_val_accuracy": avg_val_accuracy,
            "avg_committed_accuracy": avg_committed_accuracy,
            "avg_objective": avg_objective,
            "avg_added_params": avg_added_params,
            "rollbacks": rollbacks,
            "baseline_accuracy": baseline_accuracy,
            "accuracy_drop": drop,
            "degraded": degraded,
            "objective_by_task": objective_by_task,
            "accuracy_by_task": accuracy_by_task,
            "drop_by_task": drops or None,
            "plan_gain": plan_gain,
            "explored_gain": explored_gain,
            "value_error": value_error,
            "learning_rate": learning_rate,
            "entropy_coef": entropy_coef,
            "env_steps": env_steps,
            "seconds": seconds,
            **{f"{phase}_seconds": phases.get(phase) for phase in PHASES},
            "seed_stage": seed_stage,
            "active_slot": active_slot,
            "telemetry_level": telemetry_level.name.lower(),
        },
        round_idx=batch_idx,
    )


def emit_last_action(
    hub: TelemetryHub,
    env_id: int,
    device: str,
    action_type: str,
    target_slot: str | None,
    reward: float,
    cumulative_reward: float,
    action_mask: dict[str, bool],
    telemetry_level: TelemetryLevel,
    *,
    indices: Sequence[int] | None = None,
    outcome: ActionOutcome | None = None,
    log_prob: float | None = None,
    value: float | None = None,
    op_probs: Sequence[float] | None = None,
    confidences: Sequence[float] | None = None,
    seeds: Mapping[str, SeedStateReport] | None = None,
    gradient_ratios: Mapping[str, float] | None = None,
    accuracy: float | None = None,
    loss: float | None = None,
    epoch: int | None = None,
    considered: Mapping[str, Any] | None = None,
) -> None:
    """Emit one decision: `indices`, `op_probs` and `confidences` in the policy's order of heads and
    operations, the env's `seeds` after it, and fields that explain it (`considered`). Fields that the
    operation does not use are null. Nothing is emitted below level normal, because no output would keep
    it."""
    if telemetry_level < TelemetryLevel.NORMAL:
        return
    relevant = dict(zip(HEAD_NAMES, RELEVANCE[OP_NAMES.index(action_type)], strict=True))
    slot = target_slot if relevant["slot"] else None
    choices: dict[str, Any] = dict.fromkeys(("blueprint", *_VALUES))
    if indices is not None:
        sampled = dict(zip(HEAD_NAMES, indices, strict=True))
        choices |= {head: values[sampled[head]] for head, values in _VALUES.items() if relevant[head]}
        if relevant["blueprint"]:
            choices["blueprint"] = blueprint_id(sampled["blueprint"])
    executed, veto = None, None
    gate_failures: list[str] = []
    if outcome is not None:
        executed = outcome.executed
        veto = None if outcome.spec.veto is None else outcome.spec.veto.value
        if outcome.gate is not None:
            gate_failures = [failure.reason.value for failure in outcome.gate.failures]
    by_head = None
    if confidences is not None:
        by_head = {head: p for head, p in zip(HEAD_NAMES, confidences, strict=True) if relevant[head]}
    stages, alphas, contributions = None, None, None
    if seeds is not None:
        stages = {slot_id: int(seed.stage) for slot_id, seed in seeds.items()}
        alphas = {slot_id: seed.alpha for slot_id, seed in seeds.items()}
        contributions = {
            slot_id: seed.metrics.contribution
            for slot_id, seed in seeds.items()
            if seed.metrics.contribution is not None
        }
    emit_event(
        hub,
        TelemetryEventType.LAST_ACTION,
        {
            "op": action_type,
            "slot": slot,
            **choices,
            "executed": executed,
            "veto": veto,
            "gate_failures": gate_failures,
            "log_prob": log_prob,
            "value": value,
            "op_probs": None if op_probs is None else dict(zip(OP_NAMES, op_probs, strict=True)),
            "confidences": by_head,
            "accuracy": accuracy,
            "loss": loss,
            "reward": reward,
            "cumulative_reward": cumulative_reward,
            "mask": dict(action_mask),
            "stages": stages,
            "alphas": alphas,
            "contributions": contributions,
            "gradient_ratios": gradient_ratios,
            **dict.fromkeys(("slot_probs", "vetoes", "sensors", "observation")),
            **(considered or {}),
        },
        env_id=env_id,
        device=device,
        epoch=epoch,
        slot_id=slot,
    )


@torch.no_grad()
def compute_grad_norm_surrogate(model: nn.Module) -> float:
    """Norm of all gradients of a model; 0 if there are none. Computed in float64, because squares of large
    float32 numbers overflow. One transfer."""
    norms = [
        torch.linalg.vector_norm(p.grad, dtype=torch.float64)
        for p in model.parameters()
        if p.grad is not None
    ]
    return torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0


def aggregate_layer_gradient_health(layer_stats: list[LayerGradientStats]) -> dict[str, float]:
    """Number of layers whose gradient is dead or not finite, and the share of layers that are neither."""
    dead = [stats.zero_fraction > DEAD_SHARE for stats in layer_stats]
    nonfinite = [stats.nonfinite_count > 0 for stats in layer_stats]
    healthy = sum(not (is_dead or is_bad) for is_dead, is_bad in zip(dead, nonfinite, strict=True))
    return {
        "layer_health": healthy / len(layer_stats) if layer_stats else 1.0,
        "dead_layers": sum(dead),
        "nonfinite_layers": sum(nonfinite),
    }


def emit_ppo_update_event(
    hub: TelemetryHub,
    ppo_metrics: PPOUpdateMetrics,
    layer_stats: list[LayerGradientStats] | None,
    telemetry_level: TelemetryLevel,
    *,
    nonfinite: list[str] | None = None,
    clipped_grad_norm: float | None = None,
) -> None:
    """Emit one update. At level debug `layer_stats` adds the health of the policy's layers; `nonfinite` names
    what was not finite, if a step was skipped."""
    data = {f.name: getattr(ppo_metrics, f.name) for f in fields(ppo_metrics)}
    data |= {
        name: dict(zip(HEAD_NAMES, value, strict=True))
        for name, value in data.items()
        if isinstance(value, tuple)
    }
    if layer_stats is not None and telemetry_level >= TelemetryLevel.DEBUG:
        data |= aggregate_layer_gradient_health(layer_stats)
    if clipped_grad_norm is not None:
        data["clipped_grad_norm"] = clipped_grad_norm
    if nonfinite is not None:
        data["nonfinite"] = nonfinite
    emit_event(hub, TelemetryEventType.PPO_UPDATE, data)


def emit_action_distribution(
    hub: TelemetryHub, action_counts: dict[str, int], action_successes: dict[str, int]
) -> None:
    """Emit how many times each operation was sampled and carried out in a round."""
    if unknown := action_successes.keys() - action_counts.keys():
        raise EsperError(f"successes of {sorted(unknown)} without counts; {allowed(action_counts)}")
    emit_event(
        hub,
        TelemetryEventType.ACTION_DISTRIBUTION,
        {"action_counts": dict(action_counts), "action_successes": dict(action_successes)},
    )


def emit_cf_unavailable(
    hub: TelemetryHub, env_id: int, device: str, reason: str, *, epoch: int | None = None
) -> None:
    """Emit that no contribution could be measured, and the reason."""
    emit_event(
        hub, TelemetryEventType.CF_UNAVAILABLE, {"reason": reason}, env_id=env_id, device=device, epoch=epoch
    )


def emit_throughput(
    hub: TelemetryHub,
    env_id: int,
    device: str,
    batches_per_second: float,
    samples_per_second: float,
    gpu_utilization: float | None,
    *,
    epoch: int | None = None,
) -> None:
    """Emit the training speed of one env in an epoch. Utilization is None if it was not measured."""
    emit_event(
        hub,
        TelemetryEventType.THROUGHPUT,
        {
            "batches_per_second": batches_per_second,
            "samples_per_second": samples_per_second,
            "gpu_utilization": gpu_utilization,
        },
        env_id=env_id,
        device=device,
        epoch=epoch,
    )


def emit_reward_summary(
    hub: TelemetryHub,
    env_id: int,
    device: str,
    reward_components: RewardComponentsTelemetry,
    total_reward: float,
    *,
    epoch: int | None = None,
) -> None:
    """Emit the terms of one step's reward."""
    emit_event(
        hub,
        TelemetryEventType.REWARD_SUMMARY,
        {"components": dict(reward_components), "total_reward": total_reward},
        env_id=env_id,
        device=device,
        epoch=epoch,
    )


def emit_mask_hit_rates(hub: TelemetryHub, mask_stats: dict[str, dict[str, int]]) -> None:
    """Emit how often each operation was masked: {name: {"hits": times masked, "total": times computed}}."""
    for name, counts in mask_stats.items():
        if counts.keys() != {"hits", "total"} or not 0 <= counts["hits"] <= counts["total"]:
            raise EsperError(
                f"mask statistics of {name} are {counts}; allowed: hits from 0 to total, and total"
            )
    hits, totals = ({name: counts[key] for name, counts in mask_stats.items()} for key in ("hits", "total"))
    emit_event(
        hub,
        TelemetryEventType.MASK_HIT_RATES,
        {
            "hits": hits,
            "totals": totals,
            "hit_rates": {name: hits[name] / total for name, total in totals.items() if total},
        },
    )


def check_performance_degradation(
    current_accuracy: float, baseline_accuracy: float, threshold: float = 0.05
) -> tuple[bool, float]:
    """Whether accuracy is below the baseline by more than the share `threshold` of it, and the share
    (negative for a gain). The baseline must not include the current value. For a baseline of 0 the share is
    0."""
    if baseline_accuracy < 0 or threshold < 0:
        raise EsperError(
            f"baseline accuracy is {baseline_accuracy}, threshold {threshold}; both must be 0 or more"
        )
    drop = (baseline_accuracy - current_accuracy) / baseline_accuracy if baseline_accuracy else 0.0
    return drop > threshold, drop


def apply_slot_telemetry(
    slot_config: dict[str, Any], telemetry_config: TelemetryConfig, inner_epoch: int, global_epoch: int
) -> None:
    """Set what is recorded of a network's slots from now on: whether lifecycle events are, and the epochs
    that they carry."""
    slot_config.update(
        lifecycle=telemetry_config.level >= TelemetryLevel.NORMAL,
        epoch=inner_epoch,
        global_epoch=global_epoch,
    )


# -- attribution and outcomes --------------------------------------------------------------------------------


def emit_attribution(
    hub: TelemetryHub, env_id: int, device: str, table: CoalitionTable, *, epoch: int | None = None
) -> None:
    """Emit the contributions of all seeds, from the coalition table of one epoch."""
    shapley = table.shapley()
    pairs = {
        f"{a}+{b}": table.interaction(a, b) for a, b in combinations(table.slots, 2) if table.has_pairs(a)
    }
    emit_event(
        hub,
        TelemetryEventType.ATTRIBUTION,
        {
            "slots": list(table.slots),
            "accuracy": table.full.accuracy,
            "host_accuracy": table.empty.accuracy,
            "committed_accuracy": table.committed.accuracy,
            "leave_one_out": {s: table.leave_one_out(s) for s in table.slots},
            "shapley": {s: v.value for s, v in shapley.items()},
            "shapley_error": {s: v.standard_error for s, v in shapley.items()},
            "interactions": pairs,
        },
        env_id=env_id,
        device=device,
        epoch=epoch,
    )


def emit_episode_outcome(hub: TelemetryHub, outcome: EpisodeOutcome, *, device: str | None = None) -> None:
    """Emit the outcome of an episode, once, after all penalties."""
    data = asdict(outcome)
    emit_event(
        hub,
        TelemetryEventType.EPISODE_OUTCOME,
        data,
        env_id=data.pop("env_id"),
        device=device,
        epoch=outcome.epochs,
    )


__all__ = [  # noqa: RUF022  the order is a contract
    "emit_with_env_context",
    "emit_batch_completed",
    "emit_last_action",
    "compute_grad_norm_surrogate",
    "aggregate_layer_gradient_health",
    "emit_ppo_update_event",
    "emit_action_distribution",
    "emit_cf_unavailable",
    "emit_throughput",
    "emit_reward_summary",
    "emit_mask_hit_rates",
    "check_performance_degradation",
    "apply_slot_telemetry",
    "emit_attribution",
    "emit_episode_outcome",
    "emit_event",
]
