"""One seed in one slot of one network: its stage, its alpha and its measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import msgspec

from esper._files import decode
from esper.kasmina.alpha import MAX_STEEPNESS, MIN_STEEPNESS, AlphaController
from esper.leyline import (
    BLENDED_STAGES,
    COOLDOWN_STAGES,
    AlphaAlgorithm,
    AlphaCurve,
    AlphaMode,
    PruneCause,
    SeedMetrics,
    SeedStage,
    StructureError,
)

GATE_BANK = "_gate"
"""Key of the bank that holds the learned gates of GATE seeds, whatever their blueprint."""

MAX_GRADIENT_RATIO = 10.0
"""A host without gradient would make the ratio infinite."""
GRADIENT_RATIO_DECAY = 0.9
"""The ratio is smoothed over epochs."""
VELOCITY_DECAY = 0.7
"""The change of a contribution is smoothed over measurements."""


@dataclass(slots=True, kw_only=True)
class Seed:
    """A seed exists from germination to the end of the slot's cooldown; the slot's banks hold its weights."""

    seed_id: str
    blueprint_id: str
    algorithm: AlphaAlgorithm
    ramp_curve: AlphaCurve
    """Curve of the first ramp."""
    tempo_epochs: int
    """Length of the first ramp, whose target is 1; 0: no isolation and no ramp (a graft)."""
    init_seed: int
    """Random seed of its initial weights and of its gate's."""
    stage: SeedStage = SeedStage.DORMANT
    alpha: AlphaController = field(default_factory=AlphaController)
    metrics: SeedMetrics = field(default_factory=SeedMetrics)
    prune_cause: PruneCause | None = None
    """Set while a scheduled prune ramps down, and after the prune."""

    def enter(self, stage: SeedStage) -> None:
        """Change stage, restart the stage's clock and take a new accuracy baseline."""
        self.stage = stage
        self.update_metrics(epochs_in_stage=0, stage_start_accuracy=self.metrics.current_accuracy)

    def update_metrics(self, **values: Any) -> None:
        """Replace these measurements."""
        self.metrics = replace(self.metrics, **values)

    def record_accuracy(self, accuracy: float) -> None:
        """Record this epoch's validation accuracy. It counts no epoch: only step_epoch does."""
        if self.metrics.initial_accuracy is None:
            self.update_metrics(initial_accuracy=accuracy, stage_start_accuracy=accuracy)
        self.update_metrics(current_accuracy=accuracy)

    def record_gradient(self, norm: float, host_norm: float, vanishing: float, exploding: float) -> None:
        """Record one step's gradient: its norm, the host's, and the shares of tensors that vanish or
        explode."""
        metrics = self.metrics
        health, ratio = 0.0, 0.0
        if math.isfinite(norm):
            health = max(0.0, 1.0 - 0.5 * vanishing - 0.8 * exploding)
            if host_norm > 0.0 and metrics.params:
                ratio = norm / host_norm * math.sqrt(metrics.host_params / metrics.params)
                ratio = min(ratio, MAX_GRADIENT_RATIO)
        old = metrics.gradient_ratio
        if old is not None:
            ratio = GRADIENT_RATIO_DECAY * old + (1 - GRADIENT_RATIO_DECAY) * ratio
        self.update_metrics(
            gradient_norm=norm,
            gradient_exploding=exploding > 0,
            gradient_health=health,
            gradient_ratio=ratio,
        )

    def record_contribution(self, contribution: float) -> None:
        """Record a fresh leave-one-out measurement and update its smoothed change per measurement."""
        velocity, first = self.metrics.contribution_velocity, self.metrics.first_contribution
        if self.metrics.contribution is not None:
            change = contribution - self.metrics.contribution
            if velocity is None:
                velocity = change
            else:
                velocity = VELOCITY_DECAY * velocity + (1 - VELOCITY_DECAY) * change
        self.update_metrics(
            contribution=contribution,
            first_contribution=contribution if first is None else first,
            contribution_velocity=velocity,
            contribution_age=0,
        )

    @property
    def is_graft(self) -> bool:
        """The seed skips isolation and ramp: it is blended in from its first step."""
        return self.tempo_epochs == 0

    @property
    def bank_names(self) -> tuple[str, ...]:
        """Banks of the slot that hold its weights."""
        return (
            (self.blueprint_id, GATE_BANK) if self.algorithm is AlphaAlgorithm.GATE else (self.blueprint_id,)
        )

    @property
    def is_present(self) -> bool:
        """The seed has weights (a cooling slot's seed has none)."""
        return self.stage not in COOLDOWN_STAGES

    @property
    def is_blended(self) -> bool:
        """The seed changes the network's output."""
        return self.stage in BLENDED_STAGES and self.alpha.alpha > 0.0

    @property
    def is_learning(self) -> bool:
        """The optimizer may change the seed's weights: it is in the forward pass and is not being removed."""
        return self.stage is SeedStage.TRAINING or (self.is_blended and self.alpha.mode is not AlphaMode.DOWN)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for structure.json and checkpoints."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_dict(cls, data: object, origin: object = "seed") -> Seed:
        """Decode strictly: a missing, unknown or ill-typed field is an error that names it."""
        seed = decode(cls, data, origin, complete=True)
        seed.check()
        return seed

    def check(self) -> None:
        """Raise a StructureError unless every number is in range and the stage allows this alpha."""
        if self.stage in (SeedStage.UNKNOWN, SeedStage.DORMANT):
            self._refuse("stage", "a seed's own stage")
        if self.tempo_epochs < 0:
            self._refuse("tempo_epochs", "0 or more")
        if self.init_seed < 0:
            self._refuse("init_seed", "0 or more")
        alpha = self.alpha
        if not all(0.0 <= value <= 1.0 for value in (alpha.alpha, alpha.start, alpha.target)):
            self._refuse("alpha", "alpha, start and target in [0, 1]")
        if not MIN_STEEPNESS <= alpha.steepness <= MAX_STEEPNESS:
            self._refuse("alpha", f"a steepness in [{MIN_STEEPNESS:g}, {MAX_STEEPNESS:g}]")
        if alpha.mode is AlphaMode.HOLD:
            if alpha.steps_done != 0 or alpha.steps_total != 0:
                self._refuse("alpha", "no steps, because it holds")
        elif not 0 <= alpha.steps_done < alpha.steps_total:
            self._refuse("alpha", "fewer steps done than in total")
        if self.stage is not SeedStage.BLENDING:
            full = self.stage in (SeedStage.HOLDING, SeedStage.FOSSILIZED)
            if alpha.mode is not AlphaMode.HOLD or alpha.alpha != float(full):
                self._refuse("alpha", f"to hold at {float(full)}")

    def _refuse(self, name: str, legal: str) -> NoReturn:
        raise StructureError(
            f"seed {self.seed_id!r} in stage {self.stage.name}: {name} is {getattr(self, name)!r}, "
            f"which no seed in this stage can have; allowed: {legal}"
        )
