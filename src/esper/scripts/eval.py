"""`esper eval`: evaluate a grown network on the test split."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from esper.proof.grown import evaluate
from esper.scripts.process import use_one_core
from esper.scripts.prove import task_command


def eval(directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]) -> None:  # noqa: A001
    """Load a network that `esper grow` has saved, and evaluate it on the test split.

    With --import MODULE (repeatable), a module that registers tasks or datasets is imported first.

    Args:
        directory: Directory that was the --out of `esper grow`.
    """
    use_one_core()
    record, accuracy = evaluate(directory)
    print(
        f"{record.task}, network {record.network} of random seed {record.root_seed}, grown by {record.policy}"
    )
    print(f"test accuracy {accuracy:.2f} %")


main = task_command(eval)

if __name__ == "__main__":
    sys.exit(main())
