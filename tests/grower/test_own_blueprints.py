"""A user's blueprint in a user's model: offered, planted, trained, saved, exported, and refused where it does
not fit."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.grower.facts import model_facts
from esper.kasmina import measure_traits
from esper.leyline import BlueprintError, EsperError, blueprint_index
from grower_helpers import SmallCNN, TiedLM, digits, make, same, train_epoch
from helpers import registered


class Wide(nn.Module):
    """Images: a 5×5 kernel with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 5, padding=2, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Tokens(nn.Module):
    """Sequences `[B, T, D]`, and no other number of dimensions."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.out = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, features = x.shape
        return self.out(x.reshape(batch * tokens, features)).view(batch, tokens, features).relu()


@pytest.fixture(autouse=True)
def names():
    with registered("wide", "cnn", Wide), registered("tokens", "transformer", Tokens):
        yield


def grown(model: nn.Module) -> esper.grower.Grower:
    x = digits()[0][:4]
    grower = esper.attach(model, ["layer1", "layer2"], x, policy=[(1, "layer1", "wide")], blueprints=["wide"])
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.1), momentum=0.9)
    for _ in range(3):
        train_epoch(model, optimizer)
        grower.step(0.5)
    return grower


def test_it_is_planted_trained_and_measured() -> None:
    model = make()
    grower = grown(model)
    assert [result.blueprint for result in grower.history] == ["wide", None, None]
    seed = grower.body.slot("r0c0").banks["wide"]
    assert any(isinstance(m, Wide) for m in seed.modules()), "the user's own module runs"
    assert next(m for m in seed.modules() if isinstance(m, nn.BatchNorm2d)).num_batches_tracked > 0
    assert all((p != 0).all() for p in seed.gamma.parameters()), "it learns"
    assert grower.body.total_params() - grower.body.host_params == 25 * 64 + 3 * 8
    facts = model_facts(model, grower.body, digits()[0][:4], classes=10, val_samples=None)
    index = blueprint_index("wide")
    assert facts.seed_params[0, index] == 25 * 64 + 3 * 8
    assert facts.seed_flops[0, index] == 3 * 2 * 25 * 64 * 64
    assert tuple(facts.traits[0, index]) == measure_traits("cnn", "wide", 8, (8, 8)) == (5 / 8, 1, 1, 0)


def test_it_is_saved_loaded_and_exported(tmp_path) -> None:
    model = make()
    grower = grown(model)
    grower.save(tmp_path / "grown")
    twin = SmallCNN()
    loaded = esper.load(twin, tmp_path / "grown")
    assert same(model.state_dict(), twin.state_dict())
    x = digits()[0][:8]
    assert torch.equal(twin.eval()(x), model.eval()(x))
    plain = loaded.export().eval()
    assert torch.allclose(plain(x), model(x), atol=1e-6)
    assert any(isinstance(m, Wide) for m in plain.modules())
    assert not any(type(m).__module__.startswith("esper") for m in plain.modules())
    assert torch.equal(pickle.loads(pickle.dumps(plain))(x), plain(x))


def test_where_it_is_not_registered_loading_says_what_to_do(tmp_path) -> None:
    with registered("gone", "cnn", Wide):
        grower = esper.attach(make(), ["layer1"], digits()[0][:4], policy=None)
        grower.germinate("layer1", "gone")
        grower.save(tmp_path / "grown")
    model = SmallCNN()
    with pytest.raises(EsperError, match=r"blueprint 'gone' is unknown.*import the module that registers it"):
        esper.load(model, tmp_path / "grown")
    assert not hasattr(model, "_esper")


def test_it_is_offered_by_default_on_images_and_asked_for_on_sequences() -> None:
    def plant(model: nn.Module, slot: str, name: str, x: Tensor, **options) -> str | None:
        grower = esper.attach(model, [slot], x, policy=lambda _: ("germinate", slot, name), **options)
        optimizer = torch.optim.SGD(grower.param_groups(lr=0.1))
        model(x).sum().backward()
        optimizer.step()
        return grower.step(0.5).blueprint

    assert plant(make(), "layer1", "wide", digits()[0][:4]) == "wide"
    tokens = torch.zeros(2, 7, dtype=torch.int64)
    with pytest.raises(
        BlueprintError, match="decision: blueprint is 'tokens'; allowed: norm, lora, lora_large"
    ):
        plant(make(TiedLM), "block1", "tokens", tokens)  # it may mix tokens
    assert plant(make(TiedLM), "block1", "tokens", tokens, blueprints=["tokens"]) == "tokens"


def test_other_dimensions_between_batch_and_features_are_one() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2))
    x = torch.randn(4, 5, 2, 3, generator=torch.Generator().manual_seed(0))
    slots = [esper.grower.SlotAt("0", shape="BTD")]
    grower = esper.attach(model, slots, x, policy=None, blueprints=["tokens"])
    grower.germinate("0", "tokens")
    before = model(x)
    with torch.no_grad():
        for p in grower.body.slot("r0c0").banks["tokens"].gamma.parameters():
            p.fill_(1.0)
    assert model(x).shape == before.shape
    assert not torch.equal(model(x), before)
    assert torch.allclose(grower.export()(x), model(x), atol=1e-6)


def test_a_module_that_does_not_fit_is_refused_when_it_is_offered_or_planted() -> None:
    x = digits()[0][:4]
    with registered("halved", "cnn", lambda channels: nn.Sequential(nn.Conv2d(channels, channels, 3, 2, 1))):
        with pytest.raises(BlueprintError, match=r"'halved': .*\(2, 8, 8, 8\) into \(2, 8, 4, 4\)"):
            esper.attach(make(), ["layer1"], x, blueprints=["halved"])
        grower = esper.attach(make(), ["layer1"], x, policy=None)
        with pytest.raises(BlueprintError, match="the shape must stay"):
            grower.germinate("layer1", "halved")
    dropping = registered("dropping", "cnn", lambda channels: nn.Dropout2d(0.5))
    with dropping, pytest.raises(BlueprintError, match="leave dropout out"):
        esper.attach(make(), ["layer1"], x, blueprints=["dropping"])


def test_a_seed_that_changes_shape_at_another_size_is_an_error_too() -> None:
    class Pooled(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(channels, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.adaptive_avg_pool2d(x, 8) * self.scale

    with registered("pooled", "cnn", Pooled):
        model = make()
        grower = esper.attach(model, ["layer1"], digits()[0][:4], policy=None)
        grower.germinate("layer1", "pooled")
        model(digits()[0][:4])
        with pytest.raises(
            BlueprintError, match=r"seed 'pooled' turned.*\(2, 8, 16, 16\) into \(2, 8, 8, 8\)"
        ):
            model(torch.zeros(2, 1, 16, 16))
