"""Outputs of a network with some of its seeds switched off.

A coalition is the set of slots whose blended seeds are on. Evaluating many shares every common prefix:
activations fork at a slot only where the wanted coalitions differ there. One table answers every question
about the contributions of seeds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.kasmina.layers import Lanes, Mode
from esper.leyline import EsperError, SlotIdError, allowed

if TYPE_CHECKING:
    from esper.kasmina.model import MorphogeneticModel

Coalition = frozenset[str]
MAX_EXHAUSTIVE = 4
"""Maximum number of blended seeds of which all coalitions are evaluated."""
RANDOM_ORDERS = 8
"""Number of random orders whose prefixes are evaluated for more seeds."""


def all_coalitions(slots: Collection[str]) -> list[Coalition]:
    """Every subset, the empty one first."""
    ordered = sorted(slots)
    return [frozenset(c) for size in range(len(ordered) + 1) for c in combinations(ordered, size)]


def default_coalitions(slots: Collection[str], generator: torch.Generator | None = None) -> list[Coalition]:
    """All subsets of few slots; of many: full, empty, each one left out, each alone, and the prefixes of
    random orders."""
    if len(slots) <= MAX_EXHAUSTIVE:
        return all_coalitions(slots)
    ordered = sorted(slots)
    full = frozenset(ordered)
    wanted = {full, frozenset(), *(full - {s} for s in ordered), *(frozenset({s}) for s in ordered)}
    for _ in range(RANDOM_ORDERS):
        order = torch.randperm(len(ordered), generator=generator).tolist()
        wanted |= {frozenset(ordered[i] for i in order[:size]) for size in range(len(ordered) + 1)}
    return sorted(wanted, key=lambda c: (len(c), sorted(c)))


@dataclass(frozen=True, slots=True)
class CoalitionOutputs:
    """Outputs of every wanted coalition of every row: entry i is `(rows[i], coalitions[i])` with
    `outputs[i]`."""

    rows: list[int]
    coalitions: list[Coalition]
    outputs: Tensor  # [entries, B, …, classes]


@dataclass(frozen=True, slots=True)
class _Lane:
    """A distinct prefix: the row, and the coalitions that still share it."""

    row: int
    wanted: tuple[Coalition, ...]


def blended_slots(model: MorphogeneticModel, row: int) -> tuple[str, ...]:
    """Slots whose seed changes this row's output, in execution order."""
    return tuple(
        slot.slot_id for slot in model.slots() if (seed := slot.seeds[row]) is not None and seed.is_blended
    )


def evaluate_coalitions(
    model: MorphogeneticModel,
    x: Tensor,
    wanted: Mapping[int, Sequence[Coalition]],
    *,
    shared_input: bool = False,
) -> CoalitionOutputs:
    """Outputs of the wanted coalitions of the given rows, without touching any buffer.

    `x` holds every row's input, or with `shared_input` one input `[B, …]` (a single row's shape) that all
    rows see."""
    lanes = _roots(model, wanted)
    if shared_input:
        model.host.check_input(x if model.layout.image else x.unsqueeze(0), 1)
    else:
        model.host.check_input(x, model.population)
    with torch.no_grad():
        forest = _Forest(model, x, lanes, shared_input=shared_input)
        for index, slot_id in enumerate(model.slot_after):
            forest.segment(index)
            if slot_id is not None:
                forest.fork(slot_id)
        outputs = forest.finish(len(model.slot_after))
    rows, coalitions, source = [], [], []
    for i, lane in enumerate(forest.lanes):
        for coalition in lane.wanted:
            rows.append(lane.row)
            coalitions.append(coalition)
            source.append(i)
    return CoalitionOutputs(rows, coalitions, outputs[torch.tensor(source, device=outputs.device)])


