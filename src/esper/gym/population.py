"""One population of the native environment, one decision at a time. Only this module runs `simic.training`.

An epoch's measurements are made before its decision: `begin` trains the first epoch and shows it, `act`
carries the decisions out and trains the next epoch. In the last epoch the episode ends.

E envs of the population, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esper.gym.actions import HeadMasks, Indices
from esper.gym.observations import Floats, ObservationLayout
from esper.leyline import EpisodeOutcome, LifecycleRecord, ObjectiveConfig, RewardConfig, stack_reports
from esper.runtime.data import SharedBatchIterator
from esper.runtime.tasks import TaskSpec
from esper.simic.rewards import RewardEngine
from esper.simic.training.action_execution import ActionResult
from esper.simic.training.batch_ops import batch_signals_to_features
from esper.simic.training.env_factory import action_rules, create_env_group
from esper.simic.training.evaluation import split_of
from esper.simic.training.vector_env import Observation, VectorEnv


@dataclass(frozen=True, slots=True)
class Setup:
    """What all populations of an environment have in common."""

    task: TaskSpec
    layout: ObservationLayout
    reward: RewardConfig
    gamma: float
    twins: int


@dataclass(frozen=True, slots=True)
class Step:
    """What the envs of a population get for one decision."""

    rewards: npt.NDArray[np.float64]  # [E]
    ended: bool
    info: dict[str, Any]
    """Arrays [E], or dicts of them."""


@contextmanager
def training_allowed() -> Iterator[None]:
    """The networks learn even where the caller, as learners do while they collect, has gradients off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


