"""`esper eval`: a grown network on the test split."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import tyro

from esper.proof.grown import evaluate
from esper.scripts.karn import reader


def eval(directory: Annotated[Path, tyro.conf.Positional]) -> None:  # noqa: A001
    """Load a network that `esper grow` kept and test it.

    Args:
        directory: What was given to `esper grow` as --out.
    """
    torch.set_num_threads(1)
    record, accuracy = evaluate(directory)
    print(f"{record['task']}, grown by {record['policy']} from seed {record['root_seed']}")
    print(f"test accuracy {accuracy:.2f} %")


main = reader(eval)

if __name__ == "__main__":
    sys.exit(main())
