"""Families of worlds. A world is one drawn task: host, data, conditions, budget of FLOPs and prices follow
from its number alone. Whether to grow, how much and where differs from world to world.

`worlds_small` is to judge in. `worlds_mixed` is to train in: 64 networks that share host, data, budget and
prices are one population, and the other conditions are drawn for each network. There a network costs about
half as much CPU time. `worlds_dense` is to train in, too: vectors instead of images.

Numbers are divided once and for all: policies are trained on the first, chosen and tuned on the second, and
judged on the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from esper.kasmina import FlopMeter
from esper.kasmina.optim import OptimizerConfig
from esper.leyline import ObjectiveConfig, format_slot_id
from esper.leyline.errors import EsperError, allowed
from esper.leyline.rng import stream_seed
from esper.runtime.data.datasets import dataset_facts
from esper.runtime.tasks import TASKS, ConditionSpace, TaskSpec

TRAINING_WORLDS, TUNING_WORLDS = range(10_000), range(10_000, 20_000)
HELD_OUT_WORLDS = range(20_000, 1_000_000)

DATASETS = ("digits", "mnist1d", "mnist14", "fashion14")
TRAIN_SIZES = (100, 3200)
"""Number of training samples, log-uniform; at most what the dataset has beside its validation samples."""
NOISE_CHANCE, LABEL_NOISES = 0.5, (0.05, 0.3)
"""Share of wrong labels: 0, or uniform with this probability."""
RATES = (0.005, 0.05)
"""Learning rate of host and seeds, log-uniform."""
WIDTHS, DEPTHS = (2, 3, 4), (2, 3, 4)
"""Channels of the first block, and number of blocks."""
WEAKNESSES = (0.0, 0.0, 0.5, 0.5, 1.0)
"""Probability with which a block is crippled: its 3×3 kernels keep only the centre. Strong hosts have no
such block, weak ones no other."""
BUDGETS = (20, 100)
"""Training steps that the largest network can pay for, log-uniform: the one with the dearest blueprint in
every slot."""
DENSE_DATASET, DENSE_BLUEPRINTS = "digits_flat", ("mlp_small", "lora", "norm", "mlp")
DENSE_FEATURES, DENSE_LAYERS, DENSE_BUDGETS = (4, 32), (3, 4), (20, 1000)
"""Dense worlds: features and budget log-uniform."""
EPOCHS = (16, 24)
"""Number of epochs, each followed by a decision. They cost equal FLOPs."""
FREE_CHANCE, SIZE_PRICES, WASTE_PRICES = 0.2, (0.002, 0.05), (0.002, 0.05)
"""λ and κ: each is 0 with this probability, else log-uniform."""
BLUEPRINTS = ("conv_light", "conv_small", "norm", "residual")
SLOTS = 3
"""Of all places after a block or its pooling, so many are drawn."""
POPULATION, BATCH, VAL_SIZE, FINAL_VAL_SIZE = 8, 32, 128, 512
MIXED_POPULATION, CHOICES = 64, 8
"""Networks of mixed worlds in a population, and values that each of their conditions may have."""
SENSE_EVERY = 8
"""Epochs between two measurements of the growth sensors. In each epoch they would cost 2 to 44 % of a
network's budget."""
POOLS = 3
"""Images of 8 pixels can be halved so often."""
_SAMPLES = {"digits": 835, "digits_flat": 835, "mnist1d": 3488}
"""Training samples beside those for validation, where these are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What was drawn of one world."""

    number: int
    dataset: str
    train_size: int
    label_noise: float
    learning_rate: float
    width: int
    depth: int
    weakness: float
    """Probability with which each block was crippled."""
    crippled: tuple[int, ...]
    """Blocks that cannot see shapes."""
    slots: tuple[str, ...]
    """In row-major order, as tasks list them."""
    largest_steps: int
    """Its budget, in training steps of the largest network."""
    epochs: int
    size_price: float
    waste_price: float


