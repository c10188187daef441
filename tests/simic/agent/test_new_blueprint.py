"""A policy that was trained before a blueprint was registered can be loaded after it, is offered it, and
learns to choose it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from env_helpers import make_env, small_task
from esper.kasmina import blueprints as catalogue
from esper.kasmina.blueprints import Bottleneck, register_blueprint
from esper.leyline import (
    HEAD_NAMES,
    OP_GERMINATE,
    ActionMasks,
    PolicyObservation,
    blueprint_ids,
    blueprint_index,
    head_sizes,
)
from esper.leyline import blueprints as registry
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.training.batch_ops import batch_signals_to_features
from esper.tamiyo import load_policy
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT_DIM, schema
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy import RecurrentPolicy, action_uniforms, map_tensors

ENVS = 64
OP, BLUEPRINT = HEAD_NAMES.index("op"), HEAD_NAMES.index("blueprint")
KNOWN = ("conv_light", "norm", "depthwise")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch):
    """Registers one more blueprint, for this test only."""
    monkeypatch.setattr(registry, "_IDS", [*registry._IDS])
    monkeypatch.setattr(catalogue, "FACTORIES", dict(catalogue.FACTORIES))

    def register() -> str:
        register_blueprint("late", "cnn", type("Late", (Bottleneck,), {}))
        return "late"

    return register


def world(offered: tuple[str, ...]) -> tuple[PolicyObservation, ActionMasks]:
    """Observations and masks of fresh networks after one epoch."""
    env = make_env(small_task("digits_impaired", blueprints=offered), ENVS, population=ENVS)
    env.begin_round(0)
    env.train_epoch(1)
    env.validate(1)
    seen = env.sense(1)
    return batch_signals_to_features(seen.signals, seen.table, env.envs, "cpu"), seen.masks


def learn(policy: RecurrentPolicy, offered: tuple[str, ...], good: str, updates: int) -> PPOAgent:
    """Only germinating the good blueprint pays."""
    obs, masks = world(offered)
    agent = PPOAgent(
        policy,
        PPOConfig(lr=2e-3, minibatches=2, anneal_updates=updates),
        num_envs=ENVS,
        num_steps=1,
        num_slots=3,
        num_blueprints=len(blueprint_ids()),
        seed=0,
    )
    over = torch.ones(ENVS, dtype=torch.bool)
    for episode in range(updates):
        hidden = agent.initial_hidden()
        agent.begin_rollout(hidden)
        uniforms = action_uniforms(0, episode, range(ENVS), 1)[:, 0]
        step = agent.act(obs, hidden, masks, uniforms=uniforms, reset=over)
        agent.record(obs, masks, step, reward=paid(step.actions, good), terminal=over, reset=over)
        agent.update()
    return agent


def paid(actions: Tensor, good: str) -> Tensor:
    return ((actions[:, OP] == OP_GERMINATE) & (actions[:, BLUEPRINT] == blueprint_index(good))).float()


def chosen(policy: RecurrentPolicy, offered: tuple[str, ...]) -> list[str | None]:
    """What it germinates in each env when it takes its most likely actions."""
    obs, masks = world(offered)
    actions = policy.act(obs, None, masks, deterministic=True).actions
    names = blueprint_ids()
    return [names[a[BLUEPRINT]] if a[OP] == OP_GERMINATE else None for a in actions.tolist()]


def test_a_policy_from_before_learns_to_choose_a_new_blueprint(late, tmp_path) -> None:
    torch.manual_seed(0)
    network = TamiyoNetwork(BASE_DIM, SLOT_DIM, QUOTE_DIM, hidden=64)
    old = RecurrentPolicy(network, feature_schema=schema())
    learn(old, KNOWN, "depthwise", 15)
    assert set(chosen(old, KNOWN)) == {"depthwise"}
    old.save(tmp_path / "old.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}

    before = head_sizes(3)[1]
    offered = (*KNOWN, late())
    assert head_sizes(3)[1] == before + 1
    policy = load_policy(tmp_path / "old.safetensors")
    assert {name: tuple(t.shape) for name, t in policy.network.state_dict().items()} == shapes
    obs, masks = world(offered)
    assert obs.quotes.shape[2] == before + 1
    assert masks.blueprint[:, blueprint_index("late")].all()
    assert obs.quotes[:, :, blueprint_index("late"), 0].eq(1).all()
    assert set(chosen(policy, KNOWN)) == {"depthwise"}, "what it knew it still knows"
    learn(policy, offered, "late", 25)
    assert set(chosen(policy, offered)) == {"late"}


def test_it_is_used_unlearned_where_its_quote_is_like_that_of_a_good_one(late) -> None:
    """The new blueprint is a copy of a known one: the policy cannot tell them apart, and need not."""
    torch.manual_seed(1)
    policy = RecurrentPolicy(TamiyoNetwork(BASE_DIM, SLOT_DIM, QUOTE_DIM, hidden=64))
    offered = (*KNOWN, late())
    obs, masks = world(offered)
    twin, known = blueprint_index("late"), blueprint_index("norm")
    obs.quotes[:, :, twin] = obs.quotes[:, :, known]
    step = policy.distribution(
        map_tensors(obs, lambda t: t.unsqueeze(1)),
        policy.initial_hidden(ENVS),
        map_tensors(masks, lambda t: t.unsqueeze(1)),
        reset=torch.zeros(ENVS, 1, dtype=torch.bool),
        epsilon=torch.zeros(ENVS, 1),
    )[0]
    actions = torch.zeros(ENVS, 1, len(HEAD_NAMES), dtype=torch.int64)
    actions[..., OP] = OP_GERMINATE
    scores = []
    for blueprint in (twin, known):
        actions[..., BLUEPRINT] = blueprint
        scores.append(step.log_probs(actions)[..., BLUEPRINT])
    torch.testing.assert_close(*scores, atol=1e-6, rtol=0)
