"""What a real run records is what happened: metrics, counts and outcomes against the run's own results."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from esper.leyline import HEAD_NAMES
from esper.nissa import TelemetryHub
from esper.simic import train_ppo_vectorized
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.ppo_metrics import PPOUpdateMetrics
from esper.simic.training import vectorized
from memory_output import MemoryOutput
from run_helpers import SMALL, rows, story, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    updates: list[PPOUpdateMetrics] = []
    with pytest.MonkeyPatch.context() as patch:
        update = PPOAgent.update
        patch.setattr(PPOAgent, "update", lambda agent: updates.append(update(agent)) or updates[-1])
        _, history = train(directory, envs=8, ppo={"epsilon": 1.0, "epsilon_end": 1.0})
    return directory, history, updates


def events(directory, kind):
    return [event for event in story(directory) if event["event_type"] == kind]


def test_updates_are_recorded_as_the_agent_reports_them(run) -> None:
    directory, _, updates = run
    recorded = events(directory, "ppo_update")
    assert len(recorded) == len(updates) == SMALL["rounds"]
    for event, update in zip(recorded, updates, strict=True):
        for field in fields(PPOUpdateMetrics):
            value = getattr(update, field.name)
            expected = dict(zip(HEAD_NAMES, value, strict=True)) if isinstance(value, tuple) else value
            assert event["data"][field.name] == expected, field.name


def test_rounds_are_recorded_as_the_run_returns_them(run) -> None:
    directory, history, _ = run
    for event, summary in zip(events(directory, "batch_completed"), history, strict=True):
        data = event["data"]
        assert data["avg_objective"] == summary.mean_objective
        assert data["avg_accuracy"] == summary.mean_accuracy
        assert data["avg_reward"] == summary.mean_reward
        assert data["episodes_completed"] == summary.episodes_completed
    for event, summary in zip(events(directory, "action_distribution"), history, strict=True):
        assert event["data"]["action_counts"] == dict(summary.action_counts)


def test_actions_of_the_table_add_up_to_the_counts_of_the_round(run) -> None:
    directory, history, _ = run
    steps = rows(directory, "steps")
    assert len(steps) == SMALL["rounds"] * 8 * SMALL["episode_length"]
    for summary in history:
        counted = Counter(row["op"] for row in steps if row["round_idx"] == summary.round_idx)
        assert counted == Counter({op: n for op, n in summary.action_counts.items() if n})
    assert all(row["executed"] for row in steps), "what the masks allow is carried out"
    for row in steps:
        assert dict(row["mask"])[row["op"]]
        assert sum(dict(row["op_probs"]).values()) == pytest.approx(1.0, abs=1e-5)


def test_lifecycle_events_add_up_to_the_outcomes(run) -> None:
    directory, _, _ = run
    seen = Counter()
    for event in events(directory, "seed_lifecycle"):
        if event["data"]["kind"] in ("germinated", "fossilized", "pruned"):
            seen[event["round_idx"], event["env_id"], event["data"]["kind"]] += 1
    outcomes = events(directory, "episode_outcome")
    assert len(outcomes) == SMALL["rounds"] * 8
    for outcome in outcomes:
        for kind in ("germinated", "fossilized", "pruned"):
            assert seen[outcome["round_idx"], outcome["env_id"], kind] == outcome["data"][kind], kind
    assert sum(seen.values()) > 20


def test_masks_are_counted_over_every_step(run) -> None:
    directory, _, _ = run
    masked = events(directory, "mask_hit_rates")
    assert len(masked) == SMALL["rounds"]
    for event in masked:
        assert set(event["data"]["totals"].values()) == {8 * SMALL["episode_length"]}
        assert event["data"]["hits"]["WAIT"] == 0


def test_numbers_of_events_have_no_gap(monkeypatch) -> None:
    output = MemoryOutput()
    monkeypatch.setattr(vectorized, "get_hub", lambda: TelemetryHub([output]))
    train_ppo_vectorized(**SMALL)
    assert [seq for seq, _ in output.events] == list(range(len(output.events)))
    kinds = [event.event_type for _, event in output.events]
    assert kinds[0] == "run_started"
    assert kinds[-1] == "run_ended"
