"""How long each network trains: for a number of epochs, or until its budget of training FLOPs is spent.

A network changes only between epochs, so what an epoch costs is known before it begins, and with it the step
after which the budget is spent. An episode ends with the epoch in which that happens; this last epoch may be
short. Epochs have equal numbers of steps or, with `even_epochs`, equal FLOPs. What is charged: training
passes of host and seeds, incubation, the growth sensors, and every validation pass beyond one per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from esper.kasmina import FlopMeter
from esper.leyline import TimeLeft
from esper.simic.attribution import most_coalitions, most_open_coalitions
from esper.simic.training.counterfactual_eval import wanted_coalitions

if TYPE_CHECKING:
    from esper.kasmina import MorphogeneticModel
    from esper.runtime.tasks import TaskSpec
    from esper.simic.training.parallel_env_state import ParallelEnvState


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One epoch of one env, as it is known before it begins."""

    steps: int
    """Training steps of this epoch."""
    lr_factor: float
    """Factor of the learning rates in this epoch."""
    time: TimeLeft
    """How far the run will have come after this epoch."""
    is_last: bool
    """Whether the episode ends with this epoch."""
    certain: int
    """Number of further epochs that there will be even if the dearest seed is planted after this one, and
    nothing else is decided."""
    flops: int = 0
    """FLOPs charged until the end of this epoch; 0 where they are not counted."""


class Budget(Protocol):
    """The budget of one task. Each env spends its own."""

    def plan(self, env: ParallelEnvState, epoch: int) -> EpochPlan:
        """The epoch with this number, from 1, that begins with the network as it is now."""

    def without_measuring(self) -> Budget:
        """The same for networks that nobody decides for: they need no sensors and no coalitions."""


@dataclass(frozen=True, slots=True)
class EpochBudget:
    """A number of epochs, that of the env."""

    task: TaskSpec

    def plan(self, env: ParallelEnvState, epoch: int) -> EpochPlan:
        steps = self.task.steps_per_epoch
        return EpochPlan(
            steps=steps,
            lr_factor=self.task.lr_factor(epoch),
            time=TimeLeft.of_epochs(epoch, env.max_epochs, steps),
            is_last=epoch == env.max_epochs,
            certain=env.max_epochs - epoch,
        )

    def without_measuring(self) -> EpochBudget:
        return self


class FlopsBudget:
    """A number of FLOPs, that of the env. It takes its next training step as long as it has spent less."""

    def __init__(self, task: TaskSpec, meter: FlopMeter, *, root_seed: int, measures: bool = True) -> None:
        """`meter` counts networks of the task. Without `measures`, sensors and coalitions cost nothing."""
        self.task, self.meter, self.root_seed, self.measures = task, meter, root_seed, measures
        self.host_step = task.batch_size * self.meter.per_sample({})
        """FLOPs of a training step of the bare host, the unit of a budget."""
        self._share = task.steps_per_epoch * self.host_step
        """FLOPs of an epoch, where all cost the same."""
        self._sensors = task.batch_size * self.meter.sensors() if measures else 0

    def without_measuring(self) -> FlopsBudget:
        return FlopsBudget(self.task, self.meter, root_seed=self.root_seed, measures=False)

    def plan(self, env: ParallelEnvState, epoch: int) -> EpochPlan:
        task, total = self.task, env.budget_steps * self.host_step
        reports = env.model.reports()
        step = task.batch_size * self.meter.per_sample(reports)
        coalitions = self._beyond_one_pass(env, epoch)
        measuring = task.val_size * coalitions + (self._sensors if task.senses(epoch) else 0)
        usual = task.val_size * coalitions + self._sensors // task.sense_every
        if task.even_epochs:
            due = min(epoch * self._share, total)
            steps = max(-(-(due - env.flops - measuring) // step), 1)
            whole_epoch = max(self._share, step + usual)
        else:
            steps = min(task.steps_per_epoch, -(-(total - env.flops) // step))
            whole_epoch = task.steps_per_epoch * step + usual
        spent = env.flops + steps * step + measuring
        left = max(total - spent, 0)
        if not left:  # the last epoch may be validated on more samples
            spent += max(task.final_val_size - task.val_size, 0) * coalitions
        return EpochPlan(
            steps=steps,
            lr_factor=task.lr_factor_at(env.flops / total),
            time=TimeLeft(epoch, min(spent / total, 1.0), left / whole_epoch, left / step),
            is_last=not left,
            certain=-(-left // self._dearest_epoch(env)),
            flops=spent,
        )

    def _beyond_one_pass(self, env: ParallelEnvState, epoch: int) -> int:
        """FLOPs per validation sample of the epoch's coalitions, without those of one pass."""
        if not self.measures:
            return 0
        reports = env.model.reports()
        wanted = wanted_coalitions(env, self.root_seed, epoch)
        return self.meter.coalitions(reports, wanted) - self.meter.forward(reports)

    def _dearest_epoch(self, env: ParallelEnvState) -> int:
        """No epoch costs more after one more seed was planted."""
        task = self.task
        most = most_coalitions if task.counterfactuals == "all" else most_open_coalitions
        training, evaluation = self.meter.bound(env.model.reports(), task.blueprints, most)
        step, measuring = task.batch_size * training, self._sensors + task.val_size * evaluation
        if not task.even_epochs:
            return task.steps_per_epoch * step + measuring
        # An epoch ends with the first step that reaches its share. Where one step and what is measured fit
        # into a share, what was spent too much is made up for in the next epoch; otherwise it adds up.
        return self._share if step + measuring <= self._share else self._share + step + measuring


def make_budget(task: TaskSpec, models: Sequence[MorphogeneticModel], *, root_seed: int) -> Budget:
    """The budget that the task asks for."""
    if task.budget == "flops":
        return FlopsBudget(task, FlopMeter(models[0]), root_seed=root_seed)
    return EpochBudget(task)
