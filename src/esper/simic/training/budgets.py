"""How long each network trains: for a number of epochs, or until its budget of training FLOPs is spent.

A network changes only between epochs, so what an epoch costs is known before it begins, and with it the step
after which the budget is spent. A budget of FLOPs is charged for training passes of host and seeds,
incubation, the growth sensors, and every validation pass beyond one per epoch. An episode ends with the epoch
in which its budget is spent; that epoch may be short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from esper.kasmina import FlopMeter
from esper.kasmina.coalitions import MAX_EXHAUSTIVE, RANDOM_ORDERS
from esper.leyline import TimeLeft
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
    certain: int
    """Number of further epochs that there will be even if the dearest seed is planted now, and nothing more
    after it; 0: this one is the last."""
    flops: int = 0
    """Training FLOPs charged until the end of this epoch; 0 where they are not counted."""

    @property
    def is_last(self) -> bool:
        return self.certain == 0


class Budget(Protocol):
    """The budget of one task. Each env spends its own."""

    def plan(self, env: ParallelEnvState, epoch: int) -> EpochPlan:
        """The epoch with this number, from 1, that begins with the network as it is now."""


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
            certain=env.max_epochs - epoch,
        )


class FlopsBudget:
    """A number of training FLOPs. An env takes its next step as long as it has spent less."""

    def __init__(self, task: TaskSpec, model: MorphogeneticModel, *, root_seed: int) -> None:
        """`model` is one of the task's populations; only its architecture matters."""
        self.task, self.root_seed = task, root_seed
        self.meter = FlopMeter(model)
        self.total = task.budget_steps * task.batch_size * self.meter.per_sample({})
        coalitions = _most_coalitions(len(task.slots))
        self._one_more_seed, self._evaluation = self.meter.dearest(task.blueprints, coalitions)

    def plan(self, env: ParallelEnvState, epoch: int) -> EpochPlan:
        task, reports = self.task, env.model.reports()
        per_sample = self.meter.per_sample(reports)
        per_step = per_sample * task.batch_size
        steps = min(task.steps_per_epoch, -(-(self.total - env.flops) // per_step))
        wanted = wanted_coalitions(env, self.root_seed, epoch)
        beyond_one = self.meter.coalitions(reports, wanted) - self.meter.forward(reports)
        spent = env.flops + self._epoch(steps, per_sample) + beyond_one * task.val_size
        left = self.total - spent
        if left <= 0:  # the last epoch may be validated on more samples
            more = max(task.final_val_size - task.val_size, 0)
            spent += beyond_one * more
        whole_epoch = self._epoch(task.steps_per_epoch, per_sample) + beyond_one * task.val_size
        grown = self._epoch(task.steps_per_epoch, per_sample + self._one_more_seed)
        grown += self._evaluation * task.val_size
        return EpochPlan(
            steps=steps,
            lr_factor=task.lr_factor_at(env.flops / self.total),
            time=TimeLeft(
                epoch, min(spent / self.total, 1.0), max(left / whole_epoch, 0.0), max(left / per_step, 0.0)
            ),
            certain=max(-(-left // grown), 0),
            flops=spent,
        )

    def _epoch(self, steps: int, per_sample: int) -> int:
        """Training, and the sensors on the batch of the last step."""
        return (steps * per_sample + self.meter.sensors()) * self.task.batch_size


def _most_coalitions(seeds: int) -> int:
    """No epoch evaluates more coalitions of this number of seeds; see `required_coalitions`."""
    if seeds <= MAX_EXHAUSTIVE:
        return int(2**seeds)
    return 3 + 3 * seeds + RANDOM_ORDERS * (seeds + 1) + seeds * (seeds - 1) // 2


def make_budget(task: TaskSpec, models: Sequence[MorphogeneticModel], *, root_seed: int) -> Budget:
    """The budget that the task asks for."""
    if task.budget == "flops":
        return FlopsBudget(task, models[0], root_seed=root_seed)
    return EpochBudget(task)
