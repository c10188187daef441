"""A real run killed at any moment: what it had flushed is there, every reader works, and it can go on."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esper._archive import read_archive
from esper.nissa import RunDirectory
from esper.scripts.cli import main as esper
from run_helpers import SMALL, assert_same_run, assert_same_weights, train

CODE = f"""
import sys, torch
torch.set_num_threads(1)
from esper.simic import train_ppo_vectorized
fields = { {**SMALL, "episode_length": 4}!r} | {{"rounds": int(sys.argv[2])}}
train_ppo_vectorized(**fields, telemetry_dir=sys.argv[1])
"""


def kill_a_run(directory: Path, delay: float, rounds: int = 200) -> None:
    """Start a run, wait for its first checkpoint and then a while, and kill it."""
    process = subprocess.Popen([sys.executable, "-c", CODE, str(directory), str(rounds)])
    try:
        deadline = time.monotonic() + 120
        while not list(directory.glob("checkpoints/round-*.safetensors")):
            assert process.poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(delay)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "the run was over before it could be killed"


def check_what_is_left(directory: Path, capsys) -> None:
    run = RunDirectory.open(directory)
    events = list(run.events())
    assert [event["seq"] for event in events] == list(range(len(events)))
    finished = sum(event["event_type"] == "batch_completed" for event in events)
    assert finished >= 1
    # A round's rows are written when it is over, a checkpoint after the events that it counts on.
    envs, epochs = SMALL["envs"], 4
    whole = [row for row in run.table("steps").to_pylist() if row["round_idx"] < finished - 1]
    assert len(whole) == (finished - 1) * envs * epochs
    for path in (directory / "checkpoints").glob("round-*.safetensors"):
        assert read_archive(path, kind="run")[1]["seq"] <= len(events)
    name = str(directory)
    for command in (
        ["runs", str(directory.parent)],
        ["report", name],
        ["sql", name, "SELECT count(*) FROM rounds"],
        ["compare", name, name],
        ["watch", name],
    ):
        assert esper(command) == 0, command
    assert "cut off" in capsys.readouterr().out


@pytest.mark.parametrize("attempt", range(3))
def test_a_killed_run_can_be_read(attempt, tmp_path, capsys) -> None:
    kill_a_run(tmp_path / "run", random.Random(attempt).uniform(0.0, 1.0))
    check_what_is_left(tmp_path / "run", capsys)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3, 23))
def test_a_run_killed_at_any_moment_can_be_read(attempt, tmp_path, capsys) -> None:
    kill_a_run(tmp_path / "run", random.Random(attempt).uniform(0.0, 4.0))
    check_what_is_left(tmp_path / "run", capsys)


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path) -> None:
    """And tells the same story as one that was never killed."""
    kill_a_run(tmp_path / "killed", 0.0, rounds=12)
    changes = {"rounds": 12, "episode_length": 4}
    train(tmp_path / "killed", **changes, resume="auto")
    train(tmp_path / "straight", **changes)
    assert_same_run(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.parametrize("files", [None, (), ("events.jsonl",)])
def test_a_run_killed_while_its_directory_was_made_starts_when_it_is_told_to_go_on(files, tmp_path) -> None:
    if files is not None:
        (tmp_path / "killed").mkdir()
    for name in files or ():
        (tmp_path / "killed" / name).touch()
    changes = {"rounds": 1, "episode_length": 4}
    train(tmp_path / "killed", **changes, resume="auto")
    train(tmp_path / "straight", **changes)
    assert_same_run(tmp_path / "straight", tmp_path / "killed")


def test_a_run_killed_before_it_announced_its_checkpoint_does_so_when_it_goes_on(tmp_path) -> None:
    changes = {"rounds": 2, "episode_length": 4}
    for name in ("killed", "straight"):
        train(tmp_path / name, **changes)
    first, last = sorted((tmp_path / "killed" / "checkpoints").glob("round-*.safetensors"))
    best, log = first.with_name("best.safetensors"), tmp_path / "killed" / "events.jsonl"
    seq = read_archive(first, kind="run")[1]["seq"]
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:seq]))
    last.unlink()
    best.unlink()
    train(tmp_path / "killed", **changes, resume="auto")
    assert_same_run(tmp_path / "straight", tmp_path / "killed")
    assert_same_weights(
        *(
            read_archive(tmp_path / name / "checkpoints" / "best.safetensors", kind="policy")[0]
            for name in ("killed", "straight")
        )
    )
