"""One network's result is the same bits for any number of networks beside it, with the default settings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from esper.nissa import TelemetryHub
from esper.proof.episodes import play
from esper.runtime.tasks import get_task_spec
from esper.simic.training import vectorized
from esper.simic.training.config import TrainingConfig
from esper.simic.training.evaluation import HELD_OUT
from esper.tamiyo.scripted import RandomValid
from helpers import differing

ENVS = (1, 4, 16, 64, 128)
SHORT = {"episode_length": 4, "steps_per_epoch": 2, "val_size": 48, "batch_size": 16}
"""Smaller than a default episode; everything else, the population above all, is as it comes."""


def networks(policy: str, envs: int) -> dict[int, dict[str, Tensor]]:
    """Weights, buffers and optimizer state of every network at the end of the first round, before the first
    update of the policy."""
    config = TrainingConfig(policy=policy, envs=envs, rounds=1, **SHORT)
    task = vectorized.resolve_task(config, get_task_spec(config.task))
    assert task.population == get_task_spec(config.task).population == 64
    with vectorized.open_trainer(config, task, TelemetryHub()) as trainer:
        trainer.run()
        assert {group.model.population for group in trainer.env.groups} == {task.population}
        return {
            env.env_idx: env.model.snapshot().tensors
            | env.host_optimizer.state_dict()
            | env.seed_optimizer.state_dict()
            for env in trainer.env.envs
        }


@pytest.mark.parametrize("policy", ["ppo", "random"])
def test_an_env_does_not_depend_on_the_number_of_envs(policy) -> None:
    largest = networks(policy, ENVS[-1])
    shared = [name for env in range(16) for name in largest[env]]
    assert any("gamma" in name for name in shared), "some of these networks grew"
    for envs in ENVS[:-1]:
        for env, tensors in networks(policy, envs).items():
            assert differing(tensors, largest[env]) == [], f"env {env} of {envs}"


def test_a_network_does_not_depend_on_the_number_of_networks_that_are_evaluated() -> None:
    task = replace(get_task_spec("digits_shift"), **SHORT)
    sets: list[Any] = [*(range(networks) for networks in ENVS), [5, 77, 100]]
    results = []
    for numbers in sets:
        episodes = play(task, partial(RandomValid, 3), root_seed=HELD_OUT, networks=numbers)
        results.append({played.network: played for played in episodes})
    largest = results[len(ENVS) - 1]
    assert any(played.decisions for played in largest.values())
    for result in results:
        assert result == {number: largest[number] for number in result}
