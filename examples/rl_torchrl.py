"""A TorchRL PPO on Esper's world: the environment's `action_mask` goes straight into the policy.

`pip install ".[gym]" torchrl`, then `python examples/rl_torchrl.py`."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP, MaskedCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from esper.gym import make_torchrl_env


def main(task: str = "digits_shift", num_envs: int = 64, episodes: int = 40) -> list[float]:
    torch.manual_seed(1)
    env = make_torchrl_env(task, num_envs)
    env.set_seed(1)
    columns, actions = env.observation_spec["observation"].shape[-1], env.action_spec.n
    actor = ProbabilisticActor(
        TensorDictModule(MLP(columns, actions, num_cells=[64, 64]), ["observation"], ["logits"]),
        in_keys={"logits": "logits", "mask": "action_mask"},
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(columns, 1, num_cells=[64, 64]), ["observation"])
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    loss = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss.parameters(), 3e-4)
    history = []
    for episode in range(episodes):
        with torch.no_grad():
            batch = env.rollout(1000, actor)  # ends with the episode
        for _ in range(4):
            with torch.no_grad():
                gae(batch)
            flat = batch.reshape(-1)
            for rows in torch.randperm(len(flat)).split(256):
                parts = loss(flat[rows])
                total = parts["loss_objective"] + parts["loss_critic"] + parts["loss_entropy"]
                optimizer.zero_grad()
                total.backward()
                optimizer.step()
        history.append(float(batch["next", "reward"].sum(1).mean()))
        print(f"episode {episode}: mean J {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
