"""Episodes that end at different times in one rollout: returns, statistics and the update against references
that know each env's own steps only."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from esper.leyline import OP_WAIT, head_sizes
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.ppo_update import gae, normalize_by_family, subtract_twin_baseline
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy import RecurrentPolicy, action_uniforms

ENVS, STEPS, SLOTS = 6, 7, 2
LENGTHS = (3, 7, 1, 5, 7, 2)
GAMMA, LAMBDA = 0.9, 0.7


def make_agent(families: tuple[str, ...] = ("one",), *, twins: int = 1) -> PPOAgent:
    torch.manual_seed(0)
    policy = RecurrentPolicy(TamiyoNetwork(3, 2, 2, hidden=16, slot_hidden=8), families=families)
    config = PPOConfig(gamma=GAMMA, gae_lambda=LAMBDA, epochs=2, minibatches=2)
    return PPOAgent(
        policy,
        config,
        num_envs=ENVS,
        num_steps=STEPS,
        num_slots=SLOTS,
        num_blueprints=head_sizes(1)[1],
        seed=1,
        twins=twins,
    )


def rewards() -> torch.Tensor:
    return torch.randn(ENVS, STEPS, generator=torch.Generator().manual_seed(5))


def play(agent: PPOAgent, toys, *, family: torch.Tensor | None = None, garbage: float = 0.0) -> None:
    """A rollout in which env i decides LENGTHS[i] times. Afterwards its rows are empty, or hold `garbage`."""
    generator = torch.Generator().manual_seed(2)
    hidden = agent.initial_hidden()
    agent.begin_rollout(hidden)
    uniforms, paid = action_uniforms(0, 0, range(ENVS), STEPS), rewards()
    for t in range(STEPS):
        going = torch.tensor([t < length for length in LENGTHS])
        base = torch.randn(ENVS, 3, generator=generator)
        slots = torch.randn(ENVS, SLOTS, 2, generator=generator)
        base, slots = (torch.where(going.view(-1, *[1] * (x.dim() - 1)), x, garbage) for x in (base, slots))
        masks = toys.open_masks(ENVS, SLOTS)
        masks.op[~going] = False
        masks.op[:, OP_WAIT] = True
        obs = dataclasses.replace(
            toys.seen(base, slots), exists=going[:, None].repeat(1, SLOTS), family=family
        )
        reset = torch.full((ENVS,), t == 0)
        step = agent.act(obs, hidden, masks, uniforms=uniforms[:, t], reset=reset)
        agent.record(
            obs,
            masks,
            step,
            reward=torch.where(going, paid[:, t], 0.0),
            terminal=torch.tensor([t + 1 == length for length in LENGTHS]),
            reset=reset,
            valid=going,
        )
        assert step.hidden is not None
        hidden = step.hidden


def own_returns(reward: list[float], value: list[float]) -> list[float]:
    """Lambda returns of one env's whole episode, by their recursion: nothing follows its last step."""
    following, returns = 0.0, []
    for t in reversed(range(len(reward))):
        next_value = value[t + 1] if t + 1 < len(reward) else 0.0
        following = reward[t] + GAMMA * ((1 - LAMBDA) * next_value + LAMBDA * following)
        returns.append(following)
    return returns[::-1]


def test_returns_are_those_of_each_envs_own_steps(toys) -> None:
    agent = make_agent()
    play(agent, toys)
    batch = agent.buffer.finish()
    assert batch.valid.sum(1).tolist() == list(LENGTHS)
    assert not (batch.choice & ~batch.valid).any()
    assert (batch.actions[~batch.valid][:, -1] == OP_WAIT).all()
    advantages, returns = gae(batch, gamma=GAMMA, gae_lambda=LAMBDA)
    for env, length in enumerate(LENGTHS):
        value = batch.value[env, :length].double().tolist()
        wanted = own_returns(rewards()[env, :length].double().tolist(), value)
        torch.testing.assert_close(
            returns[env, :length].double(), torch.tensor(wanted).double(), atol=1e-5, rtol=1e-5
        )
    assert advantages[~batch.valid].abs().max() == 0


