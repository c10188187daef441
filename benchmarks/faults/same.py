"""What two runs must share to the last bit: weights, history, events and tables, all but the wall clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper._archive import read_archive
from esper.nissa import RunDirectory

WALL_CLOCK = {"t_wall", "seconds", "batches_per_second", "samples_per_second"}


def timeless(value: Any) -> Any:
    """An event without its wall-clock fields; NaN as a word, because it equals nothing."""
    if isinstance(value, dict):
        return {
            k: timeless(v) for k, v in value.items() if k not in WALL_CLOCK and not k.endswith("_seconds")
        }
    return "NaN" if isinstance(value, float) and value != value else value


def story(directory: Path) -> list[dict[str, Any]]:
    return [timeless(event) for event in RunDirectory.open(directory).events()]


def rows(directory: Path, table: str) -> list[dict[str, Any]]:
    return [timeless(row) for row in RunDirectory.open(directory).table(table).to_pylist()]


def last_checkpoint(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return read_archive(sorted((directory / "checkpoints").glob("round-*"))[-1], kind="run")


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, history, events and tables, all but the wall clock."""
    (tensors, meta), (other_tensors, other_meta) = last_checkpoint(one), last_checkpoint(other)
    assert_same_weights(tensors, other_tensors)
    for part in ("progress", "normalizer", "seq"):
        assert meta[part] == other_meta[part], part
    assert story(one) == story(other)
    for table in ("steps", "rewards", "throughput"):
        assert rows(one, table) == rows(other, table), table
