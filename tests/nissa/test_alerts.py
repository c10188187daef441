"""Alert rules: each fires on a fault of its kind, at its streak and not before, and a log gives the alerts of
its run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from esper.leyline import METRICS, TelemetryEvent, TelemetryEventType
from esper.nissa import Alert, AlertEngine, JsonlOutput, TelemetryError, TelemetryHub, evaluate, read_events
from esper.nissa.alerts import RULES, Severity
from memory_output import MemoryOutput

PPO = {
    "skipped_steps": 0,
    "log_prob_drift": 1e-6,
    "optimizer_steps": 24,
    "grad_norm_max": 2.0,
    "grad_norm": 0.8,
    "entropy": 1.5,
    "approx_kl_max": 0.04,
    "ratio_max": 1.6,
    "clip_fraction": 0.1,
    "value_loss": 0.3,
    "explained_variance": 0.4,
    "choice_fraction": 0.9,
    "nonfinite_layers": None,
}
BATCH = {"avg_reward": 0.6, "avg_accuracy": 70.0, "accuracy_drop": 0.01}
ACTIONS = {"WAIT": 60, "GERMINATE": 20, "PRUNE": 10, "ADVANCE": 10}
OUTCOMES = [{"germinated": 3, "fossilized": 1, "pruned": 1}] * 4

FAULTS: dict[str, dict[str, Any]] = {
    "nonfinite_metric": {"ppo": {"policy_loss": math.nan}},
    "skipped_steps": {"ppo": {"skipped_steps": 1}},
    "nonfinite_layer": {"ppo": {"nonfinite_layers": 2}},
    "log_prob_drift": {"ppo": {"log_prob_drift": 0.5}},
    "no_learning": {"ppo": {"optimizer_steps": 0}},
    "gradient_explosion": {"ppo": {"grad_norm_max": 1e4}},
    "gradient_vanishing": {"ppo": {"grad_norm": 1e-9}},
    "entropy_collapse": {"ppo": {"entropy": 0.01}},
    "kl_spike": {"ppo": {"approx_kl_max": 0.6}},
    "ratio_explosion": {"ppo": {"ratio_max": 80.0}},
    "clipping": {"ppo": {"clip_fraction": 0.8}},
    "value_collapse": {"ppo": {"value_loss": 40.0}},
    "critic_useless": {"ppo": {"explained_variance": -2.0}},
    "no_choice": {"ppo": {"choice_fraction": 0.0}},
    "accuracy_drop": {"batch": {"accuracy_drop": 0.3}},
    "rollback_storm": {"rollbacks": 3},
    "reward_explosion": {"batch": {"avg_reward": -500.0}},
    "all_wait": {"actions": {"WAIT": 1000}},
    "single_op": {"actions": {"WAIT": 10, "PRUNE": 90}},
    "failing_actions": {"successes": {"WAIT": 60, "GERMINATE": 1}},
    "stuck_seeds": {"outcomes": [{"germinated": 4, "fossilized": 0, "pruned": 0}] * 4},
}
BY_CODE = {rule.code: rule for rule in RULES}


def event(kind: str, **data: Any) -> TelemetryEvent:
    return TelemetryEvent(event_type=TelemetryEventType(kind), data=data)


def round_of(
    index: int,
    *,
    ppo: dict[str, Any] | None = None,
    batch: dict[str, Any] | None = None,
    actions: dict[str, int] | None = None,
    successes: dict[str, int] | None = None,
    rollbacks: int = 0,
    outcomes: list[dict[str, int]] | None = None,
) -> list[TelemetryEvent]:
    """A healthy round, but for what is given."""
    actions = actions or ACTIONS
    return [
        *(event("rollback", reason="collapse", loss=2.3, limit=2.2, amount=-0.1) for _ in range(rollbacks)),
        event("ppo_update", **{**PPO, **(ppo or {})}),
        event(
            "action_distribution",
            action_counts=actions,
            action_successes=actions if successes is None else successes,
        ),
        *(event("episode_outcome", **one) for one in (OUTCOMES if outcomes is None else outcomes)),
        event("batch_completed", **{**BATCH, "round_idx": index, **(batch or {})}),
    ]


def raised(rounds: list[list[TelemetryEvent]]) -> list[list[str]]:
    engine = AlertEngine()
    return [[a.code for e in one for a in engine.observe(e.event_type, e.data)] for one in rounds]


def test_a_fault_for_every_rule_and_a_rule_for_every_fault() -> None:
    assert FAULTS.keys() == BY_CODE.keys()
    assert len(BY_CODE) == len(RULES)


def test_healthy_rounds_raise_nothing() -> None:
    assert raised([round_of(i) for i in range(30)]) == [[]] * 30


def test_a_policy_that_only_germinates_is_healthy() -> None:
    assert raised([round_of(i, actions={"WAIT": 60, "GERMINATE": 40}) for i in range(8)]) == [[]] * 8


@pytest.mark.parametrize("code", FAULTS)
def test_a_rule_fires_once_at_its_streak_and_again_after_recovery(code: str) -> None:
    streak = BY_CODE[code].streak
    jump = code == "reward_explosion"  # what was a jump is the new normal
    faults = 1 if jump else streak + 2
    good, bad = [{}] * 12, [FAULTS[code]] * faults
    schedule = [*good, *bad, *good, *bad]
    found = raised([round_of(i, **fault) for i, fault in enumerate(schedule)])
    once = [[]] * 12 + [[]] * (streak - 1) + [[code]] + [[]] * (faults - streak)
    assert found == once + once


@pytest.mark.parametrize("code", [code for code, rule in BY_CODE.items() if rule.streak > 1])
def test_a_healthy_round_breaks_the_streak(code: str) -> None:
    almost = [FAULTS[code]] * (BY_CODE[code].streak - 1)
    assert raised([round_of(i, **fault) for i, fault in enumerate([*almost, {}, *almost, {}])]) == [[]] * (
        2 * len(almost) + 2
    )


def test_an_alert_says_what_was_found() -> None:
    (alert,) = evaluate(round_of(0, ppo={"skipped_steps": 2}))
    assert alert == Alert(
        "skipped_steps",
        Severity.ERROR,
        "ppo_update.skipped_steps",
        2.0,
        0,
        1,
        "Loss or gradient was not finite; the step was skipped.",
    )


def test_values_at_the_limit_are_sound() -> None:
    for rule in RULES:
        metric = METRICS[rule.metric]
        assert not metric.fault(rule.limit)
        assert metric.fault(rule.limit + (1.0 if metric.high is not None else -1.0))
        assert (metric.low is None) != (metric.high is None)


def test_what_is_active() -> None:
    engine = AlertEngine()
    for i in range(8):
        for e in round_of(i, **(FAULTS["kl_spike"] if i in (2, 3, 4, 5) else {})):
            engine.observe(e.event_type, e.data)
        assert list(engine.active) == (["kl_spike"] if i in (3, 4, 5) else [])
        if engine.active:
            assert engine.active["kl_spike"].streak == i - 1


def test_several_updates_in_a_round_count_one_by_one() -> None:
    update = event("ppo_update", **{**PPO, "clip_fraction": 0.9})
    assert [a.code for a in evaluate([update, update, update, *round_of(0)])] == ["clipping"]


def test_what_was_not_measured_is_not_judged() -> None:
    engine = AlertEngine()
    engine.observe(
        TelemetryEventType.BATCH_COMPLETED, {"round_idx": 0, "avg_reward": 1.0, "accuracy_drop": None}
    )
    assert engine.evaluated == {"nonfinite_metric"}
    for i in range(4):
        for e in round_of(i, ppo={"nonfinite_layers": 0}):
            engine.observe(e.event_type, e.data)
    assert engine.evaluated == BY_CODE.keys()


def test_figures_of_fields_that_a_log_lacks_are_not_made_up() -> None:
    engine = AlertEngine()
    for one in (
        event("action_distribution", action_counts=ACTIONS),
        event("episode_outcome", germinated=3),
        event("episode_outcome", germinated=4, fossilized=1, pruned=1),
        event("batch_completed", **BATCH),
    ):
        engine.observe(one.event_type, one.data)
    assert dict(engine.round) == {
        "nonfinite_metrics": 0.0,
        "wait_share": 0.6,
        "top_op_share": 0.25,
        "rollbacks_per_episode": 0.0,
        "unfinished_share": 0.5,
    }


def test_a_log_gives_the_alerts_of_its_run(tmp_path: Path) -> None:
    """Every fault, one after the other; NaN and both infinities, which a log holds as null."""
    faults = [fault for code, fault in FAULTS.items() for _ in range(BY_CODE[code].streak + 1)]
    faults += [{"ppo": {"entropy": value}} for value in (math.nan, math.inf, -math.inf)]
    faults += [{}, {"batch": {"avg_reward": math.nan}}, {}]
    events = [e for i, fault in enumerate(faults) for e in round_of(i, **fault)]
    with TelemetryHub().attached(JsonlOutput(tmp_path / "log")) as hub:
        for e in events:
            hub.emit(e)
    live, offline = evaluate(events), evaluate(read_events(tmp_path / "log"))
    assert {alert.code for alert in live} == BY_CODE.keys()
    assert live == offline


def test_alert_events_are_passed_over() -> None:
    memory = MemoryOutput()
    hub = TelemetryHub([memory])
    for e in [*round_of(0), event("alert", code="kl_spike"), *round_of(1)]:
        hub.emit(e)
    assert evaluate(e for _, e in memory.events) == []


@pytest.mark.parametrize(
    "line",
    [
        {"seq": 3},
        {"seq": 3, "event_type": "party", "data": {}},
        {"seq": 3, "event_type": "alert"},
        {"seq": 3, "event_type": "alert", "data": [1]},
    ],
)
def test_a_foreign_line_is_named(line: dict[str, Any]) -> None:
    with pytest.raises(
        TelemetryError, match=r"event 3: type .*allowed: run_started, run_ended, .*, with an object"
    ):
        evaluate([line])


def test_a_task_is_not_hidden_behind_the_others() -> None:
    """The worst task counts, and the alert names it."""
    fine = {"germinated": 3, "fossilized": 2, "pruned": 1, "rollbacks": 0}
    bad = {"germinated": 9, "fossilized": 0, "pruned": 0, "rollbacks": 1}
    outcomes = [{"task": "a", **fine}] * 6 + [{"task": "b", **bad}] * 2
    drops = {"accuracy_drop": 0.3, "drop_by_task": {"a": 0.3, "b": -0.1}}
    alerts = evaluate(
        [event for i in range(3) for event in round_of(i, rollbacks=2, outcomes=outcomes, batch=drops)]
    )
    assert {alert.code: (alert.value, alert.message.rpartition(". ")[2]) for alert in alerts} == {
        "rollback_storm": (1.0, "The worst task is b."),
        "stuck_seeds": (1.0, "The worst task is b."),
        "accuracy_drop": (0.3, "The worst task is a."),
    }


def test_an_alert_of_a_run_of_one_task_does_not_name_it() -> None:
    outcomes = [{"task": "a", "germinated": 3, "fossilized": 2, "pruned": 1, "rollbacks": 1}] * 4
    (alert,) = evaluate(round_of(0, rollbacks=4, outcomes=outcomes))
    assert alert.message == BY_CODE["rollback_storm"].sentence
