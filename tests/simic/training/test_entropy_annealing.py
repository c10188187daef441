"""Exploration fades on schedule: entropy weight and ε go linearly to their ends with the number of
updates."""

from __future__ import annotations

import pytest
import torch

from esper.leyline import head_sizes
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy import RecurrentPolicy
from run_helpers import play_rollout

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("name", "start", "end"), [("entropy_coef", 0.02, 0.002), ("epsilon", 0.1, 0.0), ("lr", 1e-3, 1e-4)]
)
def test_linear_then_constant(name: str, start: float, end: float) -> None:
    config = PPOConfig(**{name: start, f"{name}_end": end, "anneal_updates": 10})
    values = [config.annealed(name, u) for u in range(16)]
    assert values[:11] == pytest.approx([start + (end - start) * u / 10 for u in range(11)])
    assert values[10:] == pytest.approx([end] * 6)


def test_without_annealing_the_start_stays() -> None:
    config = PPOConfig(entropy_coef=0.05, epsilon=0.2, anneal_updates=0)
    assert [config.annealed("entropy_coef", u) for u in (0, 7, 1000)] == [0.05] * 3
    assert [config.annealed("epsilon", u) for u in (0, 7, 1000)] == [0.2] * 3


def test_the_default_ends_without_exploration() -> None:
    config = PPOConfig(anneal_updates=50)
    assert config.annealed("epsilon", 0) == pytest.approx(0.1)
    assert config.annealed("epsilon", 50) == 0.0
    assert config.annealed("lr", 50) == config.lr, "the step size stays unless an end is given"


def make_agent(config: PPOConfig) -> PPOAgent:
    torch.manual_seed(0)
    policy = RecurrentPolicy(TamiyoNetwork(2, 2, 2, hidden=16, slot_hidden=8))
    return PPOAgent(
        policy, config, num_envs=4, num_steps=3, num_slots=1, num_blueprints=head_sizes(1)[1], seed=0
    )


def test_the_agent_reports_and_stores_what_it_used() -> None:
    agent = make_agent(PPOConfig(epochs=1, anneal_updates=4, entropy_coef=0.02, entropy_coef_end=0.01))
    reported, stored = [], []
    for _ in range(6):
        play_rollout(agent)
        stored.append(agent.buffer.finish().epsilon.unique().tolist())
        metrics = agent.update()
        reported.append((metrics.entropy_coef, metrics.epsilon))
    assert [r[0] for r in reported] == pytest.approx([0.02, 0.0175, 0.015, 0.0125, 0.01, 0.01])
    assert [r[1] for r in reported] == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0, 0.0])
    assert [s[0] for s in stored] == pytest.approx([r[1] for r in reported])
    assert all(len(s) == 1 for s in stored), "exploration is constant within a rollout"


def test_entropy_weight_holds_the_policy_open() -> None:
    """Against rewards without meaning, a large entropy weight keeps the policy near uniform."""
    entropies = []
    for coefficient in (0.0, 1.0):
        agent = make_agent(
            PPOConfig(
                entropy_coef=coefficient,
                entropy_coef_end=coefficient,
                epsilon=0.0,
                lr=1e-2,
                lr_end=1e-2,
                target_kl=None,
                epochs=3,
                minibatches=1,
            )
        )
        for _ in range(12):
            play_rollout(agent)
            last = agent.update()
        entropies.append(last.entropy)
    assert entropies[1] > entropies[0]
