"""sb3-contrib's RecurrentPPO on the task: `python -m benchmarks.public_ppo.theirs SETTING SEED` prints one
line of JSON. It runs in a virtual environment of its own and imports nothing of the project but the task."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.public_ppo.recall import BUDGET, FEATURES, STEPS, Progress, Recall

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"envs": 8},
    "tuned": {
        "envs": 64,
        "n_steps": STEPS,
        "batch_size": 16 * STEPS,
        "n_epochs": 10,
        "learning_rate": 1e-3,
        "gamma": 1.0,
        "policy_kwargs": {"lstm_hidden_size": 64},
    },
}


class RecallVecEnv(VecEnv):
    """The task in the library's own interface: already vectorised, so that nothing is lost in wrappers."""

    def __init__(self, envs: int, seed: int, progress: Progress) -> None:
        super().__init__(envs, Box(-1.0, 1.0, (FEATURES,), np.float32), Discrete(2))
        self.task, self.progress = Recall(envs, seed), progress

    def reset(self) -> Any:
        return self.task.reset()

    def step_async(self, actions: Any) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        seen, earned, done = self.task.step(self.actions)
        self.progress.add(self.num_envs, earned, done)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if done:
            for info, last in zip(infos, seen, strict=True):
                info["terminal_observation"] = last
            seen = self.task.reset()
        return seen, earned, np.full(self.num_envs, done), infos

    def close(self) -> None: ...

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


class StopWhenOver(BaseCallback):
    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress

    def _on_step(self) -> bool:
        return not self.progress.over


def run(setting: dict[str, Any], seed: int) -> dict[str, float]:
    torch.set_num_threads(1)
    setting = dict(setting)
    progress = Progress()
    env = RecallVecEnv(setting.pop("envs"), 100 + seed, progress)
    agent = RecurrentPPO("MlpLstmPolicy", env, seed=seed, device="cpu", **setting)
    started = time.process_time()
    agent.learn(BUDGET, callback=StopWhenOver(progress))
    return progress.report(time.process_time() - started)


if __name__ == "__main__":
    print(json.dumps(run(SETTINGS[sys.argv[1]], int(sys.argv[2]))))
