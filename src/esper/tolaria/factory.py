"""Devices by name, and fresh networks of a task on one of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from esper.leyline import EsperError

if TYPE_CHECKING:
    from esper.kasmina import MorphogeneticModel
    from esper.runtime.tasks import TaskSpec

_DEVICE = re.compile(r"(cpu|mps|cuda)(?::(0|[1-9][0-9]*))?")


def validate_device(text: str, *, require_index: bool = False) -> torch.device:
    """The device that `text` names, if this machine has it. With `require_index`, a CUDA device needs its
    number."""
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise EsperError(f"device {text!r} is malformed or of an unknown kind; allowed: cpu, cuda:N, mps")
    kind, index = match.groups()
    if kind != "cuda":
        if index is not None:
            raise EsperError(
                f"device {text!r}: there is one {kind} device and it has no index; allowed: {kind}"
            )
        if kind == "mps" and not torch.backends.mps.is_available():
            raise EsperError(f"device {text!r} is not available on this machine; allowed: {_here()}")
        return torch.device(kind)
    if require_index and index is None:
        raise EsperError(f"device {text!r} has no number; write cuda:N, for example cuda:0")
    if int(index or 0) >= torch.cuda.device_count():
        raise EsperError(
            f"device {text!r} does not exist; this machine has {torch.cuda.device_count()} CUDA devices; "
            f"allowed: {_here()}"
        )
    return torch.device(text)


def _here() -> str:
    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return ", ".join([*names, "mps"] if torch.backends.mps.is_available() else names)


def create_model(
    task: TaskSpec, device: str | torch.device, *, population: int, seeds: Sequence[int]
) -> MorphogeneticModel:
    """Fresh networks of a task, one per row. `seeds` are random seeds: one for the initial weights of each
    row."""
    place = validate_device(str(device))
    return task.build_model(population, seeds).to(place)
