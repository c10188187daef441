"""Small worlds for tests of the Gymnasium environments, and random legal actions."""

from __future__ import annotations

import sys

import numpy as np

from esper.gym import GrowthVectorEnv

# TorchRL looks for the old package `gym`. The directory tests/gym must not be taken for it.
sys.modules["gym"] = None  # type: ignore[assignment]

SIZES = "episode_length=5,steps_per_epoch=1,val_size=48,final_val_size=64,batch_size=16,population=8"
SMALL = f"digits_shift:{SIZES}"
LENGTH = 5


class RandomLegal:
    """Numbered actions, drawn from what the masks allow."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, masks: np.ndarray) -> np.ndarray:
        return np.array([self.rng.choice(np.flatnonzero(mask)) for mask in masks])


def episode(env: GrowthVectorEnv, seed: int | None, choose: RandomLegal) -> list[tuple]:
    """What reset and the steps of one episode return, with the masks before each decision."""
    obs, info = env.reset(seed=seed)
    results: list[tuple] = [(obs, info)]
    for _ in range(env.task.episode_length):
        masks = env.action_masks()
        results.append((*env.step(choose(masks)), masks))
    return results
