"""A vector environment for Stable-Baselines3 and sb3-contrib, whose algorithms take their own `VecEnv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from esper.gym.infos import of_env
from esper.gym.vector import GrowthVectorEnv
from esper.leyline import EsperError
from esper.runtime.tasks import TaskSpec

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise ImportError(
        "esper.gym.sb3 needs stable-baselines3; install it with: pip install stable-baselines3 sb3-contrib"
    ) from error


class SB3VecEnv(VecEnv):
    """`num_envs` networks of a task. `settings` are those of `GrowthVectorEnv`; envs reset themselves in the
    step that ends their episode, as Stable-Baselines3 expects.

    MaskablePPO finds `action_masks`. An info of an ended episode has `terminal_observation`, `episode`
    (return and length, which Stable-Baselines3 logs), `objective` and `outcome`. `TimeLimit.truncated` is
    always False: an episode's length belongs to its task, and J is paid in its last step."""

    def __init__(self, task: str | TaskSpec, num_envs: int = 1, **settings: Any) -> None:
        self.env = GrowthVectorEnv(task, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **settings)
        self._actions = np.zeros(0)
        super().__init__(num_envs, self.env.single_observation_space, self.env.single_action_space)
        self.metadata = dict(self.env.metadata)

    def reset(self) -> np.ndarray:
        seed = self._seeds[0]
        if any(self._options):
            raise EsperError(f"sb3: reset options are {self._options}; allowed: none")
        obs, infos = self.env.reset(seed=seed)
        self.reset_infos = [of_env(infos, i) for i in range(self.num_envs)]
        self._reset_seeds()
        return obs

    def seed(self, seed: int | None = None) -> list[int | None]:
        """All networks follow from one random seed, which the next reset uses."""
        self._seeds = [seed] * self.num_envs
        return list(self._seeds)

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        obs, rewards, ends, _, vector_infos = self.env.step(self._actions)
        infos = [of_env(vector_infos, i) for i in range(self.num_envs)]
        for i in np.flatnonzero(ends):
            info = infos[i]
            self.reset_infos[i] = {"action_mask": info["action_mask"]}
            infos[i] = last = {**info["final_info"], "terminal_observation": info["final_obs"]}
            last["episode"] = {"r": last["outcome"]["return"], "l": last["outcome"]["length"]}
        for info in infos:
            info["TimeLimit.truncated"] = False
        return obs, rewards.astype(np.float32), ends, infos

    def close(self) -> None:
        self.env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.env, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise EsperError(f"sb3: attribute {attr_name!r} cannot be set; pass settings to SB3VecEnv")

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Calls `action_masks` or `slot_masks` once and returns the rows of these envs."""
        if method_name not in ("action_masks", "slot_masks"):
            raise EsperError(f"sb3: method {method_name!r} is unknown; allowed: action_masks, slot_masks")
        rows = getattr(self.env, method_name)(*method_args, **method_kwargs)
        return [rows[i] for i in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[np.ndarray | None]:
        return [None] * self.num_envs
