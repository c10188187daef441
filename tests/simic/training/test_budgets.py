"""Budgets of FLOPs: what is charged, when each network ends, and that its neighbours do not matter."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from env_helpers import RandomValid, make_env, play_on, run_episode, wait
from esper.kasmina import FlopMeter, all_coalitions, blended_slots
from esper.leyline import (
    OP_GERMINATE,
    EsperError,
    FactoredAction,
    LifecycleOp,
    SeedStage,
    TempoAction,
    blueprint_index,
)
from esper.runtime.tasks import ConditionSpace, TaskSpec, draw_condition, get_task_spec
from esper.simic.training.budgets import FlopsBudget
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.simic.training.vector_env import Observation, VectorEnv
from helpers import differing

BUDGETS = (4, 9, 30)
SIZES = "steps_per_epoch=3,batch_size=16,val_size=32,final_val_size=48,population=8,budget_steps=30"


def small(**changes) -> TaskSpec:
    return replace(get_task_spec(f"digits_flops:{SIZES}"), **changes)


def drawn(**changes) -> TaskSpec:
    """Each network draws its own budget."""
    return small(conditions=ConditionSpace(cripple_probability=0.0, budgets=BUDGETS), **changes)


def graft(slot: int, blueprint: str) -> list[int]:
    action = replace(
        FactoredAction.wait(),
        slot_idx=slot,
        blueprint=blueprint_index(blueprint),
        tempo=TempoAction.INSTANT,
        op=LifecycleOp.GERMINATE,
    )
    return [int(index) for index in action.to_indices()]


class Plans:
    """Grafts by env number and epoch, where they are legal; otherwise WAIT."""

    def __init__(self, plans: dict[int, dict[int, list[int]]]) -> None:
        self.plans = plans

    def __call__(self, seen: Observation) -> list[list[int]]:
        chosen = []
        for i, env in enumerate(seen.envs):
            action = self.plans.get(env.number, {}).get(seen.epoch)
            legal = action is not None and seen.masks.slot_by_op[i, OP_GERMINATE, action[0]]
            chosen.append(action if legal else list(FactoredAction.wait().to_indices()))
        return chosen


PLANS = Plans({i: {1: graft(i % 3, "conv_small"), 2: graft((i + 1) % 3, "conv_light")} for i in range(1, 6)})


# -- what is charged -----------------------------------------------------------------------------------------


def charged(
    task: TaskSpec, member: ParallelEnvState, meter: FlopMeter, *, spent: int, budget: int
) -> tuple[int, int]:
    """The epoch that begins, step by step: the steps that it has, and what is spent after it."""
    reports, steps = member.model.reports(), 0
    total = budget * task.batch_size * meter.per_sample({})
    while spent < total and steps < task.steps_per_epoch:
        spent += task.batch_size * meter.per_sample(reports)
        steps += 1
    spent += task.batch_size * meter.sensors()
    coalitions = all_coalitions(blended_slots(member.model.model, member.row))
    passes = meter.coalitions(reports, coalitions) - meter.forward(reports)
    is_last = spent + task.val_size * passes >= total
    return steps, spent + (max(task.final_val_size, task.val_size) if is_last else task.val_size) * passes


def test_each_network_trains_until_its_own_budget_is_spent() -> None:
    task = drawn()
    env = make_env(task, 6)
    env.begin_round(0)
    budgets = [draw_condition(task, 0, 0, network).budget_steps for network in range(6)]
    assert set(budgets) == set(BUDGETS)
    meter = FlopMeter(task.build_model(1, [0]))
    host_step = task.batch_size * meter.per_sample({})
    spent, epochs = [0] * 6, [0] * 6
    for epoch in range(1, task.episode_length + 1):
        if env.done:
            break
        going = [place for place, member in enumerate(env.envs) if not member.done]
        began, steps = {}, {}
        for place in going:
            began[place] = spent[place] / (budgets[place] * host_step)
            steps[place], spent[place] = charged(
                task, env.envs[place], meter, spent=spent[place], budget=budgets[place]
            )
            epochs[place] = epoch
        env.train_epoch(epoch)
        for place in going:
            member = env.envs[place]
            assert (member.planned.steps, member.flops) == (steps[place], spent[place])
            share = spent[place] / (budgets[place] * host_step)
            assert member.planned.time.progress == pytest.approx(min(share, 1.0))
            assert member.planned.is_last == (share >= 1)
            factor = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * began[place]))
            assert member.learning_rate == pytest.approx(0.01 * factor)
            rates = env.groups[0].optimizer.host_lr[member.row].item(), member.learning_rate
            assert rates[0] == pytest.approx(rates[1], rel=1e-6)
        env.validate(epoch)
        env.act(seen := env.sense(epoch), PLANS(seen))
    assert env.done
    assert [outcome.epochs for outcome in env.ledger.outcomes] == epochs
    assert len({*epochs}) > 2
    germinated = [outcome.germinated for outcome in env.ledger.outcomes]
    assert 0 in germinated
    assert max(germinated) == 2


def test_a_larger_network_takes_fewer_steps() -> None:
    task = small()
    meter = FlopMeter(task.build_model(1, [0]))
    env = make_env(task, 3)
    env.begin_round(0)
    for slot in task.slots:
        env.envs[1].model.plant_fossil(slot, "conv_light")
    env.budget = env.budget.without_measuring()
    steps = [0, 0, 0]
    for epoch in range(1, task.episode_length + 1):
        going = [place for place, member in enumerate(env.envs) if not member.done]
        if going:
            env.step(epoch, wait)
        for place in going:
            steps[place] += env.envs[place].planned.steps
    ratio = meter.per_sample(env.envs[1].model.reports()) / meter.per_sample({})
    assert steps == [30, math.ceil(30 / ratio), 30]
    assert env.envs[0].flops == 30 * env.budget.host_step


def test_nobody_pays_for_one_validation_pass_per_epoch() -> None:
    env = make_env(small(val_size=64), 1)
    env.begin_round(0)
    env.train_epoch(1)
    budget = env.budget
    assert isinstance(budget, FlopsBudget)
    assert env.envs[0].flops == 3 * budget.host_step + 16 * budget.meter.sensors()


@pytest.mark.parametrize("sense_every", [1, 3])
def test_a_real_epoch_costs_what_is_charged(sense_every) -> None:
    """Whole epochs of a network with a graft and a seed that is incubated, ramped and made permanent, by
    torch's counter: training, sensors and coalitions."""
    task = replace(
        get_task_spec("digits_mlp"),
        budget="flops",
        budget_steps=200,
        steps_per_epoch=3,
        batch_size=16,
        val_size=32,
        final_val_size=0,
        population=1,
        sense_every=sense_every,
    )
    slow = graft(1, "lora")
    slow[3] = int(TempoAction.FAST)
    env, decide = make_env(task, 1), Plans({0: {1: graft(0, "mlp_small"), 2: slow}})
    env.begin_round(0)
    (member,) = env.envs
    meter, stages, spent = FlopMeter(task.build_model(1, [0])), set(), 0
    for epoch in range(1, task.episode_length + 1):
        if env.done:
            break
        reports = member.model.reports()
        stages |= {report.stage for report in reports.values()}
        env.budget.plan(member, epoch)  # the meter counts each module once, which is not to be counted here
        with FlopCounterMode(display=False) as counter:
            env.train_epoch(epoch)
            env.validate(epoch)
        charged = member.flops - spent + task.val_size * meter.forward(reports)
        assert charged == pytest.approx(counter.get_total_flops(), rel=0.01)
        spent = member.flops
        env.act(seen := env.sense(epoch), decide(seen))
    assert stages == {
        SeedStage.TRAINING,
        SeedStage.BLENDING,
        SeedStage.HOLDING,
        SeedStage.FOSSILIZED,
    }


