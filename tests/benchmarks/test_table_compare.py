"""Learners on a table: what they choose, what they spend, and what is shown of them."""

from __future__ import annotations

from itertools import product
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from benchmarks.plan_table import PlanTable
from benchmarks.table_compare import Budget, algorithms, show
from benchmarks.table_learners import (
    ENVS,
    Learned,
    Split,
    by_condition,
    chosen_objective,
    halve,
    learn_ppo,
    learn_values,
    oracle,
    ppo_variants,
    search,
    search_at_random,
    values_variants,
)
from benchmarks.transfer import transfer

from benchmarks import table_compare
from esper.simic.agent.plan_values import Sight, ValuesConfig
from esper.tamiyo.columns import first_columns
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT, SLOT_DIM


@pytest.fixture(scope="module")
def table() -> PlanTable:
    """Two kinds of worlds: one wants a seed in slot 0, the other one in slot 1, and the slot shows it."""
    rng, worlds = np.random.default_rng(0), 96
    blueprints = ("conv_light", "norm")
    plans = tuple(product((None, *blueprints), repeat=2))
    kind = np.arange(worlds) % 2
    objective = (
        0.5
        + rng.normal(0, 0.1, worlds)
        - 0.15 * np.array([sum(b is not None for b in plan) for plan in plans])[:, None] * np.ones(worlds)
    )
    for row, plan in enumerate(plans):
        for slot in (0, 1):
            if plan[slot] == "norm":
                objective[row, kind == slot] += 0.45
    base = torch.zeros(worlds, BASE_DIM)
    quotes = torch.zeros(worlds, 2, 2, QUOTE_DIM)
    quotes[..., 0] = 1.0
    quotes[:, :, 1, 1] = 1.0
    slots = torch.zeros(worlds, 2, SLOT_DIM)
    slots[..., first_columns(SLOT)["stage_dormant"]] = 1.0
    slots[:, 1, 0] = 1.0
    slots[torch.arange(worlds), torch.from_numpy(kind), 1] = 1.0
    flags = torch.ones(worlds, 2, dtype=torch.bool)
    sight = Sight(base, slots, quotes, flags, torch.zeros(worlds, dtype=torch.int64))
    crippled = np.stack([kind == 0, kind == 1], 1)
    return PlanTable(
        "kinds", blueprints, plans, 0, 24, 0.02, objective, objective, objective, sight, crippled
    )


def test_each_random_seed_divides_the_worlds(table: PlanTable) -> None:
    one, other = Split.drawn(table, 0), Split.drawn(table, 1)
    assert sorted([*one.train, *one.test]) == list(range(96))
    assert len(one.test) == 24
    assert set(one.test) != set(other.test)


def test_searches_find_the_best_plan_within_their_budget(table: PlanTable) -> None:
    split = Split.drawn(table, 0)
    both = table.plans.index(("norm", "norm"))
    rng = np.random.default_rng(0)
    assert halve(table, split.train, 2000, rng) == both
    assert search_at_random(table, split.train, 2000, rng) == both
    never = chosen_objective(table, split.test, 0)
    with_labels = search(table, split, halve, seed=0, budgets=[24 * 2000], labels=True)
    without = search(table, split, halve, seed=0, budgets=[24 * 2000])
    assert without.curve[0][1] - never == pytest.approx(0.15)
    assert with_labels.curve[0][1] - never == pytest.approx(0.3), "each kind gets its own plan"
    assert with_labels.curve[0][1] == pytest.approx(oracle(table, split))


def test_a_search_with_hardly_a_budget_still_answers(table: PlanTable) -> None:
    split = Split.drawn(table, 0)
    for find in (halve, search_at_random):
        assert 0 <= find(table, split.train, 1, np.random.default_rng(0)) < len(table.plans)


@pytest.mark.parametrize("name", values_variants())
def test_action_values_learn_to_choose_by_what_they_see(table: PlanTable, name: str) -> None:
    split = Split.drawn(table, 0)
    small = 8
    learned = learn_values(table, split, values_variants()[name], seed=0, rounds=small, every=small)
    assert learned.curve[-1][0] == small * ENVS * 24
    assert learned.curve[-1][1] - chosen_objective(table, split.test, 0) > 0.2


def test_values_choose_in_worlds_that_they_have_not_seen(table: PlanTable) -> None:
    """The right seed gains 30 points, the best single plan half of that. What tells the kinds apart is in the
    slots."""
    config = ValuesConfig(steps=300)
    seen = transfer(table, 0, worlds=72, plans=5, config=config)
    assert seen.chosen == pytest.approx(30, abs=3)
    assert seen.hindsight == pytest.approx(30)
    assert seen.grows == 100
    blind = transfer(table, 0, worlds=72, plans=5, config=config, hide=["slots"])
    assert blind.chosen < 20


def test_the_best_plan_of_a_condition_is_chosen_in_other_worlds(table: PlanTable) -> None:
    """Plans chosen by kind gain what the right seed gains; a label that every world has for itself tells
    nothing."""
    never = table.objective[0]
    kind = np.arange(table.objective.shape[1]) % 2
    assert (by_condition(table, kind) - never).mean() == pytest.approx(0.3)
    assert (by_condition(table, np.arange(96)) - never).mean() == pytest.approx(0.15)


def test_every_stage_of_ppo_runs_and_repeats(table: PlanTable) -> None:
    split = Split.drawn(table, 0)
    for name, variant in ppo_variants(2).items():
        first, again = (learn_ppo(table, split, variant, seed=1, rounds=2, every=1) for _ in range(2))
        assert first == again, name
        start = len(split.train) * 24 if variant.baseline else 0
        assert [steps for steps, *_ in first.curve] == [start + r * ENVS * 24 for r in range(3)]
        assert len(first.explained) == 2


def test_what_is_shown_is_measured_from_never_growing(table: PlanTable, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(table_compare, "TABLES", tmp_path)
    budget = Budget.of(table, 60_000)
    assert budget.rounds == 39
    assert budget.steps[-1] == 39 * ENVS * 24
    names = list(algorithms(table, budget))
    assert "successive halving with labels" in names
    finished = {}
    for name in names:
        for seed in range(3):
            never = chosen_objective(table, Split.drawn(table, seed).test, 0)
            curve = [(100, never, never), (200, never + 0.01 * seed, never - 0.01)]
            finished[name, seed] = Learned(curve, explained=[0.0, 0.0, 0.9, 0.1], value_ratio=[1.0] * 4)
    del finished[names[0], 2]
    text = show(table, finished, names)
    row = next(line for line in text.splitlines() if line.startswith("| + distinct twins"))
    assert "| 200 | 0.0 ± 0.0 | 0.5 ± 0.5 | -1.0 ± 0.0 | 0.50 (above 0.5 in 50 %) | 1.00 |" in row
    assert (tmp_path / "kinds.md").read_text() == text
    drawing = ElementTree.fromstring((tmp_path / "kinds.svg").read_text())
    lines = [e for e in drawing.iter() if e.tag.endswith("polyline")]
    assert len(lines) == len(names)
