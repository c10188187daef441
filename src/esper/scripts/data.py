"""`esper data`: list the datasets, and download those that are not part of the package."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from esper._text import printable
from esper.leyline.errors import EsperError
from esper.runtime.data.sources import RECIPES, cache_file, data_root, get_dataset
from esper.scripts.cli import DONE, FAILED, fail, import_modules
from esper.scripts.karn import optional, without_escapes

Root = Annotated[Path | None, optional("DIR", "$ESPER_DATA, or else ~/.cache/esper")]


def get(name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")], root: Root = None) -> int:
    """Download a dataset, check it, and convert it into a file in the data directory.

    Args:
        name: Name of the dataset; `esper data list` shows the names.
        root: Data directory. Original files that are already there are not downloaded again.
    """
    if name not in RECIPES:
        return fail(f"dataset {name[:80]!r} cannot be downloaded; allowed: {', '.join(RECIPES)}")
    _check_directory(root)
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=1.0)

        def report(message: str, done: float | None) -> None:
            if done is None:
                progress.console.print(printable(message), markup=False, highlight=False, soft_wrap=True)
            else:
                progress.update(task, description=message, completed=done)

        try:
            path = get_dataset(name, root, report=report)
        except EsperError as error:
            print(f"error: {printable(error, lines=True)}", file=sys.stderr)
            return FAILED
    print(path)
    return DONE


def show(root: Root = None) -> int:
    """List the datasets, and whether they are ready. With --import MODULE, also those that MODULE registers.

    Args:
        root: Data directory.
    """
    from esper.runtime.data.datasets import registered_names  # slow: it imports torch

    _check_directory(root)
    place = data_root(root)
    table = Table("name", "content", "state", box=None)
    table.add_row("digits", "handwritten digits: 1,797 grey images, 8×8, 10 classes", "in the package")
    table.add_row("digits_flat", "the same as vectors of 64 numbers", "in the package")
    table.add_row("mnist1d", "MNIST-1D: 5,000 signals of 40 samples, 10 classes", "in the package")
    for name, recipe in RECIPES.items():
        file = cache_file(name, place)
        state = f"ready, {file.stat().st_size / 1e6:.0f} MB" if file.exists() else "not downloaded"
        table.add_row(name, recipe.summary, state)
    shape = "random prototypes with noise, 3×32×32; synthetic:CxHxW for another shape"
    table.add_row("synthetic", shape, "generated in memory")
    for name in registered_names():
        table.add_row(name, "your own", "registered")
    Console().print(table)
    print(f"data directory: {printable(place)}")
    return DONE


def _check_directory(root: Path | None) -> None:
    """Refuse a path that cannot be a directory, before anything is downloaded."""
    place = data_root(root)
    try:
        is_directory = stat.S_ISDIR(os.stat(place).st_mode)
    except FileNotFoundError:
        return  # it will be made
    except (OSError, ValueError) as error:
        raise EsperError(f"data directory {str(place)[-80:]!r}: {error}") from None
    if not is_directory:
        raise EsperError(f"data directory {place} is not a directory")


def main(args: Sequence[str] | None = None) -> int:
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            {"get": get, "list": show},
            args=import_modules(without_escapes(args)),
            prog="esper data",
            description="List the datasets, and download those that are not part of the package.",
            config=[tyro.conf.DisallowNone],
        )
    except EsperError as error:
        return fail(error)
    assert isinstance(code, int)
    return code


if __name__ == "__main__":
    sys.exit(main())
