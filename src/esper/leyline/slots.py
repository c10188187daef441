"""Slot ids, the order of slots, and the host boundaries where seeds can live."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from esper.leyline.errors import EsperError, SlotIdError, allowed

_SLOT_ID = re.compile(r"r(0|[1-9][0-9]*)c(0|[1-9][0-9]*)")


def format_slot_id(row: int, col: int) -> str:
    if row < 0 or col < 0:
        raise SlotIdError(f"slot position ({row}, {col}) is negative; rows and columns start at 0")
    return f"r{row}c{col}"


def parse_slot_id(slot_id: str) -> tuple[int, int]:
    """(row, column) of an id such as `r0c1`. The pairs sort row by row, as numbers."""
    match = _SLOT_ID.fullmatch(slot_id)
    if match is None:
        raise SlotIdError(f"slot id {slot_id!r} is malformed; write r<row>c<column>, for example r0c1")
    return int(match[1]), int(match[2])


@dataclass(frozen=True, slots=True)
class InjectionSpec:
    """One boundary of a host at which a seed can be inserted."""

    slot_id: str
    channels: int
    line: bool = False
    """Whether the features are images of height 1."""
    positions: tuple[int, ...] | None = None
    """Height and width of an image, length of a sequence, () for vectors, at the host's own size; None:
    unknown."""

    def __post_init__(self) -> None:
        parse_slot_id(self.slot_id)
        if self.channels < 1:
            raise EsperError(f"slot {self.slot_id}: channels is {self.channels}, must be at least 1")


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """The slots of a network in row-major order, which defines the policy's slot indices."""

    slot_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.slot_ids:
            raise SlotIdError("a slot configuration needs at least one slot id, for example r0c0")
        if len(set(self.slot_ids)) != len(self.slot_ids):
            raise SlotIdError(f"slot ids {self.slot_ids} are not unique")
        if list(self.slot_ids) != sorted(self.slot_ids, key=parse_slot_id):
            raise SlotIdError(
                f"slot ids {self.slot_ids} are not in row-major order; SlotConfig.from_ids sorts them"
            )

    @classmethod
    def from_ids(cls, slot_ids: Iterable[str]) -> SlotConfig:
        return cls(tuple(sorted(slot_ids, key=parse_slot_id)))

    @property
    def num_slots(self) -> int:
        return len(self.slot_ids)

    def slot_id_for_index(self, index: int) -> str:
        if not 0 <= index < self.num_slots:
            raise SlotIdError(f"slot index {index} is out of range; {allowed(range(self.num_slots))}")
        return self.slot_ids[index]

    def index_for_slot_id(self, slot_id: str) -> int:
        if slot_id not in self.slot_ids:
            raise SlotIdError(f"slot {slot_id!r} is unknown; {allowed(self.slot_ids)}")
        return self.slot_ids.index(slot_id)
