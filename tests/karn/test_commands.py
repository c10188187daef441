"""The reading commands: what they print of a sound run, and what they say to everything else."""

from __future__ import annotations

import contextlib
import csv
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

import pytest
import torch
from safetensors.torch import load_file

from esper.karn import render_report
from esper.karn.summary import open_run, summarize
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
        ["sql", "{run}", "SELEC"],
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
    "foreign": (lambda run: (run / "run.json").write_text('{"name": "other"}'), "format"),
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
def test_a_damaged_table_is_named(
    arguments: list[str], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = copy / "tables" / "steps-00001.parquet"
    table.write_bytes(table.read_bytes()[:-100])
    assert main([arguments[0], str(copy), *arguments[1:]]) == 2
    assert table.name in capsys.readouterr().err


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


def test_watching_does_not_change_training(run_path: Path, tmp_path: Path) -> None:
    path, over, looks = tmp_path / "watched", threading.Event(), []

    def look() -> None:
        while not over.is_set():
            with contextlib.suppress(TelemetryError):  # before there is a run
                looks.append(render_report(open_run(path)))

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
