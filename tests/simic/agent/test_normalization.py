"""Running statistics against numpy, the reward scale's promises, and PopArt's exact rescaling."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from esper.leyline import EsperError, StructureError
from esper.simic.agent.normalization import PopArt, RewardNormalizer, RunningMeanStd

numbers = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20)


class TestRunningMeanStd:
    @given(st.lists(numbers, min_size=1, max_size=6))
    @settings(max_examples=100, deadline=None)
    def test_batches_add_up_to_their_concatenation(self, batches: list[list[float]]) -> None:
        running = RunningMeanStd()
        for batch in batches:
            running.update(np.array(batch))
        together = np.concatenate([np.array(b) for b in batches])
        np.testing.assert_allclose(running.mean, together.mean(), atol=1e-8, rtol=1e-9)
        np.testing.assert_allclose(running.var, together.var(), atol=1e-6, rtol=1e-9)

    def test_decay_weighs_older_batches_less(self) -> None:
        running = RunningMeanStd(decay=0.5)
        old, new = np.array([0.0, 2.0]), np.array([10.0, 12.0, 14.0])
        running.update(old)
        running.update(new)
        weights = np.array([0.5, 0.5, 1, 1, 1])
        values = np.concatenate([old, new])
        mean = np.average(values, weights=weights)
        np.testing.assert_allclose(running.mean, mean)
        np.testing.assert_allclose(running.var, np.average((values - mean) ** 2, weights=weights))

    def test_vectors_have_statistics_of_their_own(self) -> None:
        running = RunningMeanStd((2,))
        running.update(np.array([[0.0, 5.0], [2.0, 5.0]]))
        np.testing.assert_allclose((running.mean, running.var), ([1.0, 5.0], [1.0, 0.0]))

    def test_state_survives_json_exactly(self) -> None:
        running = RunningMeanStd((3,), decay=0.9)
        running.update(np.random.default_rng(0).normal(size=(7, 3)))
        again = RunningMeanStd((3,))
        again.load_state_dict(json.loads(json.dumps(running.state_dict())))
        assert again.state_dict() == running.state_dict()

    def test_wrong_shapes_and_states_are_named(self) -> None:
        with pytest.raises(EsperError, match=r"batch of shape \(4, 2\)"):
            RunningMeanStd((3,)).update(np.zeros((4, 2)))
        with pytest.raises(EsperError, match="1 non-finite values of 2"):
            RunningMeanStd().update([1.0, np.nan])
        with pytest.raises(StructureError, match="field var is missing"):
            RunningMeanStd().load_state_dict({"mean": 0.0})
        with pytest.raises(StructureError, match="shape"):
            RunningMeanStd((2,)).load_state_dict(RunningMeanStd((3,)).state_dict())


class TestRewardNormalizer:
    def test_the_scale_is_the_root_mean_square_of_all_rounds(self) -> None:
        normalizer, rng = RewardNormalizer(), np.random.default_rng(0)
        rounds = [rng.normal(1.0, 2.0, size=(4, n)) for n in (5, 1, 9)]
        for rewards in rounds:
            normalizer.update(rewards)
        everything = np.concatenate([r.ravel() for r in rounds])
        assert normalizer.scale == pytest.approx(np.sqrt((everything**2).mean()), rel=1e-12)

    def test_it_scales_without_shifting_and_only_between_rounds(self) -> None:
        normalizer = RewardNormalizer()
        assert normalizer.normalize(-3.0) == -3.0
        normalizer.update(torch.tensor([[3.0, -4.0]]))
        values = [normalizer.normalize(r) for r in (-100.0, 0.0, 7.0)]
        assert values == [normalizer.normalize(r) for r in (-100.0, 0.0, 7.0)]
        assert values[1] == 0.0
        assert values[0] / values[2] == pytest.approx(-100 / 7)

    def test_it_stays_positive_when_nothing_is_paid(self) -> None:
        normalizer = RewardNormalizer()
        normalizer.update(np.zeros((3, 4)))
        normalizer.update(np.zeros((0,)))
        assert normalizer.scale == 1.0

    def test_state_survives_json_exactly_and_is_checked(self) -> None:
        normalizer = RewardNormalizer()
        normalizer.update(np.random.default_rng(1).normal(size=11))
        again = RewardNormalizer()
        again.load_state_dict(json.loads(json.dumps(normalizer.state_dict())))
        assert again.scale == normalizer.scale
        with pytest.raises(StructureError, match="mean_square is -1"):
            again.load_state_dict({"mean_square": -1.0, "count": 3})


class TestPopArt:
    @pytest.mark.parametrize("decay", [1.0, 0.9])
    @pytest.mark.parametrize(
        ("dtype", "rounds", "tolerance"),
        [
            (torch.float64, ((100.0, 5.0), (-3.0, 0.2), (40.0, 30.0)), 1e-9),
            (torch.float32, ((0.5, 0.2), (0.7, 0.05), (0.9, 0.1)), 1e-6),
        ],
    )
    def test_values_stay_and_targets_become_standard(
        self, decay: float, dtype: torch.dtype, rounds, tolerance: float
    ) -> None:
        torch.manual_seed(0)
        out = nn.Linear(16, 1, dtype=dtype)
        mean, scale = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
        family = torch.zeros(50, dtype=torch.int64)
        popart = PopArt(out, mean, scale, decay=decay)
        x, rng = torch.randn(32, 16, dtype=dtype), np.random.default_rng(0)
        weight, sums = 0.0, np.zeros(2)
        for center, spread in rounds:
            returns = torch.tensor(rng.normal(center, spread, size=50), dtype=dtype)
            before = (out(x) * scale + mean).detach()
            popart.update(returns, family)
            torch.testing.assert_close((out(x) * scale + mean).detach(), before, atol=tolerance, rtol=0)
            # Reference: weighted raw moments.
            r = returns.double().numpy()
            weight, sums = weight * decay + 50, sums * decay + np.array([r.sum(), (r**2).sum()])
            expected_mean = sums[0] / weight
            expected_scale = np.sqrt(sums[1] / weight - expected_mean**2)
            assert float(mean) == pytest.approx(expected_mean, rel=1e-6)
            assert float(scale) == pytest.approx(expected_scale, rel=1e-6)
            np.testing.assert_allclose(
                popart.normalize(returns, family).numpy(), (r - expected_mean) / expected_scale, atol=2e-6
            )

    def test_constant_returns_do_not_divide_by_nothing(self) -> None:
        out, mean, scale = nn.Linear(2, 1), torch.zeros(1), torch.ones(1)
        popart = PopArt(out, mean, scale)
        popart.update(torch.full((10,), 3.0), torch.zeros(10, dtype=torch.int64))
        assert float(scale) == pytest.approx(PopArt.MIN_SCALE)
        assert out.weight.isfinite().all()
        assert popart.normalize(torch.tensor([3.0]), torch.tensor([0])).item() == 0.0

    def test_every_family_has_its_own_statistics_and_rows(self) -> None:
        """Two families mixed in one batch give what each gives alone; a third without returns stays."""
        torch.manual_seed(0)
        weight, bias = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        heads = []
        for _ in range(4):  # all families together, then each alone
            out = nn.Linear(4, 3, dtype=torch.float64)
            out.load_state_dict({"weight": weight, "bias": bias})
            heads.append((out, torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)))
        together, *alone = [PopArt(*head) for head in heads]
        for seed in range(3):
            torch.manual_seed(seed)
            family = torch.randint(0, 2, (40,))
            returns = torch.randn(40, dtype=torch.float64) * (1 + 99 * family) + 5 * family
            together.update(returns, family)
            for index, popart in enumerate(alone):
                own = family == index
                popart.update(returns[own], family[own])
        for index, popart in enumerate(alone):
            for name in ("mean", "scale"):
                assert torch.equal(getattr(together, name)[index], getattr(popart, name)[index])
            assert torch.equal(together.out.weight[index], popart.out.weight[index])
            assert torch.equal(together.out.bias[index], popart.out.bias[index])
        assert torch.equal(together.out.weight[2], weight[2])
        assert together.scale[1] > 50 * together.scale[0]
