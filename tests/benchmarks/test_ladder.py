"""The ladder table: the choice in hindsight, and worlds that other processes have finished."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import orjson
import pytest

from benchmarks import ladder
from esper.runtime.worlds import draw_world


def record(number: int, validation: np.ndarray, test: np.ndarray) -> dict:
    world = draw_world(number)
    drawn = {
        name: getattr(world, name)
        for name in ("number", "dataset", "crippled", "depth", "width", "largest_steps")
    }
    names = ["nothing", "light 1", "light all", "heavy 1", "heavy all"]
    rows = {"validation": validation.tolist(), "test": test.tolist()}
    return {"world": drawn, "rungs": names, "params": [10, 20, 30, 40, 50], "seconds": 2.0, **rows}


def test_the_best_rung_of_a_world_is_chosen_on_the_other_networks() -> None:
    rng = np.random.default_rng(0)
    records = [record(number, rng.random((5, 4)), rng.random((5, 4))) for number in range(7)]
    chosen, single, means = ladder.gaps(records)
    for one, gained in zip(records, chosen, strict=True):
        expected = []
        for network in range(4):
            others = [n for n in range(4) if n != network]
            scores = [fmean(row[n] for n in others) for row in one["validation"]]
            expected.append(one["test"][scores.index(max(scores))][network])
        assert gained == pytest.approx(fmean(expected))
    overall = [fmean(fmean(one["test"][rung]) for one in records) for rung in range(5)]
    assert single == overall.index(max(overall))
    assert means.shape == (7, 5)


def test_the_table_counts_the_worlds_in_which_a_rung_is_best() -> None:
    best_last = np.array([[10.0] * 4, [20.0] * 4, [30.0] * 4, [40.0] * 4, [50.0] * 4])
    lines = list(ladder.table([record(n, rows, rows) for n, rows in ((0, best_last), (1, best_last[::-1]))]))
    shares = {line[:12].strip(): line.split()[-2] for line in lines[2:7]}
    assert shares == {"nothing": "0.50", "light 1": "0.00", "light all": "0.00", "heavy 1": "0.00"} | {
        "heavy all": "0.50"
    }
    assert any(line.startswith("hindsight − best single (nothing): 20.0") for line in lines)


def test_finished_worlds_are_found_and_a_line_that_was_cut_is_not(tmp_path) -> None:
    line = orjson.dumps({"world": {"number": 3}})
    (tmp_path / "worlds_small.0of2.jsonl").write_bytes(line + b"\n" + line[:9])
    (tmp_path / "worlds_small.1of2.jsonl").write_bytes(line.replace(b"3", b"4") + b"\n")
    assert sorted(ladder.finished(tmp_path, "worlds_small")) == [3, 4]
