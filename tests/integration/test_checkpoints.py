"""Checkpoints of real runs: the best policy, runs that start over, and damaged or altered files."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from esper._archive import read_archive, write_archive
from esper.karn.summary import open_run
from esper.leyline import EsperError, TelemetryEventType
from esper.nissa import TelemetryHub
from esper.runtime.tasks import get_task_spec
from esper.scripts.cli import main as esper
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training import vectorized
from esper.simic.training.checkpoint import CheckpointError
from esper.simic.training.config import TrainingConfig
from esper.tamiyo.shipped import load_policy
from run_helpers import SMALL, assert_same_run, assert_same_weights, train

QUICK = {**SMALL, "episode_length": 4, "rounds": 4}


def weights(policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.network.state_dict().items()}


def best_weights(directory: Path) -> dict[str, torch.Tensor]:
    return read_archive(directory / "checkpoints" / "best.safetensors", kind="policy")[0]


class Stop:
    """Asks the run to stop at the n-th event of a kind."""

    wants_step_events = True

    def __init__(self, kind: TelemetryEventType, count: int) -> None:
        self.kind, self.left = kind, count

    def emit(self, seq, event) -> None:
        self.left -= event.event_type is self.kind
        if self.left == 0:
            vectorized.request_stop()

    def flush(self) -> None: ...

    def close(self) -> None: ...


# -- best ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rollout_length", [None, 2])
def test_best_is_the_policy_that_played_the_best_round(tmp_path, monkeypatch, rollout_length) -> None:
    """Every round competes, also those without a checkpoint, with the weights that it began with."""
    played = []
    begin = PPOAgent.begin_rollout

    def note(agent, hidden) -> None:
        played.append((agent.updates, weights(agent.policy)))
        begin(agent, hidden)

    monkeypatch.setattr(PPOAgent, "begin_rollout", note)
    changes = {"checkpoint_every": 0, "rounds": 6, "rollout_length": rollout_length, "ppo": {"lr": 0.05}}
    _, history = train(tmp_path / "run", **QUICK | changes)
    starts = played[:: 1 if rollout_length is None else 2]
    assert len(starts) == 6
    objectives = [summary.mean_objective for summary in history]
    best = objectives.index(max(objectives))
    assert_same_weights(best_weights(tmp_path / "run"), starts[best][1])
    policy = load_policy(tmp_path / "run" / "checkpoints" / "best.safetensors")
    assert_same_weights(weights(policy), starts[best][1])


def test_best_differs_from_the_newest(tmp_path) -> None:
    """The update after the only round changes the weights; the file holds those that were measured."""
    agent, _ = train(tmp_path / "run", **QUICK | {"rounds": 1})
    newest, best = load_policy(tmp_path / "run"), load_policy(tmp_path / "run/checkpoints/best.safetensors")
    assert_same_weights(weights(newest), weights(agent.policy))
    assert any(not torch.equal(t, weights(newest)[name]) for name, t in weights(best).items())


@pytest.mark.parametrize(
    ("kind", "count"), [(TelemetryEventType.BATCH_COMPLETED, 2), (TelemetryEventType.THROUGHPUT, 17)]
)
def test_best_after_a_resume_equals_that_of_an_uninterrupted_run(tmp_path, kind, count) -> None:
    """Stopped between rounds or in the middle of one, where an update may have happened already."""
    changes = QUICK | {"checkpoint_every": 3, "rollout_length": 2, "ppo": {"lr": 0.05}}
    train(tmp_path / "straight", **changes)
    with vectorized.get_hub().attached(Stop(kind, count)):
        train(tmp_path / "stopped", **changes)
    assert len(open_run(tmp_path / "stopped").rows("SELECT * FROM rounds")) < 4
    (tmp_path / "stopped" / "checkpoints" / "best.safetensors").write_bytes(b"from a round that is undone")
    train(tmp_path / "stopped", **changes, resume="auto")
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
    assert_same_weights(best_weights(tmp_path / "straight"), best_weights(tmp_path / "stopped"))


# -- starting over -------------------------------------------------------------------------------------------


class Crash:
    """Ends the run after its first round, before there is a checkpoint."""

    def emit(self, seq, event) -> None:
        if event.event_type is TelemetryEventType.BATCH_COMPLETED:
            raise KeyboardInterrupt

    def flush(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A run without a checkpoint: its log and its best policy have begun."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    with pytest.raises(KeyboardInterrupt), vectorized.get_hub().attached(Crash()):
        train(directory, **QUICK | {"checkpoint_every": 3})
    assert not list(directory.glob("checkpoints/round-*"))
    assert (directory / "events.jsonl").stat().st_size > 0
    return directory


def test_a_run_killed_before_its_first_checkpoint_starts_over(killed, tmp_path) -> None:
    changes = QUICK | {"checkpoint_every": 3}
    run = shutil.copytree(killed, tmp_path / "run")
    train(run, **changes, resume="auto")
    train(tmp_path / "straight", **changes)
    assert_same_run(tmp_path / "straight", run)
    assert_same_weights(best_weights(tmp_path / "straight"), best_weights(run))


def test_a_run_with_other_settings_does_not_start_over(killed, tmp_path) -> None:
    run = shutil.copytree(killed, tmp_path / "run")
    before = (run / "events.jsonl").read_bytes()
    with pytest.raises(EsperError, match="seed is 42 in the run's record and 7 in this run"):
        train(run, **QUICK | {"checkpoint_every": 3, "seed": 7}, resume="auto")
    with pytest.raises(EsperError, match="not empty"):
        train(run, **QUICK)
    assert (run / "events.jsonl").read_bytes() == before


# -- damage --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "run"
    train(directory, **QUICK | {"rounds": 3})
    return directory


def newest(run: Path) -> Path:
    return sorted(run.glob("checkpoints/round-*"))[-1]


def test_auto_takes_the_intact_checkpoint_before_a_damaged_one(whole, tmp_path, caplog) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    newest(run).write_bytes(newest(run).read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        train(run, **QUICK | {"rounds": 3}, resume="auto")
    assert "round-000003-epoch-0000.safetensors" in caplog.text
    assert "continues from round-000002-epoch-0000.safetensors" in caplog.text
    assert_same_run(whole, run)


def test_a_damaged_file_names_the_intact_one_before_it(whole, tmp_path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    path = newest(run)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"intact checkpoint before it is .*round-000002-epoch-0000"):
        train(run, **QUICK | {"rounds": 4}, resume=str(path))


def test_no_intact_checkpoint_at_all(whole, tmp_path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    for path in run.glob("checkpoints/round-*"):
        path.write_bytes(b"x")
    log = (run / "events.jsonl").read_bytes()
    with pytest.raises(EsperError, match=r"no checkpoint is intact.*round-000003.*round-000001"):
        train(run, **QUICK, resume="auto")
    assert (run / "events.jsonl").read_bytes() == log


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that was stopped within its second round, so that its checkpoint has every part."""
    directory = tmp_path_factory.mktemp("stopped") / "run"
    with vectorized.get_hub().attached(Stop(TelemetryEventType.THROUGHPUT, 17)):
        train(directory, **QUICK)
    assert "epoch-0000" not in newest(directory).name
    return directory


