"""Row `gym.*`: what Gymnasium's interface adds to a step of the native environment."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.harness import Row, interleave
from esper.gym import GrowthVectorEnv
from esper.leyline import FactoredAction
from esper.runtime.tasks import get_task_spec
from esper.simic.training.batch_ops import batch_signals_to_features
from esper.simic.training.evaluation import open_env
from esper.simic.training.vector_env import VectorEnv

TASK, ENVS = "digits_shift", 64


class Native:
    """Episodes of networks that wait, as a trainer runs them: all phases and the policy's observation."""

    def __init__(self, env: VectorEnv) -> None:
        self.env, self.epoch = env, 0

    def step(self) -> None:
        if self.epoch == self.env.rules.max_epochs:
            self.epoch = 0
        if self.epoch == 0:
            self.env.begin_round(0)
        self.epoch += 1
        self.env.train_epoch(self.epoch)
        self.env.validate(self.epoch)
        seen = self.env.sense(self.epoch)
        batch_signals_to_features(seen.signals, seen.table, self.env.envs, "cpu")
        self.env.act(seen, [FactoredAction.wait().to_indices()] * ENVS)


def rows() -> Iterator[Row]:
    """Both sides reset in the step after an episode's last, and are kept in the same epoch."""
    task = get_task_spec(TASK)
    native = Native(open_env(task, range(ENVS), root_seed=0, rows=task.population))
    for name, settings in (("", {}), (".all", {"granularity": "all"})):
        env = GrowthVectorEnv(task, ENVS, autoreset_mode="SameStep", **settings)
        env.reset(seed=0)
        native.epoch = 0
        wait = np.zeros(ENVS, int)
        ratio, ours, _ = interleave(partial(env.step, wait), native.step, rounds=2 * task.episode_length)
        yield Row(f"gym.step_overhead{name}", ratio, 1.05)
        if not name:
            yield Row("gym.step_ms", ours * 1e3)
