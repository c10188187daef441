"""The fault table of runs in several processes: whatever happens to a rank, the others say so, and the run
goes on from its last checkpoint, bit for bit."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.nissa import RunDirectory
from esper.simic.ranks import Ranks
from esper.simic.training import checkpoint
from esper.simic.training.sharded_envs import ShardedEnvs
from esper.simic.training.vectorized_trainer import VectorizedPPOTrainer
from rank_helpers import SEVERAL, end_of, on_ranks, start_ranks
from run_helpers import SMALL, assert_same_run, train

STEADY = {**SEVERAL, "rounds": 3}
"""Two checkpoints within the run, and one at its end."""
PHASES: dict[str, tuple[Any, str]] = {
    "train": (ShardedEnvs, "train_epoch"),
    "validate": (ShardedEnvs, "validate"),
    "sense": (ShardedEnvs, "sense"),
    "decide": (VectorizedPPOTrainer, "_decide"),
    "act": (ShardedEnvs, "act"),
    "record": (ShardedEnvs, "record"),
    "update": (VectorizedPPOTrainer, "_update"),
    "checkpoint": (checkpoint, "capture"),
}
"""Where each phase of an epoch begins."""


def on_second_round(place: Any, name: str, fault: Callable[[], None], *, calls: int) -> None:
    """Let the fault happen before call number `calls` of a method, in this process."""
    original, count = getattr(place, name), [0]

    def struck(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == calls:
            fault()
        return original(*arguments, **options)

    setattr(place, name, struck)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def struck_run(ranks: Ranks, directory: Path, victim: int, phase: str) -> None:
    if ranks.rank == victim:
        # One checkpoint and one update belong to a round, and five of all else.
        calls = 2 if phase in ("checkpoint", "update") else 7
        on_second_round(*PHASES[phase], die, calls=calls)
    train(directory, **STEADY)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("faults") / "straight"
    train(directory, **STEADY)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_killed_in_any_phase_loses_nothing_that_was_checkpointed(
    phase, victim, straight, tmp_path
) -> None:
    messages = on_ranks(2, struck_run, tmp_path / "run", victim, phase)
    other = 1 - victim
    assert set(messages) == {other}
    assert f"rank {victim} ended without a word, killed or out of memory" in str(messages[other])
    assert list((tmp_path / "run" / "checkpoints").glob("round-000001-*"))
    events = list(RunDirectory.open(tmp_path / "run").events())
    ended = [event for event in events if event["event_type"] == "run_ended"]
    assert [event["data"]["status"] for event in ended] == (["failed"] if victim == 1 else [])
    train(tmp_path / "run", **STEADY, resume="auto")
    assert_same_run(straight, tmp_path / "run")


def sleeping_run(ranks: Ranks, directory: Path) -> None:
    if ranks.rank == 1:
        on_second_round(ShardedEnvs, "train_epoch", lambda: time.sleep(600), calls=7)
    train(directory, **STEADY)


@pytest.mark.slow
def test_a_rank_that_sleeps_ends_the_run_after_the_time_limit(straight, tmp_path) -> None:
    processes, said = start_ranks(2, sleeping_run, tmp_path / "run", limit=20.0)
    rank, message = said.get(timeout=300)
    processes[1].kill()
    end_of(processes, said)
    assert (rank, "rank 1 did not give its observations within 20 s" in message) == (0, True)
    train(tmp_path / "run", **STEADY, resume="auto")
    assert_same_run(straight, tmp_path / "run")


def run_on_a_full_disk(ranks: Ranks, directory: Path) -> None:
    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))

    if ranks.is_first:
        on_second_round(ShardedEnvs, "train_epoch", fill, calls=7)
    train(directory, **STEADY)


@pytest.mark.slow
def test_a_full_disk_on_the_first_rank_is_what_all_ranks_report(straight, tmp_path) -> None:
    messages = on_ranks(2, run_on_a_full_disk, tmp_path / "run")
    assert "File too large" in str(messages[0])
    assert messages[1] == f"rank 0 failed: {messages[0]}"
    train(tmp_path / "run", **STEADY, resume="auto")
    assert_same_run(straight, tmp_path / "run")


# -- through the command line --------------------------------------------------------------------------------


def command(directory: Path, **changes: Any) -> list[str]:
    settings = {**SMALL, **STEADY, **changes, "telemetry_dir": str(directory)}
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--preset", "none"]
    return [sys.executable, "-m", "esper.scripts.train", "ppo", "--processes", "2", *flags]


def begun(process: subprocess.Popen[str], directory: Path) -> None:
    """Wait for the first checkpoint."""
    deadline = time.monotonic() + 300
    while not list(directory.glob("checkpoints/round-*.safetensors")):
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ranks_of(launcher: int) -> dict[int, int]:
    """Process of each rank that a launcher has started."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher:
            found |= {int(v[5:]): int(entry.name) for v in variables if v.startswith(b"RANK=")}
    return found


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_and_stops_all(tmp_path) -> None:
    process = subprocess.Popen(
        command(tmp_path / "run", rounds=500), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    begun(process, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "stopped; to resume:" in out
    assert err.count("stopping after this epoch") == 1
    last = list(RunDirectory.open(tmp_path / "run").events())[-1]
    assert (last["event_type"], last["data"]["status"]) == ("run_ended", "stopped")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_launcher_names_a_rank_that_was_killed(victim, tmp_path) -> None:
    process = subprocess.Popen(
        command(tmp_path / "run", rounds=500), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    begun(process, tmp_path / "run")
    os.kill(ranks_of(process.pid)[victim], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"rank {victim} was ended by SIGKILL; the others were stopped" in err
    assert f"rank {victim} ended without a word" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_torchrun_starts_a_killed_run_again_from_its_last_checkpoint(straight, tmp_path) -> None:
    _, _, _, _, _, _, *flags = command(tmp_path / "run")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = [*launcher, "--max-restarts", "1", "-m", "esper.scripts.train", "ppo", *flags]
    process = subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    begun(process, tmp_path / "run")
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert_same_run(straight, tmp_path / "run")


def test_bad_input_is_said_once(tmp_path) -> None:
    given = [*command(tmp_path / "run", envs=8), "--rounds", "0"]
    done = subprocess.run(given, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.count("rounds is 0") == 1


@pytest.mark.parametrize("number", ["0", "x", ""])
def test_a_number_of_processes_that_cannot_be(number, capsys) -> None:
    from esper.scripts.train import main

    assert main(["ppo", f"--processes={number}"]) == 2
    assert "--processes is" in capsys.readouterr().err