def test_a_rollout_that_is_cut_is_bootstrapped_where_episodes_go_on(toys) -> None:
    agent = make_agent()
    play(agent, toys)
    buffer = agent.buffer
    going = [env for env, length in enumerate(LENGTHS) if length == STEPS]
    buffer.columns["terminal"][going, STEPS - 1] = False
    buffer.truncate([(env, STEPS - 1) for env in going], torch.tensor([2.0, -3.0]))
    _, returns = gae(buffer.finish(), gamma=GAMMA, gae_lambda=LAMBDA)
    paid = rewards()
    for env, after in zip(going, (2.0, -3.0), strict=True):
        assert returns[env, -1].item() == pytest.approx(paid[env, -1].item() + GAMMA * after, abs=1e-5)
    for env, length in enumerate(LENGTHS):
        if env not in going:
            assert returns[env, length - 1].item() == pytest.approx(paid[env, length - 1].item(), abs=1e-5)


@pytest.mark.parametrize("twins", [1, 2])
def test_what_follows_the_end_of_an_episode_changes_no_weight(twins, toys) -> None:
    """The update is the same whatever the empty rows hold, and counts the decisions alone."""
    agents = [make_agent(twins=twins) for _ in range(2)]
    metrics = []
    for agent, garbage in zip(agents, (0.0, 1e6), strict=True):
        play(agent, toys, garbage=garbage)
        metrics.append(agent.update())
    assert metrics[0] == metrics[1]
    assert metrics[0].steps == sum(LENGTHS)
    for one, other in zip(*(agent.policy.network.parameters() for agent in agents), strict=True):
        assert torch.equal(one, other)


def test_a_twin_whose_episode_is_over_is_no_baseline() -> None:
    advantages = torch.tensor([[4.0, 10.0], [2.0, 99.0], [1.0, 1.0], [7.0, 5.0]])
    where = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    taken = subtract_twin_baseline(advantages, where, 2)
    assert taken[where].tolist() == [2.0, 10.0, -2.0, -6.0, -4.0, 6.0, 4.0]


# -- families ------------------------------------------------------------------------------------------------


def test_advantages_are_normalised_within_their_family() -> None:
    g = torch.Generator().manual_seed(0)
    family = torch.tensor([0, 1, 0, 2])[:, None].expand(4, 5)
    advantages = torch.randn(4, 5, generator=g) * torch.tensor([1.0, 50.0, 0.01])[family] + 3 * family
    where = torch.rand(4, 5, generator=g) < 0.8
    floors = [0.1, 0.1, 0.5]
    normalized, deviation = normalize_by_family(advantages, where, family, floors=floors)
    deviations = []
    for index in range(3):
        values = advantages[where & (family == index)].double().tolist()
        mean = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
        deviations.append(spread)
        wanted = [(v - mean) / max(spread, floors[index]) for v in values]
        given = normalized[where & (family == index)].double()
        torch.testing.assert_close(given, torch.tensor(wanted).double(), atol=1e-4, rtol=1e-4)
    assert deviation == pytest.approx(sum(deviations) / 3, rel=1e-5)


def test_a_family_learns_from_its_own_returns(toys) -> None:
    """Statistics of a family are those of a run that has this family alone, and an agent of several families
    can be stored and restored exactly."""
    family = torch.tensor([0, 1, 0, 1, 0, 1])
    agent = make_agent(("small", "large"))
    play(agent, toys, family=family)
    agent.buffer.columns["reward"][family == 1] *= 100
    batch = agent.buffer.finish()
    _, returns = gae(batch, gamma=GAMMA, gae_lambda=LAMBDA)
    metrics = agent.update()
    for index, statistics in enumerate(agent.popart.statistics):
        own = returns[batch.valid & (family == index)[:, None]].double()
        assert float(statistics.mean) == pytest.approx(own.mean().item(), rel=1e-5)
        assert float(statistics.var) == pytest.approx(own.var(correction=0).item(), rel=1e-5)
    small, large = agent.policy.network.value_scale.tolist()
    assert large > 20 * small
    assert metrics.value_scale == pytest.approx((small + large) / 2)
    again = PPOAgent.from_state(*agent.state(), feature_schema="")
    assert again.policy.families == ("small", "large")
    for one in (agent, again):
        play(one, toys, family=family)
    assert dataclasses.asdict(agent.update()) == dataclasses.asdict(again.update())
    for one, other in zip(agent.policy.network.parameters(), again.policy.network.parameters(), strict=True):
        assert torch.equal(one, other)
