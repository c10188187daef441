"""Who is compared: networks that start with what a policy grew, hosts that were given the same size or the
same FLOPs, and two rulers for tasks that cripple blocks. The oracle is told what is crippled; the probe reads
it off an early observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esper.kasmina.hosts import CNNHost
from esper.leyline import (
    ActionMasks,
    AlphaAlgorithm,
    EsperError,
    PolicyObservation,
    PolicyProtocol,
    PolicyStep,
    SeedStage,
    objective,
    stream_seed,
)
from esper.proof.episodes import TRAINING, Fossil, Maker, Played, populations
from esper.proof.search import Pattern, Schedule, Schedules
from esper.runtime.tasks import TaskSpec, draw_condition
from esper.simic.training.batch_ops import batch_signals_to_features
from esper.simic.training.vector_env import VectorEnv
from esper.tamiyo import FixedSchedule
from esper.tamiyo.scripted import Memoryless

Array = npt.NDArray[np.float64]
RIDGE = 10.0


def with_fossils(fossils: Mapping[int, Sequence[Fossil]]) -> Callable[[VectorEnv], None]:
    """Prepares fresh networks, by seed: these seeds are there, fossilized at alpha 1, and learn from the
    first epoch."""

    def plant(env: VectorEnv) -> None:
        for member in env.envs:
            mine = fossils[member.env_idx]
            for number, fossil in enumerate(mine):
                member.model.germinate(
                    fossil.slot,
                    fossil.blueprint,
                    algorithm=AlphaAlgorithm[fossil.algorithm],
                    init_seed=stream_seed(
                        env.rules.root_seed, "germination", env.episode, member.env_idx, number
                    ),
                )
            snapshot = member.model.snapshot()
            for seed in snapshot.seeds.values():
                seed["stage"] = int(SeedStage.FOSSILIZED)
                seed["alpha"] |= {"alpha": 1.0, "start": 1.0, "target": 1.0}
            member.model.restore(snapshot)
            member.germinated = member.fossilized = len(mine)
            member.governor.reset()

    return plant


def widened(task: TaskSpec, params: float) -> TaskSpec:
    """The task with the CNN host, at least as wide as its own, whose parameters are nearest to so many."""
    if not isinstance(task.outline, CNNHost):
        raise EsperError(
            f"task {task.name!r} has a {task.topology} host; allowed: cnn, which has a width to change"
        )
    at, best = task.outline.base, task
    while True:
        at += 1
        wider = replace(task, host={**task.host, "base": at})
        if abs(wider.host_params - params) >= abs(best.host_params - params):
            return best
        best = wider


def priced(played: Played, task: TaskSpec) -> Played:
    """An episode of a widened host as one of the task's own: what the host has more counts as added."""
    end, added = played.outcome, played.outcome.host_params - task.host_params
    return replace(
        played,
        outcome=replace(
            end,
            host_params=task.host_params,
            added_params=added,
            objective=objective(
                task.objective,
                committed_accuracy=end.committed_accuracy / 100.0,
                added_params=added,
                host_params=task.host_params,
                wasted_seeds=end.germinated - end.fossilized,
                rollbacks=end.rollbacks,
            ),
        ),
    )


def oracle(task: TaskSpec, by_pattern: Mapping[Pattern, Schedule], root_seed: int) -> Maker:
    """Follows the schedule for the pattern that each seed has drawn."""
    return lambda envs: FixedSchedule(
        [by_pattern[draw_condition(task, root_seed, 0, env).crippled] for env in envs]
    )


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


class Probing(Memoryless):
    """Looks after the first epoch, then follows the schedule of the pattern that it sees."""

    def __init__(self, probe: Probe, by_pattern: Mapping[Pattern, Schedule]) -> None:
        self.probe, self.by_pattern = probe, by_pattern
        self.begin(0)

    def begin(self, envs: int) -> None:
        self._seen: list[Pattern] = []

    def state(self) -> dict[str, Any]:
        return {"seen": [list(pattern) for pattern in self._seen], "following": self._following.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._follow([tuple(pattern) for pattern in state["seen"]])
        self._following.load_state(state["following"])

    def _follow(self, seen: list[Pattern]) -> None:
        self._seen, self._following = seen, FixedSchedule([self.by_pattern[pattern] for pattern in seen])

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        if not self._seen:
            self._follow(self.probe(flat(obs)))
        return self._following.act(obs, None, masks)


def teacher(task: TaskSpec, schedules: Schedules, envs: int, probe_seeds: int = 256) -> PolicyProtocol:
    """Who knows what was found for a task: it follows the schedule of the pattern that the probe sees, or the
    best of all."""
    if not schedules.by_pattern:
        return FixedSchedule([schedules.best.schedule] * envs)
    return Probing(
        fit_probe(task, probe_seeds, root_seed=schedules.root_seed),
        {pattern: found.schedule for pattern, found in schedules.by_pattern.items()},
    )
