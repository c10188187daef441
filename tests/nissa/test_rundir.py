"""The run directory: what it holds, what survives a kill, exact truncation, and errors that say what is
wrong."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import STEP_TABLES, TelemetryEvent, TelemetryEventType
from esper.nissa import JsonlOutput, RunDirectory, TelemetryError, TelemetryHub

KINDS = [
    TelemetryEventType.LAST_ACTION,
    TelemetryEventType.THROUGHPUT,
    TelemetryEventType.SEED_LIFECYCLE,
    TelemetryEventType.BATCH_COMPLETED,
    TelemetryEventType.CHECKPOINT,
]


def event(
    kind: str | TelemetryEventType = "ppo_update", env_id: int | None = None, **data: Any
) -> TelemetryEvent:
    return TelemetryEvent(event_type=TelemetryEventType(kind), env_id=env_id, data=data)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(
        tmp_path / "run", config={"task": "digits_shift", "rounds": 3}, command=["esper", "train"]
    )


def content(run: RunDirectory) -> dict[str, Any]:
    """Everything but the times."""
    strip = [{k: v for k, v in e.items() if k != "t_wall"} for e in run.events()]
    return {
        "events": strip,
        **{t: run.table(t).drop_columns("t_wall").to_pylist() for t in STEP_TABLES.values()},
    }


def test_a_new_directory(run: RunDirectory) -> None:
    assert {p.name for p in run.path.iterdir()} == {
        "run.json",
        "config.json",
        "events.jsonl",
        "tables",
        "checkpoints",
    }
    info = json.loads((run.path / "run.json").read_text())
    assert info["command"] == ["esper", "train"]
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(info["started"])).total_seconds()) < 60
    assert {"python", "torch", "numpy", "esper-grow"} <= info["versions"].keys()
    assert info["machine"]["cpus"] >= 1
    assert json.loads((run.path / "config.json").read_text()) == {"task": "digits_shift", "rounds": 3}
    assert RunDirectory.open(run.path) == run


def test_git_commit(run: RunDirectory) -> None:
    here = Path(__file__).parent
    head = subprocess.run(
        ["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode:
        pytest.skip("not a git checkout")
    assert run.info["git"]["commit"] == head.stdout.strip()
    assert isinstance(run.info["git"]["dirty"], bool)


def test_the_command_defaults_to_this_process(tmp_path: Path) -> None:
    assert RunDirectory.create(tmp_path / "a", config={}).info["command"] == sys.argv


def test_an_empty_directory_will_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunDirectory.create(tmp_path / "empty", config={})


def test_an_existing_run_is_not_overwritten(run: RunDirectory) -> None:
    before = (run.path / "run.json").read_bytes()
    with pytest.raises(
        TelemetryError,
        match=r"run directory .*run is not empty, it holds checkpoints, config\.json, .*resume",
    ):
        RunDirectory.create(run.path, config={})
    assert (run.path / "run.json").read_bytes() == before


def test_places_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TelemetryError, match=r"cannot create the run directory .*file: File exists"):
        RunDirectory.create(tmp_path / "file", config={})
    with pytest.raises(TelemetryError, match=r"missing is not a run directory: run\.json: No such file"):
        RunDirectory.open(tmp_path / "missing")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", "", r"run\.json: not valid JSON"),
        ("run.json", '{"version": 1,', r"run\.json: not valid JSON"),
        ("run.json", "[1]", r"run\.json: the content is \[1\]: expected `object`"),
        ("run.json", '{"version": 99}', r"run\.json: version is 99, written by a newer Esper"),
        ("run.json", '{"format": 99}', r"run\.json: version is 99, written by a newer Esper"),
        ("run.json", "{}", r"run\.json: field version is missing"),
        ("run.json", '{"version": null}', r"run\.json: version is null"),
        ("run.json", None, r"not a run directory: run\.json: No such"),
        ("config.json", "}", r"config\.json: not valid JSON"),
        ("config.json", None, r"config\.json: No such file"),
        ("events.jsonl", None, r"not a complete run directory: events\.jsonl is missing"),
    ],
)
def test_damaged_directories(run: RunDirectory, name: str, text: str | None, message: str) -> None:
    if text is None:
        (run.path / name).unlink()
    else:
        (run.path / name).write_text(text)
    with pytest.raises(TelemetryError, match=message):
        RunDirectory.open(run.path)


def test_a_directory_of_the_older_name_of_this_version_opens(run: RunDirectory) -> None:
    info = json.loads((run.path / "run.json").read_text())
    info["format"] = info.pop("version")
    (run.path / "run.json").write_text(json.dumps(info))
    assert RunDirectory.open(run.path).info["version"] == 1


def test_of_runs_that_start_together_one_gets_the_directory(tmp_path: Path) -> None:
    """The others are told so, whatever the moment at which they come."""
    for attempt in range(20):
        barrier, outcomes = threading.Barrier(4), []

        def start(directory: Path, barrier: threading.Barrier, outcomes: list[str]) -> None:
            barrier.wait()
            try:
                RunDirectory.create(directory, config={})
                outcomes.append("created")
            except TelemetryError as error:
                outcomes.append(str(error))

        threads = [
            threading.Thread(target=start, args=(tmp_path / str(attempt), barrier, outcomes))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count("created") == 1
        assert all("in use" in o or "not empty" in o for o in outcomes if o != "created"), outcomes


def test_a_directory_in_use_is_refused_as_such(run: RunDirectory) -> None:
    log, _ = run.outputs()
    for begin in (RunDirectory.create, RunDirectory.restart):
        with pytest.raises(TelemetryError, match="in use: another run is writing events"):
            begin(run.path, config={})
    log.close()


def test_a_truncated_table_stops_a_resume_before_anything_is_cut(tmp_path: Path) -> None:
    """Also that of an early round, which the resume itself would not read."""
    run = RunDirectory.create(tmp_path / "run", config={})
    hub = TelemetryHub()
    with hub.attached(*run.outputs()):
        for round_idx in range(3):
            hub.round_idx = round_idx
            hub.emit(event("last_action", env_id=0))
            hub.emit(event("checkpoint"))
    first = sorted(run.tables.glob("steps-*.parquet"))[0]
    first.write_bytes(first.read_bytes()[:-20])
    log = run.log.read_bytes()
    with pytest.raises(TelemetryError, match=r"steps-00000\.parquet"):
        RunDirectory.resume(run.path, 1)
    assert run.log.read_bytes() == log


class TestRestart:
    def test_log_tables_and_best_policy_of_the_killed_run_are_gone(self, run: RunDirectory) -> None:
        run.log.write_bytes(b'{"seq":0}\n{"se')
        (run.tables / "steps-00000.parquet").write_bytes(b"x")
        (run.checkpoints / "best.safetensors").write_bytes(b"x")
        again = RunDirectory.restart(run.path, config={"rounds": 3})
        assert again.config == {"rounds": 3}
        assert list(again.events()) == []
        assert [*run.tables.iterdir(), *run.checkpoints.iterdir()] == []

    def test_a_run_with_a_checkpoint_is_left_as_it_is(self, run: RunDirectory) -> None:
        (run.checkpoints / "round-000001-epoch-0000.safetensors").touch()
        with pytest.raises(TelemetryError, match="has checkpoints"):
            RunDirectory.restart(run.path, config={})

    def test_what_a_killed_creation_leaves_is_taken_over(self, run: RunDirectory) -> None:
        (run.path / "run.json").unlink()
        (run.path / ".config.json.1.partial").touch()
        assert RunDirectory.restart(run.path, config={"rounds": 3}).config == {"rounds": 3}

    def test_a_creation_that_was_killed_at_its_start_is_taken_over(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "log only").mkdir()
        (tmp_path / "log only" / "events.jsonl").touch()
        for name in ("empty", "log only"):
            assert list(RunDirectory.restart(tmp_path / name, config={}).events()) == []

    @pytest.mark.parametrize("name", ["events.jsonl", "notes.txt"])
    def test_a_directory_of_something_else_is_left_as_it_is(self, run: RunDirectory, name: str) -> None:
        (run.path / "run.json").unlink()
        (run.path / name).write_text("precious")
        with pytest.raises(TelemetryError, match="not a run directory"):
            RunDirectory.restart(run.path, config={})
        assert (run.path / name).read_text() == "precious"


def test_one_writer_at_a_time(run: RunDirectory) -> None:
    log, _ = run.outputs()
    for act in (run.outputs, lambda: RunDirectory.resume(run.path, 0), lambda: JsonlOutput(run.log)):
        with pytest.raises(TelemetryError, match=r"in use: another run is writing events\.jsonl"):
            act()
    log.close()
    RunDirectory.resume(run.path, 0)
    run.outputs()[0].close()


def write(run: RunDirectory, kinds: list[TelemetryEventType], level: int, rounds: list[int]) -> int:
    """Emit the events, each with its place in the list, and return the number that the next one would
    have."""
    with TelemetryHub(level=level).attached(*run.outputs()) as hub:
        for i, (kind, hub.round_idx) in enumerate(zip(kinds, rounds, strict=True)):
            hub.emit(event(kind, env_id=i))
        return hub.next_seq


@pytest.mark.parametrize("level", [1, 2, 3])
@settings(max_examples=12)
@given(
    before=st.lists(st.sampled_from(KINDS), max_size=12),
    after=st.lists(st.sampled_from(KINDS), max_size=12),
    announced=st.booleans(),
)
def test_truncation_is_exact(
    level: int, before: list[TelemetryEventType], after: list[TelemetryEventType], announced: bool
) -> None:
    """A run that went on past a checkpoint, cut back to it, is the run that stopped there; cutting twice
    changes nothing."""
    announcement = [TelemetryEventType.CHECKPOINT] if announced or after else []
    rounds = [i // 5 for i in range(30)]
    with tempfile.TemporaryDirectory() as folder:
        short, long = (RunDirectory.create(Path(folder) / name, config={}) for name in ("short", "long"))
        seq = write(short, before, level, rounds[: len(before)])
        write(short, announcement, level, rounds[len(before) :][: len(announcement)])
        kinds = [*before, *announcement, *after]
        write(long, kinds, level, rounds[: len(kinds)])
        for _ in range(2):
            RunDirectory.resume(long.path, seq)
            # env ids count from 0 in each call of `write`
            ours, theirs = content(long), content(short)
            if announcement:
                theirs["events"][-1]["env_id"] = len(before)
            assert ours == theirs


def test_a_resumed_run_leaves_the_log_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    def play(run: RunDirectory, first: int, last: int) -> None:
        with TelemetryHub().attached(*run.outputs()) as hub:
            for i in range(first, last):
                hub.round_idx = i // 4
                hub.emit(event("last_action", env_id=i))
                hub.emit(event("seed_lifecycle", env_id=i))
                if i % 4 == 1:
                    hub.emit(event("checkpoint", i=i, seq=hub.next_seq))
                if i % 4 == 3:
                    hub.emit(event("batch_completed", i=i))

    straight, stopped = (RunDirectory.create(tmp_path / name, config={}) for name in "ab")
    play(straight, 0, 16)
    play(stopped, 0, 13)
    for _ in range(2):  # from the same checkpoint twice: the first attempt failed, too
        checkpoint = [e for e in stopped.events() if e["event_type"] == "checkpoint"][2]
        play(RunDirectory.resume(stopped.path, checkpoint["data"]["seq"]), checkpoint["data"]["i"] + 1, 16)
        assert content(stopped) == content(straight)


def test_steps_after_a_checkpoint_that_was_not_announced(tmp_path: Path) -> None:
    """Epochs in which nothing but steps happened, so that all of them have one position; stopped and killed
    in turn."""
    run = RunDirectory.create(tmp_path / "run", config={})

    def play(first: int, last: int, *, end: str | None = None) -> int:
        with TelemetryHub().attached(*run.outputs()) as hub:
            for epoch in range(first, last):
                hub.emit(
                    TelemetryEvent(
                        event_type=TelemetryEventType.THROUGHPUT, round_idx=epoch // 4, epoch=epoch % 4 + 1
                    )
                )
            seq = hub.next_seq
            if end is not None:
                hub.emit(event(end))
            return seq

    def played() -> list[int]:
        return [4 * row["round_idx"] + row["epoch"] - 1 for row in run.table("throughput").to_pylist()]

    assert play(0, 6, end="run_ended") == 0  # stopped in the middle of the second round
    for last in (7, 11):
        RunDirectory.resume(run.path, 0, (1, 2))
        assert played() == list(range(6))
        assert list(run.events()) == []
        play(6, last, end="batch_completed")  # and killed before the next checkpoint
        assert played() == list(range(last))
    RunDirectory.resume(run.path, 1, (2, 0))  # between rounds
    assert played() == list(range(8))


def test_a_log_without_what_the_checkpoint_counts_on(run: RunDirectory) -> None:
    write(run, [TelemetryEventType.ROLLBACK] * 3, 2, [0] * 3)
    before = run.log.read_bytes()
    with pytest.raises(TelemetryError, match=r"event 3 is missing, but the checkpoint needs events 0 to 4"):
        RunDirectory.resume(run.path, 5)
    assert run.log.read_bytes() == before
    run.log.write_bytes(before.replace(b'{"seq":1', b'{"seq":7'))
    with pytest.raises(TelemetryError, match="event 1 is missing"):
        RunDirectory.resume(run.path, 3)


@pytest.mark.parametrize("round_idx", [0, 1, 2])
def test_a_truncated_table_stops_resuming_before_anything_changes(run: RunDirectory, round_idx: int) -> None:
    write(
        run, [TelemetryEventType.LAST_ACTION, TelemetryEventType.BATCH_COMPLETED] * 3, 2, [0, 0, 1, 1, 2, 2]
    )
    table = run.tables / f"steps-0000{round_idx}.parquet"
    table.write_bytes(table.read_bytes()[:-9])
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(TelemetryError, match=rf"{table.name}: not a readable Parquet file, so it is damaged"):
        RunDirectory.resume(run.path, 2)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_burst_of_a_hundred_thousand_events_without_loss(run: RunDirectory) -> None:
    kinds = [
        TelemetryEventType.LAST_ACTION,
        TelemetryEventType.REWARD_SUMMARY,
        TelemetryEventType.THROUGHPUT,
        TelemetryEventType.ROLLBACK,
    ]
    with TelemetryHub().attached(*run.outputs()) as hub:
        for i in range(100_000):
            hub.round_idx = i // 20_000
            hub.emit(event(kinds[i % 4], env_id=i))
            if i % 20_000 == 19_999:
                hub.emit(event("batch_completed", env_id=i))
    logged = [e["env_id"] for e in run.events() if e["event_type"] == "rollback"]
    assert logged == list(range(3, 100_000, 4))
    for first, table in enumerate(("steps", "rewards", "throughput")):
        assert run.table(table)["env_id"].to_pylist() == list(range(first, 100_000, 4))


WRITER = """
import sys
from itertools import count
from esper.leyline import TelemetryEvent, TelemetryEventType as T
from esper.nissa import RunDirectory, TelemetryHub

