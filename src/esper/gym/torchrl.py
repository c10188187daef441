"""A vector environment for TorchRL, with the mask of legal actions under the key `action_mask`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Dict, MultiBinary
from gymnasium.vector import AutoresetMode, VectorWrapper
from gymnasium.vector.utils import batch_space

from esper.gym.actions import FlatActions
from esper.gym.vector import GrowthVectorEnv
from esper.leyline import EsperError
from esper.runtime.tasks import TaskSpec

try:
    import torch
    from torchrl.envs import DTypeCastTransform, EnvBase, GymWrapper, TransformedEnv
except ImportError as error:
    raise ImportError("esper.gym.torchrl needs TorchRL; install it with: pip install torchrl") from error

Observed = dict[str, npt.NDArray[Any]]


class MaskInObservation(VectorWrapper[Observed, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], Any]):
    """Observations are a dict of `observation` and `action_mask`."""

    def __init__(self, env: GrowthVectorEnv) -> None:
        super().__init__(env)
        self.growth, self.autoreset_mode = env, env.autoreset_mode
        if not isinstance(env.actions, FlatActions):
            raise EsperError(
                "torchrl: actions are heads; allowed: flat, because masks of heads depend on the op"
            )
        self.single_observation_space = Dict(
            {
                "observation": env.single_observation_space,
                "action_mask": MultiBinary(len(env.actions.names)),
            }
        )
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observed, dict[str, Any]]:
        obs, info = self.growth.reset(seed=seed, options=options)
        return self._observed(obs), info

    def step(self, actions: npt.NDArray[Any]) -> tuple[Observed, Any, Any, Any, dict[str, Any]]:
        obs, rewards, ends, cuts, info = self.growth.step(actions)
        return self._observed(obs), rewards, ends, cuts, info

    def _observed(self, obs: npt.NDArray[Any]) -> Observed:
        return {"observation": obs, "action_mask": self.growth.action_masks().astype(np.int8)}


def make_torchrl_env(task: str | TaskSpec, num_envs: int = 1, **settings: Any) -> EnvBase:
    """`num_envs` networks of a task as one batched TorchRL environment with numbered actions. `settings` are
    those of `GrowthVectorEnv`; TorchRL resets the envs whose episode has ended."""
    env = GrowthVectorEnv(task, num_envs, autoreset_mode=AutoresetMode.DISABLED, **settings)
    if env.task.budget == "flops" and env.task.population > 1:
        raise EsperError(
            f"torchrl: episodes of task {env.task.name} end at different times, and TorchRL resets each env "
            f"alone, but a population of {env.task.population} is reset as a whole; allowed: population=1"
        )
    wrapped = GymWrapper(MaskInObservation(env), categorical_action_encoding=True)
    return TransformedEnv(wrapped, DTypeCastTransform(torch.int8, torch.bool, in_keys=["action_mask"]))
