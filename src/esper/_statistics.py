"""Means and differences with intervals, by the bootstrap: what comparisons are reported with.

Randomness comes from a fixed stream, so that the same figures give the same interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from esper.leyline.errors import EsperError
from esper.leyline.rng import stream_seed

RESAMPLES = 5000
Statistic = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""[resamples, N] → [resamples]"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def mean(samples: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(samples.mean(-1))


def interquartile_mean(samples: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The mean of the middle half: robust, and it still uses half of the sample."""
    ordered = np.sort(samples, -1)
    size = samples.shape[-1]
    weights = np.clip(np.minimum(np.arange(1, size + 1) - size / 4, 3 * size / 4 - np.arange(size)), 0.0, 1.0)
    return np.asarray(ordered @ (weights / weights.sum()))


def estimate(
    samples: Sequence[float] | npt.NDArray[np.float64],
    *,
    strata: Sequence[int] | None = None,
    statistic: Statistic = mean,
) -> Estimate:
    """A statistic of a sample with its percentile bootstrap interval; resampled within each stratum, if there
    are any. Of [N, K] figures the K of one unit, which may depend on each other, are drawn together."""
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim not in (1, 2) or not values.size or not np.isfinite(values).all():
        raise EsperError(
            f"an estimate needs finite numbers, [N] or [N, K], got shape {values.shape} with "
            f"{np.count_nonzero(~np.isfinite(values))} that are not finite"
        )
    groups = np.zeros(len(values), dtype=np.int64) if strata is None else np.asarray(strata)
    if groups.shape != values.shape[:1]:
        raise EsperError(f"{len(groups)} strata for {len(values)} samples")
    rng = np.random.default_rng(stream_seed(0, "sampling", len(values)))
    drawn = [
        values[members][rng.integers(len(members), size=(RESAMPLES, len(members)))].reshape(RESAMPLES, -1)
        for members in (np.flatnonzero(groups == group) for group in np.unique(groups))
    ]
    low, high = np.quantile(statistic(np.concatenate(drawn, 1)), (0.025, 0.975))
    return Estimate(float(statistic(values.reshape(1, -1))[0]), float(low), float(high))


def nested(
    samples: npt.NDArray[np.float64],
    *,
    statistic: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]] = lambda drawn: drawn.mean(
        (1, 2)
    ),
) -> Estimate:
    """A statistic of [G, N] figures, N of each of G groups, with its percentile bootstrap interval. Groups
    are resampled, then figures within each drawn group, so both the luck of groups and that of their members
    counts. `statistic` maps [resamples, G, N] to [resamples]."""
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        raise EsperError(
            f"a nested estimate needs finite numbers, [groups, N], got shape {values.shape} with "
            f"{np.count_nonzero(~np.isfinite(values))} that are not finite"
        )
    groups, members = values.shape
    rng = np.random.default_rng(stream_seed(0, "sampling", groups, members))
    group = rng.integers(groups, size=(RESAMPLES, groups, 1))
    member = rng.integers(members, size=(RESAMPLES, groups, members))
    low, high = np.quantile(statistic(values[group, member]), (0.025, 0.975))
    return Estimate(float(statistic(values[None])[0]), float(low), float(high))


def paired(
    one: Sequence[float] | npt.NDArray[np.float64],
    other: Sequence[float] | npt.NDArray[np.float64],
    *,
    statistic: Statistic = mean,
) -> Estimate:
    """The estimate of one − other, pair by pair."""
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if a.shape != b.shape:
        raise EsperError(f"{len(a)} figures cannot be paired with {len(b)}")
    return estimate(a - b, statistic=statistic)
