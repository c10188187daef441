"""Cohorts of a comparison: networks that start with the seeds that a policy grew, hosts of the same size or
the same FLOPs, and an oracle for tasks that cripple blocks, which knows the drawn pattern."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from statistics import fmean

from esper.kasmina import FlopMeter
from esper.kasmina.hosts import CNNHost
from esper.leyline import STYLE_ALPHA_ALGORITHMS, AlphaAlgorithm, EsperError, objective, stream_seed
from esper.proof.episodes import Fossil, Maker, Played
from esper.runtime.tasks import TaskSpec, draw_condition
from esper.simic.training.vector_env import VectorEnv
from esper.tamiyo import FixedSchedule
from esper.tamiyo.schedules import Pattern, Schedule


def with_fossils(fossils: Mapping[int, Sequence[Fossil]]) -> Callable[[VectorEnv], None]:
    """Prepares fresh networks, by number: these seeds are permanent at alpha 1 and learn from the first
    epoch."""

    def plant(env: VectorEnv) -> None:
        for member in env.envs:
            planted = fossils[member.env_idx]
            for number, fossil in enumerate(planted):
                member.model.plant_fossil(
                    fossil.slot,
                    fossil.blueprint,
                    algorithm=AlphaAlgorithm[fossil.algorithm],
                    init_seed=stream_seed(
                        env.rules.root_seed, "germination", env.episode, member.env_idx, number
                    ),
                )
            member.germinated = member.fossilized = len(planted)
            member.governor.reset()

    return plant


def planned_fossils(task: TaskSpec, schedule: Schedule) -> tuple[Fossil, ...]:
    """The permanent seeds of a network whose schedule was carried out completely."""
    return tuple(
        Fossil(task.slots[p.slot], p.blueprint, STYLE_ALPHA_ALGORITHMS[p.style].name) for p in schedule
    )


def at_equal_flops(task: TaskSpec, fossils: Iterable[Sequence[Fossil]], flops: float) -> tuple[TaskSpec, int]:
    """The task with fewer epochs, and the training steps of the last one, so that networks that have these
    seeds from the first epoch spend `flops` in the mean; rounded up to a whole step, in their favour. The
    learning rate decays over the shorter episode. A task with a budget of FLOPs is at equal FLOPs as it
    is."""
    if task.budget == "flops":
        return task, task.steps_per_epoch
    per_sample = cache(partial(_training_flops, task))
    mean = fmean(per_sample(tuple(seeds)) for seeds in fossils)
    steps = max(math.ceil(flops / (mean * task.batch_size) - 1e-9), 1)
    steps = min(steps, task.episode_length * task.steps_per_epoch)
    epochs = math.ceil(steps / task.steps_per_epoch)
    return replace(task, episode_length=epochs), steps - (epochs - 1) * task.steps_per_epoch


def _training_flops(task: TaskSpec, fossils: tuple[Fossil, ...]) -> int:
    """FLOPs of training a network with these permanent seeds on one sample."""
    model = task.build_model(1, [0])
    for fossil in fossils:
        model.plant_fossil(fossil.slot, fossil.blueprint, algorithm=AlphaAlgorithm[fossil.algorithm])
    return FlopMeter(model).per_sample(model.reports())


def widened(task: TaskSpec, params: float) -> TaskSpec:
    """The task with a CNN host at least as wide as its own, with the number of parameters closest to
    `params`. A budget of FLOPs stays what it is."""
    if not isinstance(task.outline, CNNHost):
        raise EsperError(
            f"task {task.name!r} has a {task.topology} host; allowed: cnn, the only host with a width"
        )
    base, best = task.outline.base, task
    while True:
        base += 1
        wider = replace(task, host={**task.host, "base": base})
        if abs(wider.host_params - params) >= abs(best.host_params - params):
            return _with_budget_of(task, best)
        best = wider


def _with_budget_of(task: TaskSpec, other: TaskSpec) -> TaskSpec:
    """The other task with the FLOPs that this one has, rounded up to a step of its own host."""
    if task.budget == "epochs":
        return other
    ratio = Fraction(_training_flops(task, ()), _training_flops(other, ()))
    steps, conditions = math.ceil(task.budget_steps * ratio), task.conditions
    if conditions is not None:
        budgets = tuple(math.ceil(budget * ratio) for budget in conditions.budgets)
        conditions = replace(conditions, budgets=budgets)
    return replace(other, budget_steps=steps, conditions=conditions)


def priced(played: Played, task: TaskSpec) -> Played:
    """An episode of a widened host, with the additional parameters of that host counted as added."""
    end, added = played.outcome, played.outcome.host_params - task.host_params
    value = objective(
        task.objective,
        committed_accuracy=end.committed_accuracy / 100.0,
        added_params=added,
        host_params=task.host_params,
        wasted_seeds=end.germinated - end.fossilized,
        rollbacks=end.rollbacks,
    )
    outcome = replace(end, host_params=task.host_params, added_params=added, objective=value)
    return replace(played, outcome=outcome)


def oracle(task: TaskSpec, by_pattern: Mapping[Pattern, Schedule], root_seed: int) -> Maker:
    """Follows the schedule for the pattern that each network has drawn."""
    return lambda networks: FixedSchedule(
        [by_pattern[draw_condition(task, root_seed, 0, network).crippled] for network in networks]
    )
