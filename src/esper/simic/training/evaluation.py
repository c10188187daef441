"""Evaluation of policies on numbered networks, without rewards or learning.

A network's number and a root seed fix its initial weights, its data and their order, its condition and the
random numbers for its actions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from esper.runtime.data import SharedBatchIterator, Split, load_dataset, validation_split
from esper.runtime.tasks import TaskSpec
from esper.simic.training.env_factory import action_rules, create_env_group
from esper.simic.training.vector_env import VectorEnv

HELD_OUT, TRAINING = -1, 0
"""Root seeds. The root seed of a training run is 0 or more, so no policy was trained or chosen on the
held-out networks."""


@lru_cache(maxsize=2)
def _split(dataset: str, val_size: int, final_size: int, block: int, root_seed: int) -> Split:
    return validation_split(load_dataset(dataset), val_size, root_seed, block=block, final_size=final_size)


def split_of(task: TaskSpec, root_seed: int) -> Split:
    """The task's dataset, divided into training and validation samples."""
    return _split(task.dataset, task.val_size, task.final_val_size, task.block, root_seed)


def open_env(
    task: TaskSpec, networks: Sequence[int], *, root_seed: int, rows: int, twins: int = 1
) -> VectorEnv:
    """One population with an env for each number, without rewards. An env's number is that of its network;
    with `twins`, envs number `twins`·n to `twins`·(n + 1) − 1 have network n each."""
    split = split_of(task, root_seed)
    task.check_data(split.dataset)
    batches = SharedBatchIterator(
        split,
        [[number // twins for number in networks]],
        task.batch_size,
        steps_per_epoch=task.steps_per_epoch,
        seed=root_seed,
        rows=[rows],
    )
    group = create_env_group(task, networks, population=rows, device="cpu", root_seed=root_seed, twins=twins)
    return VectorEnv(task, [group], batches, split, action_rules(task, root_seed=root_seed))


def in_populations(networks: Sequence[int], size: int) -> list[list[int]]:
    """The networks in populations of `size`. The last one may have fewer, but is as wide as the others: its
    idle rows cost time, and a network's result does not depend on the number of networks that are
    evaluated."""
    # In order, because the envs of a VectorEnv are, and conditions reach the batch iterator in that order.
    ordered = sorted(networks)
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]