def wanted(member: ParallelEnvState) -> list[frozenset[str]]:
    """What is to be measured of a network: all coalitions; or all seeds, and all but one that is open. Here
    at most one is open at a time."""
    blended = blended_slots(member.model.model, member.row)
    if member.counterfactuals == "all":
        return all_coalitions(blended)
    reports = member.model.reports()
    permanent = [slot for slot in blended if reports[slot].stage is SeedStage.FOSSILIZED]
    assert len(blended) - len(permanent) <= 1
    return [*{frozenset(blended), frozenset(permanent)}]


@pytest.mark.parametrize(("counterfactuals", "sense_every"), [("all", 1), ("open", 4)])
def test_even_epochs_cost_the_same_whatever_has_grown(counterfactuals, sense_every) -> None:
    """Step by step: an epoch goes on until what it has spent, with what is measured after it, reaches its
    share of the budget."""
    task = small(even_epochs=True, steps_per_epoch=40, budget_steps=400, counterfactuals=counterfactuals)
    task = replace(task, sense_every=sense_every)
    env, meter = make_env(task, 6), FlopMeter(task.build_model(1, [0]))
    host_step = task.batch_size * meter.per_sample({})
    env.begin_round(0)
    spent, taken = [0] * 6, []
    for epoch in range(1, 11):
        planned = []
        for place, member in enumerate(env.envs):
            reports = member.model.reports()
            passes = meter.coalitions(reports, wanted(member)) - meter.forward(reports)
            measuring = task.val_size * passes
            if epoch % sense_every == 1 % sense_every:
                measuring += task.batch_size * meter.sensors()
            step, steps = task.batch_size * meter.per_sample(reports), 0
            while steps < 1 or spent[place] + steps * step + measuring < epoch * 40 * host_step:
                steps += 1
            spent[place] += steps * step + measuring
            if epoch == 10:
                spent[place] += (task.final_val_size - task.val_size) * passes
            planned.append(steps)
        env.train_epoch(epoch)
        taken.append(planned)
        assert [member.planned.steps for member in env.envs] == planned
        assert [member.flops for member in env.envs] == spent
        assert [member.planned.is_last for member in env.envs] == [epoch == 10] * 6
        left = [10 - epoch] * 6
        assert [math.ceil(member.planned.time.epochs_left - 1e-9) for member in env.envs] == left
        assert [member.planned.certain for member in env.envs] == left
        env.validate(epoch)
        env.act(seen := env.sense(epoch), PLANS(seen))
    assert env.done
    assert [outcome.epochs for outcome in env.ledger.outcomes] == [10] * 6
    assert max(taken[-1]) > 1.5 * min(taken[-1])


