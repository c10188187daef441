"""What a policy may decide in a round, from plans to everything; and exactness with the settings of an update
that are off by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.leyline import (
    HEAD_NAMES,
    OP_GERMINATE,
    OP_PRUNE,
    OP_WAIT,
    EsperError,
    TempoAction,
)
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training import vectorized
from esper.simic.training.granularity import close, level_after, limit_masks, reopen
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy import RecurrentPolicy, check_masks
from run_helpers import assert_same_run, open_masks, rows, train

LEARNING: dict[str, Any] = {
    "envs": 8,
    "twins": 4,
    "rounds": 3,
    "granularity": "plans",
    "unlock_after": 1,
    "ppo": {
        "gae_lambda": 1.0,
        "advantage_scale": "returns",
        "critic_steps": 3,
        "explore_ops_only": True,
        "fit_twins": True,
        "epsilon": 0.5,
    },
}


def test_plans_have_one_way_to_grow(tmp_path) -> None:
    train(tmp_path / "run", **{**LEARNING, "unlock_after": 0})
    steps = rows(tmp_path / "run", "steps")
    assert {row["op"] for row in steps} == {"WAIT", "GERMINATE"}
    planted = [row for row in steps if row["op"] == "GERMINATE"]
    assert {row["tempo"] for row in planted} == {0}, "epochs of the ramp"
    assert len({row["blueprint"] for row in planted}) > 1


def test_parameters_leave_the_ways_open_and_close_the_other_operations(tmp_path) -> None:
    train(tmp_path / "run", **{**LEARNING, "granularity": "parameters", "unlock_after": 0})
    steps = rows(tmp_path / "run", "steps")
    assert {row["op"] for row in steps} == {"WAIT", "GERMINATE"}
    assert len({row["tempo"] for row in steps if row["op"] == "GERMINATE"}) > 1


@pytest.mark.parametrize(
    ("objectives", "after", "level"),
    [
        ([], 2, "plans"),
        ([0.1, 0.2, 0.3, 0.4], 2, "plans"),
        ([0.3, 0.2], 2, "plans"),
        ([0.3, 0.2, 0.3], 2, "parameters"),
        ([0.3, 0.2, 0.1, 0.05, 0.04], 2, "parameters"),
        ([0.3, 0.2, 0.1, 0.05, 0.04, 0.03], 2, "all"),
        ([0.3] * 50, 2, "all"),
        ([0.3] * 50, 0, "plans"),
    ],
)
def test_a_level_opens_when_j_has_not_risen(objectives, after, level) -> None:
    assert level_after(objectives, "plans", after) == level


def test_what_is_closed_stays_closed_without_masks_and_opens_as_it_was() -> None:
    """The policy file alone keeps a policy at its plans."""
    torch.manual_seed(0)
    network = TamiyoNetwork(3, 4, 2, hidden=16)
    policy = RecurrentPolicy(network)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    close(network, "plans")
    obs, masks = open_masks()
    shares = policy.act(obs, None, masks, deterministic=True).op_probs
    assert shares[:, [OP_WAIT, OP_GERMINATE]].sum(1).min() > 1 - 1e-7
    assert shares[:, OP_PRUNE].min() > 0
    for uniform in torch.linspace(0.01, 0.99, 20):
        step = policy.act(obs, None, masks, uniforms=torch.full((len(masks.op), 8), uniform.item()))
        grown = step.actions[step.actions[:, -1] == OP_GERMINATE]
        assert (grown[:, HEAD_NAMES.index("tempo")] == int(TempoAction.INSTANT)).all()
    reopen(network, "plans", "parameters")
    reopen(network, "parameters", "all")
    for name, value in network.state_dict().items():
        torch.testing.assert_close(value, before[name], atol=1e-5, rtol=0)


def test_limited_masks_leave_a_complete_action() -> None:
    _, masks = open_masks()
    for granularity in ("plans", "parameters", "all"):
        check_masks(limit_masks(masks, granularity))
    plans = limit_masks(masks, "plans")
    assert plans.tempo.sum(1).tolist() == [1] * len(plans.op)
    assert not plans.slot_by_op[:, OP_PRUNE].any()


@pytest.mark.slow
def test_a_run_that_unlocks_is_repeated_and_resumed_exactly(tmp_path, monkeypatch) -> None:
    train(tmp_path / "straight", **LEARNING)
    train(tmp_path / "again", **LEARNING)
    assert_same_run(tmp_path / "straight", tmp_path / "again")
    for name, epochs in (("between", 8), ("within", 11)):
        calls = iter([False] * epochs + [True])
        monkeypatch.setattr(vectorized, "stop_requested", lambda calls=calls: next(calls, False))
        train(tmp_path / name, **LEARNING)
        monkeypatch.undo()
        train(tmp_path / name, **LEARNING, resume="auto")
        assert_same_run(tmp_path / "straight", tmp_path / name)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policy": "random"}, "granularity plans with policy random"),
        ({"teacher": "heuristic", "teacher_rounds": 1}, "without a teacher"),
        ({"granularity": "all"}, "nothing is left to unlock"),
        ({"granularity": "seeds"}, "plans"),
        ({"auto_forward_gates": ("g1",)}, "gate G5 is not automatic"),
    ],
)
def test_what_cannot_be_limited_is_refused(fields, words) -> None:
    with pytest.raises(EsperError, match=words):
        train(**{**LEARNING, **fields})


def test_a_new_scale_of_rewards_leaves_values_what_they_were(tmp_path, monkeypatch) -> None:
    """Returns of the second round are in another unit; the critic's statistics are in that unit too."""
    returns, means = [], []
    update = PPOAgent.update

    def look(agent: PPOAgent, **options: Any):
        means.append(float(agent.popart.statistics[0].mean))
        metrics = update(agent, **options)
        returns.append(metrics.return_mean)
        return metrics

    monkeypatch.setattr(PPOAgent, "update", look)
    train(tmp_path / "run", reward={"mode": "sparse"})
    scale = returns[1] / returns[0]
    assert scale > 1.5, "the unit has changed"
    assert means[1] == pytest.approx(returns[0] * scale, rel=0.5)
    assert means[1] > 1.4 * returns[0]
