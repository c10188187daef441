"""Tasks: a host, its slots, its data and its rules under one name; and the conditions that an episode may
draw.

A task fixes everything that a policy is judged by before any policy is trained. It never runs a training
loop."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import torch

from esper.kasmina.blueprints import blueprint_names, build_blueprint
from esper.kasmina.hosts import CNNHost, Host, build_host
from esper.kasmina.layers import check_population
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optim import OptimizerConfig, PopulationOptimizer
from esper.leyline import (
    AUTOMATIC_GATES,
    GateConfig,
    GateLevel,
    Incubation,
    ObjectiveConfig,
    Pacing,
    SlotConfig,
    TempoAction,
    Topology,
)
from esper.leyline.errors import (
    BlueprintError,
    EsperError,
    SlotIdError,
    allowed,
    check_number,
    unknown_name,
)
from esper.leyline.rng import stream_seed
from esper.runtime.data.datasets import Dataset, DatasetFacts, dataset_facts

Counterfactuals = Literal["all", "open"]
"""Seeds whose contributions are measured."""
FINAL_LR_SHARE = 0.1
"""A decaying learning rate ends at this share of its first value."""
SIZES = (
    "batch_size",
    "steps_per_epoch",
    "val_size",
    "final_val_size",
    "episode_length",
    "budget_steps",
    "population",
)
"""Fields that `name:field=number` may change, beside the sizes of the host. Those that say how long an
episode is depend on the task's budget."""
MAX_SIZE = 10**9
MAX_DEPTH = 100
"""Limits of the numbers in `name:field=number`. Depth counts modules that are built one by one."""
_DEPTHS = ("blocks", "layers", "segments", "pools")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionSpace:
    """Conditions that an episode may draw, each value with the same probability. The best action then depends
    on what is observed."""

    cripple_probability: float
    """Probability that a block of a CNN host keeps only the centre tap of its kernels."""
    crippled_blocks: tuple[int, ...] = ()
    """Blocks that keep only the centre tap in every network."""
    train_sizes: tuple[int | None, ...] = (None,)
    """Numbers of training samples; None: all."""
    label_noises: tuple[float, ...] = (0.0,)
    """Shares of training samples with a wrong label."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates of the host; empty: the optimizer's own."""
    budgets: tuple[int, ...] = ()
    """Budgets in training steps of the bare host, for a task with a budget of FLOPs; empty: the task's
    own."""

    def __post_init__(self) -> None:
        lowest = {"train_sizes": 1, "label_noises": 0, "learning_rates": 1e-9, "budgets": 1}
        for name, low in lowest.items():
            values = getattr(self, name)
            if not isinstance(values, tuple) or (not values and name in ("train_sizes", "label_noises")):
                raise EsperError(f"conditions: {name} is {values!r}, must be a tuple of one or more values")
            for value in values:
                if value is not None or name != "train_sizes":
                    whole = name in ("train_sizes", "budgets")
                    check_number("conditions", name, value, low=low, integer=whole)
        for block in self.crippled_blocks:
            check_number("conditions", "crippled_blocks", block, integer=True)
        check_number("conditions", "cripple_probability", self.cripple_probability)
        if max(self.cripple_probability, *self.label_noises) > 1:
            raise EsperError(
                f"conditions: a share above 1 in {self.cripple_probability=}, {self.label_noises=}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The drawn conditions of one network in one episode."""

    crippled: tuple[bool, ...]
    """Whether each block of a CNN host keeps only its centre taps; empty for other hosts."""
    train_size: int | None
    label_noise: float
    learning_rate: float
    """Learning rate of the host; that of seeds keeps its ratio to it."""
    budget_steps: int = 0
    """Its budget of FLOPs, in training steps of the bare host; 0 where the budget counts epochs."""


_KINDS: dict[str, Any] = {
    "name": str,
    "host": Mapping,
    "slots": tuple,
    "dataset": str,
    "optimizer": OptimizerConfig,
    "lr_decay": bool,
    "even_epochs": bool,
    "pacing": Pacing,
    "gates": GateConfig,
    "objective": ObjectiveConfig,
    "blueprints": tuple,
    "conditions": ConditionSpace | None,
    "incubation": Incubation,
    "tempo": TempoAction,
    "family": str | None,
}


@cache
def _outline(host: tuple[tuple[str, Any], ...]) -> Host:
    try:
        with torch.device("meta"):
            return build_host(dict(host))
    except (RuntimeError, OverflowError, ZeroDivisionError) as error:
        raise EsperError(f"host {dict(host)} cannot be built: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task. Everything is checked when it is created."""

    name: str
    host: Mapping[str, Any]
    """Arguments of `kasmina.build_host` without the population."""
    slots: tuple[str, ...]
    """Slots in which seeds may grow, in row-major order."""
    dataset: str
    """Name of a built-in or registered dataset."""
    batch_size: int
    steps_per_epoch: int
    val_size: int
    """Number of validation samples: images, vectors, or windows of text."""
    episode_length: int
    """Number of epochs of one episode, each followed by one decision. With a budget of FLOPs it follows from
    the largest budget: no network can have more epochs."""
    population: int
    """Number of networks that are trained as one batched module: 1 or a multiple of 8."""
    optimizer: OptimizerConfig
    lr_decay: bool
    """Whether learning rates fall to a tenth over the episode, along a cosine."""
    pacing: Pacing
    gates: GateConfig
    objective: ObjectiveConfig
    blueprints: tuple[str, ...]
    """Blueprints that may be germinated."""
    tempo: TempoAction = TempoAction.INSTANT
    """Tempo at which schedules and rules germinate; policies may choose any."""
    final_val_size: int = 0
    """Number of validation samples in the last epoch, which decides J, where that is more than `val_size`."""
    conditions: ConditionSpace | None = None
    incubation: Incubation = Incubation.SHADOW
    budget: Literal["epochs", "flops"] = "epochs"
    """What ends an episode: the number of epochs, or that a network has spent its training FLOPs. A larger
    network then takes fewer steps."""
    budget_steps: int = 0
    """The budget of FLOPs, as the number of training steps of the bare host that cost as much."""
    even_epochs: bool = False
    """With a budget of FLOPs, whether every epoch costs as much as `steps_per_epoch` steps of the bare host.
    A larger network then takes fewer steps in each epoch, and has the same number of decisions. Otherwise it
    takes as many steps, and has fewer epochs."""
    counterfactuals: Counterfactuals = "all"
    """Whose contributions are measured in each epoch: those of all seeds, or of the open ones, which are not
    permanent yet. With a budget of FLOPs a network pays for what is measured, and nothing can be decided
    about a permanent seed."""
    sense_every: int = 1
    """Growth sensors are measured in the first epoch, and then every this many epochs. In between, policies
    see the last measurement. With a budget of FLOPs a network pays for each measurement."""
    family: str | None = None
    """Tasks of one family share a row of the policy's value head, and a scale of returns. None: the part of
    the name before the colon, so that a task with other sizes belongs to the task that it was made from."""

    def __post_init__(self) -> None:
        try:
            self._set_length()
            self._check()
        except (ValueError, TypeError) as error:
            kind = type(error) if isinstance(error, EsperError) else EsperError
            raise kind(f"task {self.name!r}: {error}") from None

    def _set_length(self) -> None:
        if self.budget not in ("epochs", "flops"):
            raise EsperError(f"budget is {self.budget!r}; {allowed(('epochs', 'flops'))}")
        if self.budget == "flops":
            check_number("budget", "budget_steps", self.budget_steps, low=1, integer=True)
            check_number("budget", "steps_per_epoch", self.steps_per_epoch, low=1, integer=True)
            largest = max(self._budgets or (self.budget_steps,))
            object.__setattr__(self, "episode_length", self.most_epochs(largest))
        elif self.even_epochs:
            raise EsperError("even_epochs is True with a budget of epochs; allowed: False, or budget 'flops'")
        elif self.budget_steps or self._budgets:
            given = f"budget_steps is {self.budget_steps}, conditions draw budgets {self._budgets}"
            raise EsperError(f"{given}, with a budget of epochs; allowed: 0 and (), or budget 'flops'")

    @property
    def _budgets(self) -> tuple[int, ...]:
        """Budgets that are drawn; empty: `budget_steps` is that of every network."""
        return self.conditions.budgets if isinstance(self.conditions, ConditionSpace) else ()

    def most_epochs(self, budget_steps: int) -> int:
        """Epochs of a network that never grows and pays for nothing but training."""
        return -(-budget_steps // self.steps_per_epoch)

    def _check(self) -> None:
        for field, kind in _KINDS.items():
            if not isinstance(getattr(self, field), kind):
                raise EsperError(
                    f"{field} is {getattr(self, field)!r}, must be a {getattr(kind, '__name__', kind)}"
                )
        if not self.name or self.name != self.name.strip().lower():
            raise EsperError(f"name is {self.name!r}, must be lower case and not empty")
        facts = dataset_facts(self.dataset)
        if self.counterfactuals not in get_args(Counterfactuals):
            given = f"counterfactuals is {self.counterfactuals!r}"
            raise EsperError(f"{given}; {allowed(get_args(Counterfactuals))}")
        counts = ("batch_size", "steps_per_epoch", "val_size", "episode_length", "population", "sense_every")
        for field in counts:
            check_number("budget", field, getattr(self, field), low=1, integer=True)
        check_population(self.population)
        check_number("budget", "final_val_size", self.final_val_size, integer=True)
        host = self.outline
        kernel = host.spec().get("kernel", 1)
        if kernel % 2 == 0:
            raise EsperError(f"host: kernel is {kernel}, must be odd")
        if facts is not None:
            self._check_fit(facts)
        places = {spec.slot_id: spec for spec in host.injection_specs()}
        for slot_id in SlotConfig(self.slots).slot_ids:
            if slot_id not in places:
                raise SlotIdError(f"slot {slot_id!r} is unknown to this host; {allowed(sorted(places))}")
        growable = [name for name in blueprint_names(host.topology) if name != "noop"]
        if (
            not self.blueprints
            or len(set(self.blueprints)) < len(self.blueprints)
            or not set(self.blueprints) <= {*growable}
        ):
            raise BlueprintError(
                f"blueprints are {self.blueprints}; allowed: one or more of {', '.join(growable)}, each once"
            )
        with torch.device("meta"):
            for blueprint, slot_id in product(self.blueprints, self.slots):
                place = places[slot_id]
                build_blueprint(
                    host.topology, blueprint, 1, place.channels, line=place.line, positions=place.positions
                )
        if not self.optimizer.host_lr > 0:
            raise EsperError(f"optimizer: host_lr is {self.optimizer.host_lr}, must be above 0")
        if self.conditions is not None:
            self._check_crippled(self.conditions, kernel)

    def _check_crippled(self, space: ConditionSpace, kernel: int | None) -> None:
        if not space.cripple_probability and not space.crippled_blocks:
            return
        if kernel == 1:
            raise EsperError(
                "conditions: blocks are crippled, but this host has no kernels beyond a centre tap"
            )
        blocks = len(self.outline.blocks) if isinstance(self.outline, CNNHost) else 0
        if any(block >= blocks for block in space.crippled_blocks):
            raise EsperError(
                f"conditions: crippled_blocks is {space.crippled_blocks}; this host has the blocks "
                f"{', '.join(map(str, range(blocks))) or 'none'}"
            )

    def check_data(self, data: Dataset) -> None:
        """Raise unless the host can be trained on this dataset."""
        self._check_fit(DatasetFacts(data.kind, tuple(data.train_x.shape[1:]), data.num_classes))
        if data.vocab and data.num_classes != self.num_classes:
            raise EsperError(
                f"task {self.name!r}: dataset {data.name} has a vocabulary of {data.num_classes} characters, "
                f"the host has {self.num_classes}; they must be equal"
            )

    def _check_fit(self, facts: DatasetFacts) -> None:
        spec, topology = self.outline.spec(), self.topology
        kind = _DATA_KINDS[topology]
        if facts.kind != kind:
            raise EsperError(
                f"dataset {self.dataset} holds {facts.kind} data, a host of topology {topology} needs "
                f"{kind} data"
            )
        shape: tuple[int, ...] = ()
        if kind == "image":
            shape = (spec["channels"], spec.get("height", spec["size"]), spec["size"])
        elif kind == "vector":
            shape = (spec["inputs"],)
        if facts.shape != shape:
            raise EsperError(
                f"samples of dataset {self.dataset} have shape {facts.shape}, the host takes {shape}"
            )
        if facts.classes > self.num_classes:
            raise EsperError(
                f"dataset {self.dataset} has {facts.classes} classes, the host has {self.num_classes}; "
                f"allowed: {facts.classes} or more"
            )

    @property
    def memory(self) -> int:
        """Estimate of the bytes that one population needs in training: weights, gradients and optimizer
        state, activations of one batch, and the sample indices of one epoch."""
        spec, numbers = self.outline.spec(), 0
        if self.topology == "cnn":
            side = spec["size"]
            for block in range(spec["blocks"]):
                numbers += (spec["base"] << block) * side * spec.get("height", side)
                if block < spec["pools"]:
                    side //= 2
        elif self.topology == "transformer":
            numbers = spec["context"] * (spec["features"] * spec["layers"] * 12 + spec["vocabulary"])
        else:
            numbers = spec["inputs"] + spec["features"] * spec["layers"]
        weights = 4 * self.host_params
        activations = 3 * self.batch_size * numbers
        indices = 6 * self.batch_size * self.steps_per_epoch + 16 * self.episode_length
        return 4 * self.population * (weights + activations + indices)

    def check_memory(self) -> None:
        """Raise if one population needs more memory than this machine has."""
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.memory > available:
            raise EsperError(
                f"task {self.name!r}: a population of {self.population} needs about "
                f"{self.memory / 2**30:,.1f} GiB of memory, this machine has {available / 2**30:,.1f} GiB; "
                "choose smaller sizes"
            )

    @property
    def family_name(self) -> str:
        return self.name.partition(":")[0] if self.family is None else self.family

    @property
    def outline(self) -> Host:
        """The host on the meta device, without memory for its weights. It is shared: do not change it."""
        return _outline(tuple(sorted(self.host.items())))

    @property
    def topology(self) -> Topology:
        return self.outline.topology

    @property
    def num_classes(self) -> int:
        """Number of classes, or size of the vocabulary."""
        return int(self.outline.spec().get("vocabulary") or self.outline.spec()["classes"])

    @property
    def chance_loss(self) -> float:
        """Cross-entropy of guessing, the loss of a collapsed network."""
        return math.log(self.num_classes)

    @property
    def block(self) -> int:
        """Tokens per window of text, 0 for other data: the argument of `validation_split`."""
        return int(self.outline.spec().get("context", 0))

    @property
    def host_params(self) -> int:
        return sum(p.numel() for p in self.outline.parameters())

    def lr_factor(self, epoch: int) -> float:
        """Factor of each row's learning rates in this epoch (1 … episode_length)."""
        if self.episode_length == 1:
            return 1.0
        return self.lr_factor_at(min(max((epoch - 1) / (self.episode_length - 1), 0.0), 1.0))

    def senses(self, epoch: int) -> bool:
        """Whether growth sensors are measured in this epoch, from 1."""
        return (epoch - 1) % self.sense_every == 0

    def lr_factor_at(self, progress: float) -> float:
        """Factor of learning rates after this share of the budget."""
        if not self.lr_decay:
            return 1.0
        return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))

    def build_model(self, population: int, seeds: Sequence[int]) -> MorphogeneticModel:
        """Fresh networks, one per row, initialised from `seeds`."""
        return MorphogeneticModel(
            build_host(dict(self.host), population),
            self.slots,
            gates=self.gates,
            pacing=self.pacing,
            incubation=self.incubation,
            random_seeds=seeds,
        )

    def build_optimizer(self, model: MorphogeneticModel) -> PopulationOptimizer:
        return PopulationOptimizer(model, self.optimizer)

    def prepare_row(
        self,
        model: MorphogeneticModel,
        optimizer: PopulationOptimizer,
        row: int,
        *,
        root_seed: int,
        episode: int,
        env: int,
    ) -> Condition:
        """Apply the conditions that its episode has drawn to a fresh row."""
        condition = draw_condition(self, root_seed, episode, env)
        apply_condition(model, optimizer, row, condition)
        return condition

    def data_conditions(self, root_seed: int, episode: int, envs: Sequence[int]) -> dict[str, Any]:
        """The drawn conditions of these envs as arguments of the batch iterator's `begin_episode`."""
        drawn = [draw_condition(self, root_seed, episode, env) for env in envs]
        return {"train_size": [c.train_size for c in drawn], "label_noise": [c.label_noise for c in drawn]}


def draw_condition(task: TaskSpec, root_seed: int, episode: int, env: int) -> Condition:
    """The conditions of this env in this episode; the plain ones where the task draws nothing."""
    blocks = len(task.outline.blocks) if isinstance(task.outline, CNNHost) else 0
    space = task.conditions
    if space is None:
        return Condition(
            crippled=(False,) * blocks,
            train_size=None,
            label_noise=0.0,
            learning_rate=task.optimizer.host_lr,
            budget_steps=task.budget_steps,
        )
    rng = np.random.default_rng(stream_seed(root_seed, "condition", episode, env))
    crippled = tuple(
        bool(x < space.cripple_probability) or block in space.crippled_blocks
        for block, x in enumerate(rng.random(blocks))
    )
    rates = space.learning_rates or (task.optimizer.host_lr,)
    budgets = space.budgets or (task.budget_steps,)
    size, noise, rate, budget = (
        int(rng.integers(len(values))) for values in (space.train_sizes, space.label_noises, rates, budgets)
    )
    return Condition(
        crippled=crippled,
        train_size=space.train_sizes[size],
        label_noise=space.label_noises[noise],
        learning_rate=rates[rate],
        budget_steps=budgets[budget],
    )


def apply_condition(
    model: MorphogeneticModel, optimizer: PopulationOptimizer, row: int, condition: Condition
) -> None:
    """Set the kernels and learning rates of one row. Call it after `reset_row`. The batch iterator applies
    the conditions of the data, and the environment the budget."""
    model.check_row(row)
    if isinstance(model.host, CNNHost):
        model.host.set_centre_tap(row, condition.crippled)
    elif condition.crippled:
        raise EsperError(
            f"condition marks blocks {condition.crippled}, a {model.host.topology} host has none"
        )
    config = optimizer.config
    optimizer.host_lr[row] = condition.learning_rate
    optimizer.seed_lr[row] = condition.learning_rate * (config.seed_lr / config.host_lr)


TASKS: dict[str, TaskSpec] = {}


def register_task(spec: TaskSpec) -> TaskSpec:
    """Make a task available by its name."""
    if not isinstance(spec, TaskSpec):
        raise EsperError(f"register_task takes a TaskSpec, not {type(spec).__name__}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", spec.name):
        raise EsperError(f"task name {spec.name!r}; allowed: lower-case letters, digits and _")
    if spec.name in TASKS:
        raise EsperError(f"task {spec.name!r} is already registered; choose another name")
    TASKS[spec.name] = spec
    return spec


def task_names() -> tuple[str, ...]:
    return tuple(sorted(TASKS))


def get_task_spec(name: str) -> TaskSpec:
    """A task by name, in any case; with other sizes of task or host, as in
    `digits_shift:base=8,episode_length=12`; or a world by its number, as in `worlds_small:17`."""
    return parse_task(name)


def parse_task(text: str) -> TaskSpec:
    """The task that `name`, `name:field=number,…`, `family:number` or `family:number,field=number,…`
    describes."""
    from esper.runtime.worlds import FAMILIES, get_world  # worlds are tasks

    name, _, changes = text.lower().partition(":")
    if name in FAMILIES:
        number, _, changes = changes.partition(",")
        task = get_world(name, number)
    elif name in TASKS:
        task = TASKS[name]
    else:
        raise unknown_name("task", name, [*TASKS, *FAMILIES])
    return _with_sizes(task, changes, text.lower()) if changes or text.endswith(":") else task


def _with_sizes(task: TaskSpec, changes: str, text: str) -> TaskSpec:
    """The task with other sizes, under the name `text`."""
    host_sizes = [key for key, value in task.outline.spec().items() if isinstance(value, int)]
    fixed = "episode_length" if task.budget == "flops" else "budget_steps"
    own_sizes = [name for name in SIZES if name != fixed]
    sizes: dict[str, Any] = {}
    host = dict(task.host)
    keys = [change.partition("=")[0] for change in changes.split(",")]
    for change in changes.split(","):
        key, _, value = change.partition("=")
        if keys.count(key) > 1:
            raise EsperError(f"task {text!r}: {key} is given twice")
        if key not in (*own_sizes, *host_sizes) or not re.fullmatch(r"[0-9]+", value):
            raise EsperError(
                f"task {text!r}: {change!r} is not field=number for one of its sizes; "
                + allowed((*own_sizes, *host_sizes))
            )
        most = MAX_DEPTH if key in _DEPTHS else MAX_SIZE
        if len(value) > 12 or int(value) > most:
            raise EsperError(f"task {task.name}: {key} is {value[:24]}; allowed: at most {most:,}")
        if key in SIZES:
            sizes[key] = int(value)
        else:
            host[key] = int(value)
    changed = replace(task, name=text, host=host, **sizes)
    changed.check_memory()
    return changed


def _slots(blocks: int, rows: int) -> tuple[str, ...]:
    return tuple(f"r{row}c{block}" for row in range(rows) for block in range(blocks))


def _variant(base: TaskSpec, name: str, *, host: Mapping[str, Any] | None = None, **changes: Any) -> TaskSpec:
    return replace(base, name=name, host={**base.host, **(host or {})}, **changes)


_DATA_KINDS = {"cnn": "image", "mlp": "vector", "transformer": "text"}

# The digits are part of the package: an episode of 16 networks takes seconds. Prices and hosts were chosen
# with benchmarks/decision_value.py.
_DIGITS = TaskSpec(
    name="digits_baseline",
    host={"kind": "cnn", "blocks": 2, "base": 3, "channels": 1, "size": 8},
    slots=("r0c0", "r0c1", "r1c0"),
    dataset="digits",
    batch_size=32,
    steps_per_epoch=12,
    val_size=256,
    final_val_size=512,
    episode_length=24,
    population=64,
    optimizer=OptimizerConfig(kind="adamw", host_lr=0.01, seed_lr=0.01, host_decay=1e-4),
    lr_decay=True,
    pacing=Pacing(
        min_training_epochs=2,
        min_blending_epochs=0,
        min_prune_age=1,
        embargo_epochs=1,
        auto_forward_gates=AUTOMATIC_GATES,
    ),
    gates=GateConfig(permissive=True),
    objective=ObjectiveConfig(size_price=0.05, waste_price=0.02),
    blueprints=("conv_light", "depthwise", "conv_small", "norm"),
)
_IMPAIRED = _variant(
    _DIGITS,
    "digits_impaired",
    host={"blocks": 3, "base": 2, "kernel": 1},
    slots=_slots(3, 1),
    batch_size=64,
    optimizer=replace(_DIGITS.optimizer, host_lr=0.03, seed_lr=0.03),
    objective=replace(_DIGITS.objective, size_price=0.1),
)
_FASHION = _variant(
    _DIGITS,
    "fashion_baseline",
    host={"blocks": 3, "base": 8, "size": 28},
    slots=_slots(3, 1),
    dataset="fashion_mnist",
    steps_per_epoch=30,
    val_size=1000,
    final_val_size=4000,
    episode_length=40,
    population=8,
    blueprints=("conv_light", "depthwise", "bottleneck", "conv_small", "attention", "norm", "residual"),
)
_CIFAR = _variant(
    _FASHION,
    "cifar_baseline",
    host={"channels": 3, "size": 32},
    dataset="cifar10",
    steps_per_epoch=50,
    episode_length=75,
    population=1,
    optimizer=OptimizerConfig(host_lr=0.05, seed_lr=0.05),
    objective=ObjectiveConfig(),
    pacing=Pacing(
        min_training_epochs=5,
        min_blending_epochs=3,
        embargo_epochs=3,
        auto_forward_gates=frozenset({GateLevel.G1}),
    ),
    blueprints=(
        "conv_light",
        "depthwise",
        "bottleneck",
        "conv_small",
        "conv_heavy",
        "attention",
        "norm",
        "residual",
    ),
)
_TEXT = TaskSpec(
    name="sotu",
    host={
        "kind": "gpt",
        "vocabulary": 106,
        "features": 32,
        "heads": 4,
        "layers": 3,
        "context": 64,
        "segments": 3,
    },
    slots=_slots(3, 1),
    dataset="sotu",
    batch_size=16,
    steps_per_epoch=40,
    val_size=128,
    episode_length=40,
    population=8,
    optimizer=OptimizerConfig(kind="adamw", host_lr=3e-3, seed_lr=3e-3, host_decay=0.01),
    lr_decay=True,
    gates=_CIFAR.gates,
    pacing=_CIFAR.pacing,
    objective=ObjectiveConfig(),
    blueprints=(
        "norm",
        "attention",
        "lora",
        "lora_large",
        "mlp_small",
        "mlp",
        "flex_attention",
        "transformer_block",
    ),
)

for _spec in (
    _DIGITS,
    _IMPAIRED,
    _variant(_IMPAIRED, "digits_scale", host={"blocks": 5, "pools": 2}, slots=_slots(5, 1), batch_size=32),
    _variant(
        _DIGITS,
        "digits_shift",
        host={"base": 4},
        blueprints=("conv_light", "conv_small", "norm"),
        objective=replace(_DIGITS.objective, size_price=0.4),
        conditions=ConditionSpace(
            cripple_probability=0.5,
            train_sizes=(200, 800),
            label_noises=(0.0, 0.2),
            learning_rates=(0.01, 0.03),
        ),
    ),
    _variant(_DIGITS, "digits_flops", budget="flops", budget_steps=720, steps_per_epoch=24),
    replace(
        _DIGITS,
        name="digits_mlp",
        host={"kind": "mlp", "inputs": 64, "features": 6, "layers": 2},
        slots=_slots(2, 1),
        dataset="digits_flat",
        blueprints=("mlp_small", "mlp", "lora", "norm"),
    ),
    _FASHION,
    _variant(_FASHION, "fashion_impaired", host={"base": 2, "kernel": 1}),
    _CIFAR,
    _variant(_CIFAR, "cifar_multichannel", slots=_slots(3, 2)),
    _variant(_CIFAR, "cifar_impaired", host={"base": 1, "kernel": 1}, population=8),
    _variant(_CIFAR, "cifar_minimal", host={"base": 2, "kernel": 1, "pools": 0}, population=8),
    _variant(_CIFAR, "cifar_highres", host={"base": 16}),
    _variant(_CIFAR, "cifar_postpool", host={"base": 16}, slots=("r1c0", "r1c1", "r1c2")),
    _variant(_CIFAR, "cifar_scale", host={"blocks": 5}, slots=_slots(5, 1)),
    _variant(_CIFAR, "cifar_deep_multichannel", host={"blocks": 5}, slots=_slots(5, 2)),
    _variant(
        _CIFAR,
        "cifar_deep_impaired",
        host={"blocks": 5, "base": 2, "kernel": 1},
        slots=_slots(5, 2),
        population=8,
    ),
    _TEXT,
    _variant(
        _TEXT,
        "tinystories",
        host={"vocabulary": 50257, "features": 384, "heads": 6, "layers": 6, "context": 256},
        dataset="tinystories",
        batch_size=32,
        steps_per_epoch=50,
        episode_length=75,
        population=1,
        optimizer=OptimizerConfig(kind="adamw", host_lr=3e-4, seed_lr=3e-4, host_decay=0.1),
    ),
):
    register_task(_spec)

_MNIST14 = _variant(
    _FASHION, "mnist14_baseline", host={"base": 4, "size": 14}, dataset="mnist14", population=16
)
for _spec in (
    _variant(
        _DIGITS,
        "mnist1d_baseline",
        host={"blocks": 3, "base": 4, "size": 40, "height": 1},
        slots=_slots(3, 1),
        dataset="mnist1d",
        blueprints=(*_FASHION.blueprints, "conv_1d"),
    ),
    _MNIST14,
    _variant(_MNIST14, "fashion14_baseline", dataset="fashion14"),
    _variant(_TEXT, "shakespeare", host={"vocabulary": 84}, dataset="shakespeare"),
):
    register_task(_spec)
