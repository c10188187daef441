"""What keeps an update honest: the scale of advantages, a value head that learns by itself, returns across a
rollback, exploration that stays with operations and slots."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from esper.leyline import HEAD_NAMES, EsperError
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.ppo_update import gae, scale_by_family, subtract_twin_baseline
from esper.tamiyo.policy import categorical_entropy

OWN_CRITIC = PPOConfig(critic_steps=50, critic_lr=3e-3, advantage_scale="returns", gae_lambda=1.0)


def made(toys: ModuleType, config: PPOConfig, seed: int = 0) -> tuple[object, PPOAgent]:
    toy = toys.MaskedBandit(envs=16, seed=seed)
    return toy, toys.make_agent(toy, config, seed=seed)


def weights(agent: PPOAgent) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in agent.policy.network.state_dict().items()}


def shown(toys: ModuleType) -> object:
    """A toy whose reward is seen, whatever the action."""

    class Shown(toys.MaskedBandit):
        def reward(self, actions: torch.Tensor) -> torch.Tensor:
            return self.context.float()

    return Shown(envs=16, seed=0)


def test_the_kl_limit_does_not_stop_the_value_head(toys) -> None:
    """The policy may not move at all, and the values still learn."""
    still = {"target_kl": 1e-9, "minibatches": 1, "epochs": 2}
    explained = {}
    for steps in (0, 50):
        config = PPOConfig(**still, critic_steps=steps, critic_lr=1e-2)
        toy = shown(toys)
        agent = toys.make_agent(toy, config, seed=0)
        for episode in range(8):
            toys.rollout(toy, agent, episode)
            metrics = agent.update()
            assert metrics.kl_stops
        explained[steps] = metrics.explained_variance
    assert explained[0] < 0.3
    assert explained[50] > 0.8


def test_training_the_value_head_leaves_the_policy_as_it_is(toys) -> None:
    toy, agent = made(toys, PPOConfig(critic_steps=20, lr=1e-9))
    toys.rollout(toy, agent, 0)
    before = weights(agent)
    agent.update()
    for name, after in weights(agent).items():
        changed = (after - before[name]).abs().max().item()
        assert changed < 1e-6 or name.startswith("value_"), name
    assert (agent.policy.network.value_tower[0].weight != before["value_tower.0.weight"]).any()


@pytest.mark.slow
def test_an_agent_with_its_own_critic_learns_and_goes_on_after_a_restart(toys, tmp_path) -> None:
    toy, agent = made(toys, OWN_CRITIC)
    toys.train(toy, agent, 60)
    assert toys.score(toy, agent) > 0.85
    agent.save(tmp_path / "agent")
    again = PPOAgent.load(tmp_path / "agent", feature_schema="", config=OWN_CRITIC)
    metrics = []
    for one in (agent, again):
        same_toy = toys.MaskedBandit(envs=16, seed=5)
        for episode in range(2):
            toys.rollout(same_toy, one, episode)
            metrics.append(one.update())
    assert metrics[:2] == metrics[2:]
    for name, value in weights(agent).items():
        assert torch.equal(value, weights(again)[name]), name


def test_advantages_on_the_scale_of_returns_keep_luck_small() -> None:
    """A batch whose advantages are a hundredth of the returns' scale stays that small, family by family."""
    generator = torch.Generator().manual_seed(0)
    family = torch.tensor([0, 0, 1, 1])[:, None].expand(4, 6)
    scales = torch.tensor([2.0, 50.0])
    advantages = torch.randn(4, 6, generator=generator) * 0.01 * scales[family]
    where = torch.rand(4, 6, generator=generator) < 0.8
    scaled, deviation = scale_by_family(advantages, where, family, scales=scales)
    assert scaled.abs().max() < 0.05
    deviations = []
    for index in range(2):
        own = advantages[where & (family == index)].double().numpy()
        deviations.append(own.std())
        picked = family == index
        assert torch.allclose(scaled[picked], advantages[picked] / scales[index])
    assert deviation == pytest.approx(np.mean(deviations), rel=1e-5)


