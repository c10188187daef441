"""The probe: a linear classifier that reads off the first observation which blocks are crippled, and the
policy that then follows the schedule for that pattern. Training uses it as a teacher, comparisons as a
reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esper.leyline import ActionMasks, EsperError, PolicyObservation, PolicyProtocol, PolicyStep
from esper.runtime.tasks import TaskSpec, draw_condition
from esper.simic.ranks import current, for_all, share_work
from esper.simic.training.evaluation import TRAINING, in_populations, open_env
from esper.tamiyo import FixedSchedule
from esper.tamiyo.schedules import Pattern, Schedule, Schedules, load_schedules, marks
from esper.tamiyo.scripted import ScriptedPolicy

Array = npt.NDArray[np.float64]
RIDGE = 10.0


def patterns(task: TaskSpec) -> dict[Pattern, float]:
    """The patterns of crippled blocks that a task can draw, with their probabilities; empty if it draws
    none."""
    if task.conditions is None or not task.conditions.cripple_probability:
        return {}
    chance = task.conditions.cripple_probability
    blocks = len(draw_condition(task, TRAINING, 0, 0).crippled)
    probabilities = {
        pattern: math.prod(chance if crippled else 1 - chance for crippled in pattern)
        for pattern in product((False, True), repeat=blocks)
    }
    return {pattern: probability for pattern, probability in probabilities.items() if probability}


def task_schedules(task: TaskSpec, path: str | Path) -> Schedules:
    """The schedules of a file, once they fit the task: its name, slots, blueprints and patterns."""
    schedules = load_schedules(path, task.name, slots=task.slots, blueprints=task.blueprints)
    if schedules.by_pattern and schedules.by_pattern.keys() != patterns(task).keys():
        stored, drawn = (", ".join(map(marks, those)) for those in (schedules.by_pattern, patterns(task)))
        raise EsperError(f"{path}: by_pattern has {stored}; task {task.name!r} draws {drawn or 'none'}")
    return schedules


@dataclass(frozen=True, slots=True)
class Probe:
    """A linear classifier for each block: crippled or not."""

    mean: Array  # [F]
    scale: Array  # [F]
    weights: Array  # [F + 1, blocks]

    def __call__(self, features: Array) -> list[Pattern]:
        """[N, F] → one pattern for each network."""
        x = _standardized(features, self.mean, self.scale)
        return [tuple(bool(crippled) for crippled in row) for row in x @ self.weights > 0]


def _standardized(features: Array, mean: Array, scale: Array) -> Array:
    """[N, F] → [N, F + 1], with a constant for the intercept."""
    return np.concatenate([(features - mean) / scale, np.ones((len(features), 1))], 1)


def flat(obs: PolicyObservation) -> Array:
    """[E, F]: an observation as one vector for each env."""
    return torch.cat([obs.base, obs.slots.flatten(1)], 1).double().cpu().numpy()


def fit_probe(
    task: TaskSpec,
    networks: int,
    *,
    root_seed: int = TRAINING,
    advance: Callable[[int], None] = lambda _: None,
) -> Probe:
    """Ridge regression from the observation after the first epoch, on networks 0 … `networks` − 1."""
    pieces = in_populations(range(networks), task.population)
    advance = for_all(advance, [len(piece) for piece in pieces], current())

    def observe(index: int) -> Array:
        env = open_env(task, pieces[index], root_seed=root_seed, rows=task.population)
        env.begin_round(0)
        env.train_epoch(1)
        env.validate(1)
        sensed = env.sense(1)
        advance(len(env.envs))
        return flat(env.observe(sensed)[0])

    features = np.concatenate(share_work(len(pieces), observe, current(), "first observations"))
    mean, scale = features.mean(0), features.std(0) + 1e-6
    x = _standardized(features, mean, scale)
    crippled = np.array([draw_condition(task, root_seed, 0, network).crippled for network in range(networks)])
    targets = np.where(crippled, 1.0, -1.0)
    weights = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ targets)
    return Probe(mean, scale, np.asarray(weights, np.float64))


class ProbePolicy(ScriptedPolicy):
    """Classifies each network by its first observation, then follows the schedule for that pattern."""

    def __init__(self, probe: Probe, by_pattern: Mapping[Pattern, Schedule]) -> None:
        self.probe, self.by_pattern = probe, by_pattern
        self.begin(0)

    def begin(self, num_envs: int) -> None:
        self._follow([])

    def state(self) -> dict[str, Any]:
        return {
            "seen": [list(pattern) for pattern in self._patterns],
            "following": self._following.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._follow([tuple(pattern) for pattern in state["seen"]])
        self._following.load_state(state["following"])

    def _follow(self, seen: list[Pattern]) -> None:
        self._patterns = seen
        self._following = FixedSchedule([self.by_pattern[pattern] for pattern in seen])

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        if not self._patterns:
            self._follow(self.probe(flat(obs)))
        return self._following.act(obs, None, masks)


def schedule_teacher(
    task: TaskSpec, schedules: Schedules, envs: int, probe_networks: int = 256
) -> PolicyProtocol:
    """A policy that follows the schedule for the pattern that the probe predicts, or the best schedule where
    the task draws no patterns."""
    if not schedules.by_pattern:
        return FixedSchedule([schedules.best.schedule] * envs)
    return ProbePolicy(
        fit_probe(task, probe_networks, root_seed=schedules.root_seed),
        {pattern: result.schedule for pattern, result in schedules.by_pattern.items()},
    )
