"""`esper compare`: runs side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from esper._statistics import Estimate
from esper._text import number, printable
from esper.karn.compare import compare_runs
from esper.karn.screens import add_row, text_table
from esper.karn.summary import open_run
from esper.leyline.metrics import Metric
from esper.scripts.karn import console, optional, reader

TwoOrMore = tyro.conf.arg(metavar="RUN RUN [RUN ...]", help_behavior_hint="(required)")


def compare(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, TwoOrMore],
    /,
    *,
    by: Literal["episode", "round"] = "episode",
    last: Annotated[int | None, optional("INT", "all")] = None,
) -> None:
    """Compare runs of the same tasks with the first of them, with 95 % intervals. Runs with the same random
    seed are compared episode by episode. With several tasks, the figures of each follow those of all.

    Args:
        runs: Two or more runs: directories, names of runs under runs/, or "latest".
        by: Unit of the means and intervals: each episode of each env, or each round.
        last: Number of rounds to use, counted back from the last round that all runs have.
    """
    opened = [open_run(run) for run in runs]
    result = compare_runs(opened, by=by, last=last)
    names = [views.run.path.resolve().name for views in opened]
    differences = [f"{name} − {names[0]}" for name in names[1:]] if result.paired else []
    table = text_table("metric", "unit", *names, *differences)
    for row in result.rows:
        add_row(
            table,
            row.metric.name if row.task is None else f"{row.metric.name} ({row.task})",
            row.metric.unit,
            *(_interval(estimate) for estimate in row.runs),
            *(f"{_interval(change)}{_verdict(change, row.metric)}" for change in row.differences),
        )
    console().print(table)
    print(
        f"\nIntervals are over the {result.units} {by}s that every run has. "
        "They say nothing about other random seeds of training."
    )
    if result.paired:
        print(
            "Differences are paired: with one random seed, every run gives an env and episode the same draws."
        )
    else:
        print("The random seeds differ, so episodes cannot be paired and no differences are shown.")
    for note in result.notes:
        print(f"differs: {printable(note)}")


def _interval(estimate: Estimate) -> str:
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


def _verdict(difference: Estimate, metric: Metric) -> str:
    """Better or worse, if the interval excludes 0 and the metric has a better side."""
    if difference.low <= 0 <= difference.high or not metric.better:
        return ""
    return " better" if (difference.low > 0) == (metric.better == "higher") else " worse"


main = reader(compare)

if __name__ == "__main__":
    sys.exit(main())
