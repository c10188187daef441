"""One row of a population, used like a single model with its own optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from esper.kasmina.coalitions import blended_slots, evaluate_coalitions
from esper.kasmina.export import export_row
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optim import PopulationOptimizer
from esper.kasmina.snapshot import RowSnapshot, restore_row, snapshot_row
from esper.leyline import LIVE_STAGES, LifecycleRecord, OpResult, PruneCause, SeedStateReport


@dataclass(frozen=True, slots=True)
class NetworkRow:
    """A view: operations act on the population, this row only."""

    model: MorphogeneticModel
    row: int = 0

    def __post_init__(self) -> None:
        self.model.check_row(self.row)

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs of this network for `[B, …]`, in eval mode, without gradient."""
        full = frozenset(blended_slots(self.model, self.row))
        return evaluate_coalitions(self.model, x, {self.row: [full]}, shared_input=True).outputs[0]

    def germinate(self, slot_id: str, blueprint_id: str, **options: Any) -> OpResult:
        return self.model.germinate(slot_id, blueprint_id, row=self.row, **options)

    def plant_fossil(self, slot_id: str, blueprint_id: str, **options: Any) -> None:
        self.model.plant_fossil(slot_id, blueprint_id, row=self.row, **options)

    def advance(self, slot_id: str) -> OpResult:
        return self.model.advance(slot_id, row=self.row)

    def fossilize(self, slot_id: str) -> OpResult:
        return self.model.fossilize(slot_id, row=self.row)

    def prune(self, slot_id: str) -> OpResult:
        return self.model.prune(slot_id, row=self.row)

    def schedule_prune(self, slot_id: str, **options: Any) -> OpResult:
        return self.model.schedule_prune(slot_id, row=self.row, **options)

    def set_alpha_target(self, slot_id: str, target: float, **options: Any) -> OpResult:
        return self.model.set_alpha_target(slot_id, target, row=self.row, **options)

    def step_epoch(self) -> list[LifecycleRecord]:
        return self.model.step_epoch([self.row])

    def reports(self) -> dict[str, SeedStateReport]:
        return self.model.reports(self.row)

    def total_params(self) -> int:
        return self.model.total_params(self.row)

    def snapshot(self) -> RowSnapshot:
        return snapshot_row(self.model, self.row)

    def restore(self, snapshot: RowSnapshot) -> None:
        restore_row(self.model, snapshot, self.row)

    def export(self) -> fx.GraphModule:
        return export_row(self.model, self.row)


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One row's part of a population's optimizer: the host's state, or the seeds'."""

    optimizer: PopulationOptimizer
    row: int
    host: bool

    def _mine(self, name: str) -> bool:
        return name.startswith("host.") is self.host and not name.startswith("rates.")

    def state_dict(self) -> dict[str, Tensor]:
        return {
            name: tensor for name, tensor in self.optimizer.row_state(self.row).items() if self._mine(name)
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Strict; the other part of the row stays as it is."""
        others = {
            name: tensor
            for name, tensor in self.optimizer.row_state(self.row).items()
            if not self._mine(name)
        }
        self.optimizer.load_row_state(self.row, others | state)


@dataclass(frozen=True, slots=True)
class GovernedRow:
    """One row as the governor handles it. No method touches another row."""

    network: NetworkRow
    optimizer: PopulationOptimizer

    def snapshot_committed(self) -> RowSnapshot:
        """A copy of the permanent part: host weights, host buffers and fossilized seeds."""
        return snapshot_row(self.network.model, self.network.row, committed_only=True)

    def restore_committed(self, snapshot: RowSnapshot) -> None:
        """Make host and fossils bit-identical to the snapshot. Other slots keep only their cooldown; the
        count of germinations goes on."""
        restore_row(self.network.model, snapshot, self.network.row, committed_only=True)

    def prune_live(self, cause: PruneCause) -> tuple[LifecycleRecord, ...]:
        """Remove every seed that is neither fossilized nor already gone, at once, ramps included."""
        live = [slot_id for slot_id, report in self.network.reports().items() if report.stage in LIVE_STAGES]
        return tuple(
            record
            for slot_id in live
            for record in self.network.model.prune(slot_id, row=self.network.row, cause=cause).records
        )

    def forget_optimizer(self) -> None:
        """Zero momentum and step counts of host and seeds: they point back into the disaster."""
        self.optimizer.forget_row(self.network.row)
