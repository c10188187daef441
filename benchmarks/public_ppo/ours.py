"""The project's agent on the task: `python -m benchmarks.public_ppo.ours SEED` prints one line of JSON."""

from __future__ import annotations

import json
import sys
import time

import torch

from benchmarks.public_ppo.recall import BUDGET, FEATURES, STEPS, Progress, Recall
from esper.leyline import HEAD_NAMES, OP_FOSSILIZE, OP_WAIT, ActionMasks, PolicyObservation, head_sizes
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy import RecurrentPolicy, action_uniforms

ENVS = 64
OP = HEAD_NAMES.index("op")


def legal() -> ActionMasks:
    """Two ops at every step; one slot, so that the other heads have nothing to say."""
    _, *parameters, ops = head_sizes(1)
    op, *rest = (
        torch.ones(ENVS, *shape, dtype=torch.bool)
        for shape in ((ops,), (ops, 1), *((n,) for n in parameters))
    )
    op[:] = False
    op[:, [OP_WAIT, OP_FOSSILIZE]] = True
    return ActionMasks(op, *rest)


def run(seed: int, config: PPOConfig | None = None) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = TamiyoNetwork(FEATURES, 1, 1, hidden=64, slot_hidden=32)
    config = config or PPOConfig(epsilon=0.03, anneal_updates=10)
    kinds = head_sizes(1)[1]
    agent = PPOAgent(
        RecurrentPolicy(network),
        config,
        num_envs=ENVS,
        num_steps=STEPS,
        num_slots=1,
        num_blueprints=kinds,
        seed=seed,
    )
    task, progress, masks = Recall(ENVS, 100 + seed), Progress(), legal()
    slots, quotes, blueprints = (
        torch.zeros(ENVS, 1, 1),
        torch.zeros(ENVS, 1, kinds, 1),
        torch.full((ENVS, 1), -1),
    )
    started = time.process_time()
    for episode in range(BUDGET):
        seen, hidden = task.reset(), agent.initial_hidden()
        agent.begin_rollout(hidden)
        uniforms = action_uniforms(seed, episode, range(ENVS), STEPS)
        for t in range(STEPS):
            obs, reset = (
                PolicyObservation(torch.from_numpy(seen), slots, quotes, blueprints),
                torch.full((ENVS,), t == 0),
            )
            step = agent.act(obs, hidden, masks, uniforms=uniforms[:, t], reset=reset)
            seen, earned, done = task.step((step.actions[:, OP] == OP_FOSSILIZE).numpy())
            agent.record(
                obs,
                masks,
                step,
                reward=torch.from_numpy(earned),
                terminal=torch.full((ENVS,), done),
                reset=reset,
            )
            hidden = step.hidden
            progress.add(ENVS, earned, done)
        agent.update()
        if progress.over:
            break
    return progress.report(time.process_time() - started)


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
