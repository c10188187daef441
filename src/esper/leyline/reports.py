"""Reports from Kasmina to Tamiyo: the state of each seed and the signals of each training run.

Accuracies and contributions are percentage points (0–100). None means "not measured", never "healthy".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from esper.leyline.actions import AlphaAlgorithm, AlphaMode, LifecycleOp
from esper.leyline.errors import SlotIdError, allowed
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage, Veto, legal_ops


@dataclass(frozen=True, slots=True)
class SeedMetrics:
    """Everything measured about one seed. Its seed in Kasmina replaces it with each measurement."""

    epochs_total: int = 0
    epochs_in_stage: int = 0
    initial_accuracy: float | None = None
    current_accuracy: float | None = None
    stage_start_accuracy: float | None = None
    contribution: float | None = None
    """Leave-one-out: accuracy of the network minus its accuracy without this seed."""
    first_contribution: float | None = None
    """The first that was measured: later ones grow because the host comes to rely on the seed."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedStateReport:
    """One seed as seen from outside. An empty slot has no report; a slot in cooldown still has one."""

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
    vetoes: Mapping[LifecycleOp, Veto]
    """Every operation that is not possible in this slot now, with the reason; the others are legal."""
    metrics: SeedMetrics

    @property
    def can_advance(self) -> bool:
        """The gate of the next stage is open for this seed now."""
        return LifecycleOp.ADVANCE not in self.vetoes

    @property
    def can_fossilize(self) -> bool:
        return LifecycleOp.FOSSILIZE not in self.vetoes

    @property
    def can_retarget(self) -> bool:
        return LifecycleOp.SET_ALPHA_TARGET not in self.vetoes

    @property
    def can_prune(self) -> bool:
        return LifecycleOp.PRUNE not in self.vetoes

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
    [
        ("occupied", "?"),
        ("legal", "?", (len(LifecycleOp),)),
        *((name, _NUMPY_TYPES[_TYPES[name]]) for name in (*_REPORT_FIELDS, *_METRIC_FIELDS)),
    ]
)
"""One record per slot, generated from the dataclasses: a new field reaches the arrays by itself. NaN means
unmeasured. `legal` has one flag per operation, in the order of LifecycleOp."""

_LEGAL_WHERE_EMPTY = [op in (LifecycleOp.WAIT, *legal_ops(SeedStage.DORMANT)) for op in LifecycleOp]

ReportArray = npt.NDArray[np.void]


def _record(report: SeedStateReport) -> tuple[Any, ...]:
    legal = tuple(op not in report.vetoes for op in LifecycleOp)
    values = [True, legal, *(getattr(report, name) for name in _REPORT_FIELDS)]
    values += [getattr(report.metrics, name) for name in _METRIC_FIELDS]
    return tuple(np.nan if v is None else v for v in values)


def stack_reports(reports: Sequence[Mapping[str, SeedStateReport]], slots: SlotConfig) -> ReportArray:
    """All reports of all networks as one structured array [E, S]. Empty slots are zero records in stage
    DORMANT, with the operations that are legal there."""
    table = np.zeros((len(reports), slots.num_slots), REPORT_DTYPE)
    for name in REPORT_DTYPE.names or ():
        if _TYPES.get(name, "").endswith("None"):
            table[name] = np.nan
    table["stage"] = SeedStage.DORMANT
    table["legal"] = _LEGAL_WHERE_EMPTY
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


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """How far a training run has come. NaN: the horizon is unknown."""

    epoch: int
    """Number of epochs that are over."""
    progress: float
    """Share of the budget that is spent."""
    epochs_left: float
    """Estimate where the budget does not count epochs."""
    steps_left: float
    """Optimizer steps."""

    @classmethod
    def of_epochs(cls, epoch: int, epochs: float, steps_per_epoch: float) -> TimeLeft:
        """Where the budget is a number of epochs; NaN: unknown."""
        left = epochs - epoch
        return cls(epoch, epoch / epochs, left, left * steps_per_epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSignals:
    """One network's training run at the end of one epoch."""

    time: TimeLeft
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    plateau_epochs: int
    host_stabilized: bool
    best_accuracy: float
    loss_history: tuple[float, ...] = field(default=())
    accuracy_history: tuple[float, ...] = field(default=())
