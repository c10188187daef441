"""Values of plans: exact properties, a toy that must be learned, and exact states."""

from __future__ import annotations

import pytest
import torch

from esper.leyline import EsperError
from esper.simic.agent.plan_values import PlanValueLearner, PlanValues, Sight, ValuesConfig

BASE, SLOT, QUOTE, SLOTS, BLUEPRINTS = 3, 4, 2, 3, 4


def sight(worlds: int, seed: int = 0) -> Sight:
    """Random worlds; a blueprint has the same quote in all of them, by which it is known."""
    quotes = torch.tensor([[b == 0, b / BLUEPRINTS] for b in range(BLUEPRINTS)], dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    return Sight(
        torch.randn(worlds, BASE, generator=generator),
        torch.randn(worlds, SLOTS, SLOT, generator=generator),
        quotes.expand(worlds, SLOTS, BLUEPRINTS, QUOTE),
        torch.ones(worlds, SLOTS, dtype=torch.bool),
        torch.zeros(worlds, dtype=torch.int64),
    )


def plans(number: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-1, BLUEPRINTS, (number, SLOTS), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def values() -> PlanValues:
    return PlanValues(BASE, SLOT, QUOTE, members=4, hidden=16, seed=3)


def test_growing_nothing_gains_exactly_nothing(values) -> None:
    assert torch.equal(values(sight(6), torch.full((6, SLOTS), -1)), torch.zeros(4, 6))


def test_a_gain_does_not_depend_on_the_order_of_the_slots(values) -> None:
    world, plan, order = sight(6), plans(6), [2, 0, 1]
    turned = world._replace(
        slots=world.slots[:, order], quotes=world.quotes[:, order], exists=world.exists[:, order]
    )
    torch.testing.assert_close(values(turned, plan[:, order]), values(world, plan))


def test_slots_that_do_not_exist_count_for_nothing(values) -> None:
    world, plan = sight(6), plans(6)
    wide = world._replace(
        slots=torch.cat([world.slots, torch.randn(6, 2, SLOT)], 1),
        quotes=torch.cat([world.quotes, torch.randn(6, 2, BLUEPRINTS, QUOTE)], 1),
        exists=torch.nn.functional.pad(world.exists, (0, 2)),
    )
    padded = torch.nn.functional.pad(plan, (0, 2), value=-1)
    torch.testing.assert_close(values(wide, padded), values(world, plan))


def test_a_search_finds_the_gains_of_single_plans(values, monkeypatch) -> None:
    monkeypatch.setattr("esper.simic.agent.plan_values.SEARCH_ROWS", 7)
    world, some = sight(3), plans(11)
    table = values.gains(world, some)
    assert table.shape == (4, 3, 11)
    for w in range(3):
        for p in range(11):
            one = values(world.rows(torch.tensor([w])), some[p : p + 1])
            torch.testing.assert_close(table[:, w, p], one[:, 0])


def gain_of(world: Sight, plan: torch.Tensor) -> torch.Tensor:
    """A slot with a positive first feature wants blueprint 0; anything else anywhere costs."""
    wants = world.slots[..., 0] > 0
    right, planted = (plan == 0) & wants, plan >= 0
    return 0.1 * right.sum(1) - 0.05 * (planted & ~right).sum(1)


def play(learner: PlanValueLearner, rounds: int) -> None:
    for r in range(rounds):
        worlds = sight(8, seed=100 + r)
        world = torch.arange(8).repeat_interleave(7)
        chosen = plans(56, seed=200 + r)
        learner.learn(worlds, world, chosen, gain_of(worlds.rows(world), chosen))


def test_the_right_plans_are_learned() -> None:
    learner = PlanValueLearner(ValuesConfig(steps=200, lr=3e-3), BASE, SLOT, QUOTE, seed=1)
    play(learner, 12)
    fresh = sight(64, seed=9)
    every = torch.cartesian_prod(*[torch.arange(-1, 2)] * SLOTS)
    best = every[learner.values.gains(fresh, every).mean(0).argmax(1)]
    ideal = torch.where(fresh.slots[..., 0] > 0, 0, -1)
    assert (best == ideal).float().mean() > 0.9
    regret = gain_of(fresh, ideal) - gain_of(fresh, best)
    assert regret.mean() < 0.02, "nothing costs 0.15 on average"


def test_the_same_episodes_give_the_same_values_and_a_stored_learner_goes_on() -> None:
    config = ValuesConfig(steps=5, hidden=8)
    straight, first = (PlanValueLearner(config, BASE, SLOT, QUOTE, seed=1) for _ in range(2))
    play(straight, 2)
    play(first, 1)
    second = PlanValueLearner(config, BASE, SLOT, QUOTE, seed=1)
    second.load_state(*first.state())
    worlds, world, chosen = sight(8, seed=101), torch.arange(8).repeat_interleave(7), plans(56, seed=201)
    second.learn(worlds, world, chosen, gain_of(worlds.rows(world), chosen))
    (one, meta), (other, other_meta) = straight.state(), second.state()
    assert meta == other_meta
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_the_scale_of_gains_is_that_of_each_family() -> None:
    """A family with tiny differences is learned as well as one with large ones."""
    learner = PlanValueLearner(ValuesConfig(steps=300, lr=3e-3), BASE, SLOT, QUOTE, seed=1)
    for r in range(10):
        worlds = sight(8, seed=100 + r)._replace(family=torch.arange(8) % 2)
        world = torch.arange(8).repeat_interleave(7)
        chosen = plans(56, seed=200 + r)
        gain = gain_of(worlds.rows(world), chosen) * torch.where(world % 2 == 0, 1.0, 0.15)
        learner.learn(worlds, world, chosen, gain)
    fresh = sight(64, seed=9)._replace(family=torch.arange(64) % 2)
    every = torch.cartesian_prod(*[torch.arange(-1, 2)] * SLOTS)
    best = every[learner.values.gains(fresh, every).mean(0).argmax(1)]
    right = (best == torch.where(fresh.slots[..., 0] > 0, 0, -1)).float().mean(1)
    assert right[fresh.family == 1].mean() > 0.85


@pytest.mark.parametrize("field", ["members", "hidden", "steps", "batch", "lr", "share"])
def test_settings_out_of_range_are_refused(field) -> None:
    with pytest.raises(EsperError, match=f"{field} is 0, must lie in"):
        ValuesConfig(**{field: 0})
