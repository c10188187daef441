"""Typed boundaries of the environment step: the action, its outcome, and the inputs of a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Self

from esper.leyline import (
    AlphaAlgorithm,
    AlphaCurve,
    EpisodeOutcome,
    GateResult,
    LifecycleOp,
    LifecycleRecord,
    SeedStateReport,
    Veto,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSpec:
    """A sampled action, decoded. `veto` is the reason why it cannot be executed; None if it can."""

    env_idx: int
    op: LifecycleOp
    slot_id: str
    slot_index: int
    blueprint_id: str
    algorithm: AlphaAlgorithm
    ramp_curve: AlphaCurve
    tempo_epochs: int
    alpha_target: float
    alpha_steps: int
    alpha_curve: AlphaCurve
    alpha_steepness: float
    veto: Veto | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOutcome:
    """Outcome of an action. `effective_op` is WAIT if the action changed nothing."""

    spec: ActionSpec
    executed: bool
    effective_op: LifecycleOp
    gate: GateResult | None = None
    records: tuple[LifecycleRecord, ...] = ()
    """Changes by the action and by this epoch's tick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvMeasure:
    """One network at one moment, as rewards and outcomes see it. Accuracies are percentage points."""

    accuracy: float
    committed_accuracy: float
    loss: float
    committed_loss: float
    host_params: int
    committed_params: int
    """Parameters of fossilized seeds."""
    germinated: int
    fossilized: int
    pruned: int
    rollbacks: int
    reports: Mapping[str, SeedStateReport]
    contributions: Mapping[str, float]
    """Leave-one-out of this epoch's blended seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInputs:
    """One step of one env: the state after the previous step's tick, the outcome of the action, and the state
    after this step's tick. `before` is None at the start of a segment: the start of the episode, or after a
    rollback."""

    env_idx: int
    epoch: int
    max_epochs: int
    """Number of the episode's last epoch. Where a budget of FLOPs ends it, that is an estimate until it is
    reached."""
    outcome: ActionOutcome
    before: EnvMeasure | None
    after: EnvMeasure

    @property
    def is_last(self) -> bool:
        return self.epoch >= self.max_epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSummary:
    """One round over the envs of one task, or of all tasks."""

    mean_accuracy: float
    mean_committed_accuracy: float
    mean_objective: float
    mean_reward: float
    mean_added_params: float
    rollbacks: int

    @classmethod
    def of(cls, outcomes: Sequence[EpisodeOutcome]) -> Self:
        return cls(
            mean_accuracy=fmean(o.final_accuracy for o in outcomes),
            mean_committed_accuracy=fmean(o.committed_accuracy for o in outcomes),
            mean_objective=fmean(o.objective for o in outcomes),
            mean_reward=fmean(o.total_reward for o in outcomes),
            mean_added_params=fmean(o.added_params for o in outcomes),
            rollbacks=sum(o.rollbacks for o in outcomes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """One round over all envs."""

    round_idx: int
    episodes_completed: int
    """Number of episodes finished so far, over all envs and rounds."""
    env_steps: int = 0
    """Number of env steps taken so far: each epoch of each episode is one."""
    mean_accuracy: float
    mean_committed_accuracy: float
    mean_objective: float
    mean_reward: float
    mean_added_params: float
    rollbacks: int
    objectives: tuple[float, ...] = ()
    """J of each env."""
    by_task: Mapping[str, TaskSummary] = field(default_factory=dict)
    """The same figures for the envs of each task."""
    plan_gain: float | None = None
    """J of the plans that action values held for the best, above growing nothing; None in a round without
    them, as the next two."""
    explored_gain: float | None = None
    """The same for the plans that explored."""
    value_error: float | None = None
    action_counts: Mapping[str, int] = field(default_factory=dict)
    action_successes: Mapping[str, int] = field(default_factory=dict)
