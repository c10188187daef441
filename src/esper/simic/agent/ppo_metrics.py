"""Metrics of one PPO update, and how those of several updates are combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from operator import itemgetter
from statistics import fmean
from typing import Any

from esper.leyline import EsperError


def _by(reducer: Callable[[Sequence[float]], float]) -> Any:
    """A metric that is combined by this function instead of the mean."""
    return field(metadata={"reducer": reducer})


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOUpdateMetrics:
    """Losses and ratios are means over the optimizer steps that were kept; the rest describes the rollout or
    the schedules. Without a kept step they describe the unchanged policy. The metric registry explains each
    metric."""

    update: int = _by(itemgetter(-1))
    steps: int = _by(sum)
    choice_fraction: float
    reward_mean: float
    return_mean: float
    return_std: float
    value_mean: float
    explained_variance: float
    advantage_std: float
    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float
    approx_kl_max: float = _by(max)
    clip_fraction: float
    ratio_max: float = _by(max)
    ratio_min: float = _by(min)
    log_prob_drift: float = _by(itemgetter(0))
    grad_norm: float
    grad_norm_max: float = _by(max)
    optimizer_steps: int = _by(sum)
    skipped_steps: int = _by(sum)
    kl_stops: int = _by(sum)
    learning_rate: float = _by(itemgetter(-1))
    entropy_coef: float = _by(itemgetter(-1))
    epsilon: float = _by(itemgetter(-1))
    value_scale: float = _by(itemgetter(-1))
    head_entropy: tuple[float, ...]
    head_kl: tuple[float, ...]


def aggregate(updates: Sequence[PPOUpdateMetrics]) -> PPOUpdateMetrics:
    """One record for several updates, each field by its reducer; tuples element by element."""
    if not updates:
        raise EsperError("no updates to aggregate; run at least one")
    merged: dict[str, Any] = {}
    for f in fields(PPOUpdateMetrics):
        reduce = f.metadata.get("reducer", fmean)
        values = [getattr(u, f.name) for u in updates]
        merged[f.name] = (
            tuple(map(reduce, zip(*values, strict=True))) if isinstance(values[0], tuple) else reduce(values)
        )
    return PPOUpdateMetrics(**merged)
