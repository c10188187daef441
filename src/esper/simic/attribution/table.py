"""The coalition table of one network at one epoch, and the contributions that follow from it.

A coalition is the set of slots whose blended seeds are on. Reads are pure; a coalition that was not evaluated
is an error that names it, never a default. Contributions are differences of accuracy, in its unit."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import torch

from esper.kasmina.coalitions import (
    MAX_EXHAUSTIVE,
    RANDOM_ORDERS,
    Coalition,
    all_coalitions,
    default_coalitions,
)
from esper.leyline import EsperError, SlotIdError, allowed


class MissingCoalitionError(EsperError):
    """A read needs a coalition that was not evaluated."""


class Score(NamedTuple):
    """One coalition on the validation set."""

    loss: float
    accuracy: float


class ShapleyValue(NamedTuple):
    """A seed's mean contribution over the orders in which seeds could have joined. The standard error is 0 if
    the value is exact."""

    value: float
    standard_error: float


def required_coalitions(
    blended: Collection[str], fossilized: Collection[str], generator: torch.Generator | None = None
) -> list[Coalition]:
    """The coalitions that every read needs. For few seeds all of them; for many the default ones, all pairs,
    the committed seeds, and the committed seeds with one more. The generator samples orders of many seeds."""
    if len(blended) <= MAX_EXHAUSTIVE:
        return all_coalitions(blended)
    committed = frozenset(fossilized)
    wanted = {
        *default_coalitions(blended, generator),
        *map(frozenset, combinations(sorted(blended), 2)),
        committed,
        *(committed | {slot} for slot in blended),
    }
    return sorted(wanted, key=lambda c: (len(c), sorted(c)))


def most_coalitions(seeds: int) -> int:
    """`required_coalitions` of this number of blended seeds are never more."""
    if seeds <= MAX_EXHAUSTIVE:
        return int(2**seeds)
    none_and_all, committed, pairs = 2, seeds + 1, math.comb(seeds, 2)
    return none_and_all + 2 * seeds + RANDOM_ORDERS * (seeds - 1) + pairs + committed


def open_coalitions(blended: Collection[str], fossilized: Collection[str]) -> list[Coalition]:
    """The coalitions that decide about open seeds, which are not permanent yet: all blended seeds; all but
    one open seed; the committed seeds; the committed seeds and one open seed."""
    full, committed = frozenset(blended), frozenset(fossilized)
    wanted = {full, committed}
    for slot in full - committed:
        wanted |= {full - {slot}, committed | {slot}}
    return sorted(wanted, key=lambda c: (len(c), sorted(c)))


def most_open_coalitions(seeds: int) -> int:
    """`open_coalitions` of this number of blended seeds are never more."""
    return int(min(2**seeds, 2 * seeds + 2))


@dataclass(frozen=True, slots=True)
class CoalitionTable:
    """Scores by coalition; `fossilized` are the slots whose seeds are permanent."""

    scores: Mapping[Coalition, tuple[float, float]]
    fossilized: Coalition
    slots: tuple[str, ...] = field(init=False)
    """Slots with a blended seed, in order."""

    def __post_init__(self) -> None:
        slots = sorted(frozenset[str]().union(*self.scores))
        if not self.fossilized <= set(slots):
            raise SlotIdError(
                f"fossilized slots {sorted(self.fossilized)} are not all blended; "
                + allowed(slots or ["none"])
            )
        object.__setattr__(self, "slots", tuple(slots))

    def __getitem__(self, coalition: Collection[str]) -> Score:
        score = self.scores.get(frozenset(coalition))
        if score is None:
            raise MissingCoalitionError(
                f"coalition {_named(coalition)} was not evaluated; this table holds "
                f"{len(self.scores)} coalitions of {_named(self.slots)}"
            )
        return Score(*score)

    def accuracy(self, coalition: Collection[str]) -> float:
        return self[coalition].accuracy

    # -- single coalitions -----------------------------------------------------------------------------------

    @property
    def full(self) -> Score:
        """All blended seeds on."""
        return self[self.slots]

    @property
    def empty(self) -> Score:
        """The host alone."""
        return self[()]

    @property
    def committed(self) -> Score:
        """Only the fossilized seeds on."""
        return self[self.fossilized]

    def solo(self, slot: str) -> Score:
        """One seed alone in the host."""
        return self[self._known(slot)]

    def pair(self, a: str, b: str) -> Score:
        """Two seeds alone in the host."""
        return self[self._known(a, b)]

    # -- contributions ---------------------------------------------------------------------------------------

    def leave_one_out(self, slot: str) -> float:
        """Accuracy that the network would lose without this seed."""
        return self.full.accuracy - self.accuracy(frozenset(self.slots) - self._known(slot))

    def contributions(self) -> dict[str, float]:
        """What the network would lose without each seed, of those whose absence was evaluated."""
        full = frozenset(self.slots)
        return {slot: self.leave_one_out(slot) for slot in self.slots if full - {slot} in self.scores}

    def interaction(self, a: str, b: str) -> float:
        """Gain of two seeds together beyond the sum of their gains alone; negative if they duplicate each
        other."""
        if a == b:
            raise SlotIdError(f"interaction of slot {a!r} with itself; name two of {_named(self.slots)}")
        return self.pair(a, b).accuracy - self.solo(a).accuracy - self.solo(b).accuracy + self.empty.accuracy

    def interaction_sum(self, slot: str) -> float:
        """Sum of the interactions with all other seeds; 0 for a single seed."""
        return sum(self.interaction(slot, other) for other in self._others(slot))

    def boost_received(self, slot: str) -> float:
        """The largest positive interaction with another seed; 0 if there is none."""
        return max((0.0, *(self.interaction(slot, other) for other in self._others(slot))))

    def has_pairs(self, slot: str) -> bool:
        """Whether all interactions of this seed were evaluated."""
        others = self._others(slot)
        needed = [(), (slot,), *((other,) for other in others), *((slot, other) for other in others)]
        return all(frozenset(coalition) in self.scores for coalition in needed)

    def _others(self, slot: str) -> list[str]:
        return [other for other in self.slots if other not in self._known(slot)]

    def _known(self, *slots: str) -> Coalition:
        for slot in slots:
            if slot not in self.slots:
                raise SlotIdError(
                    f"slot {slot!r} has no blended seed here; {allowed(self.slots or ['none'])}"
                )
        return frozenset(slots)

    # -- Shapley ---------------------------------------------------------------------------------------------

    def shapley(self) -> dict[str, ShapleyValue]:
        """Each seed's Shapley value: the mean of its marginal contribution over all orders whose every prefix
        was evaluated.

        In a complete table these are all orders, and the value is exact. Otherwise they are the sampled
        orders and those that the other coalitions complete. In both cases the values sum to full − empty,
        because every order's contributions do. (The committed coalitions favour orders that begin
        with the fossils; over random games the bias stayed below the standard error.)"""
        if len(self.slots) <= MAX_EXHAUSTIVE:
            for coalition in all_coalitions(self.slots):
                self[coalition]
        below, above = self._count_orders()
        total = below[frozenset(self.slots)]
        independent = self._independent_orders({c: n * above[c] / total for c, n in below.items()})
        values = {}
        for slot in self.slots:
            mean = square = 0.0
            for coalition, ways in below.items():
                joined = coalition | {slot}
                if slot not in coalition and joined in above:
                    share = ways * above[joined] / total
                    marginal = self.accuracy(joined) - self.accuracy(coalition)
                    mean += share * marginal
                    square += share * marginal * marginal
            values[slot] = ShapleyValue(mean, math.sqrt(max(square - mean * mean, 0.0) / independent))
        return values

    def _count_orders(self) -> tuple[dict[Coalition, int], dict[Coalition, int]]:
        """For each coalition on a complete order: the number of ways from the empty coalition to it, and from
        it to the full one, through evaluated coalitions."""
        empty, full = frozenset[str](), frozenset(self.slots)
        by_size = sorted(self.scores, key=len)
        below = {empty: 1}
        for coalition in by_size:
            ways = sum(below.get(coalition - {slot}, 0) for slot in coalition)
            if ways:
                below[coalition] = ways
        if full not in below:
            reached = max(below, key=len)
            missing = min((reached | {slot} for slot in full - reached), key=sorted)
            raise MissingCoalitionError(
                f"no order of {_named(full)} was evaluated to its end: from {_named(reached)} none of "
                f"the next coalitions, such as {_named(missing)}, is in the table"
            )
        above = {full: 1}
        for coalition in reversed(by_size):
            ways = sum(above.get(coalition | {slot}, 0) for slot in full - coalition)
            if ways and coalition in below:
                above[coalition] = ways
        return {c: n for c, n in below.items() if c in above}, above

    def _independent_orders(self, shares: Mapping[Coalition, float]) -> float:
        """Number of orders that count as independent draws: the lowest effective number of coalitions of one
        size, over the sizes that were not evaluated completely. Infinite in a complete table."""
        independent = math.inf
        for size in range(len(self.slots) + 1):
            of_size = [share for coalition, share in shares.items() if len(coalition) == size]
            if len(of_size) < math.comb(len(self.slots), size):
                independent = min(independent, 1.0 / sum(share * share for share in of_size))
        return independent


def _named(coalition: Collection[str]) -> str:
    return "{" + ", ".join(sorted(coalition)) + "}"
