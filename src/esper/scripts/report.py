"""`esper report`: a run as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path

from esper._text import printable
from esper.karn.report import render_report
from esper.karn.summary import open_run
from esper.scripts.karn import RunPath, reader


def report(run: RunPath, out: Path | None = None, growth_rounds: int = 24) -> None:
    """Write a page with every chart and number of a run. The page needs no network.

    Args:
        run: A run directory, the name of a run under runs/, or "latest".
        out: File to write; by default report.html in the run directory.
        growth_rounds: Number of rounds whose growth is drawn: the best, the last, and others evenly spaced.
    """
    views = open_run(run)
    page = views.run.path / "report.html" if out is None else out
    page.write_text(render_report(views, growth_rounds), encoding="utf-8")
    print(printable(page))


main = reader(report)

if __name__ == "__main__":
    sys.exit(main())
