"""One seed in one slot of one network: its stage, its alpha and what has been measured about it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

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
    """Exists from germination to the end of the slot's cooldown; weights live in the slot's banks."""

    seed_id: str
    blueprint_id: str
    algorithm: AlphaAlgorithm
    ramp_curve: AlphaCurve
    """Curve of the first ramp."""
    tempo_epochs: int
    """Length of the first ramp."""
    alpha_target: float
    """Target of the first ramp."""
    init_seed: int
    """Source of its initial weights, and of its gate's, whenever it gets one."""
    stage: SeedStage = SeedStage.DORMANT
    alpha: AlphaController = field(default_factory=AlphaController)
    metrics: SeedMetrics = field(default_factory=SeedMetrics)
    prune_cause: PruneCause | None = None
    """Set while a scheduled prune ramps down, and after the prune."""

    def enter(self, stage: SeedStage) -> None:
        """Change stage: the stage's clock restarts and its accuracy baseline is taken anew."""
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
        velocity = self.metrics.contribution_velocity
        if self.metrics.contribution is not None:
            change = contribution - self.metrics.contribution
            if velocity is None:
                velocity = change
            else:
                velocity = VELOCITY_DECAY * velocity + (1 - VELOCITY_DECAY) * change
        self.update_metrics(contribution=contribution, contribution_velocity=velocity, contribution_age=0)

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
        """The optimizer may move the seed's weights: it takes part in a pass and is not being blended out."""
        return self.stage is SeedStage.TRAINING or (self.is_blended and self.alpha.mode is not AlphaMode.DOWN)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for structure.json."""
        return {
            name: int(value) if name in _ENUMS and value is not None else value
            for name, value in asdict(self).items()
        } | {"alpha": {k: int(v) if k in _ALPHA_ENUMS else v for k, v in asdict(self.alpha).items()}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Seed:
        """Strict: a missing, unknown or ill-typed field is an error that names it."""
        check_fields("seed", data, cls)
        check_fields("seed.alpha", data["alpha"], AlphaController)
        check_fields("seed.metrics", data["metrics"], SeedMetrics)
        try:
            values = {k: _ENUMS[k](v) if k in _ENUMS and v is not None else v for k, v in data.items()}
            alpha = {k: _ALPHA_ENUMS[k](v) if k in _ALPHA_ENUMS else v for k, v in data["alpha"].items()}
        except ValueError as error:
            raise StructureError(f"seed {data['seed_id']!r}: {error}") from None
        seed = cls(
            **(values | {"alpha": AlphaController(**alpha), "metrics": SeedMetrics(**data["metrics"])})
        )
        seed._check_values()
        return seed

    def _check_values(self) -> None:
        """What a seed's life allows: numbers in range, and an alpha that its stage can have."""
        a, holds = self.alpha, self.alpha.mode is AlphaMode.HOLD
        full = self.stage in (SeedStage.HOLDING, SeedStage.FOSSILIZED)
        for name, fits in {
            "stage": self.stage not in (SeedStage.UNKNOWN, SeedStage.DORMANT),
            "alpha_target": 0.0 < self.alpha_target <= 1.0,
            "tempo_epochs": self.tempo_epochs >= 1,
            "init_seed": 0 <= self.init_seed < 1 << 63,
            "alpha": all(0.0 <= v <= 1.0 for v in (a.alpha, a.start, a.target))
            and MIN_STEEPNESS <= a.steepness <= MAX_STEEPNESS
            and (a.steps_done == a.steps_total == 0 if holds else 0 <= a.steps_done < a.steps_total)
            and (self.stage is SeedStage.BLENDING or (holds and a.alpha == float(full))),
        }.items():
            if not fits:
                raise StructureError(
                    f"seed {self.seed_id!r} in stage {self.stage.name}: {name} is {getattr(self, name)!r}, "
                    "which no seed in this stage can have"
                )


_ENUMS: dict[str, Any] = {
    "algorithm": AlphaAlgorithm,
    "ramp_curve": AlphaCurve,
    "stage": SeedStage,
    "prune_cause": PruneCause,
}
_ALPHA_ENUMS: dict[str, Any] = {"mode": AlphaMode, "curve": AlphaCurve}


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "float | None": (int, float, type(None)),
    "int | None": (int, type(None)),
    "PruneCause | None": (int, type(None)),
    "AlphaController": (dict,),
    "SeedMetrics": (dict,),
    "frozenset[GateLevel]": (list,),
    "dict[str, Any]": (dict,),
    "dict[str, Any] | None": (dict, type(None)),
    "list[str]": (list,),
    "list[Any]": (list,),
}


def check_fields(where: str, data: Any, cls: Any) -> None:
    """Exactly the fields of the dataclass, each of the kind that JSON has for it (enums are numbers)."""
    if not isinstance(data, dict):
        raise StructureError(f"{where}: found {type(data).__name__}, wanted an object")
    kinds = {f.name: _JSON_TYPES.get(str(f.type), (int,)) for f in fields(cls)}
    if set(data) != set(kinds):
        missing, unknown = sorted(set(kinds) - set(data)), sorted(set(data) - set(kinds))
        raise StructureError(f"{where}: missing fields {missing}, unknown fields {unknown}")
    for name, value in data.items():
        if not isinstance(value, kinds[name]) or (isinstance(value, bool) and bool not in kinds[name]):
            raise StructureError(
                f"{where}: {name} is {value!r}, wanted {' or '.join(k.__name__ for k in kinds[name])}"
            )
