"""The reward scale in real runs: constant within a round, moved between rounds, part of every checkpoint."""

from __future__ import annotations

import math

import pytest

from esper.simic import train_ppo_vectorized
from esper.simic.agent.normalization import RewardNormalizer
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training import vectorized
from run_helpers import SMALL, last_checkpoint, rows, train


def test_a_checkpoint_holds_the_scale_of_all_rewards_so_far(tmp_path) -> None:
    train(tmp_path / "run")
    raw = [row["total_reward"] for row in rows(tmp_path / "run", "rewards")]
    stored = last_checkpoint(tmp_path / "run")[1]["normalizer"]
    assert stored["count"] == len(raw) == SMALL["rounds"] * SMALL["envs"] * SMALL["episode_length"]
    assert stored["mean_square"] == pytest.approx(math.fsum(r * r for r in raw) / len(raw), rel=1e-9)


def test_rewards_are_divided_by_the_scale_of_the_rounds_before(tmp_path, monkeypatch) -> None:
    stored = []
    update = PPOAgent.update

    def look(agent):
        stored.append(agent.buffer.columns["reward"][:, : agent.buffer.length].clone())
        return update(agent)

    monkeypatch.setattr(PPOAgent, "update", look)
    train(tmp_path / "run")
    raw = {
        (r["round_idx"], r["env_id"], r["epoch"]): r["total_reward"]
        for r in rows(tmp_path / "run", "rewards")
    }
    first = [reward for (round_idx, _, _), reward in raw.items() if round_idx == 0]
    scale = math.sqrt(math.fsum(r * r for r in first) / len(first))
    for round_idx, divisor in ((0, 1.0), (1, scale)):
        for env in range(SMALL["envs"]):
            for epoch in range(1, SMALL["episode_length"] + 1):
                expected = raw[round_idx, env, epoch] / divisor
                assert stored[round_idx][env, epoch - 1].item() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_a_resumed_run_goes_on_with_the_stored_scale(tmp_path, monkeypatch) -> None:
    train(tmp_path / "run", rounds=1)
    stored = last_checkpoint(tmp_path / "run")[1]["normalizer"]
    normalizers: list[RewardNormalizer] = []

    class Normalizer(RewardNormalizer):
        def __init__(self) -> None:
            super().__init__()
            normalizers.append(self)
            self.loaded = None

        def load_state_dict(self, state) -> None:
            super().load_state_dict(state)
            self.loaded = dict(state)

    monkeypatch.setattr(vectorized, "RewardNormalizer", Normalizer)
    train_ppo_vectorized(**SMALL, telemetry_dir=str(tmp_path / "run"), resume="auto")
    assert normalizers[0].loaded == stored
    assert normalizers[0].count == 2 * stored["count"]


def test_without_normalisation_rewards_are_stored_as_they_are(tmp_path, monkeypatch) -> None:
    stored = []
    update = PPOAgent.update
    monkeypatch.setattr(
        PPOAgent, "update", lambda agent: stored.append(agent.buffer.total_rewards().clone()) or update(agent)
    )
    _, history = train(tmp_path / "run", normalize_rewards=False)
    for summary, totals in zip(history, stored, strict=True):
        assert totals.mean().item() == pytest.approx(summary.mean_reward, abs=1e-6)
