"""Runs policies in real environments and computes intervals: shared by the benchmarks of decisions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from esper.leyline import EpisodeOutcome, PolicyObservation, PolicyProtocol, PolicyStep
from esper.runtime.data import SharedBatchIterator
from esper.runtime.tasks import TaskSpec
from esper.simic.training.env_factory import action_rules, create_env_group
from esper.simic.training.evaluation import split_of
from esper.simic.training.vector_env import Observation, VectorEnv

EMBEDDED = ("digits_baseline", "digits_impaired", "digits_scale", "digits_shift")
ROWS = 64
"""Networks per population."""
Watch = Callable[[Observation, PolicyObservation, PolicyStep], None]


def make_env(task: TaskSpec, envs: Sequence[int], *, rows: int = ROWS) -> VectorEnv:
    """These envs, in populations of at most `rows` networks."""
    split = split_of(task, 0)
    ids = [list(envs[at : at + rows]) for at in range(0, len(envs), rows)]
    sizes = [-(-len(group) // 8) * 8 for group in ids]
    batches = SharedBatchIterator(
        split, ids, task.batch_size, steps_per_epoch=task.steps_per_epoch, seed=0, rows=sizes
    )
    groups = [
        create_env_group(task, group, population=size, device="cpu", root_seed=0)
        for group, size in zip(ids, sizes, strict=True)
    ]
    return VectorEnv(task, groups, batches, split, action_rules(task, root_seed=0))


def play(
    env: VectorEnv,
    policy: PolicyProtocol,
    *,
    episode: int = 0,
    epochs: int | None = None,
    watch: Watch | None = None,
) -> list[EpisodeOutcome]:
    """One episode, or its first epochs, under a policy that takes its most likely actions; outcomes in env
    order."""
    env.begin_round(episode)
    policy.begin(len(env.envs))
    hidden = policy.initial_hidden(len(env.envs))
    for epoch in range(1, (epochs or env.rules.max_epochs) + 1):
        if env.done:
            break
        env.train_epoch(epoch)
        env.validate(epoch)
        seen = env.sense(epoch)
        obs, masks = env.observe(seen)
        step = policy.act(obs, hidden, masks, deterministic=True)
        hidden = step.hidden
        if watch is not None:
            watch(seen, obs, step)
        actions = step.actions.tolist()
        env.act(seen, [actions[row] for row in seen.rows])
    return env.ledger.outcomes


def outcomes(
    task: TaskSpec,
    envs: Sequence[int],
    policy: Callable[[Sequence[int]], PolicyProtocol],
    *,
    episode: int = 0,
    watch: Watch | None = None,
) -> list[EpisodeOutcome]:
    """One episode of each env. `policy` builds the policy for a list of envs."""
    results = []
    for at in range(0, len(envs), ROWS):
        part = envs[at : at + ROWS]
        results += play(make_env(task, part), policy(part), episode=episode, watch=watch)
    return results


T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""0.975 quantiles of Student's t with 1 to 9 degrees of freedom."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval. The t quantile of many values is an expansion."""
    if len(values) < 2:
        return statistics.mean(values), math.inf
    z, n = 1.959964, len(values) - 1
    if n <= len(T_QUANTILES):
        t = T_QUANTILES[n - 1]
    else:
        t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return statistics.mean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def show(values: Sequence[float], scale: float = 100) -> str:
    mean, half = interval(values)
    return f"{scale * mean:.1f} ± {scale * half:.1f}"
