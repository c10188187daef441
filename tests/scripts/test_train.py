"""`esper train`: whole runs through the command line, its exit codes, and what it says to bad input."""

from __future__ import annotations

import io
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from rich.console import Console

from esper.leyline import TelemetryEvent, TelemetryEventType
from esper.nissa import RunDirectory, TelemetryHub
from esper.runtime.data.sources import cache_file, data_root
from esper.scripts.train import ProgressOutput, main, run_directory
from esper.simic.training import vectorized
from esper.simic.training.config import TrainingConfig
from esper.simic.training.presets import resolve

ROOT = Path(__file__).parents[2]
SMALL = [
    "--preset",
    "none",
    "--task",
    "digits_impaired",
    "--envs",
    "2",
    "--episode-length",
    "4",
    "--steps-per-epoch",
    "1",
    "--val-size",
    "32",
    "--hidden",
    "16",
    "--population",
    "8",
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "esper.scripts.train", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def train(*arguments: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **options,
    )  # type: ignore[call-overload, no-any-return]


# -- whole runs ----------------------------------------------------------------------------------------------


def test_a_run_leaves_its_directory_behind(tmp_path: Path) -> None:
    flags = [
        "ppo",
        "--preset",
        "cifar_baseline",
        *SMALL,
        "--rounds",
        "2",
        "--telemetry-dir",
        "D",
        "--lr",
        "3e-4",
    ]
    done = train(*flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "round 2/2: accuracy" in done.stderr
    assert re.search(r"2 \(last\).*%", done.stdout)
    assert "results: D" in done.stdout
    run = RunDirectory.open(tmp_path / "D")
    told = {
        "task": "digits_impaired",
        "envs": "2",
        "episode_length": "4",
        "steps_per_epoch": "1",
        "val_size": "32",
        "hidden": "16",
        "population": "8",
        "rounds": "2",
        "telemetry_dir": "D",
        "ppo.lr": "3e-4",
    }
    assert TrainingConfig.from_json(run.config) == resolve("cifar_baseline", None, told)[0]
    kinds = [event["event_type"] for event in run.events()]
    assert kinds[0] == "run_started"
    assert kinds[-1] == "run_ended"
    assert kinds.count("batch_completed") == 2
    assert list(run.checkpoints.glob("round-000002-*"))


@pytest.mark.skipif(
    not cache_file("cifar10", data_root()).exists(), reason="needs CIFAR-10: esper data get cifar10"
)
@pytest.mark.slow
def test_the_minimal_cifar_run(tmp_path: Path) -> None:
    done = train(
        "ppo",
        "--preset",
        "cifar_baseline",
        "--task",
        "cifar_baseline",
        "--rounds",
        "1",
        "--envs",
        "1",
        "--episode-length",
        "5",
        "--telemetry-dir",
        "D",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (
        sum(event["event_type"] == "batch_completed" for event in RunDirectory.open(tmp_path / "D").events())
        == 1
    )


@pytest.mark.parametrize("policy", ["heuristic", "random", "wait"])
def test_policies_that_do_not_learn_run_too(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([policy, *SMALL, "--rounds", "1", "--telemetry-dir", str(tmp_path / "D")]) == 0
    assert "1 (last)" in capsys.readouterr().out
    assert RunDirectory.open(tmp_path / "D").config["policy"] == policy


def test_a_run_without_a_directory_gets_a_new_one_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for n in (1, 2):
        assert main(["wait", *SMALL, "--rounds", "1", "--seed", "5"]) == 0
        assert f"results: runs/digits_impaired-wait-5-{n}\n" in capsys.readouterr().out
    first, second = (RunDirectory.open(Path("runs") / f"digits_impaired-wait-5-{n}") for n in (1, 2))
    assert first.config["telemetry_dir"] != second.config["telemetry_dir"]
    assert torch.get_num_threads() == 1


def test_telemetry_dir_none_records_nothing_and_shows_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["wait", *SMALL, "--rounds", "1", "--telemetry-dir", "none"]) == 0
    output = capsys.readouterr().out
    assert "1 (last)" in output
    assert "nothing was recorded" in output
    assert list(tmp_path.iterdir()) == []


def test_a_task_with_other_sizes_can_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rounds", "1", "--task", "digits_impaired:base=6", "--telemetry-dir", str(tmp_path / "D")]
    assert main(["wait", *SMALL, *flags]) == 0
    capsys.readouterr()
    assert RunDirectory.open(tmp_path / "D").config["task"] == "digits_impaired:base=6"


def test_several_tasks_are_trained_on_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--envs` is the number of each task; the policy may follow the list of tasks."""
    place = tmp_path / "r"
    tasks = ["--task", "digits_impaired", "digits_mlp:features=4", "random"]
    assert main([*tasks, *SMALL[4:], "--rounds", "1", "--telemetry-dir", str(place)]) == 0
    output = capsys.readouterr()
    assert re.search(r"J [\d.]+ \(digits_impaired [\d.]+, digits_mlp:features=4 [\d.]+\)", output.err)
    assert "digits_mlp" in output.out
    run = RunDirectory.open(place)
    assert (run.config["task"], run.config["policy"]) == (
        ["digits_impaired", "digits_mlp:features=4"],
        "random",
    )
    start = next(iter(run.events()))["data"]
    assert start["envs"] == 4
    assert start["envs_by_task"] == {"digits_impaired": 2, "digits_mlp:features=4": 2}
    assert run_directory(TrainingConfig(task=("digits_shift", "digits_mlp"))).name.startswith(
        "digits_shift-digits_mlp-ppo-42-"
    )


def test_a_task_of_the_users_own_module_can_be_trained(tmp_path: Path) -> None:
    (tmp_path / "my_tasks.py").write_text(
        "from dataclasses import replace\n"
        "from esper.runtime.tasks import get_task_spec, register_task\n"
        "register_task(replace(get_task_spec('digits_impaired'), name='my_digits'))\n"
    )
    flags = ["--rounds", "1", "--task", "my_digits", "--telemetry-dir", "D"]
    done = train("wait", "--import", "my_tasks", *SMALL, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert RunDirectory.open(tmp_path / "D").config["task"] == "my_digits"
    without = train("wait", *SMALL, *flags, cwd=tmp_path)
    assert without.returncode == 2
    assert "'my_digits'" in without.stderr


def test_a_run_can_be_repeated_from_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def objectives(directory: str) -> list[float]:
        return [
            event["data"]["avg_objective"]
            for event in RunDirectory.open(tmp_path / directory).events()
            if event["event_type"] == "batch_completed"
        ]

    assert main(["ppo", *SMALL, "--rounds", "2", "--telemetry-dir", str(tmp_path / "A")]) == 0
    recorded = tmp_path / "A" / "config.json"
    assert main(["--config", str(recorded), "--telemetry-dir", str(tmp_path / "B")]) == 0
    config, _ = resolve(file=recorded, flags={"telemetry_dir": "none"})
    agent, history = vectorized.train_ppo_vectorized(**config.to_train_kwargs())
    assert agent is not None
    assert objectives("A") == objectives("B") == [summary.mean_objective for summary in history]
    capsys.readouterr()


def test_the_entry_point_is_looked_up_when_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_ppo_vectorized, told = vectorized.train_ppo_vectorized, []

    def watched(**fields: object) -> object:
        told.append(TrainingConfig(**fields))  # type: ignore[arg-type]
        return train_ppo_vectorized(**fields)

    monkeypatch.setattr(vectorized, "train_ppo_vectorized", watched)
    assert main(["wait", *SMALL, "--rounds", "1", "--telemetry-dir", str(tmp_path / "D")]) == 0
    assert [config.to_json() for config in told] == [RunDirectory.open(tmp_path / "D").config]


def test_reward_modes_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rounds", "2", "--ab-reward-modes", "shaped", "sparse", "--telemetry-dir", str(tmp_path)]
    assert main(["ppo", *SMALL, *flags]) == 0
    out = capsys.readouterr().out
    rows = [re.split(r" *│ *", line)[1:3] for line in out.splitlines() if line.startswith("│")]
    assert [name for name, _ in rows] == ["shaped", "sparse", "shaped − sparse"]
    assert "not those between training runs" in " ".join(out.split())
    shaped, sparse, difference = (float(figure.split()[0]) for _, figure in rows)
    assert difference == pytest.approx(shaped - sparse, abs=2e-4)
    assert [RunDirectory.open(tmp_path / mode).config["reward"]["mode"] for mode in ("shaped", "sparse")] == [
        "shaped",
        "sparse",
    ]
    assert main(["ppo", *SMALL, *flags]) == 2
    assert "not empty" in capsys.readouterr().err


# -- stops and failures --------------------------------------------------------------------------------------


def played(directory: Path) -> list[int]:
    events = RunDirectory.open(directory).events()
    return [event["data"]["round_idx"] for event in events if event["event_type"] == "batch_completed"]


def test_a_stopped_run_says_how_to_go_on_and_goes_on(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("ppo", *SMALL, "--rounds", "5000", "--telemetry-dir", "my run"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("round 1/"):
            process.send_signal(signal.SIGINT)
            break
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "stopping after this epoch" in errors
    again = re.search(r"to resume: python -m esper.scripts.train (.*)", output)
    assert again is not None, output
    rounds = len(played(tmp_path / "my run")) + 1
    done = train(*shlex.split(again[1]), "--rounds", str(rounds), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert played(tmp_path / "my run") == list(range(rounds))


def test_a_stopped_run_that_records_nothing_says_so(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("wait", *SMALL, "--rounds", "5000", "--telemetry-dir", "none"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("round 1/"):
            process.send_signal(signal.SIGINT)
            break
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "cannot be resumed, because nothing was recorded" in output
    assert list(tmp_path.iterdir()) == []


def test_the_later_of_two_runs_on_one_directory_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run waits for its schedules in a pipe while the first one takes the directory."""
    pipe, directory = tmp_path / "schedules.json", tmp_path / "D"
    os.mkfifo(pipe)
    schedules = files("esper") / "policies" / "digits_impaired.schedule.json"

    def take_the_directory() -> None:
        with open(pipe, "wb") as file:
            RunDirectory.create(directory, config={})
            file.write(schedules.read_bytes())

    first = threading.Thread(target=take_the_directory)
    first.start()
    teacher = ["--teacher", str(pipe), "--teacher-rounds", "1"]
    code = main(["ppo", *SMALL, "--rounds", "1", *teacher, "--telemetry-dir", str(directory)])
    first.join()
    assert code == 2
    assert str(directory) in capsys.readouterr().err


def test_the_directory_of_a_changed_task_has_a_plain_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainingConfig(task="digits_shift:base=8,episode_length=12")
    assert run_directory(config) == Path("runs/digits_shift-base-8-episode_length-12-ppo-42-1")


def test_sigterm_stops_a_run_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, handlers = (
        tmp_path / "D" / "events.jsonl",
        [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
    )

    over = threading.Event()

    def stop_after_the_first_round() -> None:
        while not over.wait(0.01):
            if log.exists() and b"batch_completed" in log.read_bytes():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    killer = threading.Thread(target=stop_after_the_first_round)
    killer.start()
    try:
        assert main(["wait", *SMALL, "--rounds", "5000", "--telemetry-dir", str(log.parent)]) == 143
    finally:
        over.set()
        killer.join()
    assert f"--telemetry-dir {log.parent} --resume auto" in capsys.readouterr().out
    assert [
        event["data"]["status"]
        for event in RunDirectory.open(log.parent).events()
        if event["event_type"] == "run_ended"
    ] == ["stopped"]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_run_that_cannot_write_fails_with_its_reason(tmp_path: Path) -> None:
    limit = 100_000  # room for the log, not for a checkpoint
    done = train(
        "ppo",
        *SMALL,
        "--rounds",
        "1",
        "--telemetry-dir",
        "D",
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert "its records are in D" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(RunDirectory.open(tmp_path / "D").events())


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--preset", "cifar_basline"], ["'cifar_basline'", "did you mean cifar_baseline?", "quickstart"]),
        (["--task", "digits_shft"], ["'digits_shft'", "digits_shift"]),
        (["--slots", "r0c7"], ["'r0c7'", "r0c0, r0c1"]),
        (["--slots", "early"], ["'early'", "r<row>c<column>"]),
        (["--reward-mode", "shapd"], ["'shapd'", "did you mean shaped?", "escrow"]),
        (["--config", "bad.yaml"], ["bad.yaml", "'ruonds'", "did you mean rounds?"]),
        (["--config", "none.yaml"], ["none.yaml", "No such file"]),
        (["--amp", "fp16", "--population", "8"], ["fp16", "population 8"]),
        (["--amp", "fp16"], ["fp16", "population 64"]),
        (["--preset", "none", "--rollout-length", "25"], ["rollout_length 25", "episode_length 24"]),
        (["--val-size", "99999"], ["val_size 99999", "samples"]),
        (["--telemetry-dir", "file/D"], ["file/D", "Not a directory"]),
        (["--telemetry-dir", "full"], ["full", "not empty", "resume"]),
        (["--devices", "cuda:99"], ["'cuda:99'", "allowed: cpu"]),
        (["--preset=none", "--task=cifar_baseline", "--data-root=empty"], ["cifar10", "esper data get"]),
        (["--task", "cifar_baseline"], ["values_rounds 24", "'cifar_baseline'", "--preset none"]),
        (["--resume", "auto"], ["resume auto", "telemetry_dir"]),
        (["--resume", "weights.safetensors"], ["weights.safetensors", "--telemetry-dir"]),
        (["--lrr", "3"], ["'--lrr'", "did you mean --lr?"]),
        (["--envs", "1000000000000"], ["envs is 1000000000000", "to 65,536"]),
        (["--envs", "65536", "--episode-length", "10000"], ["GB of memory", "a rollout of 10,000 steps"]),
        (["--batch-size", "1000000", "--envs", "4096"], ["GB of memory", "this machine has"]),
        (["--hidden", "100000000000"], ["hidden is 100000000000", "to 4,096"]),
        (["--patience", "1e300"], ["patience is 1e+300", "to 100"]),
        (["--seed", "9" * 20], ["seed is 99999999999999999999"]),
        (["--telemetry-dir", "x" * 300], ["File name too long"]),
        (["--telemetry-dir", "a\0b"], ["'a\\x00b'", "control characters"]),
        (["--task", "\x1b[2J"], ["'\\x1b[2J'"]),
        (["--envs", "0"], ["envs is 0", "from 1 to 65,536"]),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("ruonds: 3\n")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(["ppo", "--rounds", "1", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    for part in parts:
        assert part in output.err
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "runs"] == before


def test_bad_input_leaves_no_traceback(tmp_path: Path) -> None:
    done = train("ppo", "--task", "nothing", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: task 'nothing' is unknown")
    assert "Traceback" not in done.stderr


# -- progress ------------------------------------------------------------------------------------------------


def shown(*, terminal: bool) -> str:
    """What a short run of events looks like."""
    text = io.StringIO()
    output = ProgressOutput(Console(file=text, force_terminal=terminal, width=200), rounds=10)
    assert not output.started
    facts = {"avg_accuracy": 61.25, "avg_objective": 0.5125, "avg_committed_accuracy": 60.0}
    with TelemetryHub().attached(output) as hub:
        for kind, data in (
            (TelemetryEventType.RUN_STARTED, {"episode_length": 24}),
            (
                TelemetryEventType.BATCH_COMPLETED,
                {"round_idx": 0, "env_steps": 4000, "seconds": 2.0, **facts},
            ),
            (
                TelemetryEventType.ALERT,
                {"severity": "warning", "message": "Too far.", "metric": "kl", "value": 0.3, "limit": 0.1},
            ),
            (
                TelemetryEventType.BATCH_COMPLETED,
                {"round_idx": 1, "env_steps": 8000, "seconds": 4.0, **facts},
            ),
            (TelemetryEventType.CHECKPOINT, {"path": "round-2", "best": True}),
        ):
            hub.emit(TelemetryEvent(event_type=kind, data=data))
    assert output.started
    return text.getvalue()


def test_progress_is_plain_lines_away_from_a_terminal() -> None:
    facts = "accuracy 61.2 %, committed 60.0 %, J 0.512"
    assert shown(terminal=False).splitlines() == [
        f"round 1/10: {facts}, 2,000 env-steps/s, 0:00:18 left, alerts 0",
        "warning: Too far. (kl 0.3, limit 0.1)",
        f"round 2/10: {facts}, 1,000 env-steps/s, 0:00:24 left, alerts 1",
        "checkpoint round-2 (best so far)",
    ]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("every", [0.0, 3600.0])
def test_a_long_round_shows_its_epochs(terminal, every) -> None:
    text = io.StringIO()
    output = ProgressOutput(Console(file=text, force_terminal=terminal, width=200), rounds=10, every=every)
    with TelemetryHub().attached(output) as hub:
        hub.emit(TelemetryEvent(event_type=TelemetryEventType.RUN_STARTED, data={"episode_length": 24}))
        hub.round_idx = 3
        for epoch in (7, 7, 8):
            hub.emit(TelemetryEvent(event_type=TelemetryEventType.THROUGHPUT, epoch=epoch, data={}))
    if every:
        assert "epoch" not in text.getvalue()
    elif terminal:
        assert "epoch 8/24, 0:00:00 left" in text.getvalue()
    else:
        shown = [f"round 4/10, epoch {epoch}/24, 0:00:00 left" for epoch in (7, 8)]
        assert text.getvalue().splitlines() == shown


def test_progress_on_a_terminal_is_a_bar() -> None:
    text = shown(terminal=True)
    assert "━" in text
    assert "2/10" in text
    assert "warning: Too far." in text
    assert "alerts 1" in text
