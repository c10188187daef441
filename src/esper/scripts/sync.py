"""`esper sync`: a run's numbers for an experiment tracker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from esper._text import printable
from esper.karn.summary import open_run
from esper.karn.sync import sync_run
from esper.scripts.karn import RunPath, optional, reader


def sync(
    run: RunPath,
    to: Literal["tensorboard", "wandb"],
    out: Annotated[Path | None, optional("DIR", "tensorboard or wandb in the run directory")] = None,
) -> None:
    """Write the metrics of a run in the format of an experiment tracker. Nothing leaves this machine.

    Args:
        run: A run directory, the name of a run under runs/, or "latest".
        to: The tracker. For wandb, an offline run is written, which `wandb sync` can upload.
        out: Directory to write to.
    """
    directory, count = sync_run(open_run(run), to, out)
    print(f"{count} numbers in {printable(directory)}")


main = reader(sync)

if __name__ == "__main__":
    sys.exit(main())
