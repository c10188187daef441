"""FLOPs against counts by hand, and against torch's counter on real training steps: every host, blueprint,
algorithm and stage."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina import (
    FlopMeter,
    MorphogeneticModel,
    NetworkRow,
    all_coalitions,
    blended_slots,
    evaluate_coalitions,
)
from esper.leyline import AlphaAlgorithm, Incubation, SeedStage, SeedStateReport
from esper.runtime.tasks import get_task_spec
from esper.simic.sensors import GrowthProbe
from helpers import EAGER, HOSTS, LINE, blueprints, bring, generator, make


def conv(pixels: int, inputs: int, outputs: int, kernel: int) -> int:
    return 2 * pixels * inputs * outputs * kernel**2


HOST = [conv(64, 1, 2, 1), 0, conv(16, 2, 4, 1), 0, conv(4, 4, 8, 1), 0, 2 * 8 * 10]
"""digits_impaired: three blocks of 1×1 kernels, 2, 4 and 8 channels wide, on 8×8, 4×4 and 2×2 pixels; a
pooling after each."""
TRAINED = 3 * sum(HOST) - HOST[0]
"""Nothing needs the gradient of the images."""
LIGHT = {"r0c0": conv(64, 2, 2, 3), "r0c1": conv(16, 4, 4, 3), "r0c2": conv(4, 8, 8, 3)}


def network(**changes) -> tuple[FlopMeter, MorphogeneticModel]:
    task = replace(get_task_spec("digits_impaired"), **EAGER, **changes)
    model = task.build_model(1, [0])
    return FlopMeter(model), model


def per_sample(meter: FlopMeter, model: MorphogeneticModel) -> int:
    return meter.per_sample(NetworkRow(model).reports())


# -- by hand -------------------------------------------------------------------------------------------------


def test_a_host_alone_costs_three_passes_but_for_the_gradient_of_the_data():
    meter, model = network()
    assert meter.segments == HOST
    assert per_sample(meter, model) == TRAINED
    assert meter.forward({}) == sum(HOST)


def test_the_size_of_the_population_does_not_matter():
    population = get_task_spec("digits_impaired").build_model(8, range(8))
    _, model = network()
    bring(model, "r0c1", "conv_light", SeedStage.FOSSILIZED)
    meter = FlopMeter(population)
    assert meter.segments == HOST
    assert per_sample(meter, model) == TRAINED + 3 * LIGHT["r0c1"]


def test_a_seed_costs_nothing_before_it_trains_and_three_passes_once_it_is_blended():
    meter, model = network()
    bring(model, "r0c1", "conv_light", SeedStage.GERMINATED)
    assert per_sample(meter, model) == TRAINED
    for stage in (SeedStage.HOLDING, SeedStage.FOSSILIZED):
        meter, model = network()
        bring(model, "r0c1", "conv_light", stage)
        assert per_sample(meter, model) == TRAINED + 3 * LIGHT["r0c1"]
        assert meter.forward(model.reports()) == sum(HOST) + LIGHT["r0c1"]


def test_incubation_adds_two_passes_of_the_seed_and_two_through_what_comes_after():
    meter, model = network()
    bring(model, "r0c0", "conv_light", SeedStage.FOSSILIZED)
    bring(model, "r0c2", "conv_light", SeedStage.FOSSILIZED)
    bring(model, "r0c1", "conv_light", SeedStage.TRAINING)
    after = sum(HOST[3:]) + LIGHT["r0c2"]
    blended = 3 * (LIGHT["r0c0"] + LIGHT["r0c2"])
    assert per_sample(meter, model) == TRAINED + blended + 2 * (LIGHT["r0c1"] + after)
    assert meter.forward(model.reports()) == sum(HOST) + LIGHT["r0c0"] + LIGHT["r0c2"]


def test_straight_through_adds_the_seed_only():
    meter, model = network(incubation=Incubation.STE)
    bring(model, "r0c1", "conv_light", SeedStage.TRAINING)
    assert per_sample(meter, model) == TRAINED + 2 * LIGHT["r0c1"]


@pytest.mark.parametrize(
    ("blueprint", "flops"), [("norm", 0), ("depthwise", conv(16, 1, 4, 3) + conv(16, 4, 4, 1))]
)
def test_other_seeds(blueprint, flops):
    meter, model = network()
    bring(model, "r0c1", blueprint, SeedStage.FOSSILIZED)
    assert per_sample(meter, model) == TRAINED + 3 * flops


def test_a_gate_is_counted_with_its_seed():
    meter, model = network()
    bring(model, "r0c1", "conv_light", SeedStage.FOSSILIZED, algorithm=AlphaAlgorithm.GATE)
    gate = 2 * 4 * 8 + 2 * 8  # four channels, eight hidden units, one factor
    assert per_sample(meter, model) == TRAINED + 3 * (LIGHT["r0c1"] + gate)


def test_attention_is_counted():
    task = get_task_spec("sotu")
    spec = task.outline.spec()
    tokens, width = spec["context"], spec["features"]
    block = (
        2 * tokens * width * width * (4 + 8) + 2 * 2 * tokens * tokens * width
    )  # projections and MLP; scores and values
    output = 2 * tokens * width * spec["vocabulary"]
    meter = FlopMeter(task.build_model(1, [0]))
    assert meter.segments == [block] * 3 + [output]
    assert meter.per_sample({}) == 3 * (3 * block + output)


def test_kernels_on_lines_are_one_high():
    task = get_task_spec("mnist1d_baseline")
    meter = FlopMeter(task.build_model(1, [0]))
    blocks = [2 * 40 * 1 * 4 * 3, 2 * 20 * 4 * 8 * 3, 2 * 10 * 8 * 16 * 3]
    assert meter.segments == [blocks[0], 0, blocks[1], 0, blocks[2], 0, 2 * 16 * 10]
    assert meter.bank("r0c1", "conv_light").forward == 2 * 20 * 8 * 8 * 3
    assert meter.bank("r0c1", "depthwise").forward == 2 * 20 * 8 * 3 + 2 * 20 * 8 * 8


# -- against torch's counter on real steps -------------------------------------------------------------------

BATCH = 4
TOLERANCE = 0.01
STAGES = (
    (SeedStage.GERMINATED, Incubation.SHADOW),
    (SeedStage.TRAINING, Incubation.SHADOW),
    (SeedStage.TRAINING, Incubation.STE),
    (SeedStage.BLENDING, Incubation.SHADOW),
    (SeedStage.HOLDING, Incubation.SHADOW),
    (SeedStage.FOSSILIZED, Incubation.SHADOW),
)
PLACES = {name: (LINE | HOSTS)[name](1).execution_order() for name in LINE | HOSTS}


@cache
def meter_of(host: str, incubation: Incubation) -> FlopMeter:
    return FlopMeter(make(host, incubation=incubation))


@pytest.fixture
def ungrouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped convolutions run as one ordinary convolution per group, which torch counts correctly."""
    monkeypatch.setattr(F, "conv2d", group_by_group)


