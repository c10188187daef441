"""A seed in a user's model is the population's seed: same definition, same initial weights, same output and
gradients. Incubation leaves the model untouched. Exports need nothing of Esper."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations
from torch.optim.swa_utils import AveragedModel

import esper
from esper.grower.body import Body
from esper.grower.places import Place
from esper.kasmina import blueprint_names
from esper.kasmina.layers import Lanes, Mode, seed_row
from esper.kasmina.seed import GATE_BANK
from esper.leyline import AlphaAlgorithm, EsperError, SeedStage
from grower_helpers import SmallCNN, TiedLM, accuracy, attach, batches, digits, make, same, train_epoch

PLACES = {
    "BCHW": (Place("a", None, "tensor", "BCHW", 8), (3, 8, 5, 5)),
    "BCL": (Place("a", None, "tensor", "BCL", 8), (3, 8, 5)),
    "BTD": (Place("a", None, "tensor", "BTD", 8), (3, 5, 8)),
    "BD": (Place("a", None, "tensor", "BD", 8), (3, 8)),
}
TOPOLOGY = {"BCHW": "cnn", "BCL": "cnn", "BTD": "transformer", "BD": "mlp"}
SEEDS = [
    (shape, name)
    for shape in PLACES
    for name in blueprint_names(TOPOLOGY[shape])
    if name != "noop" and (shape == "BCL" or name != "conv_1d")
]


def body(shape: str) -> Body:
    return Body(nn.Linear(1, 1), [PLACES[shape][0]], measures=False, makes_permanent=False)


@pytest.mark.parametrize("algorithm", AlphaAlgorithm)
@pytest.mark.parametrize(("shape", "blueprint"), SEEDS)
def test_the_ordinary_form_equals_the_population_form(
    shape: str, blueprint: str, algorithm: AlphaAlgorithm
) -> None:
    grown = body(shape).double()
    place, size = PLACES[shape]
    h = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grown.germinate("r0c0", blueprint, tempo_epochs=0, init_seed=7, algorithm=algorithm)
    slot = next(iter(grown))
    assert torch.equal(slot(h), h)
    population = super(type(slot), slot).build_bank(blueprint, 1).double()
    seed_row(population, 0, 7)
    ours = sorted(p.flatten().tolist() for p in slot.banks[blueprint].parameters())
    assert ours == sorted(p.flatten().tolist() for p in population.parameters())
    with torch.no_grad():  # a seed that has learned
        for module in (slot.banks[blueprint], population):
            for p in module.gamma.parameters():
                p.fill_(0.5)
    x, y = h.clone().requires_grad_(), h.clone().requires_grad_()
    delta = population(place.to_seed(x), Lanes(1, Mode.TRAIN))
    if algorithm is AlphaAlgorithm.GATE:
        gate = super(type(slot), slot).build_bank(GATE_BANK, 1).double()
        seed_row(gate, 0, 8)
        delta = delta * gate(place.to_seed(x), Lanes(1, Mode.TRAIN))
    delta = place.from_seed(delta)
    expected = x * (1 + torch.tanh(delta)) if algorithm is AlphaAlgorithm.MULTIPLY else x + delta
    actual = slot(y)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    actual.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-9, atol=1e-9)


def test_the_gate_is_drawn_from_the_seeds_own_stream() -> None:
    first, second = body("BTD"), body("BTD")
    for grown in (first, second):
        grown.germinate("r0c0", "mlp", tempo_epochs=0, init_seed=7, algorithm=AlphaAlgorithm.GATE)
    assert same(first.state_dict(), second.state_dict())


def test_a_ramp_moves_alpha_without_a_new_graph() -> None:
    model = make()
    grower = attach(model)
    grower.germinate("layer1", "conv_light")
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.1))
    train_epoch(model, optimizer)
    full = model.eval()(digits()[0][:4])
    grower.body.set_alpha_target("r0c0", 0.5, steps=2)
    seen = [model(digits()[0][:4])]
    for _ in range(2):
        grower.body.step_epoch()
        seen.append(model(digits()[0][:4]))
    assert torch.allclose(seen[0], full, atol=1e-6)
    assert not torch.allclose(seen[1], seen[0])
    assert grower.reports()["layer1"].alpha == 0.5
    grower.body.schedule_prune("r0c0", steps=2)
    assert not any(p.requires_grad for p in grower.body.parameters())


# -- incubation ----------------------------------------------------------------------------------------------


class Noisy(SmallCNN):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.layer2(self.layer1(self.stem(x))).mean((2, 3)), 0.2, self.training))


def incubate(*, seed_too: bool, poison: bool = False) -> tuple[dict[str, Tensor], list[str]]:
    model = make(Noisy)
    grower = attach(model)
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    stages = []
    for epoch in range(4):
        if epoch == 1 and seed_too:
            grower.germinate("layer1", "conv_light", tempo_epochs=2)
        for x, y in batches():
            criterion = lambda out: F.cross_entropy(out, y)  # noqa: E731, B023
            loss = criterion(model(x)) + grower.loss(criterion)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if poison and seed_too and epoch == 2:
            with torch.no_grad():
                for p in grower.body.parameters():
                    p.fill_(float("nan"))
        if epoch == 2:
            break
        grower.step(accuracy(model))
        stages += [report.stage.name for report in grower.reports().values()]
    return {n: t for n, t in model.state_dict().items() if not n.startswith("_esper")}, stages


def test_incubation_leaves_host_buffers_and_generators_bit_identical() -> None:
    plain, _ = incubate(seed_too=False)
    grown, stages = incubate(seed_too=True)
    poisoned, _ = incubate(seed_too=True, poison=True)
    assert stages == ["TRAINING"]
    assert same(plain, grown)
    assert same(plain, poisoned)


def test_an_incubated_seed_learns_and_blends_in() -> None:
    model = make()
    grower = attach(model, policy=[(1, "layer1", "conv_light")])
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    stages = []
    for _ in range(10):
        for x, y in batches():
            criterion = lambda out: F.cross_entropy(out, y)  # noqa: E731, B023
            (criterion(model(x)) + grower.loss(criterion)).backward()
            optimizer.step()
            optimizer.zero_grad()
        grower.step(accuracy(model))
        stages += [report.stage for report in grower.reports().values()]
    names = list(dict.fromkeys(stage.name for stage in stages))
    assert names == ["TRAINING", "BLENDING", "HOLDING", "FOSSILIZED"]


def test_without_the_extra_loss_a_policy_grafts() -> None:
    model = make()
    grower = attach(model, policy=[(1, "layer1", "conv_light")])
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    train_epoch(model, optimizer)
    grower.step(accuracy(model))
    assert grower.reports()["layer1"].stage is SeedStage.HOLDING


def incubating(model: nn.Module) -> esper.grower.Grower:
    """A model in an epoch in which a seed incubates; its newest input is no leaf of the graph."""
    grower = attach(model)
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    grower.germinate("layer1", "conv_light", tempo_epochs=2)
    train_epoch(model, optimizer)
    grower.step(accuracy(model))
    scale = torch.ones((), requires_grad=True)
    for x, y in batches():
        criterion = lambda out: F.cross_entropy(out, y)  # noqa: E731, B023
        (criterion(model(x * scale)) + grower.loss(criterion)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert grower.reports()["layer1"].stage is SeedStage.TRAINING
    return grower


def test_a_model_can_be_copied_while_a_seed_incubates() -> None:
    model = make()
    grower = incubating(model)
    average, pickled = AveragedModel(model), pickle.loads(pickle.dumps(model))
    for twin in (copy.deepcopy(model), average.module, pickled):
        assert torch.equal(twin.eval()(digits()[0]), model.eval()(digits()[0]))
    model.train()
    x, y = next(batches())
    model(x)
    average.train()(x[:3])
    assert grower.loss(lambda out: F.cross_entropy(out, y)) > 0


def test_a_model_can_be_exported_while_a_seed_incubates() -> None:
    model = make()
    exported = incubating(model).export()
    x = digits()[0]
    assert torch.equal(exported.eval()(x), model.eval()(x))
    assert [len(m._forward_pre_hooks) for m in exported.modules() if m._forward_pre_hooks] == []
    assert b"esper" not in pickle.dumps(exported)


# -- export --------------------------------------------------------------------------------------------------


def grown_cnn() -> esper.grower.Grower:
    model = make()
    grower = attach(model)
    grower.germinate("layer1", "conv_light")
    grower.germinate("layer2", "attention", algorithm=AlphaAlgorithm.GATE)
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    for _ in range(2):
        train_epoch(model, optimizer)
        grower.step(accuracy(model))
    model.eval()
    return grower


def test_the_exported_module_runs_without_esper(tmp_path: Path) -> None:
    grower = grown_cnn()
    x = digits()[0][:4]
    exported = grower.export()
    assert torch.equal(exported(x), grower.model(x))
    assert not [name for name, m in exported.named_modules() if type(m).__module__.startswith("esper")]
    assert sum(p.numel() for p in exported.parameters()) == grower.body.total_params()
    body = nn.Sequential(exported.stem, exported.layer1, exported.layer2)
    torch.save(body, tmp_path / "body.pt")
    torch.save((x, body(x)), tmp_path / "data.pt")
    code = (
        "import sys, torch\n"
        "assert torch.__version__\n"
        f"body = torch.load({str(tmp_path / 'body.pt')!r}, weights_only=False)\n"
        f"x, y = torch.load({str(tmp_path / 'data.pt')!r})\n"
        "assert torch.equal(body(x), y)\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'esper'], 'esper was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_exported_module_can_be_exported_again_and_trained_on() -> None:
    grower = grown_cnn()
    x, y = digits()[0][:4], digits()[1][:4]
    exported = grower.export()
    program = torch.export.export(exported, (x,))
    torch.testing.assert_close(program.module()(x), grower.model(x))
    before = grower.model(x)
    F.cross_entropy(exported.train()(x), y).backward()
    torch.optim.SGD(exported.parameters(), lr=0.1).step()
    assert torch.equal(grower.model(x), before)
    assert grower.export().training is False


def test_tied_weights_stay_tied() -> None:
    model = make(TiedLM)
    tokens = torch.arange(12).view(2, 6)
    grower = esper.attach(model, ["block1", "block2"], tokens, policy=None)
    groups = grower.param_groups(lr=0.1)
    assert len(groups[0]["params"]) == len(list(model.parameters()))
    grower.germinate("block1", "mlp_small")
    exported = grower.export()
    assert exported.out.weight is exported.embed.weight
    assert torch.equal(exported(tokens), model(tokens))
    assert torch.equal(pickle.loads(pickle.dumps(exported))(tokens), model(tokens))


def learned(grower: esper.grower.Grower) -> None:
    """Seeds with an effect, and a model in eval mode."""
    with torch.no_grad():
        for number, parameter in enumerate(grower.body.parameters()):
            parameter.add_(0.1 + 0.01 * number)
    grower.model.eval()


def blocks() -> list[nn.Module]:
    return [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]


class Parts(nn.Module):
    """The layers of one Sequential run through other references to them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.features, self.head = kind, nn.Sequential(*blocks()), nn.Linear(8, 10)
        if kind == "slices":
            self.stage1, self.stage2 = self.features[:1], self.features[1:]
        elif kind == "attribute":
            self.first = self.features[0]
        elif kind == "list":
            self.layers = list(self.features)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "slices":
            x = self.stage2(self.stage1(x))
        elif self.kind == "attribute":
            assert self.first.weight.shape == (8, 1, 3, 3)
            x = self.features[1:](self.first(x))
        elif self.kind == "list":
            for layer in self.layers:
                x = layer(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("kind", ["slices", "attribute", "list"])
def test_a_module_that_has_several_places_is_exported_in_all_of_them(kind: str) -> None:
    x = digits()[0][:4]
    model = make(lambda: Parts(kind))
    grower = esper.attach(model, ["features.0", "features.2"], x, policy=None)
    before = model.eval()(x)
    grower.germinate("features.0", "conv_light")
    grower.germinate("features.2", "conv_light")
    learned(grower)
    assert not torch.equal(model(x), before)
    exported = grower.export()
    assert torch.equal(exported(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(exported))(x), model(x))
    assert sum(p.numel() for p in exported.parameters()) == grower.body.total_params()


class Chain(nn.Sequential):
    """As torchvision names its blocks."""


class Skipping(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean() + super().forward(x)


class Listed(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Named(nn.ModuleDict):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = {}
        for name, layer in self.items():
            out[name] = x = layer(x)
        return {"3": out["3"], "0": out["0"]}


class Carrier(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.head = block, nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        return self.head((h["3"] if isinstance(h, dict) else h).mean((2, 3)))


CONTAINERS = {
    "plain": lambda: nn.Sequential(*blocks()),
    "chain": lambda: Chain(*blocks()),
    "skipping": lambda: Skipping(*blocks()),
    "list": lambda: Listed(blocks()),
    "dict": lambda: Named({str(i): layer for i, layer in enumerate(blocks())}),
    "tuple": lambda: nn.Sequential(CONTAINERS["dict"]()),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_modules_that_run_their_children_are_exported(kind: str) -> None:
    x = digits()[0][:4]
    model = make(lambda: Carrier(CONTAINERS[kind]()))
    grower = esper.attach(model, ["block"], x, policy=None)
    grower.germinate("block", "conv_light")
    learned(grower)
    exported = grower.export()
    assert torch.equal(exported(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(exported))(x), model(x))


@pytest.mark.parametrize("kind", ["plain", "dict", "parts"])
def test_what_was_exported_can_grow_and_be_exported_again(kind: str) -> None:
    x = digits()[0][:4]
    slot = "features.0" if kind == "parts" else "block"
    model = make(lambda: Parts("attribute") if kind == "parts" else Carrier(CONTAINERS[kind]()))
    for _ in range(2):
        grower = esper.attach(model, [slot], x, policy=None)
        grower.germinate(slot, "conv_light")
        learned(grower)
        exported = grower.export()
        assert torch.equal(exported(x), model(x))
        model = exported


def test_a_hook_of_the_user_runs_after_the_seed_as_before() -> None:
    x = digits()[0][:4]
    model = make()
    model.stem.register_forward_hook(lambda module, args, output: output * 2 + 1)
    grower = esper.attach(model, ["stem"], x, policy=None)
    grower.germinate("stem", "conv_light")
    learned(grower)
    assert torch.equal(grower.export()(x), model(x))


def test_a_parametrization_may_come_after_attach() -> None:
    x = digits()[0][:4]
    model = make()
    grower = esper.attach(model, ["stem"], x, policy=None)
    weight_norm(model.stem)
    grower.germinate("stem", "conv_light")
    learned(grower)
    exported = grower.export()
    assert torch.equal(exported(x), model(x))
    remove_parametrizations(exported.stem, "weight")
    torch.testing.assert_close(exported(x), model(x))
    assert type(exported.stem) is nn.Conv2d
    assert torch.equal(grower.export()(x), model(x))


def test_a_class_that_was_put_on_a_slot_after_attach_cannot_be_exported() -> None:
    model = make()
    grower = attach(model)
    base = type(model.layer1)
    model.layer1.__class__ = type("Mine", (base,), {})
    assert type(copy.deepcopy(model).layer1).__name__ == "Mine"
    with pytest.raises(EsperError, match="'layer1': its class became Mine after the model was attached"):
        grower.export()
    model.layer1.__class__ = base
    grower.export()
