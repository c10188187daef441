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
    from esper.kasmina.model import Growth, MorphogeneticModel

Coalition = frozenset[str]
MAX_EXHAUSTIVE = 4
"""Maximum number of blended seeds of which all coalitions are evaluated."""
CHUNK = 64
"""Samples that pass at once: activations of more leave the cache."""
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
    """Outputs of every wanted coalition of every row, in the order asked for: entry i is `(rows[i],
    coalitions[i])` with `outputs[i]`."""

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
    roots = _roots(model, wanted)
    if shared_input:
        model.host.check_input(x if model.layout.image else x.unsqueeze(0), 1)
    else:
        model.host.check_input(x, model.population)
    plan = _plan(model, roots)
    run = _fold if model.population == 1 else _fan_out
    samples = 0 if model.layout.image or shared_input else 1  # axis
    with torch.no_grad():
        parts = [run(model, plan, part, shared_input=shared_input) for part in x.split(CHUNK, samples)]
    place = {(lane.row, c): i for i, lane in enumerate(plan.lanes[-1]) for c in lane.wanted}
    entries = [(lane.row, c) for lane in roots for c in lane.wanted]
    index = torch.tensor([place[entry] for entry in entries], device=parts[0].device)
    outputs = torch.cat([part.index_select(0, index) for part in parts], 1)
    return CoalitionOutputs([row for row, _ in entries], [c for _, c in entries], outputs)


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


@dataclass(frozen=True, slots=True)
class _Fork:
    """What happens at a slot: the lanes `off` go on as they are, then those of the growth follow, with their
    seeds on."""

    slot_id: str
    off: list[int]
    on: list[int]
    growth: list[Growth]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The lanes that enter each segment of the host, and the forks at its end."""

    lanes: list[list[_Lane]]
    forks: list[_Fork | None]  # one less: none follows the last segment


def _plan(model: MorphogeneticModel, lanes: list[_Lane]) -> _Plan:
    """Lanes whose coalitions differ at a slot split there: off lanes first, then on lanes by bank."""
    plan = _Plan([lanes], [])
    for slot_id in model.slot_after:
        branches = [_branches(lane, slot_id) for lane in lanes]
        on = [i for i, (_, with_seed) in enumerate(branches) if with_seed.wanted]
        if slot_id is None or not on:
            plan.forks.append(None)
        else:
            off = [i for i, (without, _) in enumerate(branches) if without.wanted]
            if model.population == 1:
                growth = model.growth_at(slot_id, [0], [0])
            else:
                growth = model.growth_at(slot_id, on, [lane.row for lane in lanes])
                on = [i for g in growth for i in g.members]
            plan.forks.append(_Fork(slot_id, off, on, growth))
            lanes = [*(branches[i][0] for i in off), *(branches[i][1] for i in on)]
        plan.lanes.append(lanes)
    return plan


def _branches(lane: _Lane, slot_id: str | None) -> tuple[_Lane, _Lane]:
    """The lane's coalitions without the slot, and with it."""
    without = tuple(c for c in lane.wanted if slot_id not in c)
    return _Lane(lane.row, without), _Lane(lane.row, tuple(c for c in lane.wanted if slot_id in c))


def _fan_out(model: MorphogeneticModel, plan: _Plan, x: Tensor, *, shared_input: bool) -> Tensor:
    """Outputs [lanes, B, …] of a population, whose lanes lie side by side."""
    layout = model.layout
    rows = [[lane.row for lane in model.padded(lanes)] for lanes in plan.lanes]
    count = len(rows[0])
    if not shared_input:
        x = layout.take(x, model.population, torch.tensor(rows[0], device=x.device))
    elif layout.image:
        x = x.repeat(1, count, 1, 1).contiguous(memory_format=torch.channels_last)
    else:
        x = x.unsqueeze(0).expand(count, *x.shape)
    for index, fork in enumerate(plan.forks):
        x = model.host.segment(index, x, model.lanes(rows[index], Mode.EVAL))
        if fork is not None:
            count = len(rows[index])
            pieces = [(x, count, len(fork.off))]
            if fork.off != list(range(len(fork.off))):
                off = torch.tensor(fork.off, device=x.device)
                pieces = [(layout.take(x, count, off), len(off), len(off))]
            for g in fork.growth:
                taken = x if g.places is None else layout.take(x, count, g.places.index)
                seeded = model.blend(fork.slot_id, taken, g, Mode.EVAL)
                pieces.append((seeded, g.lanes.count, len(g.members)))
            x = layout.line_up(pieces, len(rows[index + 1]))
    return model.host.segment(len(plan.forks), x, model.lanes(rows[-1], Mode.EVAL))


def _fold(model: MorphogeneticModel, plan: _Plan, x: Tensor, *, shared_input: bool) -> Tensor:
    """Outputs [lanes, B, …] of a single network. Its lanes share one set of weights, so they are folded into
    the batch."""
    axis = 0 if model.layout.image else 1
    if shared_input and not model.layout.image:
        x = x.unsqueeze(0)
    batch = x.shape[axis]
    single = Lanes(1, Mode.EVAL)
    for index, fork in enumerate(plan.forks):
        x = model.host.segment(index, x, single)
        if fork is not None:
            parts = x.split(batch, axis)
            on = x if len(fork.on) == len(parts) else torch.cat([parts[i] for i in fork.on], axis)
            grown = model.grow(fork.slot_id, on, single, fork.growth)
            x = torch.cat([*(parts[i] for i in fork.off), grown], axis)
    out = model.host.segment(len(plan.forks), x, single)
    return out.squeeze(0).unflatten(0, (-1, batch))
