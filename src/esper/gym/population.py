"""One population of the native environment, one decision at a time. Only this module runs `simic.training`.

An epoch's measurements are made before its decision: `begin` trains the first epoch and shows it, `act`
carries the decisions out and trains the next epoch. Episodes end in their last epoch, each at its own time
where the task has a budget of FLOPs.

E envs of the population, A of them with an episode that goes on, S slots.
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

from esper.gym.actions import Bools, HeadMasks, Indices
from esper.gym.observations import Floats, ObservationLayout
from esper.leyline import EpisodeOutcome, LifecycleRecord, ObjectiveConfig, RewardConfig, stack_reports
from esper.runtime.data import SharedBatchIterator
from esper.runtime.tasks import TaskSpec
from esper.simic.rewards import RewardEngine
from esper.simic.training.action_execution import ActionResult
from esper.simic.training.batch_ops import batch_signals_to_features
from esper.simic.training.env_factory import action_rules, create_env_group
from esper.simic.training.evaluation import split_of
from esper.simic.training.stacking import with_empty_rows
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
    """What the envs of a population get for one decision. Infos are arrays of the envs that they are about,
    or dicts of them."""

    rewards: npt.NDArray[np.float64]  # [E], 0 where no decision was taken
    rows: Indices
    """[A] places of the envs that decided."""
    info: dict[str, Any]
    """Of the envs that decided."""
    ended: Indices
    """Places of those whose episode ended."""
    final_info: dict[str, Any]
    """Of those whose episode ended; empty where there are none."""


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

    @property
    def running(self) -> bool:
        """Whether an episode has begun that has not ended."""
        return self._env is not None and not self._env.done

    @property
    def over(self) -> Bools:
        """[E] envs whose episode has ended."""
        return np.array([member.done for member in self.env.envs])

    @training_allowed()
    def begin(self, root_seed: int, episode: int) -> None:
        """Fresh networks of this episode, and their first epoch."""
        if self._env is None or self.root_seed != root_seed:
            self._env = self._open(root_seed)
        self.root_seed, self.episode = root_seed, episode
        self.env.begin_round(episode)
        for member in self.env.envs:
            self._rewards.begin_episode(member.env_idx)
        self.obs = np.zeros((len(self.networks), *(self.setup.layout.space.shape)), np.float32)
        self._train(1)

    def begin_next(self) -> None:
        """The next episode of the same random seed."""
        assert self.root_seed is not None, "an episode follows another"
        self.begin(self.root_seed, self.episode + 1)

    @training_allowed()
    def act(self, actions: Indices) -> Step:
        """Carry out one legal action per env [E, 8] and train the next epoch of those whose episode goes on.
        Actions of envs whose episode is over are ignored."""
        seen, env = self._seen, self.env
        result = env.act(seen, [actions[row].tolist() for row in seen.rows])
        rows = np.array(seen.rows)
        rewards = np.zeros(len(env.envs))
        rewards[rows] = result.rewards
        places = {member.env_idx: i for i, member in enumerate(env.envs)}
        for env_idx, amount in result.penalties:
            rewards[places[env_idx]] += amount
        ended = rows[np.array(result.ended)]
        info, final_info = self._step_info(seen, result), {}
        if len(ended):
            outcomes = {outcome.env_id: outcome for outcome in env.ledger.outcomes}
            final_info = self._final_info([outcomes[env.envs[place].env_idx] for place in ended])
            self._show_end(seen, ended)
        if not env.done:
            self._train(seen.epoch + 1)
        return Step(rewards, rows, info, ended, final_info)

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
        """Train, validate and measure one epoch. A network that is about to be rolled back can only wait, as
        can one whose episode is over."""
        env = self.env
        env.train_epoch(epoch)
        env.validate(epoch)
        seen = self._seen = env.sense(epoch)
        features = batch_signals_to_features(seen.signals, seen.table, seen.envs, "cpu")
        self.obs[seen.rows] = self.setup.layout.flatten(features)
        self.masks = HeadMasks(with_empty_rows(seen.masks, seen.rows, len(env.envs)))
        self.masks.only_wait([i for i, e in enumerate(env.envs) if e.done or e.env_idx in seen.panics])

    def _show_end(self, seen: Observation, ended: Indices) -> None:
        """The networks after their last decision, with the measurements of the last epoch."""
        table = stack_reports([member.model.reports() for member in seen.envs], self.env.rules.slot_config)
        features = batch_signals_to_features(seen.signals, table, seen.envs, "cpu")
        self.obs[ended] = self.setup.layout.flatten(features)[np.isin(seen.rows, ended)]
        self.masks.only_wait(ended)

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

    def _final_info(self, outcomes: Sequence[EpisodeOutcome]) -> dict[str, Any]:
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
                "length": np.array([outcome.epochs for outcome in outcomes]),
                "network": np.array([outcome.env_id for outcome in outcomes]),
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
