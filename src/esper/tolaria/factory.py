"""The model factory: a task's networks, on the device where they will live."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from esper.leyline import SlotConfig, SlotIdError, allowed
from esper.tolaria.devices import validate_device

M_co = TypeVar("M_co", bound=nn.Module, covariant=True)
M = TypeVar("M", bound=nn.Module)


class BuildsModels(Protocol[M_co]):
    """The part of a task that the factory needs. A task is a dataclass, so that a variant with fewer slots can be made."""

    __dataclass_fields__: dict[str, Any]

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> Sequence[str]: ...

    def build_model(self, population: int, seeds: Sequence[int]) -> M_co: ...


def create_model(task: BuildsModels[M], device: str | torch.device, *, population: int, seeds: Sequence[int],
                 slots: Sequence[str] | None = None) -> M:
    """Fresh networks of a task, one per row, initialised from `seeds`; with `slots`, only those of the task's slots."""
    where = validate_device(str(device))
    if slots is not None:
        task = replace(task, slots=_checked(task, slots))  # type: ignore[type-var]
    return task.build_model(population, seeds).to(where)


def _checked(task: BuildsModels[M], slots: Sequence[str]) -> tuple[str, ...]:
    if not slots or isinstance(slots, str) or len(set(slots)) != len(slots):
        raise SlotIdError(f"task {task.name!r}: slots are {slots!r}, must be one or more ids, each once; {allowed(task.slots)}")
    unknown = [slot_id for slot_id in slots if slot_id not in task.slots]
    if unknown:
        raise SlotIdError(f"task {task.name!r}: slots {unknown} are unknown; {allowed(task.slots)}")
    return SlotConfig.from_ids(slots).slot_ids
