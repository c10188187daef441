"""`esper report`: a run as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path

from esper.karn.report import render_report
from esper.karn.summary import open_run
from esper.scripts.karn import RunPath, reader


def report(run: RunPath, out: Path | None = None, growth_rounds: int = 24) -> None:
    """Write a page with every chart and number of a run; it needs no network.

    Args:
        run: The run directory.
        out: The page; by default report.html in the run directory.
        growth_rounds: Rounds whose growth is drawn: the best, the last, and others evenly spaced.
    """
    out = run / "report.html" if out is None else out
    out.write_text(render_report(open_run(run), growth_rounds), encoding="utf-8")
    print(out)


main = reader(report)

if __name__ == "__main__":
    sys.exit(main())
