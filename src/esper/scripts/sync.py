"""`esper sync`: a run's numbers for an experiment tracker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from esper.karn.summary import open_run
from esper.karn.sync import sync_run
from esper.scripts.karn import RunPath, reader


def sync(run: RunPath, to: Literal["tensorboard", "wandb"], out: Path | None = None) -> None:
    """Write a run's numbers in a tracker's format, on this machine only.

    Args:
        run: The run directory.
        to: The tracker; wandb gets an offline run.
        out: Where to write; by default a directory of the tracker's name in the run directory.
    """
    place, count = sync_run(open_run(run), to, out)
    print(f"{count} numbers in {place}")


main = reader(sync)

if __name__ == "__main__":
    sys.exit(main())
