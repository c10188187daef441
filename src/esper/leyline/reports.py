"""What the body tells the brain: the state of each seed and the signals of each training run.

Accuracies and contributions are percentage points (0–100). None means "not measured", never "healthy".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from esper.leyline.alpha import AlphaAlgorithm, AlphaMode
from esper.leyline.errors import SlotIdError, allowed
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage

MAX_GRADIENT_RATIO = 10.0
"""A host without gradient would make the ratio infinite."""
GRADIENT_RATIO_DECAY = 0.9
"""The ratio is smoothed over epochs."""
VELOCITY_DECAY = 0.7
"""So is the change of a contribution, over measurements."""


@dataclass(slots=True)
class SeedMetrics:
    """Everything measured about one seed. Kasmina owns it; reports carry a copy."""

    epochs_total: int = 0
    epochs_in_stage: int = 0
    initial_accuracy: float | None = None
    current_accuracy: float | None = None
    stage_start_accuracy: float | None = None
    contribution: float | None = None
    """Leave-one-out: accuracy of the network minus its accuracy without this seed."""
    contribution_velocity: float | None = None
    contribution_age: int | None = None
    """Epochs since the contribution was measured."""
    interaction_sum: float | None = None
    boost_received: float | None = None
    gradient_norm: float | None = None
    gradient_ratio: float | None = None
    """Seed to host gradient norm, each per square root of its parameters."""
    gradient_health: float | None = None
    gradient_exploding: bool = False
    params: int = 0
    host_params: int = 0

    def improvement_since_stage_start(self) -> float | None:
        if self.current_accuracy is None or self.stage_start_accuracy is None:
            return None
        return self.current_accuracy - self.stage_start_accuracy

    def record_accuracy(self, accuracy: float) -> None:
        """Note this epoch's validation accuracy. Counts no epoch: the stage clock has one owner,
        step_epoch."""
        if self.initial_accuracy is None:
            self.initial_accuracy = self.stage_start_accuracy = accuracy
        self.current_accuracy = accuracy

    def record_gradient(self, norm: float, host_norm: float, vanishing: float, exploding: float) -> None:
        """Note one step's gradient: its norm, the host's, and the share of tensors that vanish or explode."""
        self.gradient_norm = norm
        self.gradient_exploding = exploding > 0
        finite = math.isfinite(norm)
        self.gradient_health = max(0.0, 1.0 - 0.5 * vanishing - 0.8 * exploding) if finite else 0.0
        if not finite or not host_norm > 0.0 or not self.params:
            ratio = 0.0
        else:
            ratio = min(norm / host_norm * math.sqrt(self.host_params / self.params), MAX_GRADIENT_RATIO)
        old = self.gradient_ratio
        self.gradient_ratio = (
            ratio if old is None else GRADIENT_RATIO_DECAY * old + (1 - GRADIENT_RATIO_DECAY) * ratio
        )

    def record_contribution(self, contribution: float) -> None:
        """Note a fresh leave-one-out measurement and update its smoothed change per measurement."""
        if self.contribution is not None:
            change = contribution - self.contribution
            old = self.contribution_velocity
            self.contribution_velocity = (
                change if old is None else VELOCITY_DECAY * old + (1 - VELOCITY_DECAY) * change
            )
        self.contribution = contribution
        self.contribution_age = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedStateReport:
    """One seed as seen from outside. A slot without a report is empty; a cooling slot still reports."""

    slot_id: str
    seed_id: str
    blueprint_id: str
    blueprint_index: int
    stage: SeedStage
    alpha: float
    alpha_target: float
    alpha_mode: AlphaMode
    alpha_steps_total: int
    alpha_steps_done: int
    alpha_velocity: float
    alpha_algorithm: AlphaAlgorithm
    tempo_epochs: int
    can_advance: bool
    """The gate of the next stage would let this seed pass now."""
    can_fossilize: bool
    can_retarget: bool
    can_prune: bool
    metrics: SeedMetrics

    @property
    def time_to_target(self) -> int:
        return max(self.alpha_steps_total - self.alpha_steps_done, 0)


_NUMPY_TYPES = {
    "int": "i8",
    "bool": "?",
    "float": "f8",
    "float | None": "f8",
    "int | None": "f8",
    "SeedStage": "i4",
    "AlphaMode": "i4",
    "AlphaAlgorithm": "i4",
}
_REPORT_FIELDS = tuple(f.name for f in dataclasses.fields(SeedStateReport) if f.type in _NUMPY_TYPES)
_METRIC_FIELDS = tuple(f.name for f in dataclasses.fields(SeedMetrics))
_TYPES = {
    f.name: str(f.type) for f in (*dataclasses.fields(SeedStateReport), *dataclasses.fields(SeedMetrics))
}

REPORT_DTYPE = np.dtype(
    [("occupied", "?"), *((name, _NUMPY_TYPES[_TYPES[name]]) for name in (*_REPORT_FIELDS, *_METRIC_FIELDS))]
)
"""One record per slot, generated from the dataclasses: a new field reaches the arrays by itself. NaN means
unmeasured."""

ReportArray = npt.NDArray[np.void]


def _record(report: SeedStateReport) -> tuple[Any, ...]:
    values = [True, *(getattr(report, name) for name in _REPORT_FIELDS)]
    values += [getattr(report.metrics, name) for name in _METRIC_FIELDS]
    return tuple(np.nan if v is None else v for v in values)


def stack_reports(reports: Sequence[Mapping[str, SeedStateReport]], slots: SlotConfig) -> ReportArray:
    """All reports of all networks as one structured array [E, S]; empty slots are zero records in stage
    DORMANT."""
    table = np.zeros((len(reports), slots.num_slots), REPORT_DTYPE)
    for name in REPORT_DTYPE.names or ():
        if _TYPES.get(name, "").endswith("None"):
            table[name] = np.nan
    table["stage"] = SeedStage.DORMANT
    table["blueprint_index"] = -1
    index = {slot_id: i for i, slot_id in enumerate(slots.slot_ids)}
    for env, by_slot in enumerate(reports):
        for slot_id, report in by_slot.items():
            if slot_id not in index or report.slot_id != slot_id:
                raise SlotIdError(
                    f"report of slot {report.slot_id!r} under the name {slot_id!r}; {allowed(slots.slot_ids)}"
                )
            table[env, index[slot_id]] = _record(report)
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSignals:
    """One network's training run at the end of one epoch."""

    epoch: int
    max_epochs: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    plateau_epochs: int
    host_stabilized: bool
    best_accuracy: float
    loss_history: tuple[float, ...] = field(default=())
    accuracy_history: tuple[float, ...] = field(default=())
