"""`esper compare`: runs side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

from esper._charts import number
from esper._statistics import Estimate
from esper.karn.compare import compare_runs
from esper.karn.summary import open_run
from esper.leyline.metrics import Metric
from esper.scripts.karn import console, reader


def compare(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    *,
    by: Literal["episode", "round"] = "episode",
    last: int | None = None,
) -> None:
    """Compare runs of one task with the first of them, with 95 % intervals.

    Args:
        runs: Two run directories or more.
        by: What is counted as one observation.
        last: Only so many of the last rounds that all have.
    """
    found = compare_runs([open_run(run) for run in runs], by=by, last=last)
    names = [run.resolve().name for run in runs]
    differences = [f"{name} − {names[0]}" for name in names[1:] if found.paired]
    table = Table("metric", "unit", *names, *differences, box=None)
    for row in found.rows:
        table.add_row(
            row.metric.name,
            row.metric.unit,
            *map(_show, row.runs),
            *(f"{_show(difference)}{_verdict(difference, row.metric)}" for difference in row.differences),
        )
    console().print(table)
    print(
        f"\n{found.units} {by}s that every run has, and 95 % intervals over these: nothing about other training seeds."
    )
    print(
        "Differences are paired: with one seed, each env and episode has the same random numbers in every run."
        if found.paired
        else "The seeds differ, so nothing can be paired."
    )
    for note in found.notes:
        print(f"differs: {note}")


def _show(found: Estimate) -> str:
    return f"{number(found.value)} [{number(found.low)}, {number(found.high)}]"


def _verdict(difference: Estimate, metric: Metric) -> str:
    """Better or worse, where the interval leaves no doubt and the metric has a good side."""
    if difference.low <= 0 <= difference.high or not metric.better:
        return ""
    return " better" if (difference.low > 0) == (metric.better == "higher") else " worse"


main = reader(compare)

if __name__ == "__main__":
    sys.exit(main())
