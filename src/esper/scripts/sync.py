"""`esper sync`: a run's numbers for an experiment tracker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from esper._text import printable
from esper.karn.summary import open_run
from esper.karn.sync import sync_run
from esper.scripts.karn import RunPath, reader


def sync(run: RunPath, to: Literal["tensorboard", "wandb"], out: Path | None = None) -> None:
    """Write a run's numbers in a tracker's format. Nothing leaves this machine.

    Args:
        run: A run directory, the name of a run under runs/, or "latest".
        to: The tracker. For wandb an offline run is written.
        out: Directory to write to; by default one named for the tracker in the run directory.
    """
    directory, count = sync_run(open_run(run), to, out)
    print(f"{count} numbers in {printable(directory)}")


main = reader(sync)

if __name__ == "__main__":
    sys.exit(main())
