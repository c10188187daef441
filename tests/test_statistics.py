"""Intervals that resample groups, then their members, against a slow reference."""

from __future__ import annotations

import random
from statistics import fmean

import numpy as np
import pytest

from esper._statistics import nested
from esper.leyline import EsperError


def slow_interval(values: list[list[float]], draws: int) -> tuple[float, float]:
    """One resample at a time, with random numbers of its own."""
    rng, means = random.Random(5), []
    for _ in range(draws):
        drawn = []
        for _ in values:
            group = values[rng.randrange(len(values))]
            drawn.append(fmean(group[rng.randrange(len(group))] for _ in group))
        means.append(fmean(drawn))
    means.sort()
    return means[round(0.025 * draws)], means[round(0.975 * draws)]


@pytest.mark.parametrize(("between", "within"), [(1.0, 0.1), (0.1, 1.0), (1.0, 1.0)])
def test_nested_intervals_are_those_of_a_slow_reference(between: float, within: float) -> None:
    rng = np.random.default_rng(3)
    values = 5 + between * rng.normal(size=(12, 1)) + within * rng.normal(size=(12, 3))
    found = nested(values)
    low, high = slow_interval(values.tolist(), 4000)
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.06 * (high - low))


def test_equal_members_leave_the_luck_of_groups_and_equal_groups_that_of_members() -> None:
    column, row = np.arange(8.0)[:, None], np.array([[0.0, 1.0]])
    assert nested(np.repeat(column, 5, 1)) != nested(np.zeros((8, 5)))
    found = nested(np.repeat(row, 400, 0))
    # 800 fair coins: two standard errors are 2 · 0.5 / √800.
    assert (found.low, found.high) == pytest.approx((0.5 - 0.0346, 0.5 + 0.0346), abs=0.004)


def test_the_same_figures_give_the_same_interval() -> None:
    values = np.random.default_rng(0).normal(size=(5, 2))
    assert nested(values) == nested(values.copy())


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((0, 2)), np.array([[1.0, np.nan]])])
def test_what_has_no_interval_is_refused(values: np.ndarray) -> None:
    with pytest.raises(EsperError, match="nested estimate needs finite numbers"):
        nested(values)
