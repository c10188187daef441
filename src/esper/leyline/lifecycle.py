"""Pacing and gates of the lifecycle, and the records that lifecycle operations return."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from esper.leyline.errors import EsperError, check_numbers
from esper.leyline.stages import GateLevel, SeedStage

AUTOMATIC_GATES = frozenset({GateLevel.G1, GateLevel.G2, GateLevel.G3, GateLevel.G5})
"""Gates that the epoch clock can open without an action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """Durations of the lifecycle in epochs. The task owns them, because epochs differ between tasks."""

    min_training_epochs: int = 10
    """Minimum number of epochs in TRAINING for G2."""
    min_blending_epochs: int = 10
    """Minimum number of epochs in BLENDING for strict G3."""
    min_prune_age: int = 5
    """Minimum age at which the policy may prune a seed."""
    embargo_epochs: int = 5
    """Number of epochs that a slot stays EMBARGOED after a prune."""
    auto_forward_gates: frozenset[GateLevel] = frozenset()
    """Gates (G1, G2, G3, G5) that a seed passes without an action, as soon as they open. G5 opens for the
    clock after one epoch in HOLDING, for at most one seed of a network per epoch."""

    def epochs_to_permanence(self, tempo_epochs: int, *, strict: bool = False) -> int:
        """Smallest number of epochs from the decision to germinate to the decision, or the tick of the clock,
        that makes the seed permanent. `strict` gates have a minimum time in BLENDING."""
        if tempo_epochs == 0:
            return 1  # a graft holds at once, and its contribution is measured one epoch later
        started = 0 if GateLevel.G1 in self.auto_forward_gates else 1
        # G2 needs a measured gradient, so at least one epoch of training.
        blended = started + max(self.min_training_epochs, 1)
        held = blended + (max(tempo_epochs, self.min_blending_epochs) if strict else tempo_epochs)
        return held + 1

    def __post_init__(self) -> None:
        check_numbers("pacing", self)
        if not self.auto_forward_gates <= AUTOMATIC_GATES:
            names = ", ".join(f"G{int(gate)}" for gate in sorted(self.auto_forward_gates))
            raise EsperError(f"pacing: auto_forward_gates is {names}; allowed: G1, G2, G3, G5")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Thresholds of the gates. Accuracies and contributions are percentage points."""

    permissive: bool = False
    min_training_improvement: float = 0.5
    min_gradient_ratio: float = 0.10
    min_gradient_health: float = 0.7
    min_contribution: float = 1.0

    def __post_init__(self) -> None:
        check_numbers("gates", self)


class GateReason(StrEnum):
    """Why a gate stays shut."""

    MISSING_ID = "missing_id"
    TOO_YOUNG = "too_young"
    GRADIENT_UNMEASURED = "gradient_unmeasured"
    GRADIENT_EXPLODING = "gradient_exploding"
    GRADIENT_UNHEALTHY = "gradient_unhealthy"
    GRADIENT_RATIO_LOW = "gradient_ratio_low"
    IMPROVEMENT_LOW = "improvement_low"
    TARGET_NOT_FULL = "target_not_full"
    ALPHA_NOT_AT_TARGET = "alpha_not_at_target"
    CONTRIBUTION_UNMEASURED = "contribution_unmeasured"
    CONTRIBUTION_LOW = "contribution_low"


@dataclass(frozen=True, slots=True)
class GateFailure:
    """One failed check: its code, the measured value (None if unmeasured) and the limit."""

    reason: GateReason
    value: float | None
    limit: float | None


@dataclass(frozen=True, slots=True)
class GateResult:
    gate: GateLevel
    failures: tuple[GateFailure, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures


class LifecycleKind(StrEnum):
    """Kinds of lifecycle records."""

    GERMINATED = "germinated"
    GATE_REFUSED = "gate_refused"
    STAGE_CHANGED = "stage_changed"
    RETARGETED = "retargeted"
    PRUNE_SCHEDULED = "prune_scheduled"
    FOSSILIZED = "fossilized"
    PRUNED = "pruned"


class PruneCause(IntEnum):
    """Why a seed was removed. Value 1 is retired."""

    POLICY = 0
    ROLLBACK = 2


class FossilizeCause(IntEnum):
    """Why a seed became permanent: by an action, or because the clock opened G5."""

    POLICY = 0
    CLOCK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleRecord:
    """Change of one seed by one lifecycle operation or one tick of the clock."""

    kind: LifecycleKind
    row: int
    slot_id: str
    seed_id: str
    blueprint_id: str
    stage_from: SeedStage
    stage_to: SeedStage
    alpha: float
    params: int
    epochs_total: int
    contribution: float | None = None
    gate: GateResult | None = None
    cause: PruneCause | FossilizeCause | None = None
    """Set if the seed was removed or became permanent."""


@dataclass(frozen=True, slots=True)
class OpResult:
    """Outcome of a legal operation. `done` is False only if a gate refused; an illegal operation raises."""

    done: bool
    records: tuple[LifecycleRecord, ...] = ()
    gate: GateResult | None = None
