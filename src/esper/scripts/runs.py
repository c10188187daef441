"""`esper runs`: the runs below a directory, and how they stand."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.table import Table

from esper._charts import number
from esper.karn.summary import find_runs, open_run, summarize
from esper.leyline import EsperError
from esper.scripts.karn import RunPath, console, reader


def runs(root: RunPath = Path("runs")) -> None:
    """List the runs below a directory, oldest first.

    Args:
        root: Where to look.
    """
    found, broken = [], []
    for path in find_runs(root):
        try:
            found.append(summarize(open_run(path)))
        except (EsperError, OSError) as error:
            broken.append(f"unreadable: {error}")
    if not found:
        raise EsperError("\n".join(broken))
    table = Table(
        "run", "task", "policy", "seed", "rounds", "J", "best J", "status", "alerts", "started", box=None
    )
    for run in sorted(found, key=lambda run: run.started):
        name = str(run.path.relative_to(root)) if run.path != root else str(root)
        table.add_row(
            name,
            number(run.task),
            number(run.policy),
            number(run.seed),
            f"{run.rounds_done}/{number(run.rounds)}",
            number(run.objective),
            number(run.best),
            run.status,
            str(run.alerts),
            run.started,
        )
    console().print(table)
    for line in broken:
        print(line, file=sys.stderr)


main = reader(runs)

if __name__ == "__main__":
    sys.exit(main())
