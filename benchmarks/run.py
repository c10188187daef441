"""`make bench`: measures every ratio, prints it beside its goal and writes `bench.json`.

A row whose dataset is missing and cannot be fetched is skipped: the table and `bench.json` say so (`null`,
and the reason under `skipped`). Exit code 1 if a goal is missed on a quiet machine."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import attach, data, dist, gym, kasmina, simic, startup, system, tamiyo, web
from benchmarks.harness import Datasets, Row, interleave
from esper.scripts.process import use_one_core

PARTS: dict[str, Callable[[Datasets], Iterable[Row]]] = {
    "kasmina": lambda _: kasmina.rows(),
    "data": data.rows,
    "tamiyo": lambda _: tamiyo.rows(),
    "simic": lambda _: simic.rows(),
    "system": system.rows,
    "attach": lambda _: attach.rows(),
    "gym": lambda _: gym.rows(),
    "dist": lambda _: dist.rows(),
    "web": lambda _: web.rows(),
    "startup": lambda _: startup.rows(),
}
NOISE = 0.02
"""The same work against itself may differ by this much; beyond it the machine is too noisy to judge goals."""


def control() -> tuple[Row, bool]:
    """The same work against itself, and whether the machine is too noisy to judge goals."""
    case = kasmina.CASES["cifar_baseline"]
    model, optimizer = kasmina.population(case, 1)
    x, y = kasmina.batch(case, 1)
    work = partial(kasmina.train_step, model, optimizer, x, y)
    ratio, _, _ = interleave(work, work, rounds=151)
    return Row("bench.aa_control", ratio), abs(ratio - 1) > NOISE


def figure(row: Row) -> str:
    return "–" if row.value is None else f"{row.value:.3f}"


def verdict(row: Row, noisy: bool) -> str:
    if row.skipped:
        return "skipped"
    if row.goal is None:
        return ""
    if row.held:
        return "held"
    return "noisy" if noisy else "missed"


def as_table(rows: Sequence[Row], noisy: bool) -> Table:
    table = Table("name", "value", "goal", "")
    for row in rows:
        goal = "" if row.goal is None else f"{'≥' if row.at_least else '≤'} {row.goal}"
        table.add_row(row.name, figure(row), goal, verdict(row, noisy))
    return table


def as_json(rows: Sequence[Row]) -> str:
    """A flat object: each row by name, the machine, and why rows were skipped."""
    versions = f"python {platform.python_version()} torch {torch.__version__}"
    report: dict[str, float | str | None] = {row.name: row.value for row in rows}
    report["machine"] = f"{platform.machine()} {platform.system()} {versions}"
    report["skipped"] = "; ".join(f"{row.name}: {row.skipped}" for row in rows if row.skipped)
    return json.dumps(report, indent=2) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--only", choices=sorted(PARTS), help="run one part")
    parser.add_argument("--offline", action="store_true", help="do not fetch missing datasets")
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="file for the figures")
    given = parser.parse_args(arguments)
    use_one_core()
    console = Console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    datasets = Datasets(fetch=not given.offline, say=say)
    first, noisy = control()
    rows = [first]
    for name, part in PARTS.items():
        if given.only in (None, name):
            for row in part(datasets):
                rows.append(row)
                if not console.is_terminal:
                    print(f"{row.name} {figure(row)} {verdict(row, noisy)}".rstrip(), flush=True)
    console.print(as_table(rows, noisy))
    for row in rows:
        if row.skipped:
            say(f"skipped {row.name}: {row.skipped}")
    given.out.write_text(as_json(rows))
    say(f"written to {given.out}")
    if noisy:
        say("the machine is noisy: goals are not judged")
    return 0 if noisy or all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
