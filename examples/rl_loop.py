"""A hand-written policy gradient on Esper's world: REINFORCE with a batch baseline, no RL library.

`pip install ".[gym]"`, then `python examples/rl_loop.py`."""

from __future__ import annotations

import gymnasium
import numpy as np
import torch


def main(task: str = "digits_shift", num_envs: int = 64, episodes: int = 20) -> list[float]:
    env = gymnasium.make_vec("esper.gym:Esper/digits_shift-v0", num_envs=num_envs, task=task)
    columns, actions = env.single_observation_space.shape[0], int(env.single_action_space.n)
    torch.manual_seed(0)
    policy = torch.nn.Sequential(torch.nn.Linear(columns, 64), torch.nn.Tanh(), torch.nn.Linear(64, actions))
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    history = []
    for episode in range(episodes):
        obs, info = env.reset(seed=0 if episode == 0 else None)  # later episodes draw new networks
        log_probs, ended = [], np.zeros(num_envs, bool)
        while not ended.all():
            logits = policy(torch.from_numpy(obs))
            legal = torch.from_numpy(info["action_mask"])
            chosen = torch.distributions.Categorical(logits=logits.masked_fill(~legal, -torch.inf))
            action = chosen.sample()
            log_probs.append(chosen.log_prob(action))
            obs, _, ended, _, info = env.step(action.numpy())
        returns = torch.from_numpy(info["objective"]["J"])
        advantage = (returns - returns.mean()) / (returns.std() + 1e-8)
        loss = -(torch.stack(log_probs).sum(0) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(returns.mean()))
        print(f"episode {episode}: mean J {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