ENV = "round/envs/0"
TAMPERING: list[tuple[str, Any, str]] = [
    ("version", 99, "version is 99, written by a newer Esper"),
    ("version", 1, "version is 1, written by an older Esper.*Start the run anew"),
    ("version", None, "version is null"),
    ("config", [], r"config is \[\]"),
    ("seq", "3", "seq is '3'"),
    ("seq", -1, "seq is -1"),
    ("announced", 1, "announced is 1"),
    ("blueprints", None, "blueprints is null"),
    (
        "blueprints/3",
        "mine",
        "index 3 stands for blueprint 'mine' in the checkpoint, in this run it is 'norm'",
    ),
    ("blueprints", ["noop"], "index 1 stands for no blueprint in the checkpoint.*'conv_light'"),
    ("agent", [1], r"agent is \[1\]"),
    ("agent", None, "has no agent"),
    ("agent/updates", "x", "updates is 'x'"),
    ("agent/config/clip", [], r"config\.clip is \[\]"),
    ("progress", None, "progress is null"),
    ("progress/round_idx", 1.5, r"progress\.round_idx is 1\.5"),
    ("progress/history", {}, r"progress\.history is {}"),
    ("progress/history/0/objectives", [None], r"objectives\[0\] is null"),
    ("best/score", "high", r"best\.score is 'high'"),
    ("normalizer/count", "x", r"normalizer\.count is 'x'"),
    ("recorder/level", "debug", r"recorder\.level is 'debug'"),
    ("recorder/accuracies", None, r"recorder\.accuracies is null"),
    ("round", [], r"round is \[\]"),
    ("round/decisions/offered", [None], r"round\.decisions\.offered\[0\] is null"),
    ("round/ledger/final_accs", 3, r"round\.ledger\.final_accs is 3"),
    ("round/data/0/step", "x", "saved data position: step is 'x'"),
    ("round/scalers", [3], r"round\.scalers\[0\] is 3"),
    (ENV, 7, r"round\.envs\[0\] is 7"),
    (f"{ENV}/values/val_loss", "low", r"values\.val_loss is 'low'"),
    (f"{ENV}/values/last_op", 99, r"values\.last_op is 99"),
    (f"{ENV}/governor/history", [None], r"governor\.history\[0\] is null"),
    (f"{ENV}/row/germinations", -1, r"row\.germinations is -1"),
    (f"{ENV}/row/seeds", {"r0c0": {}}, r"row\.seeds\.r0c0\.seed_id is missing"),
    (f"{ENV}/tracker", {}, "tracker: field losses is missing"),
    (f"{ENV}/tracker/losses", ["x"], r"tracker: losses\[0\] is 'x'"),
    ("colour", 1, "field colour is unknown"),
]


