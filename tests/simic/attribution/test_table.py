"""Attribution: every read against brute force, Shapley values against their axioms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina import all_coalitions, default_coalitions
from esper.leyline import SlotIdError
from esper.simic.attribution import (
    CoalitionTable,
    MissingCoalitionError,
    most_coalitions,
    most_open_coalitions,
    open_coalitions,
    required_coalitions,
)

Coalition = frozenset[str]
Game = Mapping[Coalition, tuple[float, float]]
SLOTS = tuple(f"r0c{i}" for i in range(6))
percent = st.floats(0, 100)


@st.composite
def games(draw: st.DrawFn, smallest: int = 0, largest: int = 4) -> Game:
    """Any loss and accuracy for every coalition of a few slots."""
    slots = SLOTS[: draw(st.integers(smallest, largest))]
    return {coalition: (draw(percent), draw(percent)) for coalition in all_coalitions(slots)}


def random_game(count: int, seed: int, order: int = 3) -> dict[Coalition, tuple[float, float]]:
    """Effects of single seeds, pairs and triples."""
    g = torch.Generator().manual_seed(seed)
    slots = SLOTS[:count]
    effects = {
        c: float(torch.randn((), generator=g, dtype=torch.float64))
        for c in all_coalitions(slots)
        if len(c) <= order
    }
    return {
        c: (0.0, sum(effect for part, effect in effects.items() if part <= c)) for c in all_coalitions(slots)
    }


def table(game: Game, fossilized: Coalition = frozenset()) -> CoalitionTable:
    return CoalitionTable(game, fossilized)


def slots_of(game: Game) -> tuple[str, ...]:
    return tuple(sorted(max(game, key=len)))


def by_permutations(game: Game) -> dict[str, float]:
    """Shapley values as they are defined: mean marginal contribution over all orders."""
    slots = slots_of(game)
    total = dict.fromkeys(slots, 0.0)
    for order in permutations(slots):
        for i, slot in enumerate(order):
            total[slot] += game[frozenset(order[: i + 1])][1] - game[frozenset(order[:i])][1]
    return {slot: value / math.factorial(len(slots)) for slot, value in total.items()}


# -- reads ---------------------------------------------------------------------------------------------------


@given(games(), st.data())
def test_single_coalitions(game: Game, data: st.DataObject) -> None:
    slots = slots_of(game)
    fossilized = frozenset(data.draw(st.sets(st.sampled_from(slots)))) if slots else frozenset()
    t = table(game, fossilized)
    assert t.slots == slots
    assert (t.full, t.empty, t.committed) == (game[frozenset(slots)], game[frozenset()], game[fossilized])
    for coalition, score in game.items():
        assert t[coalition] == score
        assert t.accuracy(coalition) == score[1]
    for slot in slots:
        assert t.solo(slot) == game[frozenset({slot})]
        assert t.leave_one_out(slot) == game[frozenset(slots)][1] - game[frozenset(slots) - {slot}][1]


@given(games(smallest=2))
def test_interactions(game: Game) -> None:
    t, slots = table(game), slots_of(game)

    def f(*on: str) -> float:
        return game[frozenset(on)][1]

    for a in slots:
        terms = {b: f(a, b) - f(a) - f(b) + f() for b in slots if b != a}
        assert t.has_pairs(a)
        assert t.interaction_sum(a) == pytest.approx(sum(terms.values()), abs=1e-9)
        assert t.boost_received(a) == pytest.approx(max(0.0, *terms.values()), abs=1e-9)
        for b, value in terms.items():
            assert t.pair(a, b) == t.pair(b, a) == game[frozenset({a, b})]
            assert t.interaction(a, b) == pytest.approx(value, abs=1e-9)
            assert t.interaction(b, a) == pytest.approx(value, abs=1e-9)


def test_a_seed_without_company() -> None:
    t = table({frozenset(): (2.0, 10.0), frozenset({"r0c0"}): (1.0, 40.0)})
    assert (t.leave_one_out("r0c0"), t.interaction_sum("r0c0"), t.boost_received("r0c0")) == (30.0, 0.0, 0.0)
    assert t.has_pairs("r0c0")
    assert t.shapley() == {"r0c0": (30.0, 0.0)}


def test_a_network_without_seeds() -> None:
    t = table({frozenset(): (2.0, 10.0)})
    assert t.full == t.empty == t.committed == (2.0, 10.0)
    assert t.shapley() == {}


# -- what is missing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "read"),
    [
        ({"r0c0", "r0c1", "r0c2"}, lambda t: t.full),
        (set(), lambda t: t.empty),
        ({"r0c1"}, lambda t: t.committed),
        ({"r0c0"}, lambda t: t.solo("r0c0")),
        ({"r0c0", "r0c2"}, lambda t: t.pair("r0c0", "r0c2")),
        ({"r0c0", "r0c2"}, lambda t: t.leave_one_out("r0c1")),
        (set(), lambda t: t.interaction("r0c0", "r0c1")),
        ({"r0c1", "r0c2"}, lambda t: t.interaction_sum("r0c2")),
        ({"r0c1", "r0c2"}, lambda t: t.boost_received("r0c2")),
        ({"r0c1", "r0c2"}, lambda t: t.shapley()),
        (set(), lambda t: t.shapley()),
        ({"r0c1"}, lambda t: t.shapley()),
    ],
)
def test_a_missing_coalition_is_named(missing: set[str], read: Callable[[CoalitionTable], object]) -> None:
    game = random_game(3, 0)
    read(table(game, frozenset({"r0c1"})))
    del game[frozenset(missing)]
    with pytest.raises(MissingCoalitionError) as error:
        read(table(game, frozenset({"r0c1"})))
    assert "{" + ", ".join(sorted(missing)) + "} was not evaluated" in str(error.value)


def test_above_four_slots_a_table_without_one_complete_order_says_where_they_end() -> None:
    game = {c: score for c, score in random_game(5, 0).items() if len(c) != 3}
    with pytest.raises(
        MissingCoalitionError, match=r"from \{r0c0, r0c1\} none of the next .*, such as \{r0c0, r0c1, r0c2\}"
    ):
        table(game).shapley()


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.solo("r9c9"),
        lambda t: t.pair("r0c0", "r9c9"),
        lambda t: t.leave_one_out("r9c9"),
        lambda t: t.interaction_sum("r9c9"),
        lambda t: t.boost_received("r9c9"),
        lambda t: t.has_pairs("r9c9"),
    ],
)
def test_an_unknown_slot_lists_the_known(read: Callable[[CoalitionTable], object]) -> None:
    with pytest.raises(SlotIdError, match=r"'r9c9' has no blended seed here; allowed: r0c0, r0c1"):
        read(table(random_game(2, 0)))


def test_a_seed_does_not_interact_with_itself() -> None:
    with pytest.raises(SlotIdError, match="with itself"):
        table(random_game(2, 0)).interaction("r0c0", "r0c0")


def test_fossils_must_be_blended() -> None:
    with pytest.raises(SlotIdError, match=r"fossilized slots \['r0c3'\] are not all blended"):
        table(random_game(2, 0), frozenset({"r0c3"}))


# -- Shapley -------------------------------------------------------------------------------------------------


@given(games(smallest=1))
def test_exact_against_all_orders(game: Game) -> None:
    values = table(game).shapley()
    for slot, value in by_permutations(game).items():
        assert values[slot].value == pytest.approx(value, abs=1e-9)
        assert values[slot].standard_error == 0.0
    # Efficiency: the values share out exactly what the seeds give together.
    assert sum(v.value for v in values.values()) == pytest.approx(
        table(game).full.accuracy - table(game).empty.accuracy, abs=1e-9
    )


@given(games(smallest=1, largest=3))
def test_a_seed_that_changes_nothing_gets_nothing(game: Game) -> None:
    dull = "r9c0"
    with_null = {c | extra: score for c, score in game.items() for extra in (frozenset(), frozenset({dull}))}
    values = table(with_null).shapley()
    assert values[dull].value == pytest.approx(0.0, abs=1e-9)
    for slot, value in table(game).shapley().items():
        assert values[slot].value == pytest.approx(value.value, abs=1e-9)


@given(st.integers(2, 4), st.data())
def test_seeds_that_do_the_same_get_the_same(count: int, data: st.DataObject) -> None:
    """A game in which only the number of seeds counts."""
    accuracy = [data.draw(percent) for _ in range(count + 1)]
    values = table({c: (0.0, accuracy[len(c)]) for c in all_coalitions(SLOTS[:count])}).shapley()
    assert all(
        v.value == pytest.approx((accuracy[-1] - accuracy[0]) / count, abs=1e-9) for v in values.values()
    )


def test_a_complete_table_of_many_seeds_is_exact_too() -> None:
    game = random_game(6, 3)
    values = table(game).shapley()
    for slot, value in by_permutations(game).items():
        assert values[slot].value == pytest.approx(value, abs=1e-9)
        assert values[slot].standard_error == 0.0


@pytest.mark.parametrize("fossils", [0, 2, 5])
def test_sampled_values_share_out_exactly_and_know_their_error(fossils: int) -> None:
    squares = []
    for seed in range(12):
        game = random_game(6, seed)
        fossilized = frozenset(SLOTS[:fossils])
        wanted = required_coalitions(SLOTS, fossilized, torch.Generator().manual_seed(seed))
        assert len(wanted) < len(game)
        t = table({c: game[c] for c in wanted}, fossilized)
        values, exact = t.shapley(), by_permutations(game)
        assert sum(v.value for v in values.values()) == pytest.approx(
            t.full.accuracy - t.empty.accuracy, abs=1e-9
        )
        assert all(v.standard_error > 0 for v in values.values())
        squares += [((values[s].value - exact[s]) / values[s].standard_error) ** 2 for s in SLOTS]
    # In units of the standard error the mistakes are about 1: the error is neither hidden nor inflated.
    assert 0.5 < math.sqrt(sum(squares) / len(squares)) < 1.5


def test_sampled_values_of_seeds_without_interaction_are_exact() -> None:
    game = random_game(6, 1, order=1)
    wanted = required_coalitions(SLOTS, frozenset(), torch.Generator().manual_seed(0))
    values = table({c: game[c] for c in wanted}).shapley()
    for slot, value in by_permutations(game).items():
        assert values[slot].value == pytest.approx(value, abs=1e-9)
        assert values[slot].standard_error == pytest.approx(0.0, abs=1e-6)


# -- what to evaluate ----------------------------------------------------------------------------------------


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 1000))
def test_every_read_works_on_what_is_required(count: int, fossils: int, seed: int) -> None:
    slots = [f"r0c{i}" for i in range(count)]
    fossilized = frozenset(slots[: min(fossils, count)])
    wanted = required_coalitions(slots, fossilized, torch.Generator().manual_seed(seed))
    assert len(wanted) == len(set(wanted))
    t = table({c: (1.0, float(len(c))) for c in wanted}, fossilized)
    assert (t.full.accuracy, t.empty.accuracy, t.committed.accuracy) == (count, 0.0, len(fossilized))
    assert set(t.shapley()) == set(slots)
    for slot in slots:
        assert (
            t.leave_one_out(slot),
            t.solo(slot).accuracy,
            t.interaction_sum(slot),
            t.boost_received(slot),
        ) == (1, 1, 0, 0)
        assert t.accuracy(fossilized | {slot}) == len(
            fossilized | {slot}
        )  # what fossilizing this one would commit


def test_all_subsets_of_few_the_default_ones_and_a_few_more_of_many() -> None:
    assert required_coalitions(SLOTS[:4], frozenset(SLOTS[:1])) == all_coalitions(SLOTS[:4])
    few = set(default_coalitions(SLOTS, torch.Generator().manual_seed(0)))
    wanted = set(required_coalitions(SLOTS, frozenset(SLOTS[1:4]), torch.Generator().manual_seed(0)))
    extra = wanted - few
    assert few <= wanted
    assert all(
        len(c) == 2 or c == frozenset(SLOTS[1:4]) or (c > frozenset(SLOTS[1:4]) and len(c) == 4)
        for c in extra
    )


@pytest.mark.parametrize("seeds", range(9))
def test_there_are_never_more_coalitions_than_the_bound(seeds) -> None:
    slots = [f"r0c{i}" for i in range(seeds)]
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        counted = len(required_coalitions(slots, frozenset(slots[: seed + 2]), generator))
        assert counted <= most_coalitions(seeds)
    assert most_coalitions(4) == 16


# -- open seeds ----------------------------------------------------------------------------------------------


@given(st.data())
def test_what_decisions_about_open_seeds_need_is_evaluated(data) -> None:
    game = data.draw(games())
    slots = slots_of(game)
    fossils = frozenset(data.draw(st.sets(st.sampled_from(slots))) if slots else ())
    wanted = open_coalitions(slots, fossils)
    assert len(wanted) == len(set(wanted)) <= most_open_coalitions(len(slots)) <= most_coalitions(len(slots))
    few, every = table({c: game[c] for c in wanted}, fossils), table(game, fossils)
    assert few.slots == every.slots
    assert (few.full, few.committed) == (every.full, every.committed)
    for slot in set(slots) - fossils:
        assert few.contributions()[slot] == every.leave_one_out(slot)
        assert few[fossils | {slot}] == every[fossils | {slot}], (
            "as it will be if this seed becomes permanent"
        )
    assert every.contributions() == {slot: every.leave_one_out(slot) for slot in slots}


def test_permanent_seeds_alone_cost_one_pass() -> None:
    assert open_coalitions(SLOTS, SLOTS) == [frozenset(SLOTS)]
    assert open_coalitions((), ()) == [frozenset()]


def test_interactions_that_were_not_evaluated_are_known_to_be_missing() -> None:
    game = random_game(3, seed=0)
    few = table({c: game[c] for c in open_coalitions(SLOTS[:3], SLOTS[:1])}, frozenset(SLOTS[:1]))
    assert not any(few.has_pairs(slot) for slot in few.slots)
    assert all(table(game).has_pairs(slot) for slot in few.slots)
