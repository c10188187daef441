"""Seeds and updates in the training loop: exact schedules, slots, several updates of one rollout."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina import CNNHost, MorphogeneticModel, PopulationOptimizer
from esper.leyline import (
    EsperError,
    Pacing,
    SeedStage,
    SlotConfig,
    SlotIdError,
    head_sizes,
)
from esper.simic.agent.normalization import RunningMeanStd
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.seed_management import (
    advance_active_seed,
    aggregate_ppo_metrics,
    calculate_entropy_anneal_steps,
    resolve_target_slot,
    run_ppo_updates,
)
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy import RecurrentPolicy
from helpers import make
from run_helpers import play_rollout


def test_a_seed_goes_through_all_its_stages() -> None:
    """Like the loop in the README: train, measure, advance where the gate is open, tick."""
    model = make("cnn")
    optimizer = PopulationOptimizer(model)
    model.germinate("r0c0", "norm", tempo_epochs=2)
    x, y = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    seen = []
    for _ in range(10):
        optimizer.zero_grad()
        model.losses(x, y).total().backward()
        optimizer.step()
        model.record_gradients(optimizer.stats)
        model.record_epoch(0, 80.0, contributions={"r0c0": 5.0})
        before = model.reports()["r0c0"].stage
        done = advance_active_seed(model, "r0c0")
        after = model.reports()["r0c0"].stage
        assert done == (before is not after)
        seen += [after] * done
        if after is SeedStage.FOSSILIZED:
            break
        model.step_epoch()
    assert seen == [SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED]


def test_a_shut_gate_and_an_empty_slot() -> None:
    model = MorphogeneticModel(CNNHost(base=2), pacing=Pacing(min_training_epochs=5))
    model.germinate("r0c0", "norm", tempo_epochs=5)
    assert advance_active_seed(model, "r0c0")
    assert not advance_active_seed(model, "r0c0")
    assert model.reports()["r0c0"].stage is SeedStage.TRAINING
    with pytest.raises(SlotIdError, match="slot 'r0c1' holds no seed; allowed: r0c0"):
        advance_active_seed(model, "r0c1")


def test_slots() -> None:
    config = SlotConfig(("r0c0", "r0c1", "r0c2", "r1c0"))
    enabled = ["r0c1", "r1c0"]
    assert [resolve_target_slot(i, enabled_slots=enabled, slot_config=config) for i in range(2)] == [
        ("r0c1", 1),
        ("r1c0", 3),
    ]
    for wrong in (-1, 2):
        with pytest.raises(SlotIdError, match=f"slot index {wrong} is out of range; allowed: 0, 1"):
            resolve_target_slot(wrong, enabled_slots=enabled, slot_config=config)
    with pytest.raises(SlotIdError, match="slot 'r9c9' is unknown"):
        resolve_target_slot(0, enabled_slots=["r9c9"], slot_config=config)


@given(st.integers(0, 10_000), st.integers(0, 50), st.integers(0, 50), st.integers(0, 1000))
def test_anneal_steps(episodes: int, batches: int, epochs: int, thousandths: int) -> None:
    """Whole numbers only: the least n with 1000·n ≥ steps·thousandths."""
    steps = calculate_entropy_anneal_steps(episodes, batches, epochs, thousandths / 1000)
    exact = Fraction(episodes * batches * epochs * thousandths, 1000)
    assert steps - 1 < exact <= steps


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((100, 1, 1, 0.07), 7),
        ((3, 1, 1, 0.5), 2),
        ((200, 4, 2, 0.8), 1280),
        ((10, 1, 1, 0.0), 0),
        ((0, 5, 5, 1.0), 0),
    ],
)
def test_anneal_steps_by_hand(arguments: tuple[int, int, int, float], expected: int) -> None:
    assert calculate_entropy_anneal_steps(*arguments) == expected


@pytest.mark.parametrize(
    "arguments", [(-1, 1, 1, 0.5), (1, 1.5, 1, 0.5), (1, 1, 1, 1.1), (1, 1, 1, -0.1), (1, 1, 1, float("nan"))]
)
def test_anneal_steps_of_nonsense(arguments: tuple[int, int, int, float]) -> None:
    with pytest.raises(EsperError, match="entropy annealing"):
        calculate_entropy_anneal_steps(*arguments)


ENVS, STEPS = 4, 3


def agent_with_rollout(bf16: bool = False) -> PPOAgent:
    torch.manual_seed(0)
    policy = RecurrentPolicy(TamiyoNetwork(2, 2, 2, hidden=16, slot_hidden=8))
    agent = PPOAgent(
        policy,
        PPOConfig(epochs=2, minibatches=2, bf16=bf16),
        num_envs=ENVS,
        num_steps=STEPS,
        num_slots=1,
        num_blueprints=head_sizes(1)[1],
        seed=0,
    )
    play_rollout(agent)
    return agent


def weights(agent: PPOAgent) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in agent.policy.network.parameters()])


def test_one_update_is_the_agents() -> None:
    ours, theirs = agent_with_rollout(), agent_with_rollout()
    assert run_ppo_updates(ours, 1, [], None, False) == theirs.update()
    assert torch.equal(weights(ours), weights(theirs))
    assert ours.buffer.length == 0


def test_several_updates_learn_from_the_same_rollout() -> None:
    ours, theirs = agent_with_rollout(), agent_with_rollout()
    merged = run_ppo_updates(ours, 3, [], None, False)
    single = []
    stored = {name: column.clone() for name, column in theirs.buffer.columns.items()}
    for _ in range(3):
        for name, column in stored.items():
            theirs.buffer.columns[name].copy_(column)
        theirs.buffer.length = STEPS
        single.append(theirs.update())
    assert torch.equal(weights(ours), weights(theirs))
    assert not torch.equal(weights(ours), weights(agent_with_rollout()))
    assert merged == aggregate_ppo_metrics(single)
    assert merged.update == ours.updates == 3
    assert merged.approx_kl_max == max(m.approx_kl_max for m in single)
    assert ours.buffer.length == 0
    play_rollout(ours)
    ours.update()


def test_a_normaliser_sees_the_states_after_the_update() -> None:
    states = [np.random.default_rng(i).normal(size=(5, 2)) for i in range(3)]
    normalizer = RunningMeanStd((2,))
    run_ppo_updates(agent_with_rollout(), 1, states, normalizer, False)
    assert normalizer.count == 15
    np.testing.assert_allclose(normalizer.mean, np.concatenate(states).mean(0))
    np.testing.assert_allclose(normalizer.var, np.concatenate(states).var(0))


def test_what_updates_refuse() -> None:
    agent = agent_with_rollout()
    for count in (0, -1, 1.5, True):
        with pytest.raises(EsperError, match=f"ppo_updates_per_batch is {count}"):
            run_ppo_updates(agent, count, [], None, False)
    with pytest.raises(EsperError, match="use_amp is True, but the agent acts with bf16=False"):
        run_ppo_updates(agent, 1, [], None, True)
    assert agent.updates == 0
    assert run_ppo_updates(agent_with_rollout(bf16=True), 1, [], None, True).update == 1
    with pytest.raises(EsperError, match="no updates to aggregate"):
        aggregate_ppo_metrics([])
