"""The state of parallel environments: one record per env, and the group of envs that share a population.

An env is one network's training run. Its `model` and optimizers are views of its row in the population. Its
metrics are stored once per epoch, from a single transfer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esper.leyline import LIVE_STAGES, LifecycleOp, ObjectiveConfig, SeedStage, TelemetryEvent

if TYPE_CHECKING:
    from esper.kasmina import MorphogeneticModel, NetworkRow, OptimizerRow, PopulationOptimizer
    from esper.kasmina.optim import GradientStats
    from esper.runtime.tasks import Counterfactuals
    from esper.simic.attribution import CoalitionTable
    from esper.simic.contracts import EnvMeasure
    from esper.simic.sensors import Sensor
    from esper.simic.training.budgets import EpochPlan
    from esper.tamiyo import SignalTracker
    from esper.tamiyo.inputs import Setting
    from esper.tolaria import TolariaGovernor


@dataclass
class ParallelEnvState:
    """One environment."""

    model: NetworkRow
    host_optimizer: OptimizerRow
    seed_optimizer: OptimizerRow | None
    scaler: torch.amp.GradScaler
    stream: torch.cuda.Stream | None
    device: str
    env_idx: int
    world: int
    """Number of its random streams. Envs of the same world have the same initial weights, data and
    condition."""
    number: int
    """Its number within its task. `env_idx` counts through all tasks of a run."""

    governor: TolariaGovernor
    signal_tracker: SignalTracker
    setting: Setting
    """What its task lets a policy see: facts of the host, and what is offered."""
    prices: ObjectiveConfig
    counterfactuals: Counterfactuals = "all"
    """Whose contributions are measured: of all seeds, or of those that are not permanent."""
    learning_rate: float = math.nan
    """Of its host, in this epoch."""
    base_learning_rate: float = math.nan
    """Of its host, before decay."""
    telemetry: Callable[[TelemetryEvent], None] | None = None
    """Emits this env's events."""
    slot_telemetry: dict[str, Any] = field(default_factory=dict)
    """Recording options of its slots; see configure_slot_telemetry."""

    epoch_rewards: dict[str, float] = field(default_factory=dict)
    """Reward of this epoch's action, by slot."""
    epoch_counts: dict[str, int] = field(default_factory=dict)
    epoch_successes: dict[str, int] = field(default_factory=dict)

    train_loss: float = 0.0
    train_correct: int = 0
    train_total: int = 0
    val_loss: float = 0.0
    val_correct: int = 0
    val_total: int = 0

    lstm_hidden: tuple[Tensor, Tensor] | None = None
    """For a policy that decides for this env alone. A batched policy's state is kept by the trainer."""

    episode_idx: int = 0
    max_epochs: int = 0
    """The most epochs that its episode can have."""
    plan: EpochPlan | None = None
    """The current epoch: its steps, and the time that is left after it. None before the first."""
    budget_steps: int = 0
    """Its budget of FLOPs, in training steps of the bare host; 0 where its budget counts epochs."""
    flops: int = 0
    """FLOPs charged until the end of the current epoch, where its budget counts them."""
    done: bool = False
    """Its episode is over: it takes no part in anything until the next round."""
    sensors: dict[str, list[float]] = field(default_factory=dict)
    """Sensors of the epoch's last step by name, one number per slot."""
    coalitions: CoalitionTable | None = None
    """This epoch's validation of coalitions of blended seeds."""
    germinated: int = 0
    fossilized: int = 0
    pruned: int = 0
    rollbacks: int = 0
    last_op: LifecycleOp = LifecycleOp.WAIT
    last_success: bool = True
    last_measure: EnvMeasure | None = None
    """The state after the previous step's tick; None at the start of a segment."""
    total_reward: float = 0.0

    def __post_init__(self) -> None:
        if self.stream is not None and not self.device.startswith("cuda"):
            raise ValueError(f"CUDA stream provided but device is {self.device}")

    @property
    def row(self) -> int:
        return self.model.row

    @property
    def planned(self) -> EpochPlan:
        """The plan of the current epoch, which has begun."""
        assert self.plan is not None, "an epoch is planned before it is trained"
        return self.plan

    @property
    def is_last_epoch(self) -> bool:
        """Whether the current epoch is the last of its episode."""
        return self.planned.is_last

    @property
    def active_slot(self) -> str | None:
        """The first slot, in slot order, with a seed that may still be pruned."""
        return next(
            (slot_id for slot_id, report in self.model.reports().items() if report.stage in LIVE_STAGES), None
        )

    @property
    def seed_stage(self) -> SeedStage:
        """Stage of the active slot's seed; DORMANT where there is none."""
        slot_id = self.active_slot
        return SeedStage.DORMANT if slot_id is None else self.model.reports()[slot_id].stage

    @property
    def train_accuracy(self) -> float:
        return 100.0 * self.train_correct / max(self.train_total, 1)

    @property
    def val_accuracy(self) -> float:
        return 100.0 * self.val_correct / max(self.val_total, 1)

    def init_accumulators(self, slots: list[str]) -> None:
        """Set the accumulators of these slots to zero."""
        self.epoch_rewards = dict.fromkeys(slots, 0.0)
        self.epoch_counts = dict.fromkeys(slots, 0)
        self.epoch_successes = dict.fromkeys(slots, 0)

    def zero_accumulators(self) -> None:
        """Set all accumulators to zero, at the start of an epoch."""
        self.init_accumulators(list(self.epoch_rewards))
        self.train_loss = self.val_loss = 0.0
        self.train_correct = self.train_total = self.val_correct = self.val_total = 0

    def reset_lstm_hidden(self) -> None:
        """Clear the recurrent state, at the end of an episode or a segment."""
        self.lstm_hidden = None