CONV2D = F.conv2d


def group_by_group(x, weight, bias, stride, padding, dilation, groups) -> Tensor:
    if groups == 1:
        return CONV2D(x, weight, bias, stride, padding, dilation, groups)
    pieces = zip(x.chunk(groups, 1), weight.chunk(groups), strict=True)
    out = torch.cat([CONV2D(a, b, None, stride, padding, dilation) for a, b in pieces], 1)
    return out if bias is None else out + bias.view(1, -1, 1, 1)


def counted(call: Callable[[], object]) -> int:
    """FLOPs per sample, by torch's counter as it is. It does not know the fused attention kernel."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    total = counter.get_total_flops()
    assert total % BATCH == 0
    return total // BATCH


def batch_of(model: MorphogeneticModel) -> tuple[Tensor, Tensor]:
    x = model.host.example_input(BATCH)
    if model.host.topology == "transformer":
        return x.unsqueeze(0), x.unsqueeze(0)
    if model.host.topology == "mlp":
        x = x.unsqueeze(0)
    return torch.randn(x.shape, generator=generator(0)), torch.zeros(1, BATCH, dtype=torch.long)


def real_step(model: MorphogeneticModel) -> int:
    x, y = batch_of(model)
    return counted(lambda: model.losses(x, y).total().backward())


def check(host: str, model: MorphogeneticModel) -> None:
    reports = model.reports()
    metered, real = meter_of(host, model.incubation).per_sample(reports), real_step(model)
    assert abs(metered - real) <= TOLERANCE * real, f"{metered:,} metered, {real:,} counted"


BLUEPRINTS = [(host, name) for host in LINE | HOSTS for name in ("noop", *blueprints(host))]


@pytest.mark.usefixtures("ungrouped")
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("host", "blueprint"), BLUEPRINTS)
def test_training_costs_what_torch_counts(host, blueprint, turn):
    """Every algorithm and stage. The first and the last slot take turns; the slow suite has the others."""
    slots = (PLACES[host][0], PLACES[host][-1])
    for (i, algorithm), (j, (stage, incubation)) in product(enumerate(AlphaAlgorithm), enumerate(STAGES)):
        model = make(host, incubation=incubation)
        bring(model, slots[(i + j + turn) % 2], blueprint, stage, algorithm=algorithm)
        check(host, model)


@pytest.mark.usefixtures("ungrouped")
@pytest.mark.parametrize("incubation", Incubation)
@pytest.mark.parametrize("host", LINE | HOSTS)
def test_seeds_together_cost_what_torch_counts(host, incubation):
    """Random blueprints, algorithms and stages in all slots at once. Without `noop`: it has no gradient, but
    shares the shadow pass with seeds that have one."""
    chance = random.Random(7)
    stages = list(dict.fromkeys(stage for stage, _ in STAGES))
    for _ in range(8):
        model = make(host, incubation=incubation)
        for slot in PLACES[host]:
            name, how = chance.choice(blueprints(host)), chance.choice(list(AlphaAlgorithm))
            bring(model, slot, name, chance.choice(stages), algorithm=how)
        check(host, model)


@pytest.mark.parametrize("host", LINE | HOSTS)
def test_validation_costs_what_torch_counts(host):
    model = make(host)
    chance = random.Random(8)
    for slot in PLACES[host]:
        bring(model, slot, chance.choice(["noop", *blueprints(host)]), SeedStage.HOLDING)
    x, _ = batch_of(model)
    model.eval()
    with torch.no_grad():
        real = counted(lambda: model(x))
    meter, reports = meter_of(host, Incubation.SHADOW), model.reports()
    assert meter.forward(reports) == real
    slots = blended_slots(model, 0)
    every = all_coalitions(slots)
    some = [frozenset(), frozenset(slots[:1]), frozenset(slots), frozenset(slots[1:])]
    for wanted in (every, some):
        real = counted(lambda wanted=wanted: evaluate_coalitions(model, x, {0: wanted}))
        assert meter.coalitions(reports, wanted) == real
    assert meter.coalitions(reports, [frozenset(slots)]) == meter.forward(reports)


@pytest.mark.parametrize("name", ["cifar_baseline", "sotu", "digits_mlp"])
def test_sensors_cost_what_torch_counts(name):
    """On images large enough for torch's own convolution."""
    task = get_task_spec(name)
    if task.topology == "cnn":
        task = replace(task, slots=("r0c0",))
    model = task.build_model(1, [0])
    x, y = batch_of(model)
    probe = GrowthProbe()
    model.losses(x, y, probe=probe).total().backward()
    assert FlopMeter(model).sensors() == counted(lambda: probe.read(model, torch.ones(1)))


def test_torch_ignores_groups_in_the_gradient_of_the_weight():
    """Why the meter has a formula of its own: torch counts the weight gradient of a depthwise convolution
    once for each pair of channels."""
    channels, pixels = 8, 36

    def step(convolution: Callable[..., Tensor]) -> int:
        x = torch.zeros(BATCH, channels, 6, 6, requires_grad=True)
        weight = torch.zeros(channels, 1, 3, 3, requires_grad=True)
        return counted(lambda: convolution(x, weight, None, 1, 1, 1, channels).sum().backward())

    once = 2 * channels * pixels * 9
    assert step(group_by_group) == 3 * once
    assert step(CONV2D) == (2 + channels) * once


def test_reports_of_a_population_are_metered_row_by_row():
    model = make("cnn", 8)
    bring(model, "r0c0", "conv_light", SeedStage.FOSSILIZED, row=3)
    meter = FlopMeter(model)
    costs: list[int] = [meter.per_sample(model.reports(row)) for row in range(8)]
    seed: SeedStateReport = model.reports(3)["r0c0"]
    assert costs[3] > costs[0]
    assert costs[0] == meter.per_sample({})
    assert costs[3] == meter.per_sample({"r0c0": seed})
    assert len(set(costs)) == 2
