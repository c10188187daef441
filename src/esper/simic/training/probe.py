"""The probe: a linear classifier that reads off the first observation which blocks are crippled, and the policy
that then follows the schedule for that pattern. Training uses it as a teacher, comparisons as a reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esper.leyline import ActionMasks, PolicyObservation, PolicyProtocol, PolicyStep
from esper.runtime.tasks import TaskSpec, draw_condition
from esper.simic.training.batch_ops import batch_signals_to_features
from esper.simic.training.evaluation import TRAINING, populations
from esper.tamiyo import FixedSchedule
from esper.tamiyo.schedules import Pattern, Schedule, Schedules
from esper.tamiyo.scripted import ScriptedPolicy

Array = npt.NDArray[np.float64]
RIDGE = 10.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A linear classifier for each block: crippled or not."""

    mean: Array  # [F]
    scale: Array  # [F]
    weights: Array  # [F + 1, blocks]

    def __call__(self, features: Array) -> list[Pattern]:
        """[N, F] → a pattern for each."""
        x = np.concatenate([(features - self.mean) / self.scale, np.ones((len(features), 1))], 1)
        return [tuple(bool(mark) for mark in marks) for marks in x @ self.weights > 0]


def flat(obs: PolicyObservation) -> Array:
    """[E, F]"""
    return torch.cat([obs.base, obs.slots.flatten(1)], 1).double().cpu().numpy()


def fit_probe(
    task: TaskSpec, seeds: int, *, root_seed: int = TRAINING, advance: Callable[[int], None] = lambda _: None
) -> Probe:
    """Ridge regression on what is observed after the first epoch, on training seeds."""
    seen = []
    for env in populations(task, range(seeds), root_seed=root_seed):
        env.begin_round(0)
        env.train_epoch(1)
        env.validate(1)
        sensed = env.sense(1)
        seen.append(flat(batch_signals_to_features(sensed.signals, sensed.table, env.envs, "cpu")))
        advance(len(env.envs))
    features = np.concatenate(seen)
    mean, scale = features.mean(0), features.std(0) + 1e-6
    x = np.concatenate([(features - mean) / scale, np.ones((len(features), 1))], 1)
    crippled = np.array([draw_condition(task, root_seed, 0, seed).crippled for seed in range(seeds)])
    return Probe(
        mean,
        scale,
        np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ np.where(crippled, 1.0, -1.0)),
    )


class Probing(ScriptedPolicy):
    """Looks after the first epoch, then follows the schedule of the pattern that it sees."""

    def __init__(self, probe: Probe, by_pattern: Mapping[Pattern, Schedule]) -> None:
        self.probe, self.by_pattern = probe, by_pattern
        self.begin(0)

    def begin(self, num_envs: int) -> None:
        self._follow([])

    def state(self) -> dict[str, Any]:
        return {"seen": [list(pattern) for pattern in self._seen], "following": self._following.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._follow([tuple(pattern) for pattern in state["seen"]])
        self._following.load_state(state["following"])

    def _follow(self, seen: list[Pattern]) -> None:
        self._seen = seen
        self._following = FixedSchedule([self.by_pattern[pattern] for pattern in seen])

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        if not self._seen:
            self._follow(self.probe(flat(obs)))
        return self._following.act(obs, None, masks)


def schedule_teacher(
    task: TaskSpec, schedules: Schedules, envs: int, probe_seeds: int = 256
) -> PolicyProtocol:
    """Who knows what was found for a task: it follows the schedule of the pattern that the probe sees, or the
    best of all."""
    if not schedules.by_pattern:
        return FixedSchedule([schedules.best.schedule] * envs)
    return Probing(
        fit_probe(task, probe_seeds, root_seed=schedules.root_seed),
        {pattern: result.schedule for pattern, result in schedules.by_pattern.items()},
    )
