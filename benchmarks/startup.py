"""Rows `startup.*`: how long Esper takes to start, over how long Python itself takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.harness import Row, interleave

CASES = {
    "startup.import_vs_python": ("import esper", 2.0),
    "startup.help_vs_python": ("from esper.scripts.cli import main; main(['--help'])", 3.0),
}
"""Name of the row: what runs (the second is what the command `esper` does), and the goal."""


def start(code: str) -> None:
    """Run this code in a fresh interpreter."""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def rows() -> Iterator[Row]:
    for name, (code, goal) in CASES.items():
        ratio, _, _ = interleave(partial(start, code), partial(start, "pass"), seconds=0.1)
        yield Row(name, ratio, goal)