@dataclass(slots=True)
class EnvGroup:
    """The envs of one population on one stream; rows beyond its envs are idle."""

    model: MorphogeneticModel
    optimizer: PopulationOptimizer
    device: torch.device
    stream: torch.cuda.Stream | None
    envs: list[ParallelEnvState]
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler(enabled=False))
    loss_sum: Tensor = field(init=False)  # [P]
    correct: Tensor = field(init=False)  # [P]
    base_lr: tuple[Tensor, Tensor] = field(init=False)  # [P] each: host and seed learning rates before decay
    batches: int = 0
    samples: int = 0
    """Targets of one row seen this epoch."""
    extra_sensors: tuple[Sensor, ...] = ()
    """Registered sensors that are measured beside the built-in ones."""
    gathered: list[int] | None = None
    """Rows that this epoch's batches hold, padded; None: all."""
    sensors: dict[str, Tensor] | None = None
    """Sensors of each row's last step of the epoch by name, [P, S] each."""
    gradients: GradientStats | None = None
    """Gradients of each row's last step of the epoch."""

    def __post_init__(self) -> None:
        self.base_lr = (self.optimizer.host_lr.clone(), self.optimizer.seed_lr.clone())
        self.zero_accumulators()

    @property
    def active(self) -> list[ParallelEnvState]:
        """The envs whose episode goes on."""
        return [env for env in self.envs if not env.done]

    def only(self, envs: Sequence[ParallelEnvState]) -> EnvGroup:
        """The same population with these envs alone."""
        group = copy(self)
        group.envs = list(envs)
        return group

    def begin_epoch(self) -> None:
        """Zero the accumulators and set this epoch's learning rates, as each env has planned. Those of an env
        whose episode is over stay as they are."""
        self.zero_accumulators()
        factors = [math.nan] * self.model.population
        for env in self.active:
            factors[env.row] = env.planned.lr_factor
            env.learning_rate = env.base_learning_rate * env.planned.lr_factor
        factor = self.base_lr[0].new_tensor(factors)
        now = self.optimizer.host_lr, self.optimizer.seed_lr
        self.optimizer.host_lr, self.optimizer.seed_lr = (
            torch.where(factor.isnan(), rate, base * factor)
            for base, rate in zip(self.base_lr, now, strict=True)
        )
        self.model.train()

    def zero_accumulators(self) -> None:
        self.loss_sum = torch.zeros(self.model.population, device=self.device)
        self.correct = torch.zeros(self.model.population, device=self.device)
        self.batches = self.samples = 0
        self.sensors = self.gradients = None
        for env in self.active:
            env.zero_accumulators()

    def of_lanes(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The part of a batch that belongs to the lanes of a training pass."""
        members = self.model.members
        gathered = list(range(self.model.population)) if self.gathered is None else self.gathered
        lanes = members if members == gathered else self.model.padded(members)
        if lanes == gathered:
            return inputs, targets
        places = torch.tensor([gathered.index(row) for row in lanes], device=inputs.device)
        return self.model.layout.take(inputs, len(gathered), places), targets.index_select(0, places)

    def add(self, losses: Tensor, correct: Tensor, targets: int) -> None:
        """Add a training step of the rows that took it: their losses and correct answers, [n] each, and the
        number of answers of one row."""
        rows = self.rows_that_train
        if rows is None:
            self.loss_sum += losses
            self.correct += correct
        else:
            self.loss_sum.index_add_(0, rows, losses)
            self.correct.index_add_(0, rows, correct.to(self.correct.dtype))
        self.batches += 1
        self.samples += targets

    @property
    def rows_that_train(self) -> Tensor | None:
        """None: all rows."""
        lanes = self.model.training_lanes
        return None if lanes.rows is None else lanes.rows[: lanes.count - lanes.padding]

    def note(self, sensors: dict[str, Tensor], gradients: GradientStats) -> None:
        """Keep what a step has measured of the rows that took it; sensors are [n, S] each, or none."""
        rows = self.rows_that_train
        if rows is None:
            self.sensors, self.gradients = sensors, gradients
            return
        if self.sensors is None:
            shape = (self.model.population, self.model.slot_config.num_slots)
            self.sensors = {name: values.new_full(shape, math.nan) for name, values in sensors.items()}
        for name, values in sensors.items():
            self.sensors[name].index_copy_(0, rows, values)
        self.gradients = gradients if self.gradients is None else self.gradients.replaced(rows, gradients)

    def sensed(self) -> tuple[dict[str, Tensor], GradientStats]:
        """The epoch's sensors by name, if any were measured, and its gradients."""
        if self.sensors is None or self.gradients is None:
            raise RuntimeError("gradients are kept by the last step of an epoch's training")
        return self.sensors, self.gradients

    def on_stream(self) -> AbstractContextManager[Any]:
        """Context in which kernels run on the group's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def await_transfer(self) -> None:
        """Make the stream wait for copies that are queued on the device's default stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.default_stream(self.device))

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


__all__ = ["EnvGroup", "ParallelEnvState"]
