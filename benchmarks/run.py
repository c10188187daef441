"""`make bench`: every ratio and its goal as a table, and `bench.json`. Exit code 1 if a goal is missed on a
quiet machine."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import data, kasmina, simic, system, tamiyo
from benchmarks.harness import Row, interleave

PARTS: dict[str, Callable[[], Iterable[Row]]] = {
    "kasmina": kasmina.rows,
    "data": data.rows,
    "tamiyo": tamiyo.rows,
    "simic": simic.rows,
    "system": system.rows,
}
NOISE = 0.02
"""The same work against itself may differ by this much; beyond it the machine is too noisy to judge goals."""


def control() -> Row:
    case = kasmina.CASES["cifar_baseline"]
    model, optimizer = kasmina.population(case, 1)
    x, y = kasmina.batch(case, 1)
    work = partial(kasmina.train_step, model, optimizer, x, y)
    ratio, _, _ = interleave(work, work)
    return Row("bench.aa_control", ratio)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(PARTS), help="run one part")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    rows = [control()]
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            for row in part():
                rows.append(row)
                if not console.is_terminal:
                    print(f"{row.name} {row.value:.3f}", flush=True)
    noisy = abs(rows[0].value - 1) > NOISE
    table = Table("name", "value", "goal", "")
    for row in rows:
        verdict = "" if row.goal is None else "held" if row.held else "noisy" if noisy else "missed"
        table.add_row(row.name, f"{row.value:.3f}", "" if row.goal is None else f"≤ {row.goal}", verdict)
    console.print(table)
    machine = f"{platform.machine()} {platform.system()} python {platform.python_version()} torch {torch.__version__}"
    arguments.out.write_text(
        json.dumps({row.name: row.value for row in rows} | {"machine": machine}, indent=2) + "\n"
    )
    console.print(
        f"written to {arguments.out}" + ("; the machine is noisy, goals are not judged" if noisy else "")
    )
    return 0 if noisy or all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