def _roots(model: MorphogeneticModel, wanted: Mapping[int, Sequence[Coalition]]) -> list[_Lane]:
    if not any(wanted.values()):
        raise EsperError("no coalition is wanted; name at least one of one row, for example the empty one")
    for row, coalitions in wanted.items():
        blended = blended_slots(model, model.check_row(row))
        for coalition in coalitions:
            if not coalition <= set(blended):
                raise SlotIdError(
                    f"coalition {sorted(coalition)} names slots without a blended seed in row {row}; "
                    + allowed(blended or ["the empty coalition"])
                )
    return [_Lane(row, tuple(dict.fromkeys(coalitions))) for row, coalitions in wanted.items() if coalitions]


class _Forest:
    """The lanes of all rows as they fork. In a population lanes lie side by side; a single network, whose
    lanes all share one set of weights, folds them into the batch instead."""

    def __init__(
        self, model: MorphogeneticModel, x: Tensor, lanes: list[_Lane], *, shared_input: bool
    ) -> None:
        self.model, self.lanes = model, lanes
        self.fold = model.population == 1
        self.layout = model.layout
        if self.fold:
            self.x = x if model.layout.image or not shared_input else x.unsqueeze(0)
            self.batch = self.x.shape[0 if model.layout.image else 1]
        elif shared_input:
            count = len(model.padded(lanes))
            if model.layout.image:
                self.x = x.repeat(1, count, 1, 1).contiguous(memory_format=torch.channels_last)
            else:
                self.x = x.unsqueeze(0).expand(count, *x.shape)
        else:
            self.x = self.layout.take(
                x, model.population, self._tensor([lane.row for lane in model.padded(lanes)])
            )

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=next(self.model.host.parameters()).device)

    def _lanes(self) -> Lanes:
        if self.fold:
            return Lanes(1, Mode.EVAL)
        return self.model.lanes([lane.row for lane in self.model.padded(self.lanes)], Mode.EVAL)

    def segment(self, index: int) -> None:
        self.x = self.model.host.segment(index, self.x, self._lanes())

    def fork(self, slot_id: str) -> None:
        """Lanes whose coalitions differ at this slot split; then the seed is applied to those that have it
        on."""
        children: list[_Lane] = []
        parents: list[int] = []
        on: list[bool] = []
        for i, lane in enumerate(self.lanes):
            for flag in (False, True):
                branch = tuple(c for c in lane.wanted if (slot_id in c) is flag)
                if branch:
                    children.append(_Lane(lane.row, branch))
                    parents.append(i)
                    on.append(flag)
        if any(on):
            self._select(parents)
            self.lanes = children
            self._apply(slot_id, on)

    def _select(self, parents: list[int]) -> None:
        if parents == list(range(len(self.lanes))):
            return
        if self.fold:
            self.x = self._join([self._piece(i) for i in parents])
        else:
            count = len(self.model.padded(self.lanes))
            self.x = self.layout.take(self.x, count, self._tensor(self.model.padded(parents)))

    def _apply(self, slot_id: str, on: list[bool]) -> None:
        seeded = [i for i, flag in enumerate(on) if flag]
        if not self.fold:
            growth = self.model.growth_at(slot_id, seeded, [lane.row for lane in self.lanes])
            self.x = self.model.grow(slot_id, self.x, self._lanes(), growth)
            return
        growth = self.model.growth_at(slot_id, [0], [0])
        grown = self.model.grow(
            slot_id, self._join([self._piece(i) for i in seeded]), Lanes(1, Mode.EVAL), growth
        )
        if len(seeded) == len(on):
            self.x = grown
            return
        axis = 0 if self.layout.image else 1
        new = iter(grown.split(self.batch, axis))
        self.x = self._join([next(new) if flag else self._piece(i) for i, flag in enumerate(on)])

    def _piece(self, i: int) -> Tensor:
        return self.x.narrow(0 if self.layout.image else 1, i * self.batch, self.batch)

    def _join(self, pieces: list[Tensor]) -> Tensor:
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 0 if self.layout.image else 1)

    def finish(self, index: int) -> Tensor:
        """Outputs [lanes, B, …]."""
        out = self.model.host.segment(index, self.x, self._lanes())
        return out.squeeze(0).unflatten(0, (-1, self.batch)) if self.fold else out
