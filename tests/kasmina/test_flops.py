"""FLOPs against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from esper.kasmina import FlopMeter, MorphogeneticModel, NetworkRow
from esper.leyline import AlphaAlgorithm, Incubation, SeedStage
from esper.runtime.tasks import get_task_spec
from helpers import EAGER, bring


def conv(pixels: int, inputs: int, outputs: int, kernel: int) -> int:
    return 2 * pixels * inputs * outputs * kernel**2


HOST = [conv(64, 1, 2, 1), 0, conv(16, 2, 4, 1), 0, conv(4, 4, 8, 1), 0, 2 * 8 * 10]
"""digits_impaired: three blocks of 1×1 kernels, 2, 4 and 8 channels wide, on 8×8, 4×4 and 2×2 pixels; a
pooling after each."""
LIGHT = {"r0c0": conv(64, 2, 2, 3), "r0c1": conv(16, 4, 4, 3), "r0c2": conv(4, 8, 8, 3)}


def network(**changes) -> tuple[FlopMeter, MorphogeneticModel]:
    task = replace(get_task_spec("digits_impaired"), **EAGER, **changes)
    model = task.build_model(1, [0])
    return FlopMeter(model), model


def per_sample(meter: FlopMeter, model: MorphogeneticModel) -> int:
    return meter.per_sample(NetworkRow(model).reports())


def test_a_host_alone_costs_three_passes():
    meter, model = network()
    assert meter.segments == HOST
    assert per_sample(meter, model) == 3 * sum(HOST)


def test_the_size_of_the_population_does_not_matter():
    population = get_task_spec("digits_impaired").build_model(8, range(8))
    _, model = network()
    bring(model, "r0c1", "conv_light", SeedStage.FOSSILIZED)
    meter = FlopMeter(population)
    assert meter.segments == HOST
    assert per_sample(meter, model) == 3 * (sum(HOST) + LIGHT["r0c1"])


def test_a_seed_costs_nothing_before_it_trains_and_three_passes_once_it_is_blended():
    meter, model = network()
    bring(model, "r0c1", "conv_light", SeedStage.GERMINATED)
    assert per_sample(meter, model) == 3 * sum(HOST)
    for stage in (SeedStage.HOLDING, SeedStage.FOSSILIZED):
        meter, model = network()
        bring(model, "r0c1", "conv_light", stage)
        assert per_sample(meter, model) == 3 * (sum(HOST) + LIGHT["r0c1"])


def test_incubation_adds_two_passes_through_what_comes_after():
    meter, model = network()
    bring(model, "r0c0", "conv_light", SeedStage.FOSSILIZED)
    bring(model, "r0c2", "conv_light", SeedStage.FOSSILIZED)
    bring(model, "r0c1", "conv_light", SeedStage.TRAINING)
    after = sum(HOST[3:]) + LIGHT["r0c2"]
    assert per_sample(meter, model) == 3 * (sum(HOST) + sum(LIGHT.values())) + 2 * after


def test_straight_through_adds_the_seed_only():
    meter, model = network(incubation=Incubation.STE)
    bring(model, "r0c1", "conv_light", SeedStage.TRAINING)
    assert per_sample(meter, model) == 3 * (sum(HOST) + LIGHT["r0c1"])


@pytest.mark.parametrize(
    ("blueprint", "flops"), [("norm", 0), ("depthwise", conv(16, 1, 4, 3) + conv(16, 4, 4, 1))]
)
def test_other_seeds(blueprint, flops):
    meter, model = network()
    bring(model, "r0c1", blueprint, SeedStage.FOSSILIZED)
    assert per_sample(meter, model) == 3 * (sum(HOST) + flops)


def test_a_gate_is_counted_with_its_seed():
    meter, model = network()
    bring(model, "r0c1", "conv_light", SeedStage.FOSSILIZED, algorithm=AlphaAlgorithm.GATE)
    gate = 2 * 4 * 8 + 2 * 8  # four channels, eight hidden units, one factor
    assert per_sample(meter, model) == 3 * (sum(HOST) + LIGHT["r0c1"] + gate)


def test_attention_is_counted():
    task = get_task_spec("sotu")
    spec = task.outline.spec()
    tokens, width = spec["context"], spec["features"]
    block = (
        2 * tokens * width * width * (4 + 8) + 2 * 2 * tokens * tokens * width
    )  # projections and MLP; scores and values
    output = 2 * tokens * width * spec["vocabulary"]
    assert FlopMeter(task.build_model(1, [0])).segments == [block] * 3 + [output]