@pytest.mark.parametrize(
    ("path", "value", "message"), TAMPERING, ids=[f"{p}={v!s:.9}" for p, v, _ in TAMPERING]
)
def test_an_altered_header_is_refused_before_anything_is_cut(stopped, tmp_path, path, value, message) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    for older in sorted(run.glob("checkpoints/round-*"))[:-1]:
        older.unlink()
    tensors, header = read_archive(newest(run), kind="run")
    place: Any = header
    *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in parents:
        place = place[key]
    place[last] = value
    write_archive(newest(run), tensors, header)
    before = {p.name: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(EsperError, match=message):
        train(run, **QUICK, resume="auto")
    assert {p.name: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


# -- the command line ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [[], ["--resume", "auto"]])
def test_a_directory_in_use_is_bad_input(tmp_path, capsys, resume) -> None:
    """As for the second of two runs that were started on one directory."""
    directory = tmp_path / "run"
    config = TrainingConfig(**QUICK, telemetry_dir=str(directory))
    task = vectorized.resolve_task(config, get_task_spec(config.task))
    names = ("task", "rounds", "envs", "episode_length", "steps_per_epoch", "val_size", "batch_size")
    flags = [f"--{name.replace('_', '-')}={QUICK[name]}" for name in (*names, "population", "hidden")]
    with vectorized.open_trainer(config, task, TelemetryHub()):
        where = ["--checkpoint-every=1", "--telemetry-dir", str(directory)]
        code = esper(["train", "--preset=none", *flags, *where, *resume])
    assert code == 2
    assert f"{directory} is in use" in capsys.readouterr().err


def test_a_finished_run_that_is_resumed_stays_as_it_is(tmp_path) -> None:
    train(tmp_path / "once", **QUICK)
    shutil.copytree(tmp_path / "once", tmp_path / "twice")
    train(tmp_path / "twice", **QUICK, resume="auto")
    assert_same_run(tmp_path / "once", tmp_path / "twice")
    for path in (tmp_path / "once" / "checkpoints").iterdir():
        assert path.read_bytes() == (tmp_path / "twice" / "checkpoints" / path.name).read_bytes(), path.name
