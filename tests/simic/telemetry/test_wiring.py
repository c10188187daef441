"""Two real rounds, in the second of which every network breaks: every event type, field and alert rule must
be at work."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.leyline import EVENTS, METRICS, STEP_TABLES, TelemetryEventType
from esper.nissa import AlertEngine, RunDirectory, TelemetryHub, evaluate
from esper.nissa.alerts import RULES, event_parts
from esper.runtime.tasks import get_task_spec
from esper.simic.telemetry import TelemetryConfig, TelemetryLevel
from esper.simic.training.config import TrainingConfig
from esper.simic.training.vectorized import open_trainer, resolve_task

UNMEASURED = {
    "run_ended.message",
    "throughput.gpu_utilization",
    "ppo_update.nonfinite",
    "batch_completed.seed_stage",
    "batch_completed.active_slot",
    "batch_completed.plan_gain",
    "batch_completed.explored_gain",
    "batch_completed.value_error",
}
"""Null in a fresh run on a CPU that ends well; stage and slot where no seed is left at the end of a round;
the last three without action values (`test_plan_learner.py` sees them)."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    directory: Path = tmp_path_factory.mktemp("wiring") / "run"
    config = TrainingConfig(
        task="digits_impaired",
        rounds=2,
        envs=8,
        episode_length=14,
        steps_per_epoch=2,
        val_size=48,
        batch_size=16,
        population=8,
        hidden=16,
        checkpoint_every=1,
        permissive_gates=True,
        seed=1,
        telemetry_dir=str(directory),
        telemetry=TelemetryConfig(level=TelemetryLevel.DEBUG),
    )
    with open_trainer(config, resolve_task(config, get_task_spec(config.task)), TelemetryHub()) as trainer:
        train_epoch = trainer.env.train_epoch

        def break_in_the_second_round(epoch: int) -> None:
            train_epoch(epoch)
            if (trainer.progress.round_idx, epoch) == (1, 3):
                for group in trainer.env.groups:
                    with torch.no_grad():
                        next(group.model.host.parameters()).fill_(torch.nan)

        trainer.env.train_epoch = break_in_the_second_round
        trainer.run()
    return RunDirectory.open(directory)


@pytest.fixture(scope="module")
def events(run: RunDirectory) -> list[dict[str, Any]]:
    return list(run.events())


def test_every_event_type_is_emitted(events: list[dict[str, Any]]) -> None:
    assert {event["event_type"] for event in events} == {kind.value for kind in TelemetryEventType}


def test_payloads_are_what_the_registry_says(events: list[dict[str, Any]]) -> None:
    for event in events:
        known = {field.name for field in EVENTS[TelemetryEventType(event["event_type"])].fields}
        assert event["data"].keys() <= known, event


def test_every_field_is_measured_at_least_once(events: list[dict[str, Any]]) -> None:
    seen = {
        f"{event['event_type']}.{name}"
        for event in events
        for name, value in event["data"].items()
        if value is not None or f"data.{name}" in event.get("nonfinite", ())
    }
    wanted = {name for name in METRICS if not name.startswith("round.")}
    assert wanted - seen <= UNMEASURED


def test_every_rule_is_evaluated_and_the_log_agrees_with_the_run(events: list[dict[str, Any]]) -> None:
    engine = AlertEngine()
    for event in events:
        engine.observe(*event_parts(event))
    assert engine.evaluated == {rule.code for rule in RULES}
    recorded = [event["data"]["code"] for event in events if event["event_type"] == "alert"]
    assert recorded == [alert.code for alert in evaluate(events)]
    assert "rollback_storm" in recorded


def test_every_event_knows_its_round(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert "round_idx" in event or event["event_type"] == "run_started", event
    closing = [i for i, event in enumerate(events) if event["event_type"] == "batch_completed"]
    for round_idx, end in enumerate(closing):
        after = {event["event_type"] for event in events[end + 1 :] if event.get("round_idx") == round_idx}
        assert after <= {"alert", "checkpoint", "run_ended"}


def test_tables_hold_what_the_log_holds(run: RunDirectory, events: list[dict[str, Any]]) -> None:
    for kind, table in STEP_TABLES.items():
        logged = [event for event in events if event["event_type"] == kind]
        rows = run.table(table).to_pylist()
        assert [row["seq"] for row in rows] == [event["seq"] for event in logged]
        for row, event in zip(rows, logged, strict=True):
            assert (row["round_idx"], row["env_id"], row["epoch"]) == (
                event["round_idx"],
                event["env_id"],
                event["epoch"],
            )
            for field in EVENTS[kind].fields:
                stored = row[field.name]
                value = event["data"].get(field.name)
                if isinstance(stored, float) and not math.isfinite(stored):
                    assert any(path.endswith(field.name) for path in event["nonfinite"])
                    stored = None  # as JSON has it
                assert (dict(stored) if isinstance(value, dict) else stored) == value


def test_each_step_has_one_row_of_each_kind(run: RunDirectory) -> None:
    steps = [(row["round_idx"], row["epoch"], row["env_id"]) for row in run.table("steps").to_pylist()]
    assert steps == [(r, epoch, env) for r in range(2) for epoch in range(1, 15) for env in range(8)]
    assert run.table("throughput").num_rows == len(steps)