def test_what_is_measured_changes_nothing_but_what_is_paid() -> None:
    """With a budget of epochs nothing is paid for measuring: networks are the same to the last bit."""
    ends = []
    for counterfactuals in ("all", "open"):
        task = replace(
            get_task_spec("digits_baseline:steps_per_epoch=3,batch_size=16,val_size=32,population=8"),
            counterfactuals=counterfactuals,
            episode_length=6,
        )
        env = make_env(task, 6)
        env.begin_round(0)
        play_on(env, PLANS)
        ends.append((env.ledger.outcomes, env.groups[0].model.state_dict()))
        assert {outcome.fossilized for outcome in env.ledger.outcomes} == {0, 2}
    assert ends[0][0] == ends[1][0]
    assert not differing(ends[0][1], ends[1][1])


def test_between_measurements_of_sensors_the_last_one_stands() -> None:
    """And measuring changes nothing but what a policy sees."""
    ends = []
    for sense_every in (1, 3):
        env = make_env(small(budget="epochs", budget_steps=0, episode_length=7, sense_every=sense_every), 2)
        env.begin_round(0)
        seen = []
        for epoch in range(1, 8):
            env.step(epoch, wait)
            seen.append([member.sensors for member in env.envs])
        fresh = [epoch for epoch in range(2, 8) if seen[epoch - 1] != seen[epoch - 2]]
        assert fresh == ([*range(2, 8)] if sense_every == 1 else [4, 7])
        ends.append(env.groups[0].model.state_dict())
    assert not differing(*ends)


def test_what_may_be_measured_is_checked() -> None:
    with pytest.raises(EsperError, match="counterfactuals is 'some'; allowed: all, open"):
        small(counterfactuals="some")


