"""The fault campaign runs, and nothing breaks in a small part of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.faults.__main__ import KINDS

ROOT = Path(__file__).parents[2]


def campaign(out: Path, *words: str) -> tuple[list[dict], str]:
    """The records of a campaign in a process of its own, and what it printed."""
    command = [sys.executable, "-m", "benchmarks.faults", "--out", str(out), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [line for path in out.glob("cases.*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines], done.stdout


@pytest.mark.slow
def test_a_few_cases_and_a_second_call_that_has_nothing_to_do(tmp_path: Path) -> None:
    words = ("--cases", "3", "--only", "config", "command", "damage-dataset", "kill-attach")
    records, _ = campaign(tmp_path, *words)
    assert len(records) == 4 * 3
    assert not [record for record in records if record["broken"]]
    again, shown = campaign(tmp_path, *words)
    assert again == records
    assert "kill-attach 0" not in shown


@pytest.mark.slow
def test_some_cases_of_every_kind(tmp_path: Path) -> None:
    records, _ = campaign(tmp_path, "--cases", "3")
    assert {record["kind"] for record in records} == set(KINDS)


def test_the_campaign_is_as_large_as_promised() -> None:
    def cases(prefix: str) -> list[int]:
        return [kind.cases for name, kind in KINDS.items() if name.startswith(prefix)]

    assert sum(cases("kill-")) >= 100
    assert cases("disk") == [20]
    assert len(cases("damage-")) >= 7
    assert set(cases("damage-")) == {20}
    assert (cases("config"), cases("command")) == ([500], [500])
