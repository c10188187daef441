"""Rows `startup.*`: how long Esper takes to start, over how long Python itself takes, in processor time."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.harness import Row

ROUNDS = 25
BARE = "pass"
CASES = {
    "startup.import_vs_python": ("import esper", 2.0),
    "startup.help_vs_python": ("from esper.scripts.cli import main; main(['--help'])", 3.0),
}
"""Name of the row: what runs (the second is what the command `esper` does), and the goal."""


def cost(code: str) -> float:
    """Processor seconds of a fresh interpreter that runs this code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rows() -> Iterator[Row]:
    """Each side of a ratio goes first in every other round."""
    for name, (code, goal) in CASES.items():
        ratios = []
        for turn in range(ROUNDS):
            if turn % 2:
                bare, ours = cost(BARE), cost(code)
            else:
                ours, bare = cost(code), cost(BARE)
            ratios.append(ours / bare)
        yield Row(name, statistics.median(ratios), goal)
