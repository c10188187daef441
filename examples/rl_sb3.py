"""sb3-contrib's MaskablePPO on Esper's world, judged on held-out networks.

`pip install ".[gym]" sb3-contrib`, then `python examples/rl_sb3.py`."""

from __future__ import annotations

import torch
from sb3_contrib import MaskablePPO

from esper.gym import GrowthVectorEnv, SB3VecEnv


def main(task: str = "digits_shift", num_envs: int = 64, steps: int = 60_000, n_steps: int = 24) -> float:
    env = SB3VecEnv(task, num_envs)
    model = MaskablePPO(
        "MlpPolicy", env, n_steps=n_steps, batch_size=num_envs * n_steps // 4, seed=1, verbose=1
    )
    model.learn(steps)

    held_out = GrowthVectorEnv(task, num_envs, held_out=True)
    obs, _ = held_out.reset()
    for _ in range(held_out.task.episode_length):
        action, _ = model.predict(obs, action_masks=held_out.action_masks(), deterministic=True)
        obs, _, _, _, info = held_out.step(action)
    value = float(info["objective"]["J"].mean())
    print(f"mean J of {num_envs} held-out networks: {value:.4f}")
    return value


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
