"""Runs that go on from an older checkpoint, with more rounds, or not at all."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from esper.karn.summary import open_run, summarize
from esper.leyline import EsperError, TelemetryEventType
from esper.nissa import TelemetryHub
from esper.runtime.data import load_dataset, register_dataset
from esper.runtime.tasks import get_task_spec
from esper.simic.training import vectorized
from esper.simic.training.checkpoint import CheckpointError
from esper.simic.training.config import TrainingConfig
from esper.simic.training.vectorized import open_trainer, resolve_task
from run_helpers import SMALL, assert_same_run, train

QUICK = {**SMALL, "episode_length": 4, "rounds": 5, "keep_last": 2}


class Stop:
    """Asks the run to stop after its first round."""

    def emit(self, seq, event) -> None:
        if event.event_type is TelemetryEventType.BATCH_COMPLETED:
            vectorized.request_stop()

    def flush(self) -> None: ...

    def close(self) -> None: ...


def checkpoints(directory) -> list[str]:
    return sorted(path.name[:12] for path in (directory / "checkpoints").glob("round-*"))


def test_an_older_checkpoint_begins_the_run_anew_from_there(tmp_path) -> None:
    """Checkpoints of what came after it are gone with its log; the run then keeps its own and ends as it had
    ended."""
    train(tmp_path / "whole", **QUICK | {"keep_last": 9})
    run = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    with vectorized.get_hub().attached(Stop()):
        train(run, **QUICK, resume=str(run / "checkpoints" / "round-000001-epoch-0000.safetensors"))
    assert checkpoints(run) == ["round-000001", "round-000002"]
    train(run, **QUICK, resume="auto")
    assert checkpoints(run) == ["round-000004", "round-000005"]
    assert_same_run(tmp_path / "whole", run)


def test_no_fewer_rounds_than_are_finished(tmp_path) -> None:
    train(tmp_path, **QUICK | {"rounds": 2})
    with pytest.raises(CheckpointError, match="2 rounds are finished; rounds is 1"):
        train(tmp_path, **QUICK | {"rounds": 1}, resume="auto")
    assert summarize(open_run(tmp_path)).status == "finished"


def test_a_run_that_was_given_more_rounds_says_so(tmp_path) -> None:
    train(tmp_path, **QUICK | {"rounds": 1})
    assert summarize(open_run(tmp_path)).rounds == 1
    train(tmp_path, **QUICK | {"rounds": 3}, resume="auto")
    summary = summarize(open_run(tmp_path))
    assert (summary.rounds_done, summary.rounds, summary.seconds_left) == (3, 3, 0)


def test_the_best_round_is_one_of_the_policys_own(tmp_path) -> None:
    """What the teacher reached is no merit of the policy."""
    train(tmp_path, **QUICK | {"rounds": 3}, teacher="heuristic", teacher_rounds=2, teacher_updates=1)
    saved = open_run(tmp_path).rows("SELECT finished_rounds, best FROM checkpoints ORDER BY seq")
    assert [(row["finished_rounds"], row["best"]) for row in saved] == [(1, False), (2, False), (3, True)]


def test_a_run_that_fails_says_why(tmp_path) -> None:
    config = TrainingConfig(**QUICK, telemetry_dir=str(tmp_path / "run"))

    def fail() -> None:
        with open_trainer(
            config, resolve_task(config, get_task_spec(config.task)), TelemetryHub()
        ) as trainer:
            trainer.run(until=1)
            raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError, match="no such luck"):
        fail()
    views = open_run(tmp_path / "run")
    assert summarize(views).status == "failed"
    assert views.rows("SELECT message, rounds_completed, env_steps FROM ends") == [
        {
            "message": "RuntimeError: no such luck",
            "rounds_completed": 1,
            "env_steps": QUICK["envs"] * QUICK["episode_length"],
        }
    ]


def test_what_fails_after_the_run_is_no_failure_of_the_run(tmp_path) -> None:
    """As in a comparison, where one group has finished and another fails."""
    config = TrainingConfig(**QUICK | {"rounds": 1}, telemetry_dir=str(tmp_path / "run"))

    def fail() -> None:
        with open_trainer(
            config, resolve_task(config, get_task_spec(config.task)), TelemetryHub()
        ) as trainer:
            trainer.run()
            raise RuntimeError("too late")

    with pytest.raises(RuntimeError, match="too late"):
        fail()
    assert summarize(open_run(tmp_path / "run")).status == "finished"


def test_data_with_other_classes_than_the_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only loading tells the number of classes, the run is refused when it is built."""
    config = TrainingConfig(**QUICK)
    task = resolve_task(config, get_task_spec(config.task))
    with pytest.raises(EsperError, match="digits has 10 classes, the host has 7; allowed: 10 or more"):
        replace(task, host={**task.host, "classes": 7})
    digits = load_dataset("digits")
    parts = {"train_y": digits.train_y, "test_y": digits.test_y}
    images = {key: getattr(digits, key).permute(0, 2, 3, 1) for key in ("train_x", "test_x")}
    monkeypatch.setattr("esper.runtime.data.datasets._REGISTERED", {})
    register_dataset("late_digits", lambda: {**images, **parts})
    small = replace(task, dataset="late_digits", host={**task.host, "classes": 7})
    with (
        pytest.raises(EsperError, match="late_digits has 10 classes, the host has 7"),
        open_trainer(config, small, TelemetryHub()),
    ):
        pass
