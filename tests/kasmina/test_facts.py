"""Facts of hosts and seeds: traits against a table written by hand, costs against real seeds and against what
the meter says of networks that have them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina import (
    CNNHost,
    FlopMeter,
    GPTHost,
    MLPHost,
    MorphogeneticModel,
    blueprint_names,
    host_facts,
    measure_traits,
)
from esper.leyline import BlueprintError, SeedStage, blueprint_ids, blueprint_index
from esper.leyline.facts import TRAITS
from esper.runtime import get_task_spec
from helpers import HOSTS, LINE, blueprints, bring, make

ALL = "all"
# Positions read along the longest side, mixes space, mixes channels, multiplies.
TABLE = {
    ("cnn", "norm"): (1, 0, 0, 0),
    ("cnn", "attention"): (ALL, 1, 1, 1),
    ("cnn", "conv_small"): (1, 0, 1, 0),
    ("cnn", "conv_light"): (3, 1, 1, 0),
    ("cnn", "conv_1d"): (5, 1, 1, 0),
    ("cnn", "conv_heavy"): (5, 1, 1, 0),
    ("cnn", "residual"): (5, 1, 1, 0),
    ("cnn", "depthwise"): (3, 1, 1, 0),
    ("cnn", "bottleneck"): (3, 1, 1, 0),
    ("transformer", "attention"): (ALL, 1, 1, 0),
    ("transformer", "flex_attention"): (ALL, 1, 1, 0),
    ("transformer", "transformer_block"): (ALL, 1, 1, 0),
    **{(t, "norm"): (1, 0, 0, 0) for t in ("transformer", "mlp")},
    **{
        (t, n): (1, 0, 1, 0)
        for t in ("transformer", "mlp")
        for n in ("lora", "lora_large", "mlp_small", "mlp")
    },
    **dict.fromkeys([(t, "noop") for t in HOSTS], (0, 0, 0, 0)),
}
SIZES = {"cnn": [(8, 8), (12, 7), (6, 24), (40, 40)], "transformer": [(9,), (64,)], "mlp": [()]}


def test_every_blueprint_has_its_row_in_the_table() -> None:
    assert set(TABLE) == {(t, name) for t in HOSTS for name in blueprint_names(t)}


@pytest.mark.parametrize(("topology", "name"), TABLE)
@pytest.mark.parametrize("channels", [4, 64])
def test_traits(topology, name, channels) -> None:
    read, *flags = TABLE[topology, name]
    line = name == "conv_1d"
    for positions in [(1, 11), (1, 40)] if line else SIZES[topology]:
        side = max((1, *positions))
        reach = 1.0 if read == ALL else read / side
        assert measure_traits(topology, name, channels, positions, line=line) == (reach, *flags)


@pytest.mark.parametrize(
    ("name", "positions", "expected"),
    [
        ("conv_light", (1, 1), (1.0, 0, 1, 0)),  # its other taps see padding only
        ("conv_light", (2, 2), (1.0, 1, 1, 0)),
        ("conv_heavy", (3, 3), (1.0, 1, 1, 0)),
        ("attention", (1, 1), (1.0, 0, 1, 1)),
    ],
)
def test_on_a_small_map_a_seed_reaches_no_further_than_the_map(name, positions, expected) -> None:
    assert measure_traits("cnn", name, 8, positions) == expected


def test_a_single_channel_cannot_be_mixed() -> None:
    assert measure_traits("cnn", "depthwise", 1, (8, 8)) == (3 / 8, 1, 0, 0)


def test_traits_of_a_blueprint_that_cannot_grow_are_an_error() -> None:
    with pytest.raises(BlueprintError, match="divisible by 4"):
        measure_traits("transformer", "attention", 6, (9,))
    with pytest.raises(BlueprintError, match="height 1"):
        measure_traits("cnn", "conv_1d", 8, (8, 8))


# -- costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", LINE | HOSTS)
def test_costs_are_those_of_networks_that_have_the_seed(host) -> None:
    model = make(host)
    facts = host_facts(model, classes=None, val_samples=None)
    meter, slots = FlopMeter(model), model.slot_config.slot_ids
    assert facts.seed_params.shape == facts.seed_flops.shape == (len(slots), len(blueprint_ids()))
    assert facts.traits.shape == (len(slots), len(blueprint_ids()), len(TRAITS))
    for s, slot_id in enumerate(slots):
        for name in blueprint_ids():
            b = blueprint_index(name)
            if name not in blueprints(host):
                quotes = [facts.seed_params[s, b], facts.seed_flops[s, b], *facts.traits[s, b]]
                assert np.isnan(quotes).all()
                continue
            grown = make(host)
            bring(grown, slot_id, name, SeedStage.HOLDING)
            assert facts.seed_params[s, b] == grown.total_params() - model.host_params
            assert facts.seed_flops[s, b] == meter.per_sample(grown.reports()) - meter.per_sample({})
            assert np.isfinite(facts.traits[s, b]).all()


def test_a_blueprint_that_needs_other_channels_is_nan_where_it_cannot_grow() -> None:
    model = MorphogeneticModel(GPTHost(1, features=6, heads=2, layers=2, context=8, segments=2))
    facts = host_facts(model, classes=None, val_samples=None)
    assert np.isnan(facts.seed_params[:, blueprint_index("attention")]).all()
    assert np.isfinite(facts.seed_params[:, blueprint_index("mlp")]).all()


# -- hosts ---------------------------------------------------------------------------------------------------


def test_facts_of_a_cnn_by_hand() -> None:
    host = CNNHost(8, classes=5, blocks=2, base=4, channels=3, size=8, pools=1)
    model = MorphogeneticModel(host, ["r0c0", "r0c1", "r1c0"])  # executed: r0c0, r1c0, r0c1
    facts = host_facts(model, classes=5, val_samples=64)
    block1, block2, head = 9 * 3 * 4 + 2 * 4, 9 * 4 * 8 + 2 * 8, 8 * 5 + 5
    total = block1 + block2 + head
    assert (facts.classes, facts.val_samples, facts.params) == (5, 64, total)
    # Two FLOPs per multiply-add; the first block needs no gradient of the data.
    conv1, conv2, linear = 2 * 2 * 9 * 3 * 4 * 64, 3 * 2 * 9 * 4 * 8 * 16, 3 * 2 * 8 * 5
    assert facts.flops == conv1 + conv2 + linear == FlopMeter(model).per_sample({})
    assert facts.depth.tolist() == [0.0, 1.0, 0.5]
    assert facts.width.tolist() == [0.5, 1.0, 0.5]
    assert facts.resolution.tolist() == [1.0, 0.25, 0.25]
    assert facts.params_before.tolist() == [block1 / total, (block1 + block2) / total, block1 / total]
    first, second = conv1 / facts.flops, (conv1 + conv2) / facts.flops
    assert facts.flops_before.tolist() == [first, second, first]


def test_facts_of_a_transformer_and_of_an_mlp() -> None:
    gpt = host_facts(make("transformer"), classes=None, val_samples=None)
    assert gpt.resolution.tolist() == gpt.width.tolist() == [1.0, 1.0]
    assert gpt.params_before[1] == 1 - 2 * 8 / gpt.params, "all but the last norm: the output layer is tied"
    mlp = host_facts(MorphogeneticModel(MLPHost(1, inputs=16, features=8)), classes=10, val_samples=None)
    assert mlp.resolution.tolist() == [1.0, 1.0]
    assert mlp.params_before.tolist() == [17 * 8 / mlp.params, (17 * 8 + 9 * 8) / mlp.params]


@pytest.mark.parametrize("host", LINE | HOSTS)
def test_the_positions_that_a_host_states_are_those_of_its_features(host) -> None:
    model = make(host)
    x = model.host.example_input(2)
    seen = {}

    def note(slot_id, before, after):
        seen[slot_id] = tuple(before.shape[2:] if host in ("cnn", "line") else before.shape[2:-1])
        return after

    y = torch.zeros(1, 2, *(x.shape[1:] if host == "transformer" else ()), dtype=torch.int64)
    model.losses(x if host in ("cnn", "line") else x.unsqueeze(0), y, probe=note)
    assert seen == {spec.slot_id: spec.positions for spec in model.host.injection_specs()}


def test_facts_depend_on_the_architecture_alone_and_are_measured_once() -> None:
    task = get_task_spec("digits_shift")
    first = host_facts(task.build_model(1, [0]), classes=10, val_samples=256)
    grown = task.build_model(8, range(8))
    grown.germinate("r0c0", "conv_light", row=3)
    with FlopCounterMode(display=False) as counter:
        second = host_facts(grown, classes=2, val_samples=None)
    assert counter.get_total_flops() == 0, "nothing ran"
    assert second.traits is first.traits
    assert (second.classes, second.val_samples) == (2, None)
    with pytest.raises(ValueError, match="read-only"):
        second.traits[0] = 0.0
    assert host_facts(task.build_model(1, [0]), classes=10, val_samples=256).flops == first.flops
    wider = host_facts(get_task_spec("digits_shift:base=8").build_model(1, [0]), classes=10, val_samples=256)
    assert wider.params > first.params


@pytest.mark.parametrize("name", ["digits_scale", "mnist1d_baseline", "sotu", "digits_mlp"])
def test_what_a_task_offers_has_finite_facts(name) -> None:
    task = get_task_spec(name)
    facts = host_facts(task.build_model(1, [0]), classes=task.num_classes, val_samples=task.val_size)
    offered = [blueprint_index(b) for b in task.blueprints]
    for array in (facts.seed_params, facts.seed_flops, facts.traits):
        assert np.isfinite(array[:, offered]).all()
    assert ((facts.params_before > 0) & (facts.params_before <= 1)).all()
    assert ((facts.flops_before > 0) & (facts.flops_before <= 1)).all()
    assert math.isfinite(facts.flops)
