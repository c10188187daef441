"""The fast runner of schedules against the real environment: the same networks, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.play import make_env, play

from benchmarks import decision_value
from esper.runtime.tasks import get_task_spec
from esper.simic.training.evaluation import split_of
from esper.tamiyo import FixedSchedule, Planting


@pytest.mark.parametrize("name", ["digits_baseline", "digits_shift"])
def test_a_schedule_comes_to_the_same_in_the_environment(name) -> None:
    task = replace(get_task_spec(name), episode_length=14, steps_per_epoch=4)
    plan = (
        decision_value.Planting(1, "r0c0", "conv_light"),
        decision_value.Planting(3, "r1c0", "conv_small"),
    )
    plantings = [Planting(p.epoch, task.slots.index(p.slot), p.blueprint) for p in plan]
    found = decision_value.run(task, split_of(task, 0), [(plan, env) for env in range(5, 9)])
    played = play(make_env(task, range(5, 9)), FixedSchedule([plantings] * 4))
    for env, outcome in zip(range(5, 9), played, strict=True):
        assert outcome.fossilized == 2
        assert found[plan, env].value == outcome.objective
        assert found[plan, env].added == outcome.added_params


def test_the_grid_holds_what_it_promises() -> None:
    task = get_task_spec("digits_shift")
    plans = decision_value.grid(task, 240)
    assert len(set(plans)) == len(plans) >= 200
    for count in (1, 2, 3):
        assert sum(len(plan) == count for plan in plans) >= 70
    planted = decision_value.Planting
    assert (planted(1, "r0c0", "conv_light"), planted(2, "r1c0", "conv_light")) in plans


def test_envs_of_each_pattern_are_what_they_say() -> None:
    task = get_task_spec("digits_shift")
    found = decision_value.envs_by_pattern(task, 50, 3)
    assert sorted(found) == [(False, False), (False, True), (True, False), (True, True)]
    for pattern, envs in found.items():
        assert len(set(envs)) == 3
        assert min(envs) >= 50
        assert all(decision_value.draw_condition(task, 0, 0, env).crippled == pattern for env in envs)
