"""The update's arithmetic against references written here in plain Python floats."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline import EsperError
from esper.simic.agent import ppo_update
from esper.simic.agent.ppo_update import (
    PPOConfig,
    approx_kl,
    clipfrac,
    explained_variance,
    gae,
    policy_loss,
    value_loss,
)
from esper.simic.agent.rollout_buffer import RolloutBatch
from esper.tamiyo.policy import PolicyEvaluation


def rollout_batch(**columns: Tensor) -> RolloutBatch:
    """A batch of which only the given columns matter."""
    shape = columns["reward"].shape
    zeros, no = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    defaults = {
        "value": zeros,
        "bootstrap": zeros,
        "terminal": no,
        "truncated": no,
        "reset": no,
        "valid": ~no,
        "choice": ~no,
    }
    unused = {f.name: None for f in dataclasses.fields(RolloutBatch)}
    return RolloutBatch(**{**unused, **defaults, **columns})


def reference_advantages(batch: RolloutBatch, gamma: float, lam: float) -> list[list[float]]:
    """The definition: discounted sums of TD errors up to the end of each segment."""
    result = []
    for e in range(len(batch.reward)):
        reward, value, bootstrap = (
            getattr(batch, n)[e].double().tolist() for n in ("reward", "value", "bootstrap")
        )
        terminal, truncated, reset, valid = (
            getattr(batch, n)[e].tolist() for n in ("terminal", "truncated", "reset", "valid")
        )
        steps = len(reward)

        def ends(t: int) -> bool:
            return terminal[t] or truncated[t] or t + 1 == steps or reset[t + 1] or not valid[t + 1]  # noqa: B023

        def after(t: int) -> float:
            """What follows a rollback: rewards without a decision, then a value."""
            if valid[t]:  # noqa: B023
                return value[t]  # noqa: B023
            if truncated[t]:  # noqa: B023
                return reward[t] + gamma * bootstrap[t]  # noqa: B023
            goes_on = not terminal[t] and t + 1 < steps  # noqa: B023
            return reward[t] + (gamma * after(t + 1) if goes_on else 0.0)  # noqa: B023

        row = []
        for start in range(steps):
            total, weight, t = 0.0, 1.0, start
            while True:
                following = 0.0 if ends(t) else value[t + 1]
                if truncated[t]:
                    rolled_back = t + 1 < steps and not valid[t + 1]
                    following = after(t + 1) if rolled_back else bootstrap[t]
                total += weight * (reward[t] + gamma * following - value[t])
                if ends(t):
                    break
                weight, t = weight * gamma * lam, t + 1
            row.append(total)
        result.append(row)
    return result


class TestGAE:
    @given(st.integers(0, 10_000), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
    @settings(max_examples=60, deadline=None)
    def test_equals_the_definition_with_resets_and_truncation_inside(
        self, seed: int, gamma: float, lam: float
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        shape = (3, 9)
        terminal = torch.rand(shape, generator=g) < 0.15
        truncated = (torch.rand(shape, generator=g) < 0.15) & ~terminal
        valid = torch.rand(shape, generator=g) < 0.9
        reset = torch.rand(shape, generator=g) < 0.1
        batch = rollout_batch(
            reward=torch.randn(shape, generator=g),
            value=torch.randn(shape, generator=g),
            terminal=terminal,
            truncated=truncated,
            bootstrap=torch.randn(shape, generator=g),
            reset=reset,
            valid=valid,
        )
        advantages, returns = gae(batch, gamma=gamma, gae_lambda=lam)
        expected = torch.tensor(reference_advantages(batch, gamma, lam))
        torch.testing.assert_close(advantages[valid].double(), expected[valid].double(), atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(returns, advantages + batch.value)

    def test_known_numbers(self) -> None:
        batch = rollout_batch(
            reward=torch.tensor([[1.0, 1.0, 10.0, 2.0]]),
            value=torch.tensor([[0.5, 0.25, 1.0, 0.75]]),
            terminal=torch.tensor([[False, True, False, False]]),
            truncated=torch.tensor([[False, False, False, True]]),
            bootstrap=torch.tensor([[0.0, 0.0, 0.0, 4.0]]),
        )
        advantages, _ = gae(batch, gamma=0.9, gae_lambda=0.5)
        torch.testing.assert_close(
            advantages, torch.tensor([[1.0625, 0.75, 11.8575, 4.85]]), atol=1e-6, rtol=0
        )

    def test_envs_do_not_leak_into_each_other(self) -> None:
        g = torch.Generator().manual_seed(0)
        columns = {n: torch.randn(4, 6, generator=g) for n in ("reward", "value")}
        columns["terminal"] = torch.rand(4, 6, generator=g) < 0.3
        order = torch.tensor([3, 1, 0, 2])
        a, _ = gae(rollout_batch(**columns), gamma=0.9, gae_lambda=0.8)
        b, _ = gae(rollout_batch(**{k: v[order] for k, v in columns.items()}), gamma=0.9, gae_lambda=0.8)
        assert torch.equal(a[order], b)


class TestLosses:
    def test_the_whole_loss_equals_a_plain_reference(self) -> None:
        g = torch.Generator().manual_seed(3)
        shape = (4, 7)
        config, entropy_coef = PPOConfig(clip=0.2, value_coef=0.7), 0.03
        head_log_probs = -torch.rand(*shape, 8, generator=g)
        seen = PolicyEvaluation(
            head_log_probs, torch.rand(*shape, 8, generator=g), torch.randn(shape, generator=g)
        )
        old_heads = head_log_probs + 0.15 * torch.randn(*shape, 8, generator=g)
        valid = torch.rand(shape, generator=g) < 0.85
        choice = valid & (torch.rand(shape, generator=g) < 0.7)
        advantages, returns = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
        old_heads[~valid] = torch.nan  # what does not count may hold anything
        mb = rollout_batch(
            reward=torch.zeros(shape),
            valid=valid,
            choice=choice,
            behaviour_head_log_probs=old_heads,
            behaviour_log_prob=old_heads.sum(-1),
        )
        loss, measured = ppo_update.minibatch_loss(
            seen, mb, advantages, returns, config=config, entropy_coef=entropy_coef
        )

        surrogate = value_error = entropy = kl = clipped = 0.0
        choices = values = 0
        for e in range(4):
            for t in range(7):
                if choice[e, t]:
                    choices += 1
                    logratio = sum(
                        float(head_log_probs[e, t, h]) - float(old_heads[e, t, h]) for h in range(8)
                    )
                    ratio, advantage = math.exp(logratio), float(advantages[e, t])
                    surrogate += min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
                    entropy += float(seen.head_entropies[e, t].sum())
                    kl += ratio - 1 - logratio
                    clipped += abs(ratio - 1) > 0.2
                if valid[e, t]:
                    values += 1
                    value_error += 0.5 * (float(seen.normalized_value[e, t]) - float(returns[e, t])) ** 2
        expected = -surrogate / choices + 0.7 * value_error / values - 0.03 * entropy / choices
        assert loss.item() == pytest.approx(expected, abs=1e-6)
        assert measured["approx_kl"].item() == pytest.approx(kl / choices, abs=1e-6)
        assert measured["clip_fraction"].item() == pytest.approx(clipped / choices, abs=1e-6)

    @pytest.mark.parametrize(
        ("advantage", "logratio", "moves"),
        [(1.0, 0.5, False), (1.0, -0.5, True), (-1.0, -0.5, False), (-1.0, 0.5, True)],
    )
    def test_the_clip_stops_only_what_would_overshoot(
        self, advantage: float, logratio: float, moves: bool
    ) -> None:
        x = torch.tensor([logratio], requires_grad=True)
        policy_loss(x, torch.tensor([advantage]), torch.tensor([True]), clip=0.2).backward()
        assert x.grad is not None
        assert bool(x.grad != 0) == moves

    def test_an_unchanged_policy_has_no_divergence(self) -> None:
        zero, where = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
        assert approx_kl(zero, where) == 0
        assert clipfrac(zero, where, clip=0.2) == 0
        assert approx_kl(zero, ~where) == 0
        assert value_loss(zero, zero + 2, ~where) == 0

    @given(st.lists(st.floats(-3, 3), min_size=1, max_size=8))
    @settings(deadline=None)
    def test_the_divergence_estimate_is_never_negative(self, values: list[float]) -> None:
        assert approx_kl(torch.tensor(values), torch.ones(len(values), dtype=torch.bool)) >= -1e-6

    def test_explained_variance(self) -> None:
        returns, where = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), torch.tensor([[True, True, True, False]])
        assert explained_variance(returns, returns, where) == pytest.approx(1.0)
        assert explained_variance(torch.zeros(1, 4), returns, where) == pytest.approx(0.0)
        assert explained_variance(-returns, returns, where) == pytest.approx(-3.0)
        assert explained_variance(returns, torch.ones(1, 4), where) == 0.0


class TestAdvantages:
    def test_normalised_over_the_rows_with_a_choice(self) -> None:
        advantages = torch.tensor([[1.0, 3.0, 1000.0]])
        normalized, std = ppo_update.normalize_advantages(
            advantages, torch.tensor([[True, True, False]]), floor=1e-3
        )
        torch.testing.assert_close(normalized[0, :2], torch.tensor([-1.0, 1.0]))
        assert std == pytest.approx(1.0)

    def test_a_solved_tasks_noise_is_not_blown_up(self) -> None:
        noise = 1e-4 * torch.tensor([[1.0, -1.0]])
        normalized, _ = ppo_update.normalize_advantages(noise, torch.ones(1, 2, dtype=torch.bool), floor=0.1)
        torch.testing.assert_close(normalized, noise / 0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", 1.1),
        ("epochs", 0),
        ("clip", 0.0),
        ("lr", -1.0),
        ("epsilon", 2.0),
        ("minibatches", 0),
        ("target_kl", 0.0),
        ("anneal_updates", -1),
    ],
)
def test_settings_outside_their_range_are_named(field: str, value: float) -> None:
    with pytest.raises(EsperError, match=f"PPOConfig: {field} is {value}"):
        PPOConfig(**{field: value})
