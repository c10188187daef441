"""What the commands that read runs share: how they are started, how they fail, where they print."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from esper.leyline import EsperError

BAD_INPUT = 2
RunPath = Annotated[Path, tyro.conf.Positional]


def reader(command: Callable[..., None]) -> Callable[..., int]:
    """A command's `main`: it parses the arguments and turns what is wrong with a run into a message and an
    exit code."""

    def main(arguments: Sequence[str] | None = None) -> int:
        try:
            tyro.cli(command, args=arguments, prog=f"esper {command.__name__}")
        except BrokenPipeError:  # the reader of our output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (EsperError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return BAD_INPUT
        return 0

    return main


def console() -> Console:
    """Standard output; tables that go to a file or a pipe are not cut to a width."""
    return Console() if sys.stdout.isatty() else Console(width=1000)


def width() -> int:
    return shutil.get_terminal_size((120, 40)).columns
