"""Static networks at equal FLOPs: a ladder of them for each host, from the blueprints of its task; the best
rung in hindsight; and successive halving, which looks for it within a budget.

A rung is the host with seeds that are permanent from its first step on. Nobody decides for such networks, so
nothing is measured or charged but training. All rungs of a network have the same initial weights of the host,
and the same data in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from esper.kasmina import FlopMeter
from esper.leyline import AlphaAlgorithm, EpisodeOutcome, EsperError, check_number, objective, stream_seed
from esper.proof.episodes import Fossil, Played
from esper.runtime.data import test_batches, validation_batches
from esper.runtime.tasks import TaskSpec, draw_condition
from esper.simic.ranks import current, for_all, share_work
from esper.simic.training.budgets import FlopsBudget
from esper.simic.training.evaluation import open_env, split_of
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.simic.training.vector_env import VectorEnv

Array = npt.NDArray[np.float64]
HALVING_EPOCHS = 1
"""Epochs of the first round of successive halving. Each later round has twice as many as the one before."""
CHOOSERS = 3
"""Number of other networks on which the best rung of a network is chosen."""
ROWS = 64
"""At most this many networks train as one population."""


class BudgetError(EsperError):
    """A budget that successive halving cannot divide."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One static network of the ladder."""

    name: str
    """Which blueprint, and in which of the slots in execution order, from 1."""
    fossils: tuple[Fossil, ...]


def ladder(task: TaskSpec) -> tuple[Rung, ...]:
    """Nothing; a light blueprint in each slot alone and in all; the same with a heavy one. Heavy is the
    blueprint of the task that costs most FLOPs, light the first other one."""
    meter = FlopMeter(task.build_model(1, [0]))
    slots = [slot for slot in task.outline.execution_order() if slot in task.slots]
    heavy = max(task.blueprints, key=lambda name: meter.bank(slots[0], name).training)
    light = next((name for name in task.blueprints if name != heavy), None)
    if light is None:
        raise EsperError(f"task {task.name!r} offers {heavy} alone; a ladder needs two or more blueprints")
    rungs = [Rung("nothing", ())]
    for weight, blueprint in (("light", light), ("heavy", heavy)):
        seeds = [Fossil(slot, blueprint, AlphaAlgorithm.ADD.name) for slot in slots]
        rungs += [Rung(f"{weight} {place}", (seed,)) for place, seed in enumerate(seeds, 1)]
        rungs.append(Rung(f"{weight} all", tuple(seeds)))
    return tuple(rungs)