run = RunDirectory.open(sys.argv[1])
with TelemetryHub().attached(*run.outputs()) as hub:
    for round_idx in count():
        hub.round_idx = round_idx
        for i in range(50):
            hub.emit(TelemetryEvent(event_type=T.LAST_ACTION, env_id=i))
            hub.emit(TelemetryEvent(event_type=T.REWARD_SUMMARY, env_id=i))
            hub.emit(TelemetryEvent(event_type=T.SEED_LIFECYCLE, env_id=i))
        seq = hub.next_seq
        hub.emit(TelemetryEvent(event_type=T.CHECKPOINT, data={"seq": seq}))
        hub.emit(TelemetryEvent(event_type=T.BATCH_COMPLETED, data={"round_idx": round_idx}))
        hub.flush()
        print(round_idx, flush=True)
"""


def kill_a_writer(run: RunDirectory, delay: float) -> None:
    """After its first round, at a moment of its own; what it reported as flushed must be there, and the rest
    a prefix."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run.path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n"
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    reported = process.communicate()[0].split()
    assert process.returncode == -signal.SIGKILL
    flushed = 1 + int(reported[-1]) if reported else 1
    events = list(RunDirectory.open(run.path).events())
    assert sum(e["event_type"] == "batch_completed" for e in events) >= flushed
    pattern = ["seed_lifecycle"] * 50 + ["checkpoint", "batch_completed"]
    assert [e["event_type"] for e in events] == [pattern[i % 52] for i in range(len(events))]
    for table in ("steps", "rewards"):
        rows = run.table(table)
        assert rows.num_rows % 50 == 0
        assert rows.num_rows >= 50 * flushed
        assert rows["round_idx"].to_pylist() == [i // 50 for i in range(rows.num_rows)]
    checkpoint = [e for e in events if e["event_type"] == "checkpoint"][flushed - 1]
    resumed = RunDirectory.resume(run.path, checkpoint["seq"])
    assert [e["seq"] for e in resumed.events()] == list(range(checkpoint["seq"] + 1))
    assert resumed.table("steps").num_rows == 50 * flushed
    assert resumed.table("rewards").num_rows == 50 * flushed


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.05])
def test_kill_leaves_a_valid_prefix(run: RunDirectory, delay: float) -> None:
    kill_a_writer(run, delay)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
def test_kill_at_any_moment_leaves_a_valid_prefix(run: RunDirectory, attempt: int) -> None:
    kill_a_writer(run, random.Random(attempt).uniform(0.0, 0.3))
