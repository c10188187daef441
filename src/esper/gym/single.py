"""One growing network as a Gymnasium environment: a view of a vector environment with one env."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from esper.gym.actions import Bools
from esper.gym.infos import of_env
from esper.gym.observations import Floats
from esper.gym.vector import GrowthVectorEnv
from esper.runtime.tasks import TaskSpec


class GrowthEnv(gymnasium.Env[Floats, npt.NDArray[np.int64]]):
    """The first network of a task. Its population has the task's width, so it does what env 0 of a vector
    environment does, and costs as much; `population=1` is the cheap one. `settings` are those of
    `GrowthVectorEnv`."""

    def __init__(self, task: str | TaskSpec, **settings: Any) -> None:
        self.vector = GrowthVectorEnv(task, 1, autoreset_mode=AutoresetMode.DISABLED, **settings)
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space
        self.metadata = {key: v for key, v in self.vector.metadata.items() if key != "autoreset_mode"}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        obs, infos = self.vector.reset(seed=seed, options=options)
        return obs[0], of_env(infos, 0)

    def step(self, action: Any) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        obs, rewards, ends, cuts, infos = self.vector.step(np.asarray(action)[None])
        return obs[0], float(rewards[0]), bool(ends[0]), bool(cuts[0]), of_env(infos, 0)

    def action_masks(self) -> Bools:
        """Legal choices now, as in the vector environment."""
        return self.vector.action_masks()[0]
