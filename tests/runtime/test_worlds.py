"""Worlds: what their numbers draw, within which limits, and how they are named."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, fields, replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from esper.leyline import EsperError
from esper.runtime import get_task_spec
from esper.runtime.data import load_dataset, validation_split
from esper.runtime.tasks import draw_condition
from esper.runtime.worlds import (
    BATCH,
    BUDGETS,
    DATASETS,
    DENSE_BLUEPRINTS,
    DENSE_BUDGETS,
    DENSE_FEATURES,
    DENSE_LAYERS,
    DEPTHS,
    EPOCHS,
    FINAL_VAL_SIZE,
    HELD_OUT_WORLDS,
    LABEL_NOISES,
    RATES,
    SIZE_PRICES,
    TRAIN_SIZES,
    TRAINING_WORLDS,
    TUNING_WORLDS,
    VAL_SIZE,
    WASTE_PRICES,
    WEAKNESSES,
    WIDTHS,
    World,
    draw_world,
)

MANY = [draw_world(number) for number in range(2000)]


def test_every_property_stays_within_its_range_and_uses_it() -> None:
    limits = {
        "train_size": TRAIN_SIZES,
        "learning_rate": RATES,
        "largest_steps": BUDGETS,
        "epochs": EPOCHS,
        "label_noise": (0.0, LABEL_NOISES[1]),
        "size_price": (0.0, SIZE_PRICES[1]),
        "waste_price": (0.0, WASTE_PRICES[1]),
    }
    for name, (low, high) in limits.items():
        values = [getattr(world, name) for world in MANY]
        assert low <= min(values) <= max(values) <= high, name
        assert max(values) > low + 0.9 * (high - low), name
    for name, choices in {"dataset": DATASETS, "width": WIDTHS, "depth": DEPTHS}.items():
        counts = Counter(getattr(world, name) for world in MANY)
        assert set(counts) == set(choices)
        for value, count in Counter(choices).items():  # a value may be listed twice
            assert counts[value] / len(MANY) == pytest.approx(count / len(choices), abs=0.05)


def test_hosts_are_strong_mixed_and_weak() -> None:
    """Blocks are crippled one by one, with a probability that is drawn for the whole world."""
    shares = [len(world.crippled) / world.depth for world in MANY]
    assert sum(shares) / len(MANY) == pytest.approx(sum(WEAKNESSES) / len(WEAKNESSES), abs=0.03)
    strong = sum(share == 0 for share in shares) / len(MANY)
    expected = sum(sum((1 - w) ** depth for w in WEAKNESSES) for depth in DEPTHS)
    assert strong == pytest.approx(expected / len(WEAKNESSES) / len(DEPTHS), abs=0.03)
    first = [0 in world.crippled for world in MANY if 0 < len(world.crippled) < world.depth]
    assert sum(first) / len(first) == pytest.approx(0.5, abs=0.06)


def test_prices_are_zero_in_a_fifth_of_worlds_and_otherwise_log_uniform() -> None:
    for name, (low, high) in {"size_price": SIZE_PRICES, "waste_price": WASTE_PRICES}.items():
        prices = [getattr(world, name) for world in MANY]
        assert sum(price == 0 for price in prices) / len(MANY) == pytest.approx(0.2, abs=0.03)
        charged = [price for price in prices if price]
        below_middle = sum(price < math.sqrt(low * high) for price in charged) / len(charged)
        assert below_middle == pytest.approx(0.5, abs=0.04)
        assert min(charged) >= low


def test_properties_do_not_follow_each_other() -> None:
    by_name = {
        field.name: torch.tensor([float(getattr(world, field.name)) for world in MANY])
        for field in fields(World)
        # digits has fewer samples than the others.
        if field.name not in ("dataset", "slots", "crippled", "train_size")
    }
    related = torch.corrcoef(torch.stack(list(by_name.values()))).abs()
    assert float((related - torch.eye(len(by_name))).max()) < 0.1


def test_a_world_follows_from_its_number_in_every_process() -> None:
    code = "from esper.runtime.worlds import draw_world; print(draw_world(17), draw_world(20_000))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == f"{draw_world(17)} {draw_world(20_000)}"
    assert draw_world(17) != draw_world(18)


def test_the_task_of_a_world_has_what_was_drawn() -> None:
    for number in (0, 1, 2, 5):
        world, task = draw_world(number), get_task_spec(f"worlds_small:{number}")
        condition = draw_condition(task, root_seed=3, episode=1, env=2)
        host = task.outline.spec()
        assert asdict(world) == asdict(world) | {
            "dataset": task.dataset,
            "train_size": condition.train_size,
            "label_noise": condition.label_noise,
            "learning_rate": condition.learning_rate,
            "width": host["base"],
            "depth": host["blocks"],
            "crippled": tuple(block for block, mark in enumerate(condition.crippled) if mark),
            "slots": task.slots,
            "epochs": task.episode_length,
            "size_price": task.objective.size_price,
            "waste_price": task.objective.waste_price,
        }
        assert task.family_name == "worlds_small"
        assert task.population == 8
        assert len(task.slots) == 3


def test_networks_of_mixed_worlds_share_a_host_and_draw_the_rest() -> None:
    for number in (0, 1, 4):
        small, mixed = get_task_spec(f"worlds_small:{number}"), get_task_spec(f"worlds_mixed:{number}")
        drawn = ("name", "population", "conditions")
        assert replace(mixed, **{name: getattr(small, name) for name in drawn}, family=small.family) == small
        assert (mixed.family_name, mixed.population) == ("worlds_small", 64)
        conditions = [draw_condition(mixed, root_seed=0, episode=0, env=env) for env in range(2000)]
        world = draw_world(number)
        crippled = sum(sum(c.crippled) for c in conditions) / (2000 * world.depth)
        assert crippled == pytest.approx(world.weakness, abs=0.03)
        others = [own for own in MANY if own.dataset == world.dataset]
        for name in ("train_size", "learning_rate"):
            means = [
                sum(math.log(getattr(one, name)) for one in some) / len(some) for some in (conditions, others)
            ]
            assert means[0] == pytest.approx(means[1], abs=0.1), name
        noises = [c.label_noise for c in conditions]
        assert sum(noise == 0 for noise in noises) / 2000 == pytest.approx(0.5, abs=0.04)
        assert LABEL_NOISES[0] < min(noise for noise in noises if noise) < max(noises) < LABEL_NOISES[1]


DENSE = [get_task_spec(f"worlds_dense:{number}") for number in range(300)]


def test_dense_worlds_draw_their_hosts_and_share_prices_with_the_others() -> None:
    widths, layers = ([task.host[name] for task in DENSE] for name in ("features", "layers"))
    assert DENSE_FEATURES[0] <= min(widths) <= max(widths) <= DENSE_FEATURES[1]
    assert set(layers) == set(DENSE_LAYERS)
    middle = math.sqrt(DENSE_FEATURES[0] * DENSE_FEATURES[1])
    assert sum(width < middle for width in widths) / len(DENSE) == pytest.approx(0.5, abs=0.1)
    for number, task in enumerate(DENSE):
        small = get_task_spec(f"worlds_small:{number}")
        shared = ("objective", "episode_length", "sense_every", "counterfactuals", "batch_size", "family")
        assert all(getattr(task, name) == getattr(small, name) for name in shared)
        assert len(task.slots) == 3
        assert (task.dataset, task.blueprints) == ("digits_flat", DENSE_BLUEPRINTS)


def test_networks_of_a_dense_world_draw_their_data_and_learning_rate() -> None:
    conditions = [draw_condition(DENSE[3], root_seed=0, episode=0, env=env) for env in range(500)]
    for name, (low, high) in {"train_size": (100, 835), "learning_rate": RATES}.items():
        values = [getattr(condition, name) for condition in conditions]
        assert low <= min(values) < math.sqrt(low * high) < max(values) <= high
    assert not any(any(condition.crippled) for condition in conditions)


@pytest.mark.parametrize(
    ("family", "dearest", "steps"),
    [("worlds_small", "residual", BUDGETS), ("worlds_dense", "mlp", DENSE_BUDGETS)],
)
@pytest.mark.parametrize("number", range(4))
def test_a_budget_pays_for_the_drawn_steps_of_the_largest_network(number, family, dearest, steps) -> None:
    """Counted by torch on a real forward and backward pass."""
    task = get_task_spec(f"{family}:{number}")
    costs = []
    for seeds in ((), task.slots):
        model = task.build_model(1, [0])
        for slot in seeds:
            model.plant_fossil(slot, dearest)
        x = torch.randn(4, *model.host.example_input(1).shape[1:])
        x = x if x.dim() == 4 else x.unsqueeze(0)  # of one network
        with FlopCounterMode(display=False) as counter:
            model.losses(x, torch.zeros(1, 4, dtype=torch.int64)).total().backward()
        costs.append(counter.get_total_flops())
    paid = task.budget_steps * costs[0] / costs[1]
    if family == "worlds_small":
        assert paid == pytest.approx(draw_world(number).largest_steps, rel=0.03, abs=3)
    assert steps[0] - 3 <= paid <= steps[1] * 1.03


def test_embedded_data_have_as_many_samples_as_worlds_may_draw() -> None:
    for dataset in ("digits", "mnist1d"):
        most = max(world.train_size for world in MANY if world.dataset == dataset)
        split = validation_split(load_dataset(dataset), VAL_SIZE, 0, final_size=FINAL_VAL_SIZE)
        assert BATCH <= most <= len(split.train)


def test_ranges_of_numbers_do_not_overlap() -> None:
    assert [TRAINING_WORLDS[0], TUNING_WORLDS[0], HELD_OUT_WORLDS[0]] == [0, 10_000, 20_000]
    assert (TRAINING_WORLDS.stop, TUNING_WORLDS.stop) == (TUNING_WORLDS.start, HELD_OUT_WORLDS.start)


@pytest.mark.parametrize("text", ["", ":", ":x", ":-1", ":1.5", ":007", ":1000000", ":²"])
def test_a_bad_number_is_refused_with_those_that_are_allowed(text) -> None:
    with pytest.raises(EsperError, match="no number of a world; allowed: 0 to 9,999"):
        get_task_spec(f"worlds_small{text}")


def test_a_world_can_have_other_sizes() -> None:
    task = get_task_spec("worlds_small:3,val_size=64,population=16")
    assert (task.val_size, task.population, task.name) == (64, 16, "worlds_small:3,val_size=64,population=16")
    assert task.family_name == "worlds_small"
    assert task.host == get_task_spec("worlds_small:3").host
    with pytest.raises(EsperError, match="'episode_length=3' is not field=number"):
        get_task_spec("worlds_small:3,episode_length=3")
