"""Small real training runs, and what two of them must share to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from benchmarks.faults.same import (
    assert_same_run,
    assert_same_weights,
    last_checkpoint,
    rows,
    story,
)

from esper.leyline import ActionMasks, PolicyObservation, head_sizes
from esper.simic import train_ppo_vectorized
from esper.simic.agent.ppo import PPOAgent
from esper.tamiyo.policy import action_uniforms

__all__ = [
    "SMALL",
    "assert_same_run",
    "assert_same_weights",
    "last_checkpoint",
    "play_rollout",
    "rows",
    "story",
    "train",
]
SMALL: dict[str, Any] = {
    "task": "digits_impaired",
    "rounds": 2,
    "envs": 3,
    "episode_length": 8,
    "steps_per_epoch": 2,
    "val_size": 48,
    "batch_size": 16,
    "population": 8,
    "hidden": 16,
    "checkpoint_every": 1,
}


def train(directory: Path | None = None, **changes: Any):
    """(agent, history) of a small run, recorded in `directory` if there is one."""
    fields = {**SMALL, **changes}
    return train_ppo_vectorized(**fields, telemetry_dir=None if directory is None else str(directory))


def open_masks(envs: int = 4, slots: int = 2) -> tuple[PolicyObservation, ActionMasks]:
    """Random observations, and everything is legal."""
    generator = torch.Generator().manual_seed(0)
    _, blueprints, *parameters, ops = head_sizes(slots)
    obs = PolicyObservation(
        torch.randn(envs, 3, generator=generator),
        torch.randn(envs, slots, 4, generator=generator),
        torch.ones(envs, slots, blueprints, 2),
        torch.full((envs, slots), -1),
    )
    flags = [torch.ones(envs, n, dtype=torch.bool) for n in (blueprints, *parameters)]
    by_op = torch.ones(envs, ops, slots, dtype=torch.bool)
    return obs, ActionMasks(by_op.any(2), by_op, *flags)


def play_rollout(agent: PPOAgent) -> None:
    """Fill the buffer of an agent for one slot and two features: everything is legal, rewards are random."""
    envs, steps = agent.buffer.num_envs, agent.buffer.num_steps
    _, *parameters, ops = head_sizes(1)
    masks = ActionMasks(
        torch.ones(envs, ops, dtype=torch.bool),
        torch.ones(envs, ops, 1, dtype=torch.bool),
        *(torch.ones(envs, n, dtype=torch.bool) for n in parameters),
    )
    quotes = torch.ones(envs, 1, head_sizes(1)[1], 2)
    obs = PolicyObservation(torch.zeros(envs, 2), torch.zeros(envs, 1, 2), quotes, torch.full((envs, 1), -1))
    hidden = agent.initial_hidden()
    agent.begin_rollout(hidden)
    uniforms = action_uniforms(0, agent.updates, range(envs), steps)
    for t in range(steps):
        reset = torch.full((envs,), t == 0)
        step = agent.act(obs, hidden, masks, uniforms=uniforms[:, t], reset=reset)
        agent.record(
            obs,
            masks,
            step,
            reward=torch.rand(envs, generator=torch.Generator().manual_seed(t)),
            terminal=torch.full((envs,), t + 1 == steps),
            reset=reset,
        )
        assert step.hidden is not None
        hidden = step.hidden
