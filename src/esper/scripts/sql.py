"""`esper sql`: questions to a run, in SQL."""

from __future__ import annotations

import csv
import sys
from typing import Annotated, Literal

import orjson
import tyro
from rich.table import Table

from esper._charts import number
from esper.karn.summary import open_run
from esper.karn.views import EVENT_VIEWS, VIEWS, View
from esper.leyline import EsperError
from esper.scripts.karn import RunPath, console, reader


def sql(
    run: RunPath,
    query: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    *,
    output: Literal["table", "csv", "json"] = "table",
) -> None:
    """Ask a run in SQL (DuckDB's dialect, in memory: a query cannot change the run). Without a query, list
    what can be asked.

    Args:
        run: The run directory.
        query: For example "SELECT round_idx, avg_objective FROM rounds".
        output: How to print the answer.
    """
    views = open_run(run)
    if query is None:
        _describe()
        return
    names, rows = views.query(query)
    if output == "json":
        print(_json([dict(zip(names, row, strict=True)) for row in rows], orjson.OPT_INDENT_2))
        return
    cells = [[_json(value) if isinstance(value, dict | list) else value for value in row] for row in rows]
    if output == "csv":
        csv.writer(sys.stdout).writerows([names, *cells])
        return
    table = Table(*names, box=None)
    for row in cells:
        table.add_row(*map(number, row))
    console().print(table)


def _json(value: object, option: int = 0) -> str:
    try:
        return orjson.dumps(value, default=str, option=option).decode()
    except orjson.JSONEncodeError as error:
        raise EsperError(f"the answer does not fit into JSON: {error}; cast it in the query") from error


def _describe() -> None:
    """Every view; the columns that all views of events share only once."""
    shared = set.intersection(*(set(VIEWS[name].columns) for name in EVENT_VIEWS.values()))
    context = View(
        "every view of events",
        "also has these columns.",
        tuple(c for c in VIEWS["lifecycle"].columns if c in shared),
    )
    for view in (context, *VIEWS.values()):
        table = Table(
            "column",
            "holds",
            "unit",
            "meaning",
            box=None,
            title=f"{view.name}: {view.meaning}",
            title_justify="left",
        )
        for column in view.columns:
            if column not in shared or view is context or view.query:
                table.add_row(column.name, column.kind.value, column.unit, column.meaning)
        console().print(table, "")


main = reader(sql)

if __name__ == "__main__":
    sys.exit(main())