class Population:
    """Networks that are trained as one batched module, and where their episode is."""

    obs: Floats  # [E, columns]
    masks: HeadMasks

    def __init__(self, setup: Setup, networks: Sequence[int]) -> None:
        self.setup, self.networks = setup, list(networks)
        self.root_seed: int | None = None
        self.episode = 0
        self.running = False
        """Whether an episode has begun and has not ended."""
        self._env: VectorEnv | None = None
        self._rewards = RewardEngine(
            setup.reward, setup.task.objective, gamma=setup.gamma, num_envs=1 + self.networks[-1]
        )
        self._seen: Observation

    @property
    def env(self) -> VectorEnv:
        """The native environment."""
        assert self._env is not None, "begin opens it"
        return self._env

    @training_allowed()
    def begin(self, root_seed: int, episode: int) -> None:
        """Fresh networks of this episode, and their first epoch."""
        if self._env is None or self.root_seed != root_seed:
            self._env = self._open(root_seed)
        self.root_seed, self.episode, self.running = root_seed, episode, True
        self.env.begin_round(episode)
        for member in self.env.envs:
            self._rewards.begin_episode(member.env_idx)
        self._train(1)

    def begin_next(self) -> None:
        """The next episode of the same random seed."""
        assert self.root_seed is not None, "an episode follows another"
        self.begin(self.root_seed, self.episode + 1)

    @training_allowed()
    def act(self, actions: Indices) -> Step:
        """Carry out one legal action per env [E, 8] and, unless the episode ends, train the next epoch."""
        seen, env = self._seen, self.env
        result = env.act(seen, actions.tolist())
        rewards = np.array(result.rewards)
        places = {member.env_idx: i for i, member in enumerate(env.envs)}
        for env_idx, amount in result.penalties:
            rewards[places[env_idx]] += amount
        ended = seen.epoch >= env.rules.max_epochs
        info = self._step_info(seen, result)
        if ended:
            self.running = False
            info |= self._final_info(env.ledger.outcomes, seen.epoch)
            self._show_end(seen)
        else:
            self._train(seen.epoch + 1)
        return Step(rewards, ended, info)

    def _open(self, root_seed: int) -> VectorEnv:
        setup, task = self.setup, self.setup.task
        split = split_of(task, root_seed)
        task.check_data(split.dataset)
        worlds = [network // setup.twins for network in self.networks]
        batches = SharedBatchIterator(
            split,
            [worlds],
            task.batch_size,
            steps_per_epoch=task.steps_per_epoch,
            seed=root_seed,
            rows=[task.population],
        )
        group = create_env_group(
            task,
            self.networks,
            population=task.population,
            device="cpu",
            root_seed=root_seed,
            twins=setup.twins,
        )
        rules = replace(
            action_rules(task, root_seed=root_seed),
            reward=self._rewards,
            rollback_reward=self._rewards.rollback,
        )
        return VectorEnv(task, [group], batches, split, rules)

    def _train(self, epoch: int) -> None:
        """Train, validate and measure one epoch. A network that is about to be rolled back can only wait."""
        env = self.env
        env.train_epoch(epoch)
        env.validate(epoch)
        self._seen = env.sense(epoch)
        features = batch_signals_to_features(self._seen.signals, self._seen.table, env.envs, "cpu")
        self.obs, self.masks = self.setup.layout.flatten(features), HeadMasks(self._seen.masks)
        panics = self._seen.panics
        self.masks.only_wait([i for i, member in enumerate(env.envs) if member.env_idx in panics])

    def _show_end(self, seen: Observation) -> None:
        """The networks after their last decision, with the measurements of the last epoch."""
        env = self.env
        table = stack_reports([member.model.reports() for member in env.envs], env.rules.slot_config)
        self.obs = self.setup.layout.flatten(batch_signals_to_features(seen.signals, table, env.envs, "cpu"))
        self.masks.only_wait(slice(None))

    def _step_info(self, seen: Observation, result: ActionResult) -> dict[str, Any]:
        components = [paid or {} for paid in result.components]
        names = list(dict.fromkeys(name for paid in components for name in paid))
        events = np.empty(len(components), object)
        events[:] = [
            tuple(_event(record, seen.epoch) for record in outcome.records) for outcome in result.outcomes
        ]
        return {
            "accuracy": np.array([signals.val_accuracy / 100.0 for signals in seen.signals]),
            "executed": np.array([outcome.executed for outcome in result.outcomes]),
            "rolled_back": ~np.array(result.valid),
            "reward_parts": {name: np.array([paid.get(name, 0.0) for paid in components]) for name in names},
            "events": events,
        }

    def _final_info(self, outcomes: Sequence[EpisodeOutcome], epochs: int) -> dict[str, Any]:
        prices = self.setup.task.objective
        parts = [_parts(outcome, prices) for outcome in outcomes]
        numbers = {
            name: np.array([getattr(outcome, name) for outcome in outcomes])
            for name in ("germinated", "fossilized", "pruned", "rollbacks", "host_params", "added_params")
        }
        return {
            "objective": {name: np.array([part[name] for part in parts]) for name in parts[0]},
            "outcome": {
                "return": np.array([outcome.total_reward for outcome in outcomes]),
                "length": np.full(len(outcomes), epochs),
                "network": np.array(self.networks),
                "round": np.full(len(outcomes), self.episode),
                "final_accuracy": np.array([outcome.final_accuracy / 100.0 for outcome in outcomes]),
                **numbers,
            },
        }


def _parts(outcome: EpisodeOutcome, prices: ObjectiveConfig) -> dict[str, float]:
    """J, and the amounts whose sum it is."""
    return {
        "J": outcome.objective,
        "committed_accuracy": outcome.committed_accuracy / 100.0,
        "size": -prices.size_price * math.log1p(outcome.added_params / outcome.host_params),
        "waste": -prices.waste_price * (outcome.germinated - outcome.fossilized),
        "rollback": -prices.rollback_price * outcome.rollbacks,
    }


def _event(record: LifecycleRecord, epoch: int) -> dict[str, Any]:
    """A lifecycle record as plain values."""
    return {
        "epoch": epoch,
        "kind": str(record.kind),
        "slot": record.slot_id,
        "blueprint": record.blueprint_id,
        "from": record.stage_from.name,
        "to": record.stage_to.name,
        "alpha": record.alpha,
        "params": record.params,
        "cause": None if record.cause is None else record.cause.name,
    }
