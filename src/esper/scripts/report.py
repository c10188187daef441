"""`esper report`: a run as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from esper._text import printable
from esper.karn.report import render_report
from esper.karn.summary import locate_run
from esper.scripts.karn import RunPath, optional, reader


def report(
    run: RunPath,
    out: Annotated[Path | None, optional("FILE", "report.html in the run directory")] = None,
    growth_rounds: int = 24,
) -> None:
    """Write every chart and figure of a run to one HTML page. The page loads nothing from elsewhere.

    Args:
        run: A run directory, the name of a run under runs/, or "latest".
        out: File to write.
        growth_rounds: Number of rounds whose growth is drawn: the best one, the last one, and others at even
            distances.
    """
    path = locate_run(run)
    page = path / "report.html" if out is None else out
    page.write_text(render_report(path, growth_rounds), encoding="utf-8")
    print(printable(page))


main = reader(report)

if __name__ == "__main__":
    sys.exit(main())
