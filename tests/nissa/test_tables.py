"""Step events as Parquet rows: every row equals its event, files are whole, and nothing is converted in
silence."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import EVENTS, STEP_TABLES, TelemetryEvent, TelemetryEventType
from esper.leyline.metrics import FieldKind
from esper.nissa import ParquetOutput, TelemetryError, TelemetryHub
from esper.nissa.tables import read_table, truncate_tables

texts = st.text("abcπ", max_size=4)
VALUES = {
    FieldKind.FLOAT: st.floats() | st.integers(-5, 5).map(float),
    FieldKind.INT: st.integers(-(2**63), 2**63 - 1),
    FieldKind.FLAG: st.booleans(),
    FieldKind.TEXT: texts,
    FieldKind.TEXTS: st.lists(texts, max_size=3),
    FieldKind.NUMBERS: st.dictionaries(texts, st.floats(), max_size=3),
    FieldKind.COUNTS: st.dictionaries(texts, st.integers(0, 9), max_size=3),
    FieldKind.FLAGS: st.dictionaries(texts, st.booleans(), max_size=3),
    FieldKind.LABELS: st.dictionaries(texts, texts, max_size=3),
    FieldKind.VECTOR: st.lists(st.floats(width=32), max_size=3),
}


@st.composite
def step_events(draw: st.DrawFn) -> TelemetryEvent:
    kind = draw(st.sampled_from(sorted(STEP_TABLES)))
    data = draw(
        st.fixed_dictionaries({}, optional={f.name: st.none() | VALUES[f.kind] for f in EVENTS[kind].fields})
    )
    return TelemetryEvent(
        event_type=kind,
        data=data,
        round_idx=draw(st.integers(0, 2)),
        env_id=draw(st.integers(0, 3)),
        device="cpu",
        epoch=draw(st.none() | st.integers(1, 9)),
        slot_id=draw(st.sampled_from([None, "r0c0"])),
    )


def action(i: int = 0, round_idx: int | None = 0, **data: Any) -> TelemetryEvent:
    return TelemetryEvent(
        event_type=TelemetryEventType.LAST_ACTION, round_idx=round_idx, env_id=i, data={"op": "WAIT", **data}
    )


def end(kind: str = "batch_completed") -> TelemetryEvent:
    return TelemetryEvent(event_type=TelemetryEventType(kind))


def same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def equal(sent: Any, found: Any) -> bool:
    if isinstance(sent, dict):  # a map column comes back as pairs
        return len(sent) == len(found) and all(
            a == k and same(b, v) for (a, b), (k, v) in zip(sent.items(), found, strict=True)
        )
    if isinstance(sent, list):
        return len(sent) == len(found) and all(map(same, sent, found))
    return same(sent, found)


@settings(max_examples=40)
@given(st.lists(st.one_of(step_events(), st.just(end())), max_size=25))
def test_rows_equal_the_events(events: list[TelemetryEvent]) -> None:
    events.sort(key=lambda e: e.round_idx or 0)
    with tempfile.TemporaryDirectory() as folder:
        with TelemetryHub().attached(ParquetOutput(folder)) as hub:
            for event in events:
                hub.emit(event)
        for kind, table in STEP_TABLES.items():
            sent = [e for e in events if e.event_type is kind]
            rows = read_table(folder, table).to_pylist()
            assert len(rows) == len(sent)
            for row, event in zip(rows, sent, strict=True):
                for name in ("round_idx", "env_id", "device", "epoch", "slot_id", "seed_id"):
                    assert row[name] == getattr(event, name)
                for field in EVENTS[kind].fields:
                    assert equal(event.data.get(field.name), row[field.name])


def test_one_file_per_round_and_table(tmp_path: Path) -> None:
    output = ParquetOutput(tmp_path)
    for round_idx in (0, 1, 100_000):
        output.emit(round_idx, action(round_idx=round_idx))
        assert len(list(tmp_path.iterdir())) == min(round_idx, 2)
        output.emit(round_idx, end())
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "steps-00000.parquet",
        "steps-00001.parquet",
        "steps-100000.parquet",
    ]
    assert read_table(tmp_path, "steps")["round_idx"].to_pylist() == [0, 1, 100_000]
    assert read_table(tmp_path, "rewards").num_rows == 0
    assert duckdb.sql(f"select count(*), max(round_idx) from '{tmp_path}/steps-*.parquet'").fetchall() == [
        (3, 100_000)
    ]


@pytest.mark.parametrize(
    "write", [lambda o: o.flush(), lambda o: o.emit(9, end("checkpoint")), lambda o: o.close()]
)
def test_a_round_may_be_written_in_parts(tmp_path: Path, write: Any) -> None:
    for first in (0, 3):  # the second part by another process
        output = ParquetOutput(tmp_path)
        for i in range(first, first + 3):
            output.emit(i, action(i))
        write(output)
        assert read_table(tmp_path, "steps")["env_id"].to_pylist() == list(range(first + 3))
        assert [p.name for p in tmp_path.iterdir()] == ["steps-00000.parquet"]


def test_what_is_unmeasured_and_what_is_not_finite_stay_apart(tmp_path: Path) -> None:
    output = ParquetOutput(tmp_path)
    for i, value in enumerate((None, math.nan, math.inf, 0.0)):
        output.emit(i, action(value=value, op_probs={"WAIT": math.nan}))
    output.close()
    found = read_table(tmp_path, "steps")["value"].to_pylist()
    assert found[0] is None
    assert math.isnan(found[1])
    assert found[2:] == [math.inf, 0.0]


def test_numpy_values(tmp_path: Path) -> None:
    output = ParquetOutput(tmp_path)
    output.emit(
        0,
        action(
            value=np.float32(0.1),
            tempo=np.int64(3),
            executed=np.bool_(True),
            op_probs={"WAIT": np.float64(0.5)},
        ),
    )
    output.close()
    (row,) = read_table(tmp_path, "steps").to_pylist()
    assert (row["value"], row["tempo"], row["executed"]) == (float(np.float32(0.1)), 3, True)
    assert row["op_probs"] == [("WAIT", 0.5)]


def test_later_changes_of_a_payload_do_not_reach_the_table(tmp_path: Path) -> None:
    data = {"op": "WAIT", "reward": 1.0}
    output = ParquetOutput(tmp_path)
    output.emit(0, TelemetryEvent(event_type=TelemetryEventType.LAST_ACTION, round_idx=0, data=data))
    data["reward"] = 2.0
    output.close()
    assert read_table(tmp_path, "steps")["reward"].to_pylist() == [1.0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"reward": torch.tensor(1.0)}, "column reward holds double"),
        ({"tempo": 1.5}, "column tempo holds int64"),
        ({"op": 3}, "column op holds string"),
        ({"executed": 1}, "column executed holds bool"),
        ({"tempo": 2**70}, "column tempo"),
        ({"stages": {"r0c0": 1.5}}, "column stages holds map"),
        ({"stages": [1]}, "column stages holds map"),
        ({"op_probs": [1.0]}, "column op_probs holds map"),
        ({"op_probs": {"WAIT": "x"}}, "column op_probs holds map"),
    ],
)
def test_values_that_a_column_cannot_hold(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    hub = TelemetryHub([ParquetOutput(tmp_path)])
    hub.emit(TelemetryEvent(event_type=TelemetryEventType.LAST_ACTION, round_idx=0, data=data))
    with pytest.raises(TelemetryError, match=f"ParquetOutput.*{message}"):
        hub.flush()
    assert list(tmp_path.iterdir()) == []


def test_fields_and_rounds_must_be_known(tmp_path: Path) -> None:
    hub = TelemetryHub([ParquetOutput(tmp_path)])
    with pytest.raises(
        TelemetryError,
        match=r"last_action has fields \['rewrad'\] that the registry does not know; allowed: op",
    ):
        hub.emit(action(rewrad=1.0))
    with pytest.raises(TelemetryError, match="last_action names no round; set the hub's round_idx"):
        hub.emit(action(round_idx=None))
    hub.round_idx = 4
    hub.emit(action(round_idx=None))
    hub.flush()
    assert [p.name for p in tmp_path.iterdir()] == ["steps-00004.parquet"]


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    output = ParquetOutput(tmp_path)
    output.emit(0, action())
    output.emit(0, end())
    path = tmp_path / "steps-00000.parquet"
    whole = path.read_bytes()
    for damage in (b"", whole[:100], whole[:-1], b"x" * 200):
        path.write_bytes(damage)
        with pytest.raises(TelemetryError, match=r"steps-00000\.parquet: not a readable Parquet file"):
            read_table(tmp_path, "steps")
    pq.write_table(pq.read_table(io.BytesIO(whole)).select(["reward"]), path)
    with pytest.raises(TelemetryError, match=r"steps-00000\.parquet: has no column seq"):
        read_table(tmp_path, "steps")
    with pytest.raises(TelemetryError, match="table 'step' is unknown; allowed: steps, rewards, throughput"):
        read_table(tmp_path, "step")
    with pytest.raises(TelemetryError, match="missing is not a directory"):
        ParquetOutput(tmp_path / "missing")


def test_flipped_bits_are_found_by_the_checksums_of_pages(tmp_path: Path) -> None:
    """All but a few: names of columns and headers of pages have none."""
    output = ParquetOutput(tmp_path)
    for number in range(20):
        output.emit(number, action())
    output.emit(20, end())
    path = tmp_path / "steps-00000.parquet"
    whole, rows = path.read_bytes(), read_table(tmp_path, "steps").to_pydict()
    refused: list[str] = []
    places, changed = range(0, len(whole), 29), 0
    for at in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            changed += repr(read_table(tmp_path, "steps").to_pydict()) != repr(rows)
        except TelemetryError as error:
            refused.append(str(error))
    assert changed <= 0.03 * len(places)
    assert len(refused) >= 0.3 * len(places)
    assert all("steps-00000.parquet" in message for message in refused)


def test_what_a_killed_writer_left_half_done_is_removed(tmp_path: Path) -> None:
    half = tmp_path / ".steps-00000.parquet.partial"
    half.write_bytes(b"PAR1")
    assert read_table(tmp_path, "steps").num_rows == 0
    ParquetOutput(tmp_path)
    assert not half.exists()


def test_truncation_touches_only_what_it_must(tmp_path: Path) -> None:
    output = ParquetOutput(tmp_path)
    for i in range(9):
        output.emit(10 * i, action(i, round_idx=i // 3))
    output.close()
    before = {p.name: p.stat().st_ino for p in tmp_path.iterdir()}
    truncate_tables(tmp_path, 40)
    after = {p.name: p.stat().st_ino for p in tmp_path.iterdir()}
    assert after.keys() == {"steps-00000.parquet", "steps-00001.parquet"}
    assert after["steps-00000.parquet"] == before["steps-00000.parquet"]
    assert read_table(tmp_path, "steps")["seq"].to_pylist() == [0, 10, 20, 30, 40]


FULL = """
import resource, signal, sys
from esper.leyline import TelemetryEvent, TelemetryEventType
from esper.nissa import RunDirectory, TelemetryError, TelemetryHub

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = RunDirectory.create(sys.argv[1], config={})
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
try:
    with TelemetryHub().attached(*run.outputs()) as hub:
        for round_idx in range(1000):
            hub.round_idx = round_idx
            for i in range(40 * round_idx):
                data = {"op": str(hash((i, round_idx)) ** 5), "value": hash((round_idx, i)) / 7}
                hub.emit(TelemetryEvent(event_type=TelemetryEventType.LAST_ACTION, env_id=i, data=data))
            end = {"round_idx": round_idx}
            hub.emit(TelemetryEvent(event_type=TelemetryEventType.BATCH_COMPLETED, data=end))
            hub.flush()
except TelemetryError as error:
    print(round_idx, error)
"""


def test_a_full_disk_is_reported_and_saved_rounds_stay(tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk that fills up."""
    run = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    failed, message = run.stdout.split(maxsplit=1)
    assert "ParquetOutput" in message
    assert "File too large" in message
    assert int(failed) > 3
    rows = read_table(tmp_path / "run" / "tables", "steps")["round_idx"].to_pylist()
    assert rows == [r for r in range(int(failed)) for _ in range(40 * r)]
    assert not list((tmp_path / "run" / "tables").glob(".*"))
