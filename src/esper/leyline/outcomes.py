"""The objective J that every policy is judged by, and the outcome of one episode."""

from __future__ import annotations

import math
from dataclasses import dataclass

from esper.leyline.errors import EsperError, check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """Prices in J. The task owns them; they are fixed before any policy is trained."""

    size_price: float = 0.05
    """λ: cost of ln(1 + added/host parameters)."""
    waste_price: float = 0.01
    """κ: cost of each seed germinated and not fossilized."""
    rollback_price: float = 0.1
    """Cost of each rollback by the governor."""

    def __post_init__(self) -> None:
        check_numbers("objective", self)


def objective(
    config: ObjectiveConfig,
    *,
    committed_accuracy: float,
    added_params: int,
    host_params: int,
    wasted_seeds: int,
    rollbacks: int,
) -> float:
    """J: committed accuracy in [0, 1] (fossilized seeds on, live ones off) minus the price of growth."""
    if not 0.0 <= committed_accuracy <= 1.0:
        raise EsperError(
            f"objective: committed accuracy is {committed_accuracy}, must lie in [0, 1], not in percentage "
            "points"
        )
    size = math.log1p(added_params / host_params)
    return (
        committed_accuracy
        - config.size_price * size
        - config.waste_price * wasted_seeds
        - config.rollback_price * rollbacks
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcome:
    """The outcome of one episode of one env, written exactly once."""

    env_id: int
    task: str
    """Name of the task that the env belongs to."""
    episode_idx: int
    epochs: int
    final_accuracy: float
    """Percentage points, all blended seeds on."""
    committed_accuracy: float
    """Percentage points, fossilized seeds only."""
    objective: float
    total_reward: float
    host_params: int
    added_params: int
    """Parameters of the fossilized seeds."""
    germinated: int
    fossilized: int
    pruned: int
    rollbacks: int
