"""`esper`: one program with a subcommand for each job, and what the subcommands share.

`esper --help` is answered before anything else is imported: each function imports what it needs."""

from __future__ import annotations

import os
import sys

import esper

TYPE_CHECKING = False  # typing takes longer to import than the help takes to print
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DONE, FAILED, BAD_INPUT = 0, 1, 2
"""Exit codes. A run that was stopped by a signal exits with 128 + the signal's number."""
COMMANDS = {
    "train": ("esper.scripts.train", "train a policy, or run one that is not trained"),
    "prove": ("esper.scripts.prove", "compare policies with their rivals on held-out networks"),
    "grow": ("esper.scripts.grow", "train one network while a policy grows it, and save it"),
    "eval": ("esper.scripts.eval", "evaluate a grown network on the test split"),
    "demo": ("esper.scripts.demo", "train a policy and compare it with its rivals, in minutes"),
    "by_hand": ("esper.scripts.by_hand", "train sixteen small networks, half of which grow, in 20 seconds"),
    "config": ("esper.scripts.config", "show settings with their origins; list presets and tasks"),
    "baseline": ("esper.scripts.baseline", "capture the results of short runs, and check them later"),
    "data": ("esper.scripts.data", "list the datasets, or download one"),
    "runs": ("esper.scripts.runs", "list runs and their status"),
    "ui": ("esper.scripts.ui", "show runs in a browser, live: networks, decisions, comparisons, proofs"),
    "watch": ("esper.scripts.watch", "watch a run, live or finished"),
    "report": ("esper.scripts.report", "write a run's results as one HTML page"),
    "sql": ("esper.scripts.sql", "query a run with SQL"),
    "compare": ("esper.scripts.compare", "compare runs, with confidence intervals"),
    "sync": ("esper.scripts.sync", "export a run's metrics to TensorBoard or W&B"),
}
"""Subcommand → module with `main(arguments) -> int`, and a line of help. Modules are imported on demand."""


def fail(error: object) -> int:
    """Print the message of bad input and return its exit code."""
    from esper._text import printable

    print(f"error: {printable(error, lines=True)}", file=sys.stderr)
    return BAD_INPUT


def import_modules(arguments: Sequence[str]) -> list[str]:
    """Import the modules named by `--import MODULE` (repeatable) and return the other arguments.

    The modules may register tasks, datasets, blueprints, rewards and sensors, so call this before anything
    else is parsed. The current directory is importable."""
    remaining: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, name = word.partition("=")
        if flag != "--import":
            remaining.append(word)
            continue
        if not equals:
            name = next(words, "")
        _import(name)
    return remaining


def _import(name: str) -> None:
    import traceback
    from importlib import import_module

    from esper.leyline.errors import EsperError

    if not all(part.isidentifier() for part in name.split(".")):
        raise EsperError(
            f"--import {name!r} is not the name of a Python module; write my_module for the file my_module.py"
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        import_module(name)
    except Exception as error:  # whatever the user's module raises
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if isinstance(error, ModuleNotFoundError) else f" ({where.filename}, line {where.lineno})"
        raise EsperError(f"--import {name}: {type(error).__name__}: {error}{place}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print("usage: esper COMMAND …\n")
        for name, (_, help_line) in COMMANDS.items():
            print(f"  esper {name:<10} {help_line}")
        print("\n`esper COMMAND --help` explains a command; `esper --version` prints the version.")
        return DONE if given else BAD_INPUT
    if given[0] == "--version":
        print(f"esper {esper.__version__}")
        return DONE
    if given[0] not in COMMANDS:
        import difflib

        matches = difflib.get_close_matches(given[0], COMMANDS, n=2)
        suggestion = f" (did you mean {' or '.join(matches)}?)" if matches else ""
        return fail(f"unknown command {given[0]!r}{suggestion}; allowed: {', '.join(COMMANDS)}")
    from importlib import import_module

    run: Callable[[Sequence[str]], int] = import_module(COMMANDS[given[0]][0]).main
    try:
        code = run(given[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        import signal

        # Whoever read the output, for example `head`, has gone. Python would flush once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


if __name__ == "__main__":
    sys.exit(main())
