"""`esper runs`: the runs below a directory and the state of each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from esper._text import number, printable
from esper.karn.screens import add_row, text_table
from esper.karn.summary import RUNS, find_runs, open_run, summarize
from esper.leyline import EsperError
from esper.scripts.karn import console, reader

COLUMNS = ("run", "task", "policy", "random seed", "rounds", "J", "best J", "status", "alerts", "started")


def runs(
    root: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[DIR]")] = RUNS,
) -> None:
    """List the runs below a directory, oldest first: task, policy, finished rounds, J, status and alerts.

    Args:
        root: Directory to search.
    """
    summaries, unreadable = [], []
    for path in find_runs(root):
        try:
            summaries.append(summarize(open_run(path)))
        except (EsperError, OSError) as error:
            unreadable.append(f"unreadable: {error}")
    if not summaries:
        raise EsperError("\n".join(unreadable))
    table = text_table(*COLUMNS)
    for run in sorted(summaries, key=lambda run: run.started):
        add_row(
            table,
            root if run.path == root else run.path.relative_to(root),
            run.task,
            run.policy,
            run.seed,
            f"{run.rounds_done}/{number(run.rounds)}",
            run.objective,
            run.best,
            run.status,
            run.alerts,
            run.started,
        )
    console().print(table)
    for line in unreadable:
        print(printable(line, lines=True), file=sys.stderr)


main = reader(runs)

if __name__ == "__main__":
    sys.exit(main())
