"""`esper sql`: query a run in SQL."""

from __future__ import annotations

import csv
import sys
from typing import Annotated, Any, Literal

import orjson
import tyro
from rich.text import Text

from esper._text import number, printable
from esper.karn.screens import add_row, text_table
from esper.karn.summary import open_run
from esper.karn.views import EVENT_VIEWS, VIEWS, View
from esper.leyline import EsperError
from esper.scripts.karn import RunPath, console, optional, reader


def sql(
    run: RunPath,
    query: Annotated[str | None, tyro.conf.Positional, optional("[QUERY]", "list the views")] = None,
    /,
    *,
    output: Literal["table", "csv", "json"] = "table",
) -> None:
    """Query a run in SQL (DuckDB's dialect). Without a query, list every view and its columns. The database
    is in memory, so a query cannot change the run. Columns named round_idx count rounds from 0; the other
    commands count them from 1.

    Args:
        run: A run directory, the name of a run under runs/, or "latest".
        query: The query, for example "SELECT round_idx, avg_objective FROM rounds".
        output: Format of the answer. Only json keeps control characters in text.
    """
    views = open_run(run)
    if query is None:
        _describe()
        return
    names, rows = views.query(query)
    if output == "json":
        print(_json([dict(zip(names, row, strict=True)) for row in rows], orjson.OPT_INDENT_2))
        return
    heads = [printable(name) for name in names]
    cells = [[_json(value) if isinstance(value, dict | list) else value for value in row] for row in rows]
    if output == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(heads)
        writer.writerows([_csv_cell(value) for value in row] for row in cells)
        return
    table = text_table(*heads)
    for row in cells:
        add_row(table, *(_table_cell(value) for value in row))
    console().print(table)


def _csv_cell(value: Any) -> Any:
    return printable(value, lines=True) if isinstance(value, str) else value


def _table_cell(value: Any) -> Text:
    return Text(printable(value, lines=True) if isinstance(value, str) else number(value))


def _json(value: object, option: int = 0) -> str:
    """JSON in which characters that a terminal could act on are escaped, so that it prints safely and decodes
    to the exact text."""
    try:
        text = orjson.dumps(value, default=str, option=option).decode()
    except orjson.JSONEncodeError as error:
        raise EsperError(f"the answer does not fit into JSON: {error}; cast it in the query") from error
    return "".join(_json_character(c) for c in text)


def _json_character(character: str) -> str:
    if character == "\n" or character.isprintable():
        return character
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def _describe() -> None:
    """Every view. The columns that all views of events share are listed once."""
    shared = set.intersection(*(set(VIEWS[name].columns) for name in EVENT_VIEWS.values()))
    context = View(
        "every view of events",
        "also has these columns.",
        tuple(column for column in VIEWS["lifecycle"].columns if column in shared),
    )
    for view in (context, *VIEWS.values()):
        table = text_table("column", "holds", "unit", "meaning", title=f"{view.name}: {view.meaning}")
        for column in view.columns:
            if column not in shared or view is context or view.query:
                add_row(table, column.name, column.kind.value, column.unit, column.meaning)
        console().print(table, "")


main = reader(sql)

if __name__ == "__main__":
    sys.exit(main())
