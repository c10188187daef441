"""Attempts at a policy for all worlds, on tuning worlds."""

from __future__ import annotations

import pytest
from benchmarks.tuning_worlds import main

SIZES = ["--num-worlds", "2", "--networks", "2"]


@pytest.mark.slow
def test_the_next_attempt_plays_no_rival_again(tmp_path, capsys) -> None:
    main([*SIZES, "--policy", "general-1", "--out", str(tmp_path)])
    first = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line for line in first.splitlines() if line.startswith("| ")}
    assert {"random", "heuristic", "periodic", "plateau", "general-1"} <= set(rows)
    rivals = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "rivals").iterdir()}
    assert set(rivals) == {"10000.json", "10001.json"}
    main([*SIZES, "--policy", "general-1", "digits_shift-1", "--out", str(tmp_path)])
    second = capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "rivals").iterdir()} == rivals
    assert rows["general-1"] in second
    assert "| digits_shift-1 |" in second


def test_held_out_worlds_are_refused(tmp_path) -> None:
    with pytest.raises(SystemExit, match="held-out worlds are for final figures"):
        main([*SIZES, "--first-world", "20000", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
