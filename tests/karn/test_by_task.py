"""Readers of a run of several tasks: every figure by task, against plain arithmetic on the log."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

import pytest
from rich.console import Console

from esper._text import number
from esper.karn import compare_runs, render_report
from esper.karn.screens import overview
from esper.karn.summary import open_run, summarize
from esper.karn.sync import points
from esper.karn.views import Views
from esper.scripts.cli import main
from esper.simic import train_ppo_vectorized
from frozen import data_of

from .conftest import SMALL

TASKS = ("digits_impaired", "digits_mlp")
MANY = {**SMALL, "task": TASKS, "envs": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "two"
    train_ppo_vectorized(**MANY, telemetry_dir=str(path))
    return path


@pytest.fixture
def views(path: Path) -> Views:
    return open_run(path)


def outcomes(views: Views, task: str, round_idx: int) -> list[dict]:
    return [
        event["data"] | {"env_id": event["env_id"]}
        for event in views.run.events()
        if event["event_type"] == "episode_outcome"
        and (event["round_idx"], event["data"]["task"]) == (round_idx, task)
    ]


def test_the_view_of_tasks_against_the_log(views: Views) -> None:
    rows = views.rows("SELECT * FROM tasks")
    assert [(row["round_idx"], row["task"]) for row in rows] == [
        (i, task) for i in range(2) for task in TASKS
    ]
    for row in rows:
        own = outcomes(views, row["task"], row["round_idx"])
        first = 2 * TASKS.index(row["task"])
        assert [outcome["env_id"] for outcome in own] == [first, first + 1]
        assert row["episodes"] == 2
        for name in ("objective", "final_accuracy", "committed_accuracy", "added_params", "epochs"):
            assert row[name] == pytest.approx(fmean(outcome[name] for outcome in own)), name
        assert row["rollbacks"] == sum(outcome["rollbacks"] for outcome in own)


def test_the_log_names_the_tasks_and_their_envs(views: Views) -> None:
    conv, mlp = views.tasks()
    assert (conv.name, mlp.name) == TASKS
    assert (conv.envs, mlp.envs) == (range(2), range(2, 4))
    assert (conv.slots, mlp.slots) == (("r0c0", "r0c1", "r0c2"), ("r0c0", "r0c1"))
    assert summarize(views).task == "digits_impaired digits_mlp"


def test_the_report_shows_each_task(views: Views, path: Path) -> None:
    run = data_of(render_report(path))["run"]
    rows = {row["task"]: row for row in run["parts"]["tasks"]}
    assert tuple(rows) == TASKS
    for task in TASKS:
        objective = fmean(outcome["objective"] for outcome in outcomes(views, task, 1))
        assert rows[task]["J"] == pytest.approx(objective)
        assert rows[task]["episodes"] == 2
        assert run["curves"][f"objective_by_task/{task}"][1][-1] == pytest.approx(objective)
    assert run["parts"]["start"]["slots_by_task"] == dict(
        zip(TASKS, (["r0c0", "r0c1", "r0c2"], ["r0c0", "r0c1"]), strict=True)
    )


def test_a_report_of_one_task_has_no_part_by_task(run_path: Path) -> None:
    run = data_of(render_report(run_path))["run"]
    assert run["parts"]["tasks"] == []
    assert not [name for name in run["curves"] if name.startswith("objective_by_task")]


def test_watch_shows_each_task(views: Views) -> None:
    console = Console(width=200, record=True)
    console.print(overview(views, 200))
    text = console.export_text()
    for task in TASKS:
        objective = fmean(outcome["objective"] for outcome in outcomes(views, task, 1))
        assert re.search(rf"^{task}\s+{re.escape(number(objective))}\b", text, re.MULTILINE), text


def test_runs_are_compared_by_task(views: Views, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "random"
    train_ppo_vectorized(**MANY, policy="random", telemetry_dir=str(other))
    result = compare_runs([views, open_run(other)])
    assert result.paired
    assert [row.task for row in result.rows[::9]] == [None, *TASKS]
    by_task = {row.task: row for row in result.rows if row.metric.name == "objective"}
    for task in TASKS:
        mine, theirs = (
            [outcome["objective"] for i in range(2) for outcome in outcomes(run, task, i)]
            for run in (views, open_run(other))
        )
        assert by_task[task].runs[0].value == pytest.approx(fmean(mine))
        assert by_task[task].differences[0].value == pytest.approx(fmean(theirs) - fmean(mine))
    assert main(["compare", str(views.run.path), str(other)]) == 0
    assert "objective (digits_mlp)" in capsys.readouterr().out


def test_trackers_get_each_task(views: Views) -> None:
    names = {name for point in points(views) for name in point.values}
    assert {f"batch_completed/objective_by_task/{task}" for task in TASKS} <= names
