"""One policy on several tasks at once: envs of each task as if it were alone, figures by task, and runs that
stop in the middle of a round."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from esper.leyline import EsperError
from esper.nissa import TelemetryHub
from esper.runtime.tasks import get_task_spec
from esper.scripts.train import show_results
from esper.simic.training import vectorized
from esper.simic.training.config import TrainingConfig
from esper.tamiyo import load_policy
from memory_output import StopAfter
from run_helpers import SMALL, assert_same_run, last_checkpoint, rows, story, train

TASKS = ("digits_shift:episode_length=8", "digits_scale:episode_length=5", "digits_mlp:episode_length=7")
"""Three, five and two slots; convolutions and none; episodes of 8, 5 and 7 epochs."""


def many(**changes):
    return {**SMALL, "task": TASKS, "episode_length": None, **changes}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    directory = tmp_path_factory.mktemp("many") / "straight"
    _, history = train(directory, **many())
    return directory, history


def decided(row: dict) -> dict:
    """A step but for its place in the log, and for the value, whose sum is rounded otherwise where the value
    head has more rows."""
    return {name: value for name, value in row.items() if name not in ("seq", "value")}


def of_task(directory, task: str, table: str = "steps", *, rounds: int = 1) -> list[dict]:
    """The rows of one task in the first rounds, envs numbered within the task."""
    first = TASKS.index(task) * SMALL["envs"]
    return [
        decided(row) | {"env_id": row["env_id"] - first}
        for row in rows(directory, table)
        if 0 <= row["env_id"] - first < SMALL["envs"] and row["round_idx"] < rounds
    ]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("policy", ["ppo", "random", "heuristic"])
def test_an_env_does_not_depend_on_the_other_tasks(task, policy, tmp_path) -> None:
    """Before the first update, when all policies are still the same one. The memory of a new policy spans the
    longest episode, so a single task is given the same one."""
    alone = {**many(task=task), "policy": policy, "rounds": 1, "heuristic": {"max_progress": 0.8}}
    directory = tmp_path / "together"
    train(directory, **{**alone, "task": TASKS})
    with pytest.MonkeyPatch.context() as patch:
        network = vectorized.TamiyoNetwork
        patch.setattr(vectorized, "TamiyoNetwork", lambda **sizes: network(**{**sizes, "memory_horizon": 8}))
        train(tmp_path / "alone", **alone)
    single = [decided(row) for row in rows(tmp_path / "alone", "steps")]
    assert of_task(directory, task) == single
    assert {row["epoch"] for row in single} == set(range(1, get_task_spec(task).episode_length + 1))
    if policy != "heuristic":
        assert any(row["op"] == "GERMINATE" for row in single)


def test_history_has_figures_of_each_task(straight) -> None:
    directory, history = straight
    outcomes = [event for event in story(directory) if event["event_type"] == "episode_outcome"]
    for summary in history:
        assert set(summary.by_task) == set(TASKS)
        for task, figures in summary.by_task.items():
            own = [
                event["data"]
                for event in outcomes
                if event["round_idx"] == summary.round_idx and event["data"]["task"] == task
            ]
            assert len(own) == SMALL["envs"]
            assert {data["epochs"] for data in own} == {get_task_spec(task).episode_length}
            assert figures.mean_objective == pytest.approx(sum(data["objective"] for data in own) / len(own))
            assert figures.rollbacks == sum(data["rollbacks"] for data in own)
        assert summary.mean_objective == pytest.approx(
            sum(figures.mean_objective for figures in summary.by_task.values()) / 3
        )
        assert summary.env_steps == (summary.round_idx + 1) * SMALL["envs"] * (8 + 5 + 7)
    rounds = [event["data"] for event in story(directory) if event["event_type"] == "batch_completed"]
    for data, summary in zip(rounds, history, strict=True):
        assert data["env_steps"] == summary.env_steps
        assert data["objective_by_task"] == {
            task: figures.mean_objective for task, figures in summary.by_task.items()
        }


def test_envs_whose_episode_is_over_enter_no_statistic(straight) -> None:
    directory, history = straight
    decided = SMALL["envs"] * (8 + 5 + 7)
    for summary in history:
        assert sum(summary.action_counts.values()) == decided
    steps = rows(directory, "steps")
    assert len(steps) == decided * len(history)
    assert all(row["epoch"] <= (8, 5, 7)[row["env_id"] // SMALL["envs"]] for row in steps)
    updates = [event["data"] for event in story(directory) if event["event_type"] == "ppo_update"]
    assert [data["steps"] for data in updates] == [decided] * len(history)
    masks = [event["data"] for event in story(directory) if event["event_type"] == "mask_hit_rates"]
    assert all(set(data["totals"].values()) == {decided} for data in masks)


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({}, (1, 6)),  # one task is over
        ({"rollout_length": 3}, (1, 7)),
        pytest.param({"policy": "random"}, (1, 6), marks=pytest.mark.slow),
        ({"policy": "heuristic"}, (1, 3)),
        pytest.param({"teacher": "heuristic", "teacher_rounds": 2}, (1, 6), marks=pytest.mark.slow),
    ],
)
def test_a_run_stopped_in_the_middle_of_a_round_goes_on_bit_for_bit(
    changes, at, straight, tmp_path, monkeypatch
) -> None:
    whole = straight[0]
    if changes:
        whole = tmp_path / "whole"
        train(whole, **many(**changes))
    hub = TelemetryHub([StopAfter(*at)])
    monkeypatch.setattr(vectorized, "get_hub", lambda: hub)
    _, history = train(tmp_path / "cut", **many(**changes))
    assert len(history) == 1
    meta = last_checkpoint(tmp_path / "cut")[1]
    assert meta["progress"]["epoch"] == at[1]
    over = sum(length <= at[1] for length in (8, 5, 7))
    assert sum(env["values"]["done"] for env in meta["round"]["envs"]) == over * SMALL["envs"]
    assert len(meta["round"]["ledger"]["outcomes"]) == over * SMALL["envs"]
    monkeypatch.setattr(vectorized, "get_hub", TelemetryHub)
    train(tmp_path / "cut", **many(**changes, resume="auto"))
    assert_same_run(whole, tmp_path / "cut")


@pytest.mark.slow
def test_a_run_of_three_tasks_that_sigterm_stops_goes_on_bit_for_bit(tmp_path) -> None:
    """Through the command line, with populations of the tasks' own size."""
    words = ["ppo", "--task", "digits_shift", "digits_scale", "digits_mlp", "--envs", "8", "--rounds", "2"]
    words += ["--steps-per-epoch", "2", "--val-size", "64", "--hidden", "16"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def command(place: Path, *more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "esper.scripts.train", *words, "--telemetry-dir", str(place), *more],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        )

    assert command(whole).wait() == 0
    run = command(cut)
    while (
        not (cut / "events.jsonl").exists() or b"batch_completed" not in (cut / "events.jsonl").read_bytes()
    ):
        assert run.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)  # some epochs into the second round
    run.terminate()
    assert run.wait() == 143
    progress = last_checkpoint(cut)[1]["progress"]
    assert progress["round_idx"] == 1
    assert progress["epoch"] > 0, "stopped in the middle of a round"
    assert command(cut, "--resume", "auto").wait() == 0
    assert_same_run(whole, cut)


