"""Real environments for tests: the embedded tasks at a small budget, and decision rules to drive them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from esper.leyline import HEAD_NAMES, IRRELEVANT_VALUES, RELEVANCE, EpisodeOutcome, FactoredAction
from esper.runtime.data import SharedBatchIterator, load_dataset, validation_split
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.simic.training.env_factory import action_rules, create_env_group
from esper.simic.training.vector_env import Observation, VectorEnv
from esper.tamiyo.inputs import FeatureInputs, stack_inputs

Decide = Callable[[Observation], Sequence[Sequence[int]]]
PARAMETERS = ("blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")


def small_task(name: str, *, epochs: int = 8, steps: int = 2, val_size: int = 48, **changes) -> TaskSpec:
    return replace(
        get_task_spec(name),
        episode_length=epochs,
        steps_per_epoch=steps,
        val_size=val_size,
        batch_size=16,
        **{"final_val_size": 0, **changes},
    )


def make_env(
    task: TaskSpec, envs: int, *, population: int | None = None, root_seed: int = 0, hub=None
) -> VectorEnv:
    rows = population or task.population
    split = validation_split(
        load_dataset(task.dataset), task.val_size, root_seed, final_size=task.final_val_size
    )
    ids = [list(range(first, min(first + rows, envs))) for first in range(0, envs, rows)]
    batches = SharedBatchIterator(
        split,
        ids,
        task.batch_size,
        steps_per_epoch=task.steps_per_epoch,
        seed=root_seed,
        rows=[rows] * len(ids),
    )
    groups = [
        create_env_group(task, group, population=rows, device="cpu", root_seed=root_seed, hub=hub)
        for group in ids
    ]
    return VectorEnv(
        task,
        groups,
        batches,
        split,
        action_rules(task, root_seed=root_seed),
    )


def run_episode(env: VectorEnv, episode: int, decide: Decide) -> list[EpisodeOutcome]:
    """One round in which `decide` chooses the actions."""
    env.begin_round(episode)
    play_on(env, decide)
    return env.ledger.outcomes


def stacked(env: VectorEnv, seen: Observation, **changes: Any) -> FeatureInputs:
    """What the policy's observation is made of, with some parts replaced."""
    parts = {
        "signals": seen.signals,
        "table": seen.table,
        "sensors": seen.sensors,
        "setting": env.envs[0].setting,
        "prices": [member.prices for member in env.envs],
        "learning_rate": [member.learning_rate for member in env.envs],
        "last_op": [member.last_op for member in env.envs],
        "last_success": [member.last_success for member in env.envs],
    }
    return stack_inputs(**(parts | changes))


def play_on(env: VectorEnv, decide: Decide, *, after: int = 0) -> None:
    """The rest of a round, of which `after` epochs are over."""
    for epoch in range(after + 1, env.rules.max_epochs + 1):
        if not env.done:
            env.step(epoch, decide)


def wait(seen: Observation) -> list[Sequence[int]]:
    return [FactoredAction.wait().to_indices()] * len(seen.signals)


class RandomValid:
    """A uniform choice among what the masks allow, from one stream per env, so that env i does not depend on
    the others."""

    def __init__(self, seed: int) -> None:
        self.seed, self.streams = seed, {}

    def __call__(self, seen: Observation) -> list[list[int]]:
        return [self.choose(env, seen) for env in range(len(seen.signals))]

    def choose(self, env: int, seen: Observation) -> list[int]:
        number = seen.envs[env].number
        rng = self.streams.setdefault(number, np.random.default_rng((self.seed, number)))
        masks = seen.masks
        op = rng.choice(np.flatnonzero(masks.op[env].numpy()))
        slot = rng.choice(np.flatnonzero(masks.slot_by_op[env, op].numpy()))
        parameters = {
            name: int(rng.choice(np.flatnonzero(getattr(masks, name)[env].numpy())))
            for name, relevant in zip(HEAD_NAMES, RELEVANCE[op], strict=True)
            if relevant and name in PARAMETERS
        }
        chosen = [
            parameters.get(name, int(value))
            for name, value in zip(HEAD_NAMES, IRRELEVANT_VALUES, strict=True)
        ]
        return [int(slot), *chosen[1:-1], int(op)]
