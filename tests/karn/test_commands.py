"""The reading commands: what they print of a sound run, and what they say to everything else."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from esper.karn import render_report
from esper.karn.summary import is_locked, is_written, locate_run, open_run, summarize
from esper.karn.views import VIEWS
from esper.leyline import METRICS
from esper.nissa import RunDirectory, TelemetryError, TelemetryHub
from esper.scripts.cli import main
from esper.simic import train_ppo_vectorized

from .conftest import SMALL, Write

READERS: dict[str, Callable[[Path], list[str]]] = {
    "runs": lambda run: ["runs", str(run)],
    "watch": lambda run: ["watch", str(run)],
    "report": lambda run: ["report", str(run), "--out", str(run.parent / "page.html")],
    "sql": lambda run: ["sql", str(run), "SELECT * FROM rounds"],
    "compare": lambda run: ["compare", str(run), str(run)],
    "sync": lambda run: ["sync", str(run), "--to", "tensorboard", "--out", str(run.parent / "board")],
}


@pytest.fixture
def copy(run_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_path, tmp_path / "copy" / "run"))


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_leaves_the_run_as_it_is(name: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(copy)
    assert main(READERS[name](copy)) == 0
    assert capsys.readouterr().out
    assert contents(copy) == before


def test_runs_lists_how_each_stands(
    run_path: Path, random_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (run_path, random_path):
        shutil.copytree(path, tmp_path / "deep" / path.name)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    lines = {line.split()[0]: line.split() for line in shown.out.splitlines()}
    for name, policy in (("deep/small", "ppo"), ("deep/random", "random")):
        assert lines[name][1:5] == ["digits_impaired", policy, "5", "2/2"]
        assert lines[name][7:9] == ["finished", "0"]
    assert "broken/run.json" in shown.err


def test_sql_prints_tables_csv_and_json(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = "SELECT round_idx, avg_objective, {'a': [1]} AS nested FROM rounds ORDER BY round_idx"
    expected = open_run(run_path).rows("SELECT round_idx, avg_objective FROM rounds ORDER BY round_idx")
    assert main(["sql", str(run_path), query, "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [row | {"nested": {"a": [1]}} for row in expected]
    assert main(["sql", str(run_path), query, "--output", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["avg_objective"]) for row in rows] == [row["avg_objective"] for row in expected]
    assert [json.loads(row["nested"]) for row in rows] == [{"a": [1]}] * 2
    assert main(["sql", str(run_path), "SELECT 'long ' || repeat('x', 300) AS text"]) == 0
    assert "x" * 300 in capsys.readouterr().out  # a table in a pipe is not cut


def test_sql_without_a_query_lists_every_metric(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sql", str(run_path)]) == 0
    shown = capsys.readouterr().out
    for name, metric in METRICS.items():
        assert metric.name in shown, name
        assert metric.meaning in shown, name


@pytest.mark.parametrize(
    "arguments",
    [
        ["watch", "{run}", "--env", "9"],
        ["watch", "{run}", "--round", "7"],
        ["report", "{run}", "--growth-rounds", "0"],
        ["report", "{run}", "--out", "{run}/no/x.html"],
        ["compare", "{run}"],
        ["compare", "{run}", "{run}", "--last", "0"],
    ],
)
def test_bad_arguments_are_explained(
    arguments: list[str], run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(run=run_path) for argument in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    "query",
    [
        "",
        "  ;",
        "-- nothing",
        "SELEC",
        "SELECT * FROM rouns",
        "SELECT j FROM rounds",
        "SELECT 'x'::INTEGER",
        "SELECT interval '99999999 years'",
        "SELECT '\udc80'",
    ],
)
def test_a_bad_query_is_explained_with_the_views(
    query: str, run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sql", str(run_path), query]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: query: ")
    assert f"Views: {', '.join(VIEWS)}." in shown.err
    assert "Traceback" not in shown.err
    assert not shown.out


def test_rounds_are_counted_from_1(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(run_path), "--round", "2"]) == 0
    assert "round 2, env 0" in capsys.readouterr().out
    assert main(["watch", str(run_path), "--round", "0"]) == 2
    assert "round is 0, must be 1 or more" in capsys.readouterr().err
    assert main(["watch", str(run_path), "--round", "3"]) == 2
    assert "round 3 is not recorded; allowed: 1, 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*READERS, "grow"])
def test_help_names_each_argument_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert "Args:" not in shown
    assert "usage: esper" in shown


# -- names of runs -------------------------------------------------------------------------------------------


@pytest.fixture
def runs(run_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with three runs under runs/; "second" was started last."""
    for name, started in (("first", "01"), ("second", "03"), ("deep/third", "02")):
        run = Path(shutil.copytree(run_path, tmp_path / "runs" / name))
        info = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(info | {"started": f"2026-01-{started}T00:00:00+00:00"}))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_runs_are_located_by_name_path_and_latest(runs: Path) -> None:
    assert locate_run("first") == Path("runs/first")
    assert locate_run("deep/third") == Path("runs/deep/third")
    assert locate_run("latest") == Path("runs/second")
    assert locate_run("runs/first") == Path("runs/first")
    assert locate_run(runs / "first") == runs / "first"
    shutil.copytree(runs / "first", runs.parent / "second")
    assert locate_run("second") == Path("second")  # a path comes before a name
    (runs / "second" / "run.json").write_text("{")
    assert locate_run("latest") == Path("runs/deep/third")


