"""Twins that see the same take different actions."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from esper.leyline import OP_GERMINATE, OP_WAIT, EsperError, PolicyObservation
from esper.simic.training import vectorized
from esper.simic.training.config import TrainingConfig
from esper.simic.training.distinct_twins import draw_distinct, places, plan_actions
from esper.simic.training.granularity import limit_masks
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy import RecurrentPolicy, map_tensors
from esper.tamiyo.scripted import OP_HEAD
from run_helpers import assert_same_run, open_masks, rows, train

DISTINCT: dict[str, Any] = {
    "envs": 8,
    "twins": 4,
    "rounds": 2,
    "granularity": "plans",
    "distinct_twins": True,
}


def made_policy(seed: int = 0) -> RecurrentPolicy:
    torch.manual_seed(seed)
    return RecurrentPolicy(TamiyoNetwork(3, 4, 2, hidden=16, slot_hidden=8))


def alike(groups: int, twins: int) -> tuple[PolicyObservation, Any]:
    """Groups that differ, of twins that do not; two blueprints are offered."""
    obs, masks = open_masks(groups)
    index = torch.arange(groups).repeat_interleave(twins)
    obs, masks = map_tensors(obs, lambda part: part[index]), map_tensors(masks, lambda part: part[index])
    masks.blueprint[:, 2:] = False
    return obs, limit_masks(masks, "plans")


def draw(policy: RecurrentPolicy, obs: PolicyObservation, masks: Any, twins: int, **changes: Any) -> Any:
    envs = len(obs.base)
    settings: dict[str, Any] = {
        "hidden": policy.initial_hidden(envs),
        "epsilon": 0.0,
        "reset": torch.zeros(envs, dtype=torch.bool),
        "seed": 0,
        "round_idx": 0,
        "epoch": 1,
        "numbers": range(envs),
    }
    settings |= changes
    return draw_distinct(policy, obs, settings.pop("hidden"), masks, twins=twins, **settings)


def test_those_that_see_the_same_are_found() -> None:
    obs, _ = alike(2, 4)
    obs.base[6] += 1  # the third twin of the second group has done something else
    hidden = (torch.zeros(8, 2), torch.zeros(8, 2))
    hidden[1][1, 0] = 1.0  # the second twin of the first group remembers something else
    leader, before = places(obs, hidden, twins=4)
    assert leader.tolist() == [0, 1, 0, 0, 4, 4, 6, 4]
    assert before.tolist() == [0, 0, 1, 2, 0, 1, 0, 2]


def test_twins_take_different_actions_and_the_first_waits() -> None:
    obs, masks = alike(3, 5)
    actions = draw(made_policy(), obs, masks, 5).unflatten(0, (3, 5))
    assert (actions[:, 0, OP_HEAD] == OP_WAIT).all()
    assert (actions[:, 1:, OP_HEAD] == OP_GERMINATE).all()
    for group in actions.tolist():
        assert len({tuple(action) for action in group}) == 5


def test_with_more_twins_than_actions_the_last_wait() -> None:
    obs, masks = alike(1, 8)  # to wait, and two blueprints in two slots: five actions
    actions = draw(made_policy(), obs, masks, 8)
    assert (actions[5:, OP_HEAD] == OP_WAIT).all()
    assert len({tuple(action) for action in actions[:5].tolist()}) == 5


def test_an_env_alone_in_what_it_sees_draws_from_the_policy() -> None:
    """Frequencies over many draws against the policy's own probabilities."""
    policy, draws = made_policy(3), 4000
    obs, masks = open_masks(1)
    masks.blueprint[:, 2:] = False
    masks = limit_masks(masks, "plans")
    every = plan_actions(2, [0, 1])
    index = torch.zeros(len(every), dtype=torch.int64)
    step = policy.act(
        map_tensors(obs, lambda part: part[index]),
        None,
        map_tensors(masks, lambda part: part[index]),
        given=every,
    )
    wanted = step.log_prob.exp()
    assert wanted.sum().item() == pytest.approx(1.0, abs=1e-5)
    index = torch.zeros(2 * draws, dtype=torch.int64)
    many = map_tensors(obs, lambda part: part[index])
    many.base[::2] += 1  # the first twin of each pair, which always waits, sees something else
    drawn = draw(policy, many, map_tensors(masks, lambda part: part[index]), 2)[1::2]
    counts = Counter(tuple(action) for action in drawn.tolist())
    for action, share in zip(every.tolist(), wanted.tolist(), strict=True):
        error = 4 * math.sqrt(share * (1 - share) / draws)
        assert counts[tuple(action)] / draws == pytest.approx(share, abs=error)


def test_a_run_repeats_and_its_first_twins_wait(tmp_path) -> None:
    for name in ("one", "two"):
        train(tmp_path / name, **DISTINCT)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    steps = rows(tmp_path / "one", "steps")
    assert {row["op"] for row in steps if row["env_id"] % 4 == 0} == {"WAIT"}
    first = [row for row in steps if row["epoch"] == 1 and row["round_idx"] == 0]
    taken = {(row["env_id"] // 4, row["op"], row["slot_id"], row["blueprint"]) for row in first}
    assert len(taken) == 8, "two groups of four different actions"


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_exactly(tmp_path, monkeypatch) -> None:
    train(tmp_path / "straight", **DISTINCT)
    calls = iter([False] * 5 + [True])
    monkeypatch.setattr(vectorized, "stop_requested", lambda: next(calls, False))
    train(tmp_path / "cut", **DISTINCT)
    monkeypatch.undo()
    train(tmp_path / "cut", **DISTINCT, resume="auto")
    assert_same_run(tmp_path / "straight", tmp_path / "cut")


@pytest.mark.parametrize("changes", [{"twins": 1}, {"granularity": "all"}, {"unlock_after": 2}])
def test_it_needs_twins_that_play_plans(changes: dict[str, Any]) -> None:
    with pytest.raises(EsperError, match="distinct_twins with twins"):
        TrainingConfig(**{**DISTINCT, **changes})
