"""`esper data`: get the datasets that are not part of the package, and list what is there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from esper.leyline.errors import EsperError
from esper.runtime.data.sources import RECIPES, cache_file, data_root, get_dataset


def get(name: Annotated[str, tyro.conf.Positional], root: Path | None = None) -> None:
    """Fetch a dataset, check it and convert it into the data directory.

    Args:
        name: One of those that `list` shows.
        root: The data directory; by default $ESPER_DATA or ~/.cache/esper. Raw files that lie there are used
        first.
    """
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=1.0)

        def report(message: str, done: float | None) -> None:
            if done is None:
                progress.console.print(message, markup=False, highlight=False, soft_wrap=True)
            else:
                progress.update(task, description=message, completed=done)

        path = get_dataset(name, root, report=report)
    print(path)


def show(root: Path | None = None) -> None:
    """List the datasets and whether they are ready.

    Args:
        root: The data directory; by default $ESPER_DATA or ~/.cache/esper.
    """
    place = data_root(root)
    table = Table("name", "what", "state", box=None)
    table.add_row("digits", "handwritten digits: 1,797 grey images, 8×8, 10 classes", "in the package")
    for name, recipe in RECIPES.items():
        file = cache_file(name, place)
        table.add_row(
            name,
            recipe.summary,
            f"ready, {file.stat().st_size / 1e6:.0f} MB" if file.exists() else "not here",
        )
    table.add_row(
        "synthetic", "prototypes with noise, 3×32×32; synthetic:CxHxW for another shape", "made in memory"
    )
    Console().print(table)
    print(f"data directory: {place}")


def main(args: Sequence[str] | None = None) -> int:
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"get": get, "list": show}, args=args, prog="esper data", description=__doc__
        )
    except EsperError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
