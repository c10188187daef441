"""`esper compare`: runs side by side."""
from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

from esper.karn.charts import number
from esper.karn.compare import Interval, compare_runs
from esper.karn.summary import open_run
from esper.leyline.metrics import Metric
from esper.scripts.karn import console, run_reader


def compare(runs: Annotated[tuple[Path, ...], tyro.conf.Positional], /, *, by: Literal["episode", "round"] = "episode",
            last: int | None = None) -> None:
    """Compare runs of one task with the first of them, with 95 % intervals.

    Args:
        runs: Two run directories or more.
        by: What is counted as one observation.
        last: Only so many of the last rounds that all have.
    """
    found = compare_runs([open_run(run, steps=False) for run in runs], by=by, last=last)
    names = [run.resolve().name for run in runs]
    table = Table("metric", "unit", *names, *(f"{name} − {names[0]}" for name in names[1:]), box=None)
    for row in found.rows:
        table.add_row(row.metric.name, row.metric.unit, *map(_show, row.runs),
                      *(f"{_show(difference)}{_verdict(difference, row.metric)}" for difference in row.differences))
    console().print(table)
    print(f"\n{found.units} {by}s that every run has; " + (
        "differences are paired: one seed, so each env and episode has the same random numbers everywhere." if found.paired
        else "seeds differ, so differences are not paired.")
        + " Intervals are over these and say nothing about other training seeds.")
    for note in found.notes:
        print(f"differs: {note}")


def _show(interval: Interval) -> str:
    return number(interval.mean) + ("" if interval.half is None else f" ± {number(interval.half)}")


def _verdict(difference: Interval, metric: Metric) -> str:
    """Better or worse, where the interval leaves no doubt and the metric has a good side."""
    if not difference.sign or not metric.better:
        return ""
    return " better" if (difference.sign > 0) == (metric.better == "higher") else " worse"


def main(arguments: Sequence[str] | None = None) -> int:
    return run_reader(compare, arguments)


if __name__ == "__main__":
    sys.exit(main())