def draw_world(number: int) -> World:
    """What is drawn of `worlds_small:number`. Each property has a random number of its own."""
    names = ("data", "size", "noisy", "noise", "rate", "width", "depth", "weakness", "budget", "epochs")
    prices = ("size_free", "size_price", "waste_free", "waste_price")
    rng = np.random.default_rng(stream_seed(0, "world", number))
    drawn = dict(zip((*names, *prices), rng.random(len(names) + len(prices)).tolist(), strict=True))
    dataset, depth = _choose(DATASETS, drawn["data"]), _choose(DEPTHS, drawn["depth"])
    places = [(row, block) for row in (0, 1) for block in range(depth if row == 0 else min(depth, POOLS))]
    slots = sorted(places[i] for i in rng.permutation(len(places))[:SLOTS])
    weakness = _choose(WEAKNESSES, drawn["weakness"])
    return World(
        number=number,
        dataset=dataset,
        train_size=round(_log_uniform(_train_sizes(dataset), drawn["size"])),
        label_noise=_uniform(LABEL_NOISES, drawn["noise"]) if drawn["noisy"] < NOISE_CHANCE else 0.0,
        learning_rate=_log_uniform(RATES, drawn["rate"]),
        width=_choose(WIDTHS, drawn["width"]),
        depth=depth,
        weakness=weakness,
        crippled=tuple(block for block in range(depth) if rng.random() < weakness),
        slots=tuple(format_slot_id(row, block) for row, block in slots),
        largest_steps=round(_log_uniform(BUDGETS, drawn["budget"])),
        epochs=_choose(range(EPOCHS[0], EPOCHS[1] + 1), drawn["epochs"]),
        size_price=_price(SIZE_PRICES, drawn["size_free"], drawn["size_price"]),
        waste_price=_price(WASTE_PRICES, drawn["waste_free"], drawn["waste_price"]),
    )


def _train_sizes(dataset: str) -> tuple[int, int]:
    low, high = TRAIN_SIZES
    return low, min(high, _SAMPLES.get(dataset, high))


def _choose(values: Sequence[Any], share: float) -> Any:
    return values[int(share * len(values))]


def _uniform(limits: tuple[float, float], share: float) -> float:
    return limits[0] + share * (limits[1] - limits[0])


def _log_uniform(limits: tuple[float, float], share: float) -> float:
    return math.exp(_uniform((math.log(limits[0]), math.log(limits[1])), share))


def _price(limits: tuple[float, float], free: float, share: float) -> float:
    return 0.0 if free < FREE_CHANCE else _log_uniform(limits, share)


@cache
def small_world(number: int) -> TaskSpec:
    """The task `worlds_small:number`."""
    world = draw_world(number)
    conditions = ConditionSpace(
        cripple_probability=0.0,
        crippled_blocks=world.crippled,
        train_sizes=(world.train_size,),
        label_noises=(world.label_noise,),
    )
    return _task(world, f"worlds_small:{number}", conditions, POPULATION, world.largest_steps)


@cache
def mixed_worlds(number: int) -> TaskSpec:
    """The task `worlds_mixed:number`: host, slots, data, budget, epochs and prices of `worlds_small:number`;
    every network draws its training set, label noise, learning rate and crippled blocks."""
    world = draw_world(number)
    conditions = _drawn_by_network(world)
    return _task(world, f"worlds_mixed:{number}", conditions, MIXED_POPULATION, world.largest_steps)


@cache
def dense_worlds(number: int) -> TaskSpec:
    """The task `worlds_dense:number`: handwritten digits as vectors, a host of linear layers, and blueprints
    for vectors. Epochs and prices are those of `worlds_small:number`."""
    world = replace(draw_world(number), dataset=DENSE_DATASET, weakness=0.0)
    rng = np.random.default_rng(stream_seed(0, "world", number, 1))
    features, depth, budget = rng.random(3).tolist()
    layers = _choose(DENSE_LAYERS, depth)
    slots = sorted(rng.permutation(layers)[:SLOTS].tolist())
    width = round(_log_uniform(DENSE_FEATURES, features))
    return _task(
        world,
        f"worlds_dense:{number}",
        _drawn_by_network(world),
        MIXED_POPULATION,
        round(_log_uniform(DENSE_BUDGETS, budget)),
        host={"kind": "mlp", "inputs": 64, "features": width, "layers": layers},
        slots=tuple(format_slot_id(0, layer) for layer in slots),
        blueprints=DENSE_BLUEPRINTS,
    )


