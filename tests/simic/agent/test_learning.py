"""The agent learns tasks whose best play is known. One seed here; `make test-slow` needs three of three."""

from __future__ import annotations

import pytest

from esper.simic.agent.ppo import PPOConfig


def learn_bandit(toys, seed: int) -> None:
    toy = toys.MaskedBandit(envs=64, seed=100 + seed)
    agent = toys.make_agent(toy, PPOConfig(anneal_updates=20), seed=seed)
    first = toys.rollout(toy, agent, episode=0)
    toys.train(toy, agent, updates=20, goal=0.965)
    score = toys.score(toy, agent)
    assert first < 0.75, "acting at random should not nearly solve it"
    assert score >= 0.95


def learn_recall(toys, seed: int, *, free: bool, updates: int) -> None:
    toy = toys.Recall(envs=64, seed=100 + seed, free=free)
    # Among free decisions only the last of 31 steps is paid: with λ below 1 most of the credit would come
    # from a value head that has not learned the cue yet.
    gae_lambda = 1.0 if free else PPOConfig().gae_lambda
    agent = toys.make_agent(toy, PPOConfig(anneal_updates=updates, gae_lambda=gae_lambda), seed=seed)
    toys.train(toy, agent, updates=updates, goal=0.99)
    assert toys.score(toy, agent) >= 0.95
    assert toys.score(toy, agent, forget=True) <= 0.60, "the same weights without memory can only guess"


def learn_identity(toys, seed: int) -> None:
    toy = toys.Identity(envs=128, seed=100 + seed)
    agent = toys.make_agent(toy, PPOConfig(anneal_updates=32), seed=seed)
    toys.train(toy, agent, updates=32, goal=0.96)
    assert toys.score(toy, agent) >= 0.95


def test_learns_a_masked_contextual_bandit(toys) -> None:
    learn_bandit(toys, seed=0)


def test_learns_to_remember_a_cue_for_thirty_steps(toys) -> None:
    learn_recall(toys, seed=0, free=False, updates=20)


def test_learns_every_head_of_the_factored_identity(toys) -> None:
    learn_identity(toys, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
class TestThreeOfThree:
    def test_bandit(self, toys, seed: int) -> None:
        learn_bandit(toys, seed)

    def test_recall(self, toys, seed: int) -> None:
        learn_recall(toys, seed, free=False, updates=24)

    def test_recall_among_free_decisions(self, toys, seed: int) -> None:
        learn_recall(toys, seed, free=True, updates=80)

    def test_identity(self, toys, seed: int) -> None:
        learn_identity(toys, seed)
