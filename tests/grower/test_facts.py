"""Facts of a user's model: by hand for small models, and without a trace in the model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import esper
from esper.grower.facts import model_facts
from esper.kasmina import measure_traits
from esper.leyline import blueprint_index
from grower_helpers import SmallCNN, TiedLM, make, same


def facts_of(model: nn.Module, slots: list, example, **options):
    grower = esper.attach(model, slots, example, policy=None, **options)
    return model_facts(model, grower.body, example, classes=10, val_samples=300)


def test_a_cnn_by_hand() -> None:
    facts = facts_of(make(), ["layer1", "layer2"], torch.zeros(6, 1, 8, 8))
    stem, layer1 = 9 * 8 + 8, 9 * 64 + 8 + 16
    assert (facts.classes, facts.val_samples) == (10, 300)
    assert facts.params == stem + 2 * layer1 + 90
    assert facts.params_before.tolist() == [
        (stem + layer1) / facts.params,
        (stem + 2 * layer1) / facts.params,
    ]
    steps = np.cumsum([2 * 9 * 8 * 64, 2 * 9 * 64 * 64, 2 * 9 * 64 * 16, 2 * 80])
    assert facts.flops == 3 * steps[-1], "per sample, three forward passes"
    assert facts.flops_before.tolist() == (steps[1:3] / steps[-1]).tolist()
    assert facts.depth.tolist() == [0.0, 1.0]
    assert facts.width.tolist() == [1.0, 1.0]
    assert facts.resolution.tolist() == [1.0, 0.25]
    light = blueprint_index("conv_light")
    assert facts.seed_params[:, light].tolist() == [9 * 64 + 24] * 2
    assert facts.seed_flops[:, light].tolist() == [3 * 2 * 9 * 64 * 64, 3 * 2 * 9 * 64 * 16]
    assert tuple(facts.traits[1, light]) == measure_traits("cnn", "conv_light", 8, (4, 4))
    assert np.isnan(facts.seed_params[:, blueprint_index("lora")]).all()


def test_tied_weights_count_once_and_tokens_are_positions() -> None:
    facts = facts_of(make(TiedLM), ["block1", "block2"], torch.zeros(3, 7, dtype=torch.int64))
    embed, block = 20 * 16, 2 * (16 * 16 + 16)
    assert facts.params == embed + 2 * block
    assert facts.params_before.tolist() == [(embed + block) / facts.params, 1.0]
    assert facts.flops_before[1] < 1.0, "the output layer multiplies by the tied weight"
    assert facts.resolution.tolist() == [1.0, 1.0]
    assert facts.seed_flops[0, blueprint_index("mlp")] == 3 * 7 * 2 * (2 * 16 * 64)


class Attending(nn.Module):
    """Its attention uses the weight of a child that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.place
        return self.head(self.norm(self.attention(x, x, x)[0]).mean(1))


def test_weights_that_are_used_without_a_call_count_too() -> None:
    facts = facts_of(make(Attending), ["norm"], torch.zeros(2, 5, 8))
    assert facts.params_before.tolist() == [(40 + 4 * 8 * 8 + 4 * 8 + 16) / facts.params]


def test_lines_and_vectors() -> None:
    model = nn.Sequential(nn.Conv1d(1, 6, 3, padding=1), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(60, 4))
    facts = facts_of(model, ["0"], torch.zeros(2, 1, 20))
    assert facts.resolution.tolist() == [1.0]
    assert tuple(facts.traits[0, blueprint_index("conv_1d")]) == (5 / 20, 1.0, 1.0, 0.0)
    vectors = facts_of(nn.Sequential(nn.Linear(12, 6), nn.Linear(6, 4)), ["0"], torch.zeros(2, 12))
    assert vectors.resolution.tolist() == [1.0]
    assert vectors.traits[0, blueprint_index("mlp"), 0] == 1.0


def test_measuring_leaves_no_trace() -> None:
    model, twin = make(), make()
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    grower = esper.attach(model.train(), ["layer1", "layer2"], x, policy=None)
    grower.germinate("layer1", "conv_light")
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    random = torch.random.get_rng_state()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    with_seed = model_facts(model, grower.body, x, classes=10, val_samples=None)
    assert same(model.state_dict(), state)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert model.training
    assert with_seed.flops == facts_of(twin, ["layer1", "layer2"], x).flops, "the host's, without its seeds"
    assert grower.body.slot("r0c0").is_applied


def test_without_an_example_what_cannot_be_known_is_nan(tmp_path) -> None:
    x = torch.zeros(2, 1, 8, 8)
    grower = esper.attach(make(), ["layer1", "layer2"], x, policy=None)
    grower.save(tmp_path / "grown")
    model = SmallCNN()
    loaded = esper.load(model, tmp_path / "grown")
    facts = model_facts(model, loaded.body, None, classes=None, val_samples=None)
    assert math.isnan(facts.flops)
    for array in (facts.flops_before, facts.params_before, facts.resolution, facts.seed_flops):
        assert np.isnan(array).all()
    light = blueprint_index("conv_light")
    assert facts.seed_params[0, light] == 9 * 64 + 24
    assert facts.traits[0, light].tolist() == [3 / 16, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("example", [(torch.zeros(2, 1, 8, 8),), {"x": torch.zeros(2, 1, 8, 8)}])
def test_an_example_may_be_a_tuple_or_a_mapping(example) -> None:
    assert facts_of(make(), ["layer1"], example).resolution.tolist() == [1.0]
