"""Sparse reward through the entry point: nothing until the end, then J, and a rollback's price where it was
caused."""

from __future__ import annotations

import pytest

from esper.simic import train_ppo_vectorized
from run_helpers import SMALL, rows, story, train


@pytest.mark.parametrize("policy", ["ppo", "random"])
def test_an_episode_pays_its_objective_at_its_end_and_nothing_before(tmp_path, policy) -> None:
    train(tmp_path / "run", reward={"mode": "sparse"}, policy=policy)
    paid = {
        (r["round_idx"], r["env_id"], r["epoch"]): r["total_reward"]
        for r in rows(tmp_path / "run", "rewards")
    }
    assert len(paid) == SMALL["rounds"] * SMALL["envs"] * SMALL["episode_length"]
    for outcome in (e for e in story(tmp_path / "run") if e["event_type"] == "episode_outcome"):
        key = outcome["round_idx"], outcome["env_id"]
        assert not outcome["data"]["rollbacks"]
        assert [paid[*key, epoch] for epoch in range(1, SMALL["episode_length"])] == [0.0] * (
            SMALL["episode_length"] - 1
        )
        assert paid[*key, SMALL["episode_length"]] == pytest.approx(outcome["data"]["objective"], abs=1e-9)
        assert outcome["data"]["total_reward"] == pytest.approx(outcome["data"]["objective"], abs=1e-9)


def test_shaping_changes_when_an_episode_pays_not_how_much() -> None:
    """One round: the policies have learned nothing yet, so they play the same episodes."""
    once = {**SMALL, "rounds": 1, "ppo": {"gamma": 1.0}}
    totals = {
        mode: train_ppo_vectorized(**{**once, "reward": {"mode": mode}})[1][0].mean_reward
        for mode in ("sparse", "shaped", "escrow")
    }
    assert totals["shaped"] == pytest.approx(totals["sparse"], abs=1e-9)
    assert totals["escrow"] == pytest.approx(totals["sparse"], abs=1e-9)


def test_seeds_that_the_clock_makes_permanent_count_in_the_objective(tmp_path) -> None:
    gates = ("g1", "g2", "g3", "g5")
    train(tmp_path / "run", policy="random", envs=8, episode_length=24, rounds=1, auto_forward_gates=gates)
    events = story(tmp_path / "run")
    changes = [e["data"] for e in events if e["event_type"] == "seed_lifecycle"]
    permanent = [data for data in changes if data["kind"] == "fossilized"]
    assert any(data["cause"] == "CLOCK" for data in permanent)
    outcomes = [e["data"] for e in events if e["event_type"] == "episode_outcome"]
    assert sum(outcome["fossilized"] for outcome in outcomes) == len(permanent)
    assert sum(outcome["added_params"] for outcome in outcomes) == sum(data["params"] for data in permanent)
