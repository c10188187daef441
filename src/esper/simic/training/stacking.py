"""One batch for one policy: observations and masks of envs that differ in their number of slots, and of envs
whose episodes end at different times.

A task with fewer slots than another is filled up with slots that do not exist. An env whose episode is over
has an empty row: no slot exists in it, and only WAIT is legal.

E envs, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from esper.leyline import OP_WAIT, ActionMasks, PolicyObservation

_Batch = TypeVar("_Batch", PolicyObservation, ActionMasks)
_SLOT_AXIS = {"slots": 1, "blueprints": 1, "quotes": 1, "exists": 1, "slot_by_op": 2}
"""Axis of the slots, by field; other fields have none."""
_EMPTY = {"blueprints": -1}
"""Value of each field where there is nothing; otherwise 0 or False."""


def with_empty_rows(batch: _Batch, rows: Sequence[int], envs: int) -> _Batch:
    """The batch's rows at places `rows` of a batch of `envs`; the other rows are empty."""
    if len(rows) == envs:
        return batch
    at = torch.tensor(rows)

    def place(name: str, tensor: Tensor) -> Tensor:
        whole = tensor.new_full((envs, *tensor.shape[1:]), _EMPTY.get(name, 0))
        whole[at.to(tensor.device)] = tensor
        return whole

    placed = _map(batch, place)
    if isinstance(placed, ActionMasks):
        placed.op[:, OP_WAIT] = True
    return placed


def side_by_side(parts: Sequence[_Batch], slots: int) -> _Batch:
    """All parts in one batch, filled up to this number of slots."""
    first = parts[0]
    if len(parts) == 1 and _num_slots(first) == slots:
        return first
    filled = [_map(part, lambda name, tensor: _fill_up(name, tensor, slots)) for part in parts]
    joined = {f.name: torch.cat([getattr(part, f.name) for part in filled]) for f in fields(first)}
    return replace(first, **joined)


def part_of(batch: _Batch, envs: slice, slots: int) -> _Batch:
    """The inverse of `side_by_side` for one part: these envs with their first `slots` slots."""

    def cut(name: str, tensor: Tensor) -> Tensor:
        axis = _SLOT_AXIS.get(name)
        return tensor[envs] if axis is None else tensor[envs].narrow(axis, 0, slots)

    return _map(batch, cut)


def _num_slots(part: PolicyObservation | ActionMasks) -> int:
    return part.exists.shape[1] if isinstance(part, PolicyObservation) else part.slot_by_op.shape[2]


def _fill_up(name: str, tensor: Tensor, slots: int) -> Tensor:
    axis = _SLOT_AXIS.get(name)
    if axis is None:
        return tensor
    after = [0, 0] * (tensor.dim() - axis - 1)  # `pad` counts axes from the last one
    return pad(tensor, [*after, 0, slots - tensor.shape[axis]], value=_EMPTY.get(name, 0))


def _map(batch: _Batch, function: Callable[[str, Tensor], Tensor]) -> _Batch:
    return replace(batch, **{f.name: function(f.name, getattr(batch, f.name)) for f in fields(batch)})
