"""Emitters: the payload that each event carries is the one that the registry describes, and nothing else."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from esper.leyline import (
    EVENTS,
    HEAD_NAMES,
    OP_NAMES,
    AlphaAlgorithm,
    AlphaCurve,
    EpisodeOutcome,
    EsperError,
    FactoredAction,
    GateFailure,
    GateLevel,
    GateReason,
    GateResult,
    LifecycleOp,
    TelemetryEvent,
    TelemetryEventType,
)
from esper.leyline.metrics import FieldKind
from esper.nissa import TelemetryHub
from esper.simic.agent.ppo_metrics import PPOUpdateMetrics
from esper.simic.attribution import CoalitionTable
from esper.simic.contracts import ActionOutcome, ActionSpec
from esper.simic.rewards import RewardComponentsTelemetry
from esper.simic.telemetry import TelemetryConfig, TelemetryLevel, collect_per_layer_gradients, emitters
from esper.simic.telemetry.debug_telemetry import LayerGradientStats
from esper.simic.telemetry.emitters import (
    aggregate_layer_gradient_health,
    apply_slot_telemetry,
    check_performance_degradation,
    compute_grad_norm_surrogate,
    emit_action_distribution,
    emit_attribution,
    emit_batch_completed,
    emit_cf_unavailable,
    emit_episode_outcome,
    emit_last_action,
    emit_mask_hit_rates,
    emit_ppo_update_event,
    emit_reward_summary,
    emit_throughput,
    emit_with_env_context,
)
from esper.tolaria.governor import Veto
from memory_output import MemoryOutput

CHECKS = {
    FieldKind.FLOAT: lambda v: type(v) in (float, int),
    FieldKind.INT: lambda v: type(v) is int,
    FieldKind.FLAG: lambda v: type(v) is bool,
    FieldKind.TEXT: lambda v: isinstance(v, str),
    FieldKind.TEXTS: lambda v: isinstance(v, list) and all(isinstance(i, str) for i in v),
    FieldKind.NUMBERS: lambda v: all(type(i) in (float, int) for i in v.values()),
    FieldKind.COUNTS: lambda v: all(type(i) is int for i in v.values()),
    FieldKind.FLAGS: lambda v: all(type(i) is bool for i in v.values()),
}
MASK = dict.fromkeys(OP_NAMES, True)


@pytest.fixture
def hub() -> TelemetryHub:
    memory = MemoryOutput()
    hub = TelemetryHub([memory], level=3)
    hub.memory, hub.round_idx = memory, 7
    return hub


def only(hub: TelemetryHub) -> TelemetryEvent:
    """The one event; its payload has fields that the registry knows, of the kinds that it names."""
    ((_, event),) = hub.memory.events
    known = {f.name: f.kind for f in EVENTS[event.event_type].fields}
    assert event.data.keys() <= known.keys()
    for name, value in event.data.items():
        assert value is None or CHECKS[known[name]](value), f"{name} is {value!r}"
    assert event.round_idx is not None
    return event


def metrics(**changes: Any) -> PPOUpdateMetrics:
    values: dict[str, Any] = {}
    for f in fields(PPOUpdateMetrics):
        if "tuple" in str(f.type):
            values[f.name] = tuple(range(8))
        else:
            values[f.name] = 3 if f.type == "int" else 0.5
    return PPOUpdateMetrics(**values | changes)


def spec(op: LifecycleOp, veto: Veto | None = None) -> ActionSpec:
    return ActionSpec(
        env_idx=0,
        op=op,
        slot_id="r0c1",
        slot_index=1,
        blueprint_id="norm",
        algorithm=AlphaAlgorithm.ADD,
        ramp_curve=AlphaCurve.LINEAR,
        tempo_epochs=3,
        alpha_target=1.0,
        alpha_steps=0,
        alpha_curve=AlphaCurve.LINEAR,
        alpha_steepness=12.0,
        veto=veto,
    )


def test_every_emitter_is_exported_in_order() -> None:
    assert emitters.__all__[:13] == [
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
    ]
    assert {n for n in vars(emitters) if n.startswith("emit_")} <= set(emitters.__all__)


def test_env_context(hub: TelemetryHub) -> None:
    emit_with_env_context(hub, TelemetryEvent(event_type=TelemetryEventType.ROLLBACK, epoch=3), 2, "cpu")
    event = only(hub)
    assert (event.env_id, event.device, event.epoch, event.round_idx) == (2, "cpu", 3, 7)


def test_batch_completed(hub: TelemetryHub) -> None:
    emit_batch_completed(
        hub,
        4,
        80,
        0.5,
        60.0,
        55.0,
        1e-3,
        0.02,
        "BLENDING",
        "r0c1",
        TelemetryLevel.NORMAL,
        rounds=10,
        avg_committed_accuracy=58.0,
        avg_objective=0.55,
        avg_added_params=156.0,
        rollbacks=1,
        env_steps=1920,
        baseline_accuracy=80.0,
        seconds=3.0,
        phase_seconds={"train": 2.0, "update": 0.5},
    )
    event = only(hub)
    assert event.round_idx == 4
    expected = {
        "round_idx": 4,
        "rounds": 10,
        "episodes_completed": 80,
        "avg_reward": 0.5,
        "avg_accuracy": 60.0,
        "avg_val_accuracy": 55.0,
        "avg_committed_accuracy": 58.0,
        "avg_objective": 0.55,
        "env_steps": 1920,
        "accuracy_drop": 0.25,
        "degraded": True,
        "train_seconds": 2.0,
        "update_seconds": 0.5,
        "sense_seconds": None,
        "seed_stage": "BLENDING",
        "active_slot": "r0c1",
        "telemetry_level": "normal",
        "learning_rate": 1e-3,
    }
    assert {name: event.data[name] for name in expected} == expected
    assert event.data.keys() == {f.name for f in EVENTS[TelemetryEventType.BATCH_COMPLETED].fields}


def test_a_round_without_a_baseline_has_no_drop(hub: TelemetryHub) -> None:
    emit_batch_completed(hub, 0, 16, 0.5, 60.0, 55.0, None, None, None, None, TelemetryLevel.MINIMAL)
    data = only(hub).data
    assert (data["accuracy_drop"], data["degraded"], data["rounds"]) == (None, None, None)


def test_unknown_phase(hub: TelemetryHub) -> None:
    with pytest.raises(EsperError, match=r"phases \['lunch'\] are unknown; allowed: train, validate"):
        emit_batch_completed(
            hub,
            0,
            1,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            None,
            None,
            TelemetryLevel.NORMAL,
            phase_seconds={"lunch": 1.0},
        )


@pytest.mark.parametrize(
    ("op", "relevant"),
    [
        ("WAIT", {}),
        (
            "GERMINATE",
            {
                "slot": "r0c1",
                "blueprint": "conv_small",
                "style": "LINEAR_MULTIPLY",
                "tempo": 8,
            },
        ),
        (
            "SET_ALPHA_TARGET",
            {
                "slot": "r0c1",
                "style": "LINEAR_MULTIPLY",
                "alpha_target": 0.7,
                "alpha_speed": 5,
                "alpha_curve": "SIGMOID_SHARP",
            },
        ),
        ("PRUNE", {"slot": "r0c1", "alpha_speed": 5, "alpha_curve": "SIGMOID_SHARP"}),
        ("FOSSILIZE", {"slot": "r0c1"}),
        ("ADVANCE", {"slot": "r0c1"}),
    ],
)
def test_last_action_shows_only_what_the_operation_uses(
    hub: TelemetryHub, op: str, relevant: dict[str, Any]
) -> None:
    indices = FactoredAction.from_indices(1, 6, 1, 2, 1, 2, 4, OP_NAMES.index(op)).to_indices()
    outcome = ActionOutcome(spec=spec(LifecycleOp[op]), executed=True, effective_op=LifecycleOp[op])
    emit_last_action(
        hub,
        3,
        "cpu",
        op,
        "r0c1",
        0.1,
        0.7,
        MASK,
        TelemetryLevel.NORMAL,
        indices=indices,
        outcome=outcome,
        log_prob=-2.0,
        value=0.4,
        op_probs=[0.5, 0.1, 0.1, 0.1, 0.1, 0.1],
        confidences=[0.1 * i for i in range(8)],
        epoch=5,
    )
    event = only(hub)
    heads = ("slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
    assert {name: event.data[name] for name in heads if event.data[name] is not None} == relevant
    assert event.data["confidences"] == {
        h: 0.1 * i for i, h in enumerate(HEAD_NAMES) if h in relevant or h == "op"
    }
    assert event.data["op_probs"] == dict(zip(OP_NAMES, [0.5, 0.1, 0.1, 0.1, 0.1, 0.1], strict=True))
    assert (event.env_id, event.epoch, event.slot_id) == (3, 5, relevant.get("slot"))
    assert (event.data["executed"], event.data["veto"], event.data["gate_failures"]) == (True, None, [])
    assert event.data.keys() == {f.name for f in EVENTS[TelemetryEventType.LAST_ACTION].fields}


def test_last_action_says_why_it_was_refused(hub: TelemetryHub) -> None:
    gate = GateResult(GateLevel.G5, (GateFailure(GateReason.CONTRIBUTION_LOW, 0.1, 1.0),))
    outcome = ActionOutcome(
        spec=spec(LifecycleOp.FOSSILIZE, Veto.GATE_SHUT),
        executed=False,
        effective_op=LifecycleOp.WAIT,
        gate=gate,
    )
    emit_last_action(
        hub, 0, "cpu", "FOSSILIZE", "r0c0", 0.0, 0.0, MASK, TelemetryLevel.NORMAL, outcome=outcome
    )
    data = only(hub).data
    assert (data["executed"], data["veto"], data["gate_failures"]) == (
        False,
        "gate_shut",
        ["contribution_low"],
    )
    assert (data["op_probs"], data["blueprint"]) == (None, None)


@pytest.mark.parametrize("level", [TelemetryLevel.OFF, TelemetryLevel.MINIMAL])
def test_last_action_below_normal(hub: TelemetryHub, level: TelemetryLevel) -> None:
    emit_last_action(hub, 0, "cpu", "WAIT", None, 0.0, 0.0, MASK, level)
    assert hub.next_seq == 0


def test_the_mask_is_copied(hub: TelemetryHub) -> None:
    mask = {"WAIT": True}
    emit_last_action(hub, 0, "cpu", "WAIT", None, 0.0, 0.0, mask, TelemetryLevel.NORMAL)
    mask["WAIT"] = False
    assert only(hub).data["mask"] == {"WAIT": True}


def test_grad_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    assert compute_grad_norm_surrogate(model) == 0.0
    model[0](torch.ones(5, 3)).pow(2).sum().backward()
    expected = math.sqrt(sum(float(g) ** 2 for p in model[0].parameters() for g in p.grad.flatten()))
    assert compute_grad_norm_surrogate(model) == pytest.approx(expected, rel=1e-12)
    model[0].weight.grad.fill_(1e30)
    model[0].bias.grad.zero_()
    assert compute_grad_norm_surrogate(model) == pytest.approx(math.sqrt(12) * 1e30, rel=1e-6)


def layer(zero: float = 0.0, nonfinite: int = 0) -> LayerGradientStats:
    return LayerGradientStats("x", zero, nonfinite)


def test_layer_health() -> None:
    stats = [layer(), layer(zero=0.95), layer(zero=0.9), layer(nonfinite=1), layer(nonfinite=3)]
    assert aggregate_layer_gradient_health(stats) == {
        "layer_health": 2 / 5,
        "dead_layers": 1,
        "nonfinite_layers": 2,
    }
    assert aggregate_layer_gradient_health([])["layer_health"] == 1.0


@pytest.mark.parametrize("level", [TelemetryLevel.NORMAL, TelemetryLevel.DEBUG])
def test_ppo_update(hub: TelemetryHub, level: TelemetryLevel) -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    emit_ppo_update_event(hub, metrics(entropy=1.25), collect_per_layer_gradients(model), level)
    data = only(hub).data
    assert data["entropy"] == 1.25
    assert data["head_kl"] == {head: i for i, head in enumerate(HEAD_NAMES)}
    assert data.get("layer_health") == (1.0 if level is TelemetryLevel.DEBUG else None)
    assert {f.name for f in fields(PPOUpdateMetrics)} <= data.keys()


def test_action_distribution(hub: TelemetryHub) -> None:
    counts = {"WAIT": 5, "PRUNE": 2}
    emit_action_distribution(hub, counts, {"PRUNE": 1})
    counts["WAIT"] = 99
    assert only(hub).data == {"action_counts": {"WAIT": 5, "PRUNE": 2}, "action_successes": {"PRUNE": 1}}
    with pytest.raises(EsperError, match=r"successes of \['JUMP'\] without counts; allowed: WAIT, PRUNE"):
        emit_action_distribution(hub, counts, {"JUMP": 1})


def test_mask_hit_rates(hub: TelemetryHub) -> None:
    emit_mask_hit_rates(hub, {"PRUNE": {"hits": 3, "total": 4}, "ADVANCE": {"hits": 0, "total": 0}})
    assert only(hub).data == {
        "hits": {"PRUNE": 3, "ADVANCE": 0},
        "totals": {"PRUNE": 4, "ADVANCE": 0},
        "hit_rates": {"PRUNE": 0.75},
    }
    for wrong in ({"hits": 5, "total": 4}, {"hits": 1}, {"hits": -1, "total": 2}):
        with pytest.raises(EsperError, match="mask statistics of PRUNE are"):
            emit_mask_hit_rates(hub, {"PRUNE": wrong})


def test_cf_unavailable(hub: TelemetryHub) -> None:
    emit_cf_unavailable(hub, 1, "cpu", "no blended seed", epoch=4)
    assert only(hub).data == {"reason": "no blended seed"}


def test_throughput(hub: TelemetryHub) -> None:
    emit_throughput(hub, 1, "cpu", 10.0, 320.0, None, epoch=2)
    assert only(hub).data == {
        "batches_per_second": 10.0,
        "samples_per_second": 320.0,
        "gpu_utilization": None,
    }


def test_reward_summary(hub: TelemetryHub) -> None:
    components = RewardComponentsTelemetry(objective=0.5, shaping=-0.125)
    emit_reward_summary(hub, 1, "cpu", components, components.total, epoch=2)
    data = only(hub).data
    assert data == {"components": {"objective": 0.5, "shaping": -0.125}, "total_reward": 0.375}
    assert list(data["components"]) == ["objective", "shaping"]


@pytest.mark.parametrize(
    ("current", "baseline", "threshold", "expected"),
    [
        (95.0, 100.0, 0.05, (False, 0.05)),
        (94.0, 100.0, 0.05, (True, 0.06)),
        (110.0, 100.0, 0.05, (False, -0.1)),
        (0.5, 1.0, 0.4, (True, 0.5)),
        (3.0, 0.0, 0.05, (False, 0.0)),
        (99.9, 100.0, 0.0, (True, 0.001)),
    ],
)
def test_degradation(current: float, baseline: float, threshold: float, expected: tuple[bool, float]) -> None:
    degraded, drop = check_performance_degradation(current, baseline, threshold)
    assert degraded is expected[0]
    assert drop == pytest.approx(expected[1])


def test_degradation_refuses_nonsense() -> None:
    for baseline, threshold in ((-1.0, 0.1), (1.0, -0.1)):
        with pytest.raises(EsperError, match="must be 0 or more"):
            check_performance_degradation(1.0, baseline, threshold)


@pytest.mark.parametrize("level", TelemetryLevel)
def test_slot_telemetry(level: TelemetryLevel) -> None:
    recorded: dict[str, Any] = {}
    apply_slot_telemetry(recorded, TelemetryConfig(level=level), 3, 27)
    assert recorded == {"lifecycle": level >= 2, "epoch": 3, "global_epoch": 27}


def test_attribution(hub: TelemetryHub) -> None:
    scores = {
        frozenset(): (1.0, 50.0),
        frozenset({"a"}): (1.0, 60.0),
        frozenset({"b"}): (1.0, 52.0),
        frozenset({"a", "b"}): (1.0, 70.0),
    }
    emit_attribution(hub, 2, "cpu", CoalitionTable(scores, frozenset({"a"})), epoch=24)
    assert only(hub).data == {
        "slots": ["a", "b"],
        "accuracy": 70.0,
        "host_accuracy": 50.0,
        "committed_accuracy": 60.0,
        "leave_one_out": {"a": 18.0, "b": 10.0},
        "shapley": {"a": 14.0, "b": 6.0},
        "shapley_error": {"a": 0.0, "b": 0.0},
        "interactions": {"a+b": 8.0},
    }


def test_episode_outcome(hub: TelemetryHub) -> None:
    outcome = EpisodeOutcome(
        env_id=5,
        task="digits_shift",
        episode_idx=9,
        epochs=24,
        final_accuracy=80.0,
        committed_accuracy=75.0,
        objective=0.7,
        total_reward=0.6,
        host_params=438,
        added_params=156,
        germinated=2,
        fossilized=1,
        pruned=1,
        rollbacks=0,
    )
    emit_episode_outcome(hub, outcome, device="cpu")
    event = only(hub)
    assert (event.env_id, event.epoch) == (5, 24)
    assert event.data.keys() == {f.name for f in EVENTS[TelemetryEventType.EPISODE_OUTCOME].fields}
    assert EpisodeOutcome(env_id=5, **event.data) == outcome
