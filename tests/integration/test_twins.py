"""Envs that share a world: the same until they decide otherwise, and judged by what they did."""

from __future__ import annotations

import pytest
import torch

from esper.leyline import EsperError
from esper.simic.agent.ppo_update import subtract_twin_baseline
from run_helpers import rows, train

SHIFT = {"task": "digits_shift", "envs": 6, "rounds": 1, "population": 24}


def by_env(directory) -> dict[int, list[tuple[float, ...]]]:
    by_env: dict[int, list[tuple[float, ...]]] = {}
    for row in rows(directory, "steps"):
        by_env.setdefault(row["env_id"], []).append(
            tuple(v for k, v in row.items() if k not in ("env_id", "seq", "device"))
        )
    return by_env


def test_twins_live_the_same_life_until_they_decide(tmp_path) -> None:
    train(tmp_path / "run", **SHIFT, twins=3, policy="wait")
    lives = by_env(tmp_path / "run")
    assert lives[0] == lives[1] == lives[2]
    assert lives[3] == lives[4] == lives[5]
    assert lives[0] != lives[3]


def test_a_world_is_that_of_the_env_of_its_number(tmp_path) -> None:
    train(tmp_path / "twins", **SHIFT, twins=3, policy="wait")
    train(tmp_path / "single", **{**SHIFT, "envs": 2}, policy="wait")
    twins, single = by_env(tmp_path / "twins"), by_env(tmp_path / "single")
    assert (twins[0], twins[3]) == (single[0], single[1])


def test_twins_that_act_go_their_own_ways(tmp_path) -> None:
    train(tmp_path / "run", **SHIFT, twins=2, policy="random")
    lives = by_env(tmp_path / "run")
    assert lives[0] != lives[1]


def test_what_twins_share_is_taken_out() -> None:
    """Against a plain loop, undecided steps included."""
    generator = torch.Generator().manual_seed(0)
    advantages, where = torch.randn(6, 4, generator=generator), torch.rand(6, 4, generator=generator) < 0.7
    relative = subtract_twin_baseline(advantages, where, 3)
    for i in range(6):
        for t in range(4):
            others = [
                advantages[j, t].item() for j in range(6) if j // 3 == i // 3 and j != i and where[j, t]
            ]
            wanted = advantages[i, t].item() - (sum(others) / len(others) if others else 0.0)
            assert relative[i, t].item() == pytest.approx(wanted, abs=1e-6)
    assert torch.equal(subtract_twin_baseline(advantages, where, 1), advantages)
    same = torch.ones(2, 4)
    assert torch.equal(subtract_twin_baseline(same * 5, same > 0, 2), same * 0)


def test_twins_learn(tmp_path) -> None:
    agent, _ = train(tmp_path / "run", **SHIFT, twins=2)
    assert agent.twins == 2
    assert agent.updates == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"envs": 5, "twins": 2}, "must be a multiple"),
        ({"envs": 4, "twins": 2, "rollout_length": 4}, "whole episodes"),
        ({"envs": 6, "twins": 3}, "population 8 .* must be a multiple of their number"),
    ],
)
def test_twins_that_cannot_be(fields, words) -> None:
    with pytest.raises(EsperError, match=words):
        train(**fields)