def test_the_value_head_has_a_row_for_each_family(straight) -> None:
    directory, _ = straight
    policy = load_policy(directory)
    assert policy.families == ("digits_shift", "digits_scale", "digits_mlp")
    assert policy.network.value_out.weight.shape[0] == 3
    scales = policy.network.value_scale
    assert len(set(scales.tolist())) == 3, "every family has returns of its own"
    policy.save(directory / "policy.safetensors")
    again = load_policy(directory / "policy.safetensors")
    assert again.families == policy.families
    again.meet(["digits_mlp", "sotu"])
    assert again.families == (*policy.families, "sotu")
    assert torch.equal(again.network.value_mean[3], policy.network.value_mean.mean())


def test_variants_of_one_task_are_one_family(tmp_path) -> None:
    agent, history = train(
        tmp_path / "run", task=("digits_mlp", "digits_mlp:features=4"), rounds=1, episode_length=4
    )
    assert agent.policy.families == ("digits_mlp",)
    assert set(history[0].by_task) == {"digits_mlp", "digits_mlp:features=4"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"task": ("digits_mlp", "digits_mlp")}, "name each task once"),
        ({"task": ()}, "task is empty; give one name or more"),
        ({"task": ("digits_mlp", 3)}, "task is 3, must be text"),
        ({"task": ("digits_mlp", "digits_map")}, "digits_map"),
        ({"task": ("digits_mlp", "digits_shift"), "slots": ("r0c2",)}, "r0c2"),
        (
            {"task": TASKS, "episode_length": None, "rollout_length": 9},
            "exceeds the longest episode_length 8",
        ),
    ],
)
def test_tasks_that_cannot_be(fields, words) -> None:
    with pytest.raises(EsperError, match=words):
        train(**fields)


def test_one_task_is_written_as_before_and_several_as_a_list() -> None:
    one = TrainingConfig(task=["digits_mlp"])
    assert (one.task, one.tasks) == ("digits_mlp", ("digits_mlp",))
    assert one.to_json()["task"] == "digits_mlp"
    several = TrainingConfig(task=TASKS)
    assert several.tasks == several.task == TASKS
    assert several.to_json()["task"] == list(TASKS)
    for config in (one, several):
        assert TrainingConfig.from_json(config.to_json()) == config


def test_a_range_of_worlds_is_each_of_them() -> None:
    config = TrainingConfig(task=("digits_mlp", "worlds_small:9-11", "worlds_small:98-98,val_size=64"))
    worlds = ("worlds_small:9", "worlds_small:10", "worlds_small:11", "worlds_small:98,val_size=64")
    assert config.tasks == ("digits_mlp", *worlds)
    assert TrainingConfig(task="worlds_small:9-11").tasks == worlds[:3]
    with pytest.raises(EsperError, match=r"worlds_small:11-9.*first world, 11.*last, 9"):
        TrainingConfig(task="worlds_small:11-9")
    with pytest.raises(EsperError, match="digits_mlp:1-2"):
        get_task_spec("digits_mlp:1-2")


def test_the_output_shows_each_of_a_few_tasks_and_counts_many(straight, capsys, monkeypatch) -> None:
    _, history = straight
    show_results(history)
    shown = capsys.readouterr().out
    assert all(task.partition(":")[0] in shown for task in TASKS)
    monkeypatch.setattr("esper.scripts.train.SHOWN_TASKS", 2)
    show_results(history)
    shown = capsys.readouterr().out
    assert "means of 3 tasks" in shown
    assert not any(task.partition(":")[0] in shown for task in TASKS)
