"""Episodes of numbered networks under any policy.

A network's number and the root seed fix its initial weights, its data and their order, its condition and the
random numbers for its actions, whichever policy decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from esper.kasmina import FlopMeter
from esper.leyline import EpisodeOutcome, LifecycleOp, PolicyProtocol, SeedStage
from esper.runtime.data import test_batches
from esper.runtime.tasks import Condition, TaskSpec, draw_condition
from esper.simic.ranks import current, for_all, share_work
from esper.simic.training.evaluation import in_populations, open_env, split_of
from esper.simic.training.vector_env import VectorEnv

Maker = Callable[[Sequence[int]], PolicyProtocol]
"""Makes the policy for one episode of these networks."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An operation that was executed. Waiting is not recorded."""

    epoch: int
    op: str
    slot: str
    blueprint: str | None
    """Of a germination; None for other operations."""


@dataclass(frozen=True, slots=True)
class Fossil:
    """A permanent seed."""

    slot: str
    blueprint: str
    algorithm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result of one episode."""

    network: int
    """Number of the network under the root seed."""
    outcome: EpisodeOutcome
    test_accuracy: float
    """Percentage points, with the fossilized seeds only."""
    flops: int
    """Of training; with a budget of FLOPs, all that was charged."""
    condition: Condition | None
    """None if the task draws none."""
    decisions: tuple[Decision, ...]
    fossils: tuple[Fossil, ...]


def play(
    task: TaskSpec,
    make_policy: Maker,
    *,
    root_seed: int,
    networks: Sequence[int],
    population: int | None = None,
    plant: Callable[[VectorEnv], None] | None = None,
    last_steps: int | None = None,
    static: bool = False,
    advance: Callable[[int], None] | None = None,
) -> list[Played]:
    """One episode of each network, in the order of their numbers. `plant` prepares fresh networks; the last
    epoch has `last_steps` training steps, by default as many as the others; `static` networks never grow, so
    their budget pays for training alone; `advance` is called with the number of env-steps as they finish, or
    turn out not to be needed, of `task.episode_length` for each network. Several ranks share the populations,
    and all get all results."""
    job = Job(make_policy, networks)
    (played,) = play_jobs(
        task,
        [job],
        root_seed=root_seed,
        population=population,
        plant=plant,
        last_steps=last_steps,
        static=static,
        advance=advance,
    )
    return played


@dataclass(frozen=True, slots=True)
class Job:
    """Networks that follow one policy."""

    make_policy: Maker
    networks: Sequence[int]


def play_jobs(
    task: TaskSpec,
    jobs: Sequence[Job],
    *,
    root_seed: int,
    population: int | None = None,
    plant: Callable[[VectorEnv], None] | None = None,
    last_steps: int | None = None,
    static: bool = False,
    advance: Callable[[int], None] | None = None,
) -> list[list[Played]]:
    """`play` for several jobs that do not depend on each other; the ranks share the populations of all."""
    meter, ranks = FlopMeter(task.build_model(1, [0])), current()
    size = population or task.population
    pieces = [
        (number, numbers) for number, job in enumerate(jobs) for numbers in in_populations(job.networks, size)
    ]

    if advance is not None:
        advance = for_all(advance, [len(numbers) for _, numbers in pieces], ranks)

    def work(index: int) -> list[Played]:
        number, networks = pieces[index]
        env = open_env(task, networks, root_seed=root_seed, rows=size)
        if static:
            env.budget = env.budget.without_measuring()
        env.begin_round(0)
        if plant is not None:
            plant(env)
        policy = jobs[number].make_policy([e.env_idx for e in env.envs])
        return finish_round(env, task, policy, meter, advance, last_steps=last_steps)

    played: list[list[Played]] = [[] for _ in jobs]
    for (number, _), results in zip(pieces, share_work(len(pieces), work, ranks, "episodes"), strict=True):
        played[number] += results
    return played


def finish_round(
    env: VectorEnv,
    task: TaskSpec,
    policy: PolicyProtocol,
    meter: FlopMeter,
    advance: Callable[[int], None] | None = None,
    *,
    last_steps: int | None = None,
) -> list[Played]:
    """Play a round that has begun to its end, and test the networks."""
    policy.begin(len(env.envs))
    hidden = policy.initial_hidden(len(env.envs))
    flops: list[int] = [0] * len(env.envs)
    decisions: list[list[Decision]] = [[] for _ in env.envs]
    for epoch in count(1):
        steps = task.steps_per_epoch
        if epoch == task.episode_length and last_steps is not None:
            steps = last_steps
        env.train_epoch(epoch, steps=steps)
        env.validate(epoch)
        seen = env.sense(epoch)
        obs, masks = env.observe(seen)
        step = policy.act(obs, hidden, masks)
        actions = step.actions.tolist()
        result = env.act(seen, [actions[row] for row in seen.rows])
        if step.hidden is not None:
            # A network that was rolled back starts a new episode: the policy's memory of it is reset.
            kept = torch.ones(len(env.envs), 1, dtype=torch.bool)
            kept[seen.rows, 0] = torch.tensor(result.valid)
            hidden = (torch.where(kept, step.hidden[0], 0.0), torch.where(kept, step.hidden[1], 0.0))
        for i, reports, outcome in zip(seen.rows, seen.reports, result.outcomes, strict=True):
            flops[i] += meter.per_sample(reports) * env.envs[i].planned.steps * task.batch_size
            spec = outcome.spec
            if outcome.effective_op is not LifecycleOp.WAIT:
                planted = spec.blueprint_id if spec.op is LifecycleOp.GERMINATE else None
                decisions[i].append(Decision(epoch, spec.op.name, spec.slot_id, planted))
        if advance is not None:
            advance(len(seen.envs) + sum(result.ended) * (task.episode_length - epoch))
        if env.done:
            break
    root = env.rules.root_seed
    accuracy = env.test(test_batches(split_of(task, root), task.val_size))
    outcomes = {outcome.env_id: outcome for outcome in env.ledger.outcomes}
    return [
        Played(
            network=e.env_idx,
            outcome=outcomes[e.env_idx],
            test_accuracy=accuracy[i],
            flops=e.flops if task.budget == "flops" else flops[i],
            condition=None if task.conditions is None else draw_condition(task, root, 0, e.env_idx),
            decisions=tuple(decisions[i]),
            fossils=tuple(
                Fossil(slot_id, report.blueprint_id, report.alpha_algorithm.name)
                for slot_id, report in e.model.reports().items()
                if report.stage is SeedStage.FOSSILIZED
            ),
        )
        for i, e in enumerate(env.envs)
    ]