def train_ladder(
    task: TaskSpec,
    networks: Sequence[int],
    *,
    root_seed: int,
    rungs: Sequence[Rung] | None = None,
    test_size: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> list[list[Played]]:
    """The episodes of each rung, in the order of the networks' numbers. They are tested on the first
    `test_size` samples of the test part, by default on all. `advance` is called with the number of networks
    that are done. Several ranks share the work, and all get all results."""
    rungs = ladder(task) if rungs is None else rungs
    parts = _parts(sorted(networks), len(rungs))
    advance = for_all(advance, [len(part) for part in parts], current())

    def work(part: int) -> list[Played]:
        env = _plant(task, parts[part], rungs, root_seed)
        for epoch in range(1, task.episode_length + 1):
            _train(env, epoch)
        played = _results(env, task, rungs, test_size)
        advance(len(played))
        return played

    played = [*chain(*share_work(len(parts), work, current(), "ladder"))]
    return [played[rung :: len(rungs)] for rung in range(len(rungs))]


@dataclass(frozen=True, slots=True)
class HalvingRound:
    """One round of successive halving: so many rungs train for so many epochs, then the best ones stay."""

    rungs: int
    epochs: int


def halving_rounds(rungs: int) -> tuple[HalvingRound, ...]:
    """All rungs, then half of them for twice as long, down to two. Rounds cost about the same."""
    rounds, epochs = [], HALVING_EPOCHS
    while rungs > 1:
        rounds.append(HalvingRound(rungs, epochs))
        rungs, epochs = rungs // 2, 2 * epochs
    return tuple(rounds)


def halve(
    task: TaskSpec,
    networks: Sequence[int],
    *,
    root_seed: int,
    budgets: int = 1,
    rungs: Sequence[Rung] | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Played]:
    """Successive halving over the ladder, for each network by itself, with the training FLOPs of `budgets`
    networks in all. Rungs train at the same pace and are ranked by J at that time, on the validation part;
    the survivors go on, and the winner gets what is left. The learning rate decays over what the winner gets.
    The result is the winner, with the FLOPs of all rungs: they exceed the budget by less than one of its
    steps, unless the others have spent everything. Several ranks share the work, and all get all results."""
    check_number("halving", "budgets", budgets, low=1, integer=True)
    if task.conditions is not None and task.conditions.budgets:
        raise BudgetError(f"halving: networks of task {task.name!r} draw budgets; allowed: one for all")
    rungs = ladder(task) if rungs is None else rungs
    rounds, total = halving_rounds(len(rungs)), budgets * task.budget_steps
    shares, reserve = sum(one.rungs * one.epochs for one in rounds), _step_of_each(task, rungs)
    steps, left = divmod(total - reserve, shares)
    if steps < 1:
        raise BudgetError(
            f"halving: a budget of {total} steps of the bare host is too small for {len(rungs)} rungs; "
            f"allowed: {shares + reserve} or more"
        )
    paced = replace(
        task,
        steps_per_epoch=steps,
        budget_steps=steps * sum(one.epochs for one in rounds) + left + reserve,
        even_epochs=True,
    )
    parts = _parts(sorted(networks), len(rungs))
    advance = for_all(advance, [len(part) for part in parts], current())

    def work(part: int) -> list[Played]:
        winners = _halve(_plant(paced, parts[part], rungs, root_seed), paced, rungs, rounds, total)
        advance(len(winners))
        return winners

    return [*chain(*share_work(len(parts), work, current(), "halving"))]


def _halve(
    env: VectorEnv, task: TaskSpec, rungs: Sequence[Rung], rounds: Sequence[HalvingRound], total: int
) -> list[Played]:
    """The winner of each network, in the order of their numbers. All rungs of a network may cost `total`
    steps of the bare host."""
    assert isinstance(env.budget, FlopsBudget)
    validation = validation_batches(split_of(task, env.rules.root_seed), task.val_size, final=True)
    networks = [env.envs[i : i + len(rungs)] for i in range(0, len(env.envs), len(rungs))]
    going = [list(members) for members in networks]
    epoch = 0
    for one in rounds:
        for _ in range(one.epochs):
            epoch += 1
            _train(env, epoch)
        scores = {
            member.env_idx: _objective(task, member, accuracy)
            for member, accuracy in zip(env.envs, env.test(validation), strict=True)
        }
        for members in going:
            members.sort(key=lambda member, scores=scores: (-scores[member.env_idx], member.number))  # type: ignore[misc]
            for member in members[one.rungs // 2 :]:
                member.done = True
            del members[one.rungs // 2 :]
    for (winner,), members in zip(going, networks, strict=True):
        # A rung takes whole steps, so the others have cost more than their shares: most of it is the reserve.
        others = sum(member.flops for member in members if member is not winner)
        winner.budget_steps = total - others // env.budget.host_step
    for last in range(epoch + 1, task.episode_length + 1):
        _train(env, last)
    results = dict(zip((e.env_idx for e in env.envs), _results(env, task, rungs), strict=True))
    return [
        replace(results[winner.env_idx], flops=sum(member.flops for member in members))
        for (winner,), members in zip(going, networks, strict=True)
    ]


def _step_of_each(task: TaskSpec, rungs: Sequence[Rung]) -> int:
    """The cost of one training step of every rung, in steps of the bare host."""
    meter = FlopMeter(task.build_model(1, [0]))
    seeds = sum(
        meter.bank(fossil.slot, fossil.blueprint).training for rung in rungs for fossil in rung.fossils
    )
    return len(rungs) + -(-seeds // meter.per_sample({}))


def _parts(networks: Sequence[int], rungs: int) -> list[Sequence[int]]:
    """Networks whose rungs train as one population."""
    size = max(1, ROWS // rungs)
    return [networks[first : first + size] for first in range(0, len(networks), size)]


def _plant(task: TaskSpec, networks: Sequence[int], rungs: Sequence[Rung], root_seed: int) -> VectorEnv:
    """Fresh networks with the seeds of each rung, in one population: env `len(rungs)`·n + r is rung r of
    network n."""
    if task.budget != "flops":
        raise EsperError(f"task {task.name!r} has a budget of {task.budget}; a ladder needs one of flops")
    count = len(rungs)
    numbers = [count * network + rung for network in networks for rung in range(count)]
    rows = -(-len(numbers) // 8) * 8
    env = open_env(task, numbers, root_seed=root_seed, rows=rows, twins=count)
    env.budget = env.budget.without_measuring()
    env.begin_round(0)
    for member in env.envs:
        seeds = rungs[member.number % count].fossils
        for number, fossil in enumerate(seeds):
            member.model.plant_fossil(
                fossil.slot,
                fossil.blueprint,
                algorithm=AlphaAlgorithm[fossil.algorithm],
                init_seed=stream_seed(root_seed, "germination", 0, member.world, number),
            )
        member.germinated = member.fossilized = len(seeds)
    return env


def _train(env: VectorEnv, epoch: int) -> None:
    if not env.done:
        env.train_epoch(epoch, sense=False)
        for member in env.envs:
            member.done = member.done or member.planned.is_last


def _results(
    env: VectorEnv, task: TaskSpec, rungs: Sequence[Rung], test_size: int | None = None
) -> list[Played]:
    """Validation and test of every network as it is now, in env order."""
    split = split_of(task, env.rules.root_seed)
    validated = env.test(validation_batches(split, task.val_size, final=True))
    tests = test_batches(split, task.val_size)
    tested = env.test(replace(tests, x=tests.x[:test_size], y=tests.y[:test_size]))
    return [
        _played(env, task, member, rungs[member.number % len(rungs)], accuracy, test)
        for member, accuracy, test in zip(env.envs, validated, tested, strict=True)
    ]


def _objective(task: TaskSpec, member: ParallelEnvState, accuracy: float) -> float:
    """J of a static network with this validation accuracy in percent."""
    return objective(
        task.objective,
        committed_accuracy=accuracy / 100.0,
        added_params=member.model.total_params() - task.host_params,
        host_params=task.host_params,
        wasted_seeds=0,
        rollbacks=0,
    )


def _played(
    env: VectorEnv, task: TaskSpec, member: ParallelEnvState, rung: Rung, accuracy: float, test: float
) -> Played:
    added = member.model.total_params() - task.host_params
    outcome = EpisodeOutcome(
        env_id=member.world,
        task=task.name,
        episode_idx=0,
        epochs=member.planned.time.epoch,
        final_accuracy=accuracy,
        committed_accuracy=accuracy,
        objective=_objective(task, member, accuracy),
        total_reward=0.0,
        host_params=task.host_params,
        added_params=added,
        germinated=len(rung.fossils),
        fossilized=len(rung.fossils),
        pruned=0,
        rollbacks=0,
    )
    root = env.rules.root_seed
    return Played(
        network=member.world,
        outcome=outcome,
        test_accuracy=test,
        flops=member.flops,
        condition=None if task.conditions is None else draw_condition(task, root, 0, member.world),
        decisions=(),
        fossils=rung.fossils,
    )


def hindsight(validation: Array) -> list[int]:
    """The rung for each network that is best in the mean of the three networks that follow it, the first
    after the last. Its own luck is not rewarded. `validation` is [rungs, networks]."""
    networks = validation.shape[1]
    if networks < 2:
        raise EsperError(f"{networks} network; the best rung is chosen on others, so it takes two or more")
    others = [[(n + i) % networks for i in range(1, min(networks, 1 + CHOOSERS))] for n in range(networks)]
    return [int(validation[:, chosen].mean(1).argmax()) for chosen in others]
