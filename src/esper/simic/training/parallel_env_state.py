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
    from esper.simic.attribution import CoalitionTable
    from esper.simic.contracts import EnvMeasure
    from esper.simic.sensors import Sensor
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
    """Number of epochs of its episode."""
    done: bool = False
    """Its episode is over: it takes no part in anything until the next round."""
    sensors: dict[str, list[float]] = field(default_factory=dict)
    """Sensors of the epoch's last step by name, one number per slot."""
    coalitions: CoalitionTable | None = None
    """This epoch's validation of every coalition of blended seeds."""
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

    def epochs_left(self, epoch: int) -> int:
        """Epochs after this one; 0 in its last."""
        return self.max_epochs - epoch

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
    sensors: dict[str, Tensor] | None = None
    """Sensors of the epoch's last step by name, [P, S] each."""

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

    def begin_epoch(self, lr_factor: float = 1.0) -> None:
        """Zero the accumulators and set this epoch's learning rates."""
        self.zero_accumulators()
        self.optimizer.host_lr, self.optimizer.seed_lr = (lr * lr_factor for lr in self.base_lr)
        for env in self.envs:
            env.learning_rate = env.base_learning_rate * lr_factor
        self.model.train()

    def zero_accumulators(self) -> None:
        self.loss_sum = torch.zeros(self.model.population, device=self.device)
        self.correct = torch.zeros(self.model.population, device=self.device)
        self.batches = self.samples = 0
        self.sensors = None
        for env in self.active:
            env.zero_accumulators()

    def sensed(self) -> dict[str, Tensor]:
        """The epoch's sensors by name."""
        if self.sensors is None:
            raise RuntimeError("growth sensors are measured by the last step of an epoch's training")
        return self.sensors

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
