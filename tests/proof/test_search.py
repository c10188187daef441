"""The search for the best schedule: its budget, its choice, its file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from esper.leyline import EsperError, GerminationStyle, ObjectiveConfig, TempoAction
from esper.proof import play, search_schedules
from esper.proof.search import (
    draw_schedules,
    neighbours,
    patterns,
    refine_schedules,
)
from esper.runtime.tasks import get_task_spec, parse_task
from esper.simic.training.evaluation import TRAINING
from esper.tamiyo import FixedSchedule, Planting
from proof.worlds import IMPAIRED

SIZES = "episode_length=3,steps_per_epoch=1,val_size=24,batch_size=8"
TINY, PLAIN = f"digits_shift:{SIZES}", f"digits_impaired:{SIZES}"
FEW = {"candidates": 4, "population": 8}


def test_every_env_follows_its_own_schedule():
    task = parse_task(IMPAIRED)
    plans = [(), (Planting(1, 0, "norm"),), (Planting(2, 1, "conv_light"), Planting(3, 2, "depthwise"))]
    played = play(
        task, lambda envs: FixedSchedule([plans[env] for env in envs]), root_seed=0, networks=range(3)
    )
    for plan, one in zip(plans, played, strict=True):
        assert [(d.epoch, d.slot, d.blueprint) for d in one.decisions if d.op == "GERMINATE"] == [
            (p.epoch, task.slots[p.slot], p.blueprint) for p in plan
        ]


def test_the_grid_is_wide_and_fits_the_task():
    for name in ("digits_baseline", "digits_impaired", "digits_scale", "digits_shift", "cifar_impaired"):
        task = get_task_spec(name)
        plans = draw_schedules(task, 208, 0)
        assert len(set(plans)) == len(plans) == 209
        assert {len(plan) for plan in plans} == {0, 1, 2, 3}
        for plan in plans:
            assert len({p.slot for p in plan}) == len(plan)
            assert all(p.blueprint in task.blueprints and p.slot < len(task.slots) for p in plan)
        started = [plan[0].epoch for plan in plans if plan]
        assert started.count(1) > 50
        assert len(set(started)) > 5
        assert plans == draw_schedules(task, 208, 0) != draw_schedules(task, 208, 1)


def test_patterns_have_their_probabilities():
    task = get_task_spec("digits_shift")
    assert patterns(task) == dict.fromkeys([(False, False), (False, True), (True, False), (True, True)], 0.25)
    rare = replace(task, conditions=replace(task.conditions, cripple_probability=0.1))
    assert patterns(rare)[False, True] == pytest.approx(0.09)
    assert patterns(get_task_spec("digits_impaired")) == {}


def count_steps():
    steps: dict[str, int] = {}

    def track(what, total):
        steps[what] = 0

        def advance(done):
            steps[what] += done

        return advance

    return steps, track


@pytest.mark.parametrize(("task", "budget"), [(PLAIN, 90), (PLAIN, 300), (TINY, 150)])
def test_the_budget_is_kept_and_what_was_used_is_told(task, budget):
    task, (steps, track) = parse_task(task), count_steps()
    found = search_schedules(task, budget, **FEW, track=track)
    assert steps["search"] == found.best.env_steps <= budget
    assert found.best.env_steps > 0.6 * budget
    assert set(found.by_pattern) == set(patterns(task))
    used = [one.env_steps for one in found.by_pattern.values()]
    assert sum(used) <= budget
    assert sum(steps.values()) == found.best.env_steps + sum(used)


def test_it_finds_that_growth_does_not_pay_where_it_cannot():
    task = replace(parse_task(TINY), objective=ObjectiveConfig(size_price=50.0, waste_price=1.0))
    found = search_schedules(task, 150, **FEW)
    assert [found.best.schedule, *(one.schedule for one in found.by_pattern.values())] == [()] * 5
    assert found.best.gain == 0.0
    static = play(task, lambda envs: FixedSchedule([()] * len(envs)), root_seed=TRAINING, networks=range(64))
    values = {one.outcome.objective for one in static}
    assert min(values) <= found.best.objective <= max(values)


def test_neighbours_differ_in_one_seed():
    task = get_task_spec("digits_impaired")
    plan = (Planting(4, 0, "norm"), Planting(5, 2, "conv_light"))
    near = [one for one in neighbours(task, plan) if {p.style for p in one} == {plan[0].style}]
    others = {tuple(sorted((p.slot, p.blueprint) for p in one)) for one in near}
    assert len(others) == len(near)
    mine, kinds = {(0, "norm"), (2, "conv_light")}, task.blueprints
    for one in near:
        assert [p.epoch for p in one] == list(range(4, 4 + len(one)))
        assert len({p.slot for p in one}) == len(one)
    # One less: 2. Elsewhere or of another kind: each seed in its own slot (3 kinds) or in the free one (4).
    # One more: 4.
    assert len(near) == 2 + 2 * (3 + 4) + 4
    assert all(len(mine - set(one)) <= 1 and len(set(one) - mine) <= 1 for one in others)
    assert {tuple(p.style for p in one) for one in set(neighbours(task, plan)) - set(near)} == {
        (style, style)
        for style in GerminationStyle
        if style not in (plan[0].style, GerminationStyle.LINEAR_ADD)  # the same graft as SIGMOID_ADD
    }
    assert {p.tempo for one in neighbours(task, plan) for p in one} == {TempoAction.INSTANT}
    ramped = replace(task, tempo=TempoAction.FAST)
    slow = tuple(replace(p, tempo=TempoAction.FAST) for p in plan)
    assert {p.tempo for one in neighbours(ramped, slow) for p in one} == {TempoAction.FAST}
    assert {p.style for one in neighbours(ramped, slow) for p in one} == set(GerminationStyle)
    linear = tuple(replace(p, style=GerminationStyle.LINEAR_ADD) for p in plan)
    assert all(p.style is linear[0].style for one in neighbours(task, linear)[:5] for p in one)
    assert len(neighbours(task, ())) == 3 * len(kinds)
    full = tuple(Planting(1 + i, i, "norm") for i in range(3))
    assert {len(one) for one in neighbours(task, full)} == {2, 3}


def test_a_winner_is_refined_on_networks_of_its_own():
    task, (steps, track) = parse_task(PLAIN), count_steps()
    found = search_schedules(task, 90, **FEW)
    better = refine_schedules(task, found, population=8, track=track)
    assert better.best.schedule in [found.best.schedule, *neighbours(task, found.best.schedule)]
    assert better.best.env_steps == found.best.env_steps + steps["refine"]
    assert better.best.networks == 12  # half a population and a whole one
    met = range(1_000_000, 1_000_012)
    played = play(
        task,
        lambda envs: FixedSchedule([better.best.schedule] * len(envs)),
        root_seed=TRAINING,
        networks=met,
        population=8,
    )
    assert better.best.objective == pytest.approx(sum(one.outcome.objective for one in played) / 12)
    assert refine_schedules(task, found, population=8) == better


@pytest.mark.slow
def test_patterns_are_refined_each_alone():
    task, (steps, track) = parse_task(TINY), count_steps()
    task = replace(task, objective=ObjectiveConfig(size_price=50.0, waste_price=1.0))
    found = search_schedules(task, 150, **FEW)
    better = refine_schedules(task, found, population=8, track=track)
    assert set(steps) == {"refine", "refine 00", "refine 01", "refine 10", "refine 11"}
    assert [better.best.schedule, *(one.schedule for one in better.by_pattern.values())] == [()] * 5


@pytest.mark.slow
def test_it_finds_the_seed_that_pays():
    """One plan is far better than not growing: where waiting costs nothing and a grown network reads digits,
    it must win."""
    task = parse_task("digits_impaired:episode_length=16,steps_per_epoch=8")
    task = replace(
        task, objective=ObjectiveConfig(size_price=0.0, waste_price=0.0), blueprints=("conv_light",)
    )
    found = search_schedules(task, 16 * 4 * 3 * 9, candidates=8, population=8)
    assert found.best.schedule
    assert found.best.gain > 0.05


@pytest.fixture(scope="module")
def found():
    return search_schedules(parse_task(TINY), 150, **FEW)


def test_the_same_search_gives_the_same_answer(found):
    assert search_schedules(parse_task(TINY), 150, **FEW) == found


@pytest.mark.parametrize(
    ("budget", "options", "told"),
    [
        (100, {}, "too few.*or more"),
        (3, {}, "too few"),
        (0, {}, "budget_env_steps is 0"),
        (-5, {}, "budget_env_steps is -5"),
        (150, {"candidates": 0}, "candidates is 0"),
        (10**6, {"candidates": 10**4}, "too many"),
    ],
)
def test_bad_budgets(budget, options, told):
    with pytest.raises(EsperError, match=told):
        search_schedules(parse_task(TINY), budget, **FEW | options)


def test_what_the_message_allows_is_allowed():
    task = parse_task(TINY)
    with pytest.raises(EsperError) as refused:
        search_schedules(task, 100, **FEW)
    enough = int(str(refused.value).split("allowed: ")[1].split()[0])
    assert search_schedules(task, enough, **FEW).best.env_steps <= enough
    with pytest.raises(EsperError):
        search_schedules(task, enough - 1, **FEW)