def _drawn_by_network(world: World) -> ConditionSpace:
    shares = [(i + 0.5) / CHOICES for i in range(CHOICES)]
    noises = [(share - NOISE_CHANCE) / (1 - NOISE_CHANCE) for share in shares]
    sizes = _train_sizes(world.dataset)
    return ConditionSpace(
        cripple_probability=world.weakness,
        train_sizes=tuple(round(_log_uniform(sizes, share)) for share in shares),
        label_noises=tuple(0.0 if noise < 0 else _uniform(LABEL_NOISES, noise) for noise in noises),
        learning_rates=tuple(_log_uniform(RATES, share) for share in shares),
    )


def _task(
    world: World,
    name: str,
    conditions: ConditionSpace,
    population: int,
    largest_steps: int,
    **changes: Any,
) -> TaskSpec:
    """A task with the budget of a world. Without `changes` its host is that of images."""
    common = replace(
        TASKS["digits_baseline"],
        name=name,
        family="worlds_small",
        dataset=world.dataset,
        batch_size=BATCH,
        val_size=VAL_SIZE,
        final_val_size=FINAL_VAL_SIZE,
        episode_length=world.epochs,
        population=population,
        optimizer=OptimizerConfig(
            kind="adamw", host_lr=world.learning_rate, seed_lr=world.learning_rate, host_decay=1e-4
        ),
        objective=ObjectiveConfig(size_price=world.size_price, waste_price=world.waste_price),
        conditions=conditions,
        counterfactuals="open",
        sense_every=SENSE_EVERY,
        budget="flops",
        budget_steps=world.epochs,
        even_epochs=True,
        steps_per_epoch=1,
        **(changes or _image_host(world)),
    )
    # The budget is given in steps of the largest network, a task's in steps of its bare host.
    steps = max(1, round(largest_steps * largest_ratio(common) / world.epochs))
    return replace(common, steps_per_epoch=steps, budget_steps=steps * world.epochs)


def _image_host(world: World) -> dict[str, Any]:
    facts = dataset_facts(world.dataset)
    assert facts is not None, "datasets of worlds are built in"
    channels, height, size = facts.shape
    host = {"kind": "cnn", "blocks": world.depth, "base": world.width}
    host |= {"channels": channels, "size": size, "pools": min(world.depth, POOLS)}
    if height == 1:
        host["height"] = 1
    return {"host": host, "slots": world.slots, "blueprints": BLUEPRINTS}


def largest_ratio(task: TaskSpec) -> float:
    """FLOPs of a training step of the largest network, in those of the bare host."""
    meter = FlopMeter(task.build_model(1, [0]))
    host = meter.per_sample({})
    seeds = (max(meter.bank(slot, name).training for name in task.blueprints) for slot in task.slots)
    return (host + sum(seeds)) / host


FAMILIES = {"worlds_small": small_world, "worlds_mixed": mixed_worlds, "worlds_dense": dense_worlds}
"""What draws the task with a number, by the name of the family."""


def get_world(family: str, number: str) -> TaskSpec:
    """A world by the text of its number."""
    if not number.isascii() or not number.isdecimal() or len(number) > 6 or str(int(number)) != number:
        ranges = [
            f"{worlds[0]:,} to {worlds[-1]:,} ({use})"
            for worlds, use in (
                (TRAINING_WORLDS, "training"),
                (TUNING_WORLDS, "tuning"),
                (HELD_OUT_WORLDS, "held out"),
            )
        ]
        example = f"{family}:17"
        raise EsperError(
            f"task {family}:{number}: {number!r} is no number of a world; {allowed(ranges)}; as in {example}"
        )
    return FAMILIES[family](int(number))