@pytest.mark.parametrize("name", ["watch", "report", "sql", "compare", "sync"])
@pytest.mark.parametrize("run", ["first", "latest"])
def test_readers_take_a_name(run: str, name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {
        "sql": ["SELECT count(*) FROM rounds"],
        "compare": ["second"],
        "sync": ["--to", "tensorboard"],
    }
    assert main([name, run, *arguments.get(name, [])]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out
    directory = runs / ("second" if run == "latest" else run)
    assert (directory / "report.html").exists() == (name == "report")
    assert (directory / "tensorboard").exists() == (name == "sync")


def test_an_unknown_name_is_answered_with_the_known(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "frist"]) == 2
    error = capsys.readouterr().err
    assert "there is no run frist or runs/frist" in error
    assert "second, deep/third, first" in error
    shutil.rmtree(runs)
    for name in ("frist", "latest", "a\0b"):
        assert main(["watch", name]) == 2
        assert capsys.readouterr().err.startswith("error: ")


# -- hostile runs --------------------------------------------------------------------------------------------

TITLE, CLEAR, CSI, REVERSED = "\x1b]0;owned\x07", "\x1b[2J", "\x9b2J", "\u202e"
MARKUP = "[link=https://example.org]x[/link][/]"
HOSTILE = f"evil{TITLE}{CLEAR}{CSI}{REVERSED}{MARKUP}"


@pytest.fixture
def hostile(write_run: Write) -> Path:
    """A run in which every text is hostile to a terminal."""
    at = {"round_idx": 0, "env_id": 0, "epoch": 1, "slot_id": HOSTILE}
    step = {
        "op": HOSTILE,
        "slot": HOSTILE,
        "blueprint": HOSTILE,
        "veto": HOSTILE,
        "executed": False,
        "stages": {HOSTILE: 3},
        "alphas": {HOSTILE: 7.0},
    }
    lifecycle = {"kind": "germinated", "blueprint_id": HOSTILE}
    start = {"task": HOSTILE, "policy": HOSTILE, "slots": [HOSTILE], "rounds": 1, "seed": 1, "envs": 1}
    return write_run(
        [
            ("run_started", start),
            ("seed_lifecycle", lifecycle, at),
            ("last_action", step, at),
            ("reward_summary", {"components": {HOSTILE: 1.0}, "total_reward": 1.0}, at),
            ("attribution", {"slots": [HOSTILE], "shapley": {HOSTILE: 1.0}}, at),
            ("ppo_update", {"head_entropy": {HOSTILE: 1.0}}, {"round_idx": 0}),
            ("action_distribution", {"action_counts": {HOSTILE: 1}}, {"round_idx": 0}),
            ("episode_outcome", {"episode_idx": 0, "objective": 0.5}, at),
            ("batch_completed", {"round_idx": 0, "seconds": 1e300, "avg_reward": 1e308}, {"round_idx": 0}),
            ("alert", {"code": HOSTILE, "severity": HOSTILE, "message": HOSTILE}, {"round_idx": 0}),
            ("rollback", {"reason": HOSTILE}, at),
            ("checkpoint", {"path": HOSTILE, HOSTILE: 1}),
            ("run_ended", {"status": HOSTILE, "message": HOSTILE}),
        ],
        name=f"run{CLEAR}",
        setting=HOSTILE,
    )


def assert_harmless(shown: str) -> None:
    assert [character for character in shown if not character.isprintable() and character != "\n"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["runs", "{parent}"],
        ["watch", "{run}"],
        ["report", "{run}"],
        ["compare", "{run}", "{run}"],
        ["sync", "{run}", "--to", "tensorboard"],
        ["sql", "{run}", "SELECT task, policy FROM starts"],
        ["sql", "{run}", "SELECT task FROM starts", "--output", "json"],
        ["sql", "{run}", "SELECT task, slots FROM starts", "--output", "csv"],
        ["sql", "{run}", "SELECT * FROM (PIVOT starts ON task USING count(*))"],
        ["sql", "{run}", "SELECT task::INTEGER FROM starts"],
        ["sql", "{run}", "SELECT * FROM slots"],
        ["watch", "{run}", "--env", "9"],
        ["watch", "{run}/nothing"],
    ],
    ids=" ".join,
)
def test_text_of_a_run_cannot_act_on_the_terminal(
    arguments: list[str], hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [argument.format(run=hostile, parent=hostile.parent) for argument in arguments]
    assert main(arguments) in (0, 2)
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert shown.out or shown.err
    assert_harmless((shown.out + shown.err).replace("\r\n", "\n"))
    if arguments[0] in ("runs", "watch", "sql") and not shown.err:
        assert "evil\\x1b]0;owned" in shown.out or "evil\\u001b]0;owned" in shown.out
        assert "[link=https://example.org]" in shown.out


def test_json_keeps_the_exact_text(hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = hostile.rename(tmp_path / "harmless")  # its own name is refused as an argument
    assert main(["sql", str(run), "SELECT task FROM starts", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"task": HOSTILE}]


def test_the_page_shows_control_characters(hostile: Path) -> None:
    assert_harmless(render_report(hostile))


@pytest.mark.parametrize("seed", range(12))
def test_a_log_with_values_of_wrong_types_is_explained(
    seed: int, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Payload values of a real log are replaced at random; readers show the run or name what is wrong."""
    random = Random(seed)
    lines = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    for event in random.sample(lines, 4):
        if event["data"]:
            name = random.choice(sorted(event["data"]))
            event["data"][name] = random.choice(
                [None, "x", -1, 1e300, [], [["a", 1]], {"a": "b"}, True, 2**70]
            )
    (copy / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("runs", "watch", "report", "sql", "compare"):
        assert main(READERS[name](copy)) in (0, 2), name
        assert "Traceback" not in capsys.readouterr().err


# -- damaged runs --------------------------------------------------------------------------------------------


def _change_line(number: int, old: str, new: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
        assert old in lines[number]
        lines[number] = lines[number].replace(old, new)
        (run / "events.jsonl").write_text("".join(lines))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, "run"),
    "empty": (lambda run: [shutil.rmtree(run), run.mkdir()], "run"),
    "half-written": (lambda run: (run / "run.json").unlink(), "run"),
    "foreign": (lambda run: (run / "run.json").write_text('{"name": "other"}'), "version"),
    "no JSON": (lambda run: (run / "run.json").write_text('{"form'), "JSON"),
    "no log": (lambda run: (run / "events.jsonl").unlink(), "events.jsonl"),
    "no settings": (lambda run: (run / "config.json").unlink(), "config.json"),
    "not JSON within": (_change_line(3, '{"seq":', '{"seq'), "line 4"),
    "a gap": (_change_line(3, '"seq":3', '"seq":4'), "event 4"),
    "an unknown event": (_change_line(0, "run_started", "run_begun"), "run_begun"),
    "no payload": (_change_line(0, '"data":{', '"date":{'), "line 1"),
    "a wrong kind": (_change_line(0, '"rounds":2', '"rounds":"two"'), "rounds"),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_sound_run_is_explained(
    damage: str, name: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, named = DAMAGES[damage]
    spoil(copy)
    assert main(READERS[name](copy)) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert named in shown.err
    assert str(copy) in shown.err
    assert "Traceback" not in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    "arguments", [["watch"], ["report"], ["sql", "SELECT * FROM Slots"], ["sql", "SELECT * FROM steps"]]
)
@pytest.mark.parametrize("damage", ["truncated", "empty", "header only", "overwritten", "foreign"])
def test_a_damaged_table_is_named(
    damage: str, arguments: list[str], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = copy / "tables" / "steps-00001.parquet"
    content = table.read_bytes()
    if damage == "foreign":
        pq.write_table(pa.table({"seq": ["one"], "op": ["WAIT"]}), table)
    else:
        damages = {
            "truncated": content[:-100],
            "empty": b"",
            "header only": content[:4],
            "overwritten": b"\xff" * len(content),
        }
        table.write_bytes(damages[damage])
    assert main([arguments[0], str(copy), *arguments[1:]]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert str(table) in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("version", [0, 99, "1"])
def test_a_run_of_another_format_is_named(
    version: object, name: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = json.loads((copy / "run.json").read_text())
    info.update({key: version for key in ("format", "version") if key in info})
    (copy / "run.json").write_text(json.dumps(info))
    assert main(READERS[name](copy)) == 2
    shown = capsys.readouterr()
    assert str(copy / "run.json") in shown.err
    assert repr(version) in shown.err
    assert not shown.out


@pytest.mark.parametrize("share", [0.0, 0.003, 0.2, 0.5, 0.8, 0.999])
def test_readers_take_a_log_that_was_cut_anywhere(
    share: float, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a kill leaves it: whole lines, perhaps a part of one, and the tables of the rounds that were
    over."""
    whole = (copy / "events.jsonl").read_bytes()
    (copy / "events.jsonl").write_bytes(whole[: int(len(whole) * share)])
    rounds = [event for event in RunDirectory.open(copy).events() if event["event_type"] == "batch_completed"]
    for table in (copy / "tables").iterdir():
        if int(table.stem.split("-")[1]) >= len(rounds):
            table.unlink()
    summary = summarize(open_run(copy))
    assert summary.status == "cut off"
    assert summary.rounds_done == len(rounds)
    for name in ("runs", "watch", "report", "sql"):
        assert main(READERS[name](copy)) == 0, capsys.readouterr().err
    assert "cut off" in capsys.readouterr().out


def test_status(run_path: Path, copy: Path, write_run: Write) -> None:
    start, end = ("run_started", {"task": "t", "rounds": 3}), ("run_ended", {"status": "stopped"})
    assert summarize(open_run(run_path)).status == "finished"
    assert summarize(open_run(write_run([start, end], "a"))).status == "stopped"
    assert summarize(open_run(write_run([start, end, start], "b"))).status == "cut off"
    path = write_run([start], "c")
    with TelemetryHub().attached(*RunDirectory.open(path).outputs()):
        summary = summarize(open_run(path))
    assert (summary.status, summary.rounds_done, summary.rounds, summary.objective) == ("running", 0, 3, None)
    assert summarize(open_run(path)).status == "cut off"


def test_a_lock_counts_only_on_the_logs_device(tmp_path: Path) -> None:
    """Inode numbers repeat from one file system to the next."""
    locks = (
        "1: POSIX  ADVISORY  WRITE 71 fe:00:7 0 EOF\n"
        "2: FLOCK  ADVISORY  WRITE 72 fe:01:4711 0 EOF\n"
        "2: -> FLOCK  ADVISORY  WRITE 73 00:1b:99 0 EOF\n"
    )
    assert is_locked(locks, {(254, 1)}, 4711)
    assert is_locked(locks, {(8, 1), (0, 27)}, 99)
    assert not is_locked(locks, {(254, 0)}, 4711)  # the same inode number on another device
    assert not is_locked(locks, {(254, 1)}, 471)
    assert not is_locked(locks, {(254, 0)}, 7)
    log = tmp_path / "events.jsonl"
    log.touch()
    assert not is_written(log)
    with log.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_written(log)


def test_watching_does_not_change_training(run_path: Path, tmp_path: Path) -> None:
    path, over, looks = tmp_path / "watched", threading.Event(), []

    def look() -> None:
        while not over.is_set():
            with contextlib.suppress(TelemetryError):  # before there is a run
                looks.append(render_report(path))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        train_ppo_vectorized(**SMALL, telemetry_dir=str(path))
    finally:
        over.set()
        watcher.join()
    assert looks
    alone, watched = (
        {
            (file.name, name): tensor
            for file in (run / "checkpoints").glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for run in (run_path, path)
    )
    assert alone
    assert alone.keys() == watched.keys()
    assert all(torch.equal(tensor, watched[key]) for key, tensor in alone.items())


def test_a_killed_run_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real one, with SIGKILL in its second round or later, while it is being watched."""
    path = tmp_path / "killed"
    code = (
        f"import torch; torch.set_num_threads(1); from esper.simic import train_ppo_vectorized as train; "
        f"train(**{SMALL | {'rounds': 500}!r}, telemetry_dir={str(path)!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 120
        while not list(path.glob("tables/throughput-00000.parquet")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        assert main(["runs", str(path)]) == 0
        assert "running" in capsys.readouterr().out
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    for name, arguments in READERS.items():
        if name != "sync":
            assert main(arguments(path)) == 0, name
    assert "cut off" in capsys.readouterr().out
