"""Shared by the commands: how they start, how they fail, how they print."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from esper._text import printable, shorten
from esper.leyline import EsperError

BAD_INPUT = 2
_ESCAPES = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Control characters but NUL, which no argument can hold, and those of plain text: tab and ends of lines."""
RunPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
"""A run directory, the name of a run under `runs/`, or "latest"."""


def optional(metavar: str, default: str) -> Any:
    """For the help of an argument that may be None: its value, and in words what None means."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


def joined(docstring: str | None) -> str:
    """A docstring with the description of each argument on one line: tyro would keep the line breaks."""
    return re.sub(r"\n {8,}", " ", inspect.cleandoc(docstring or ""))


def without_escapes(arguments: Sequence[str] | None) -> list[str]:
    """The arguments, by default those of this process. What a terminal would act on is refused here, because
    tyro shows an unknown argument as it is."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for word in given:
        if _ESCAPES.search(word):
            raise EsperError(f"argument {shorten(word)} holds control characters; allowed: printable text")
    return given


def reader(command: Callable[..., None]) -> Callable[..., int]:
    """The `main` of a command: parses the arguments, and turns bad input into a message and an exit code."""
    command.__doc__ = joined(command.__doc__)

    def main(arguments: Sequence[str] | None = None) -> int:
        try:
            tyro.cli(
                command,
                args=without_escapes(arguments),
                prog=f"esper {command.__name__}",
                config=[tyro.conf.DisallowNone],
            )
        except BrokenPipeError:  # whoever reads our output has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (EsperError, OSError) as error:
            print(f"error: {printable(error, lines=True)}", file=sys.stderr)
            return BAD_INPUT
        return 0

    return main


def console() -> Console:
    """Standard output. Tables that go to a file or a pipe are not cut to a width; square brackets in a run's
    names are text, not markup."""
    width = None if sys.stdout.isatty() else 1000
    return Console(width=width, markup=False, emoji=False, highlight=False)


def width() -> int:
    return shutil.get_terminal_size((120, 40)).columns
