"""What one PPO update reports about itself: one frozen record whose fields carry unit, reducer and meaning."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

from esper.leyline import HEAD_NAMES, EsperError

Reducer = Callable[[Sequence[float]], float]
REDUCERS: dict[str, Reducer] = {"mean": fmean, "max": max, "min": min, "sum": sum, "first": lambda values: values[0],
                                "last": lambda values: values[-1]}
"""How a metric of several updates becomes one."""


def _metric(unit: str, reducer: str, meaning: str) -> Any:
    return field(metadata={"unit": unit, "reducer": reducer, "meaning": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOUpdateMetrics:
    """Losses and ratios are means over the update's optimizer steps; the rest describes the rollout or the schedules."""

    update: int = _metric("updates", "last", "Number of this update, counted from 1.")
    steps: int = _metric("steps", "sum", "Valid steps in the rollout.")
    choice_fraction: float = _metric("share", "mean", "Share of valid steps at which more than one action was legal.")
    reward_mean: float = _metric("reward", "mean", "Mean stored reward of a valid step.")
    return_mean: float = _metric("reward", "mean", "Mean target of the value head.")
    return_std: float = _metric("reward", "mean", "Spread of the value head's targets.")
    value_mean: float = _metric("reward", "mean", "Mean value that the policy predicted while acting.")
    explained_variance: float = _metric("share", "mean", "1 − Var(return − value) / Var(return); 1 is perfect, 0 is a constant.")
    advantage_std: float = _metric("reward", "mean", "Spread of advantages before normalisation, where there was a choice.")
    policy_loss: float = _metric("advantage", "mean", "Clipped surrogate loss.")
    value_loss: float = _metric("return variance", "mean", "Half the squared error of the normalised value.")
    entropy: float = _metric("nats", "mean", "Chain-rule entropy of the joint action.")
    approx_kl: float = _metric("nats", "mean", "KL divergence from the acting policy, estimated as ratio − 1 − log ratio.")
    approx_kl_max: float = _metric("nats", "max", "Largest KL estimate of a minibatch.")
    clip_fraction: float = _metric("share", "mean", "Share of steps whose ratio left the clip range.")
    ratio_max: float = _metric("ratio", "max", "Largest probability ratio to the acting policy.")
    ratio_min: float = _metric("ratio", "min", "Smallest probability ratio to the acting policy.")
    log_prob_drift: float = _metric("nats", "first", "Largest difference between acting and update log-probs before any step.")
    grad_norm: float = _metric("norm", "mean", "Gradient norm before clipping.")
    grad_norm_max: float = _metric("norm", "max", "Largest gradient norm before clipping.")
    optimizer_steps: int = _metric("steps", "sum", "Optimizer steps taken.")
    skipped_steps: int = _metric("steps", "sum", "Optimizer steps skipped because loss or gradient was not finite.")
    kl_stops: int = _metric("updates", "sum", "Updates that ended early because the KL estimate passed its limit.")
    learning_rate: float = _metric("rate", "last", "Learning rate of this update.")
    entropy_coef: float = _metric("coefficient", "last", "Weight of the entropy bonus, as annealed.")
    epsilon: float = _metric("share", "last", "Share of uniform exploration in the acting policy.")
    value_scale: float = _metric("reward", "last", "PopArt's scale of returns.")
    head_entropy: tuple[float, ...] = _metric("nats", "mean", f"Each head's share of the entropy: {', '.join(HEAD_NAMES)}.")
    head_kl: tuple[float, ...] = _metric("nats", "mean", f"Each head's KL estimate: {', '.join(HEAD_NAMES)}.")


def aggregate(updates: Sequence[PPOUpdateMetrics]) -> PPOUpdateMetrics:
    """One record for several updates, each field by its reducer; tuples element by element."""
    if not updates:
        raise EsperError("no updates to aggregate; run at least one")
    merged: dict[str, Any] = {}
    for f in fields(PPOUpdateMetrics):
        reduce = REDUCERS[f.metadata["reducer"]]
        values = [getattr(u, f.name) for u in updates]
        merged[f.name] = tuple(map(reduce, zip(*values, strict=True))) if isinstance(values[0], tuple) else reduce(values)
    return PPOUpdateMetrics(**merged)