def test_the_share_of_the_twins_that_is_subtracted_is_fitted_step_by_step() -> None:
    """Against a regression by hand. Twins that agree lose all they share, twins that do not lose nothing."""
    rng = np.random.default_rng(0)
    groups, twins = 200, 4
    common = rng.normal(size=(groups, 1, 1)).repeat(twins, 1)
    alike, half, apart = (
        share * common + np.sqrt(1 - share**2) * rng.normal(size=common.shape) for share in (1.0, 0.7, 0.0)
    )
    advantages = np.concatenate([alike, half, apart], -1).reshape(groups * twins, 3)
    where = rng.random(advantages.shape) < 0.9
    wanted = np.zeros_like(advantages)
    left = []
    for t in range(3):
        baseline = np.zeros(len(advantages))
        for i in range(len(advantages)):
            first = i // twins * twins
            others = [advantages[j, t] for j in range(first, first + twins) if j != i and where[j, t]]
            baseline[i] = np.mean(others) if others else 0.0
        x, y = baseline[where[:, t]], advantages[where[:, t], t]
        share = np.clip((x @ y) / (x @ x), 0, 1)
        wanted[:, t] = advantages[:, t] - share * baseline
        left.append(share)
    taken = subtract_twin_baseline(
        torch.from_numpy(advantages), torch.from_numpy(where), twins, fitted=True
    ).numpy()
    assert taken == pytest.approx(wanted, abs=1e-9)
    assert left[0] > 0.99
    assert 0.3 < left[1] < 0.9
    assert left[2] < 0.1


def test_the_return_before_a_rollback_is_what_follows_it_minus_the_price(toys) -> None:
    """Env 1 is rolled back after its second decision, restarts after two rows without one, and is paid in the
    end; env 2 is rolled back at the end and paid in a row without a decision."""
    toy = toys.MaskedBandit(envs=3, seed=0, steps=6)
    agent = toys.make_agent(toy, PPOConfig(), seed=0)
    hidden = agent.initial_hidden()
    agent.begin_rollout(hidden)
    values = torch.zeros(3, 6)
    rewards = torch.arange(18.0).reshape(3, 6) / 10
    for t in range(6):
        obs, masks = toy.observe()
        valid = torch.tensor([True, t not in (2, 3), t < 5])
        reset = torch.tensor([t == 0, t in (0, 3, 4), t == 0])
        if t == 2:
            assert agent.buffer.add_penalty(1, -2.0)
        if t == 5:
            assert agent.buffer.add_penalty(2, -0.5)
        step = agent.act(obs, hidden, masks, uniforms=torch.full((3, 8), 0.5), reset=reset)
        values[:, t] = step.value
        agent.record(
            obs,
            masks,
            step,
            reward=rewards[:, t],
            terminal=torch.full((3,), t == 5),
            reset=reset,
            valid=valid,
        )
    gamma = 0.9
    _, returns = gae(agent.buffer.finish(), gamma=gamma, gae_lambda=1.0)
    after = rewards[1, 2] + gamma * (rewards[1, 3] + gamma * values[1, 4])
    second = rewards[1, 1] - 2.0 + gamma * after
    assert returns[1, 1].item() == pytest.approx(second.item(), abs=1e-5)
    assert returns[1, 0].item() == pytest.approx((rewards[1, 0] + gamma * second).item(), abs=1e-5)
    assert returns[1, 4].item() == pytest.approx((rewards[1, 4] + gamma * rewards[1, 5]).item(), abs=1e-5)
    last = rewards[2, 4] - 0.5 + gamma * rewards[2, 5]
    assert returns[2, 4].item() == pytest.approx(last.item(), abs=1e-5)
    whole = sum(gamma**t * rewards[0, t] for t in range(6))
    assert returns[0, 0].item() == pytest.approx(float(whole), abs=1e-5)


@pytest.mark.parametrize("everywhere", [True, False])
def test_exploration_can_leave_the_parameters_alone(toys, everywhere: bool) -> None:
    toy = toys.Identity(envs=8, seed=0)
    agent = toys.make_agent(toy, PPOConfig(explore_ops_only=not everywhere), seed=0)
    obs, masks = toy.observe()
    asked = toy.asked
    steps = []
    for epsilon in (0.0, 1.0):
        steps.append(agent.policy.act(obs, None, masks, given=asked, epsilon=epsilon).head_log_probs)
    certain, explored = steps
    free = [HEAD_NAMES.index(name) for name in ("slot", "op")]
    others = [head for head in range(len(HEAD_NAMES)) if head not in free]
    assert not torch.equal(certain[:, free], explored[:, free])
    assert torch.equal(certain[:, others], explored[:, others]) is not everywhere


def test_without_exploration_of_parameters_acting_and_learning_still_agree(toys) -> None:
    toy, agent = made(toys, PPOConfig(explore_ops_only=True, epsilon=0.5, minibatches=1))
    for episode in range(2):
        toys.rollout(toy, agent, episode)
        metrics = agent.update()
        assert metrics.log_prob_drift < 1e-5
    assert metrics.head_entropy[HEAD_NAMES.index("op")] > 0.9 * categorical_entropy(
        torch.full((2,), 0.5).log()
    )


@pytest.mark.parametrize(("field", "value"), [("critic_steps", -1), ("critic_lr", 0.0)])
def test_bad_settings_of_the_critic_are_refused(field: str, value: float) -> None:
    with pytest.raises(EsperError, match=field):
        PPOConfig(**{field: value})
