"""The model factory: a task's networks, on the device where they will live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from esper.tolaria.devices import validate_device

M_co = TypeVar("M_co", bound=nn.Module, covariant=True)
M = TypeVar("M", bound=nn.Module)


class BuildsModels(Protocol[M_co]):
    """The part of a task that the factory needs."""

    def build_model(self, population: int, seeds: Sequence[int]) -> M_co: ...


def create_model(
    task: BuildsModels[M], device: str | torch.device, *, population: int, seeds: Sequence[int]
) -> M:
    """Fresh networks of a task, one per row, initialised from `seeds`."""
    where = validate_device(str(device))
    return task.build_model(population, seeds).to(where)