# -- the time that is left -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "even",
    [
        {},
        {"even_epochs": True},
        {"even_epochs": True, "steps_per_epoch": 1},
        {"even_epochs": True, "counterfactuals": "open"},
    ],
)
def test_a_seed_that_may_be_planted_has_time_to_become_permanent(seed, even) -> None:
    """Random valid actions, then nothing but waiting: everything planted last is permanent at the end, where
    the clock decides. And no mask is stricter than the dearest seed makes necessary."""
    task, rng = small(budget_steps=24, **even), np.random.default_rng(seed)
    env = make_env(task, 8)
    env.begin_round(0)
    last: dict[int, tuple[str, int]] = {}
    certain: dict[int, tuple[int, int]] = {}

    def decide(seen: Observation) -> list[list[int]]:
        chosen = []
        for i, member in enumerate(seen.envs):
            legal = torch.nonzero(seen.masks.slot_by_op[i, OP_GERMINATE]).flatten().tolist()
            if not legal or member.number in last or rng.random() < 0.5:
                chosen.append(list(FactoredAction.wait().to_indices()))
                continue
            slot = int(rng.choice(legal))
            tempo = int(rng.choice(np.flatnonzero(seen.masks.tempo[i].numpy())))
            last[member.number] = (task.slots[slot], seen.epoch)
            certain[member.number] = (seen.epoch, member.planned.certain)
            action = graft(slot, task.blueprints[rng.integers(len(task.blueprints))])
            chosen.append([*action[:3], tempo, *action[4:]])
        return chosen

    play_on(env, decide)
    assert last
    for outcome in env.ledger.outcomes:
        assert outcome.fossilized == outcome.germinated == (outcome.env_id in last)
    for number, (epoch, promised) in certain.items():
        assert env.ledger.outcomes[number].epochs - epoch >= promised >= 1


def test_nothing_can_be_planted_at_the_end_of_a_budget() -> None:
    env = make_env(small(budget_steps=6), 2)
    env.begin_round(0)
    env.step(1, wait)
    env.train_epoch(2)
    env.validate(2)
    seen = env.sense(2)
    assert [member.planned.is_last for member in env.envs] == [True, True]
    assert not seen.masks.op[:, OP_GERMINATE].any()
    assert not seen.masks.tempo.any()
    assert [signals.time.epochs_left for signals in seen.signals] == [0.0, 0.0]


def test_bounds_hold_for_every_network() -> None:
    """What a network may cost after one more seed, against all that it can become."""
    task = small()
    meter = FlopMeter(task.build_model(1, [0]))
    model = task.build_model(1, [0])
    model.plant_fossil("r0c0", "depthwise")
    training, evaluation = meter.bound(model.reports(), task.blueprints, lambda seeds: 2**seeds)
    dearest = 0
    for slot in ("r0c1", "r1c0"):
        for blueprint in task.blueprints:
            other = task.build_model(1, [0])
            other.plant_fossil("r0c0", "depthwise")
            other.plant_fossil(slot, blueprint)
            reports = other.reports()
            dearest = max(dearest, meter.per_sample(reports))
            assert meter.coalitions(reports, all_coalitions(list(reports))) <= evaluation
    assert dearest <= training <= 2 * dearest


# -- neighbours ----------------------------------------------------------------------------------------------


def everything(env: VectorEnv, place: int):
    member = env.envs[place]
    group = env.groups[0]
    tensors = member.model.snapshot().tensors | group.optimizer.row_state(member.row)
    sensors = {name: torch.tensor(values) for name, values in member.sensors.items()}
    return env.ledger.outcomes[place], sensors | tensors


def assert_same(one, other) -> None:
    assert one[0] == other[0]
    assert not differing(one[1], other[1])


def play(task: TaskSpec, envs: int, *, budgets=None, decide=None) -> VectorEnv:
    env = make_env(task, envs, population=16)
    env.begin_round(0)
    for member, budget in zip(env.envs, budgets or [], strict=False):
        member.budget_steps = budget
    play_on(env, decide or RandomValid(3))
    return env


def test_a_network_does_not_depend_on_neighbours_that_end_earlier_or_later() -> None:
    """Sixteen networks with random growth, of which eleven end early, late or in the same epoch at another
    step; the same five alone, and beside neighbours that all end at once."""
    task = small()
    own = [30, 17, 9, 22, 5]
    mixed = play(task, 16, budgets=[*own, 3, 30, 4, 9, 10, 11, 28, 29, 1, 2, 16])
    assert len({outcome.epochs for outcome in mixed.ledger.outcomes}) >= 4
    assert sum(outcome.germinated for outcome in mixed.ledger.outcomes[:5]) > 2
    alone, short = play(task, 5, budgets=own), play(task, 16, budgets=own + [1] * 11)
    for place in range(5):
        for other in (alone, short):
            assert_same(everything(mixed, place), everything(other, place))


def test_a_round_is_the_same_every_time() -> None:
    env = make_env(drawn(), 6)
    first = run_episode(env, 0, RandomValid(1))
    run_episode(env, 1, RandomValid(2))
    assert run_episode(env, 0, RandomValid(1)) == first
    assert [outcome.env_id for outcome in first] == list(range(6))
