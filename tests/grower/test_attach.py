"""Attaching changes nothing that a user can see; germination changes no output; errors say what to do."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.grower import Grower, SlotAt
from esper.leyline import BlueprintError, EsperError, ShapeError, SlotIdError, TransitionError
from grower_helpers import SmallCNN, accuracy, attach, batches, digits, make, same, train_epoch

X = digits()[0][:8]


def trained(grower: Grower, model: nn.Module, epochs: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.05, momentum=0.9))
    for _ in range(epochs):
        train_epoch(model, optimizer)
        grower.step(accuracy(model))
    return optimizer


# -- what does not change ------------------------------------------------------------------------------------


def test_attach_changes_no_key_no_output_no_generator_and_no_flag() -> None:
    model, untouched = make(), make()
    model.layer1.eval()
    generator, flags = torch.get_rng_state(), [m.training for m in model.modules()]
    buffers = copy.deepcopy(dict(model.named_buffers()))
    attach(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [m.training for n, m in model.named_modules() if "_esper" not in n] == flags
    assert same({k: v for k, v in model.named_buffers() if k in buffers}, buffers)
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert repr(type(model.layer1)) == repr(nn.Sequential)
    assert isinstance(model.layer1, nn.Sequential)
    assert torch.equal(model.eval()(X), untouched.eval()(X))


def test_training_an_empty_model_is_bit_identical_to_training_without_esper() -> None:
    model, plain = make(), make()
    grower = attach(model)
    ours = torch.optim.AdamW(grower.param_groups(lr=0.01))
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(2):
        train_epoch(model, ours)
        grower.step(accuracy(model))
        train_epoch(plain, theirs)
    assert same(model.state_dict(), plain.state_dict())


def test_germination_changes_no_output_and_no_host_gradient() -> None:
    model = make()
    grower = attach(model)
    optimizer = trained(grower, model)
    before, generator = model.eval()(X), torch.get_rng_state()
    grower.germinate("layer1", "conv_light")
    grower.germinate("layer2", "norm")
    assert torch.equal(model(X), before)
    assert torch.equal(torch.get_rng_state(), generator)
    weight = model.stem.weight.detach().clone()
    model.train()
    train_epoch(model, optimizer)
    assert not torch.equal(model.stem.weight, weight)
    assert not torch.equal(model.eval()(X), before)
    gamma = grower.body.slot("r0c0").banks["conv_light"].gamma
    assert any(p.abs().max() > 0 for p in gamma.parameters())


def test_without_switches_one_seed_off() -> None:
    model = make()
    grower = attach(model)
    grower.germinate("layer1", "conv_light")
    optimizer = trained(grower, model, 1)
    grown = model.eval()(X)
    with grower.without("layer1"):
        alone = model(X)
    assert not torch.equal(grown, alone)
    assert torch.equal(model(X), grown)
    grower.prune("layer1")
    assert torch.equal(model(X), alone)
    assert not [k for k in model.state_dict() if k.startswith("_esper")]
    assert len(optimizer.param_groups[1]["params"]) == 0


def test_copies_and_pickles_are_independent_and_equal() -> None:
    model = make()
    grower = attach(model)
    grower.germinate("layer2", "conv_light")
    trained(grower, model, 1)
    model.eval()
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(X), model(X))
    assert torch.equal(loaded(X), model(X))
    grower.prune("layer2")
    assert not torch.equal(twin(X), model(X))


def test_other_device_and_dtype_after_attach() -> None:
    model = make().double()
    grower = attach_float(model)
    model.float()
    grower.germinate("layer1", "conv_light")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.isfinite(model(X)).all()
    model.bfloat16()
    grower.germinate("layer2", "depthwise")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.eval()(X.bfloat16()).dtype == torch.bfloat16


def attach_float(model: nn.Module) -> Grower:
    return esper.attach(model, ["layer1", "layer2"], X.double(), policy=None)


def dtypes(grower: Grower, slot: str) -> set[torch.dtype]:
    return {p.dtype for p in grower.body.slot(grower.body.slot_id(slot)).parameters()}


class HalfStem(SmallCNN):
    """A stem in bfloat16, the rest in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x.bfloat16()).float())).mean((2, 3)))


def test_a_seed_has_the_dtype_of_what_it_receives() -> None:
    model = make(HalfStem)
    grower = attach(model, slots=["stem", "layer1"])
    grower.germinate("stem", "conv_light")
    grower.germinate("layer1", "conv_light")
    assert [dtypes(grower, name) for name in grower.body.names] == [{torch.bfloat16}, {torch.float32}]
    trained(grower, model, 1)
    assert torch.isfinite(model(X)).all()


def test_a_loaded_seed_has_the_dtype_of_its_file(tmp_path: Path) -> None:
    model, fresh = make(HalfStem), make(HalfStem, 5)
    grower = attach(model, slots=["stem", "layer1", "layer2"])
    grower.germinate("stem", "conv_light")
    grower.germinate("layer1", "conv_light")
    grower.save(tmp_path)
    loaded = esper.load(fresh, tmp_path)
    assert same(fresh.state_dict(), model.state_dict())
    loaded.germinate("layer2", "conv_light")
    assert torch.isfinite(fresh(X)).all()


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_seed_in_autocast_keeps_the_dtype_of_the_weights(where: str) -> None:
    class Inside(SmallCNN):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=where == "inside"):
                return super().forward(x)

    model = make(Inside)
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "outside"):
        grower = attach(model)
    grower.germinate("layer1", "conv_light")
    assert dtypes(grower, "layer1") == {torch.float32}
    trained(grower, model, 1)


def test_a_seed_after_a_module_that_autocasts_alone_has_the_dtype_of_its_output() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 8, 3)

        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alone, self.head = Alone(), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.alone(x).float().mean((2, 3)))

    model = make(Whole)
    grower = esper.attach(model, ["alone"], X, policy=None)
    grower.germinate("alone", "conv_light")
    assert dtypes(grower, "alone") == {torch.bfloat16}
    trained(grower, model, 1)


def test_weights_that_the_user_froze_stay_frozen() -> None:
    model = make()
    grower = attach(model, evaluate=lambda: 0.5)
    grower.germinate("layer1", "conv_light")
    optimizer = trained(grower, model, 1)
    seed = list(grower.body.slot("r0c0").parameters())
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    with grower.without("layer1"):
        model(X)
    train_epoch(model, optimizer)
    grower.step()
    assert not any(p.requires_grad for p in seed)
    grower.prune("layer1")
    grower.germinate("layer2", "conv_light")
    assert all(p.requires_grad for p in grower.body.parameters())


def test_several_growers_in_one_process_do_not_meet() -> None:
    models = [make(seed=0), make(seed=1)]
    growers = [attach(model) for model in models]
    optimizers = [torch.optim.SGD(g.param_groups(lr=0.05)) for g in growers]
    growers[0].germinate("layer1", "conv_light")
    for model, optimizer in zip(models, optimizers, strict=True):
        train_epoch(model, optimizer)
    assert [len(o.param_groups[1]["params"]) for o in optimizers] == [4, 0]
    growers[0].step(0.5)
    growers[1].step(0.5)
    assert [len(g.reports()) for g in growers] == [1, 0]


# -- kinds of models -----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    hidden: Tensor
    extra: int


@dataclass
class Out:
    extra: None
    hidden: Tensor


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(64, 12), kind

    def forward(self, x: Tensor, *, scale: float = 1.0) -> object:
        h = self.linear(x) * scale
        return {
            "tensor": h,
            "tuple": (h, 1),
            "list": [h, 1],
            "dict": {"hidden": h, "n": 1},
            "namedtuple": Pair(h, 1),
            "dataclass": Out(None, h),
        }[self.kind]


class Around(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.head, self.kind = Returns(kind), nn.Linear(12, 10), kind

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x.flatten(1), scale=2.0)
        if self.kind in ("tuple", "list"):
            assert out[1] == 1
            out = out[0]
        elif self.kind == "dict":
            out = out["hidden"]
        elif self.kind != "tensor":
            out = out.hidden
        return self.head(out)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "dict", "namedtuple", "dataclass"])
def test_modules_may_return_tuples_dicts_and_dataclasses(kind: str) -> None:
    model = make(lambda: Around(kind))
    grower = esper.attach(model, ["inner"], X, policy=None)
    before = model(X)
    grower.germinate("inner", "mlp_small")
    assert torch.equal(model(X), before)
    trained(grower, model, 1)
    assert not torch.equal(model.eval()(X), before)
    exported = pickle.loads(pickle.dumps(grower.export()))
    assert torch.equal(exported(X), model(X))


def test_a_model_that_is_a_sequential_does_not_run_what_esper_adds() -> None:
    model = make(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(inplace=True), nn.Linear(16, 10))
    )
    keys = list(model.state_dict())
    grower = esper.attach(model, ["1"], X, policy=None)
    assert list(model.state_dict()) == keys
    assert len(model) == 4
    assert isinstance(model[-1], nn.Linear)
    assert [type(m).__name__ for m in model] == ["Flatten", "Linear", "ReLU", "Linear"]
    assert model[1:3](X.flatten(1)).shape == (8, 16)
    grower.germinate("1", "mlp_small")
    trained(grower, model, 1)
    model.eval()
    assert torch.equal(copy.deepcopy(model)(X), model(X))
    assert torch.equal(grower.export()(X), model(X))
    assert type(grower.export()) is nn.Sequential


def test_a_sequential_with_an_empty_part_keeps_its_length() -> None:
    model = make(
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.Sequential(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
        )
    )
    before = list(model)
    grower = esper.attach(model, ["0"], X, policy=None)
    assert list(model) == before
    assert len(model) == 5
    assert model[1] is before[1]
    grower.germinate("0", "conv_light")
    trained(grower, model, 1)
    model.eval()
    assert torch.equal(grower.export()(X), model(X))


def test_signals_grow_as_images_of_height_one() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                flat=nn.Flatten(2),
                conv=nn.Conv1d(1, 6, 3, padding=1),
                act=nn.ReLU(),
                pool=nn.AdaptiveAvgPool1d(1),
                out=nn.Flatten(),
                head=nn.Linear(6, 10),
            )
        )

    model = make(build)
    grower = esper.attach(model, ["conv"], X, policy=None)
    assert [slot.place.shape for slot in grower.body] == ["BCL"]
    grower.germinate("conv", "conv_light")
    trained(grower, model, 1)
    model.eval()
    assert torch.equal(grower.export()(X), model(X))


def test_patterns_name_all_matching_modules_in_the_order_in_which_they_run() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            for block in reversed(self.blocks):
                x = block(x)
            return x

    grower = esper.attach(make(Backwards), ["blocks.*"], X, policy=None)
    assert grower.body.names == ["blocks.2", "blocks.1", "blocks.0"]


def test_an_operation_in_place_after_a_slot_does_not_spoil_the_gradients() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x)
            h += 1.0
            return self.head(F.relu_(h).mean((2, 3)))

    model, plain = make(InPlace), make(InPlace)
    grower = esper.attach(model, ["conv"], X, policy=None)
    ours = torch.optim.SGD(grower.param_groups(lr=0.1))
    train_epoch(model, ours)
    train_epoch(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert same(model.state_dict(), plain.state_dict())
    measured = grower._sensing.read({}, 1, loss_scale=1.0)
    assert all(torch.isfinite(torch.tensor(v)).all() for v in measured.sensors.values())
    grower.germinate("conv", "conv_light")
    train_epoch(model, ours)


# -- errors --------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.idle, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shared(self.shared(x.flatten(1))))


class Ambiguous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.head = nn.Identity(), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.own(x.flatten(2)).flatten(1))


@pytest.mark.parametrize(
    ("kind", "slots", "error", "words"),
    [
        (SmallCNN, ["layer_1"], SlotIdError, "did you mean layer1"),
        (SmallCNN, ["nothing"], SlotIdError, "its children are stem, layer1, layer2, head"),
        (SmallCNN, "layer1", SlotIdError, "must be a list of names"),
        (SmallCNN, [], SlotIdError, "must be a list of names"),
        (SmallCNN, ["layer1", "layer1"], SlotIdError, "named twice"),
        (SmallCNN, ["layer1", "head"], ShapeError, "slots layer1 carry images, head do not"),
        (SmallCNN, [SlotAt("layer1", shape="BCL")], ShapeError, "which is not BCL"),
        (SmallCNN, [SlotAt("layer1", shape="NCHW")], ShapeError, "allowed: BCHW, BCL, BTD, BD"),
        (Twice, ["shared"], EsperError, "runs 2 times in one forward pass"),
        (Twice, ["idle"], EsperError, "does not run"),
        (Ambiguous, ["own"], ShapeError, "SlotAt\\('own', shape='BCL' or 'BTD'\\)"),
        (lambda: Around("dict"), [SlotAt("inner", field="n")], ShapeError, "part 'n' is no tensor"),
    ],
)
def test_slots_that_cannot_carry_a_seed_are_refused(kind, slots, error, words) -> None:
    model = make(kind)
    before = [type(m) for m in model.modules()]
    with pytest.raises(error, match=words):
        esper.attach(model, slots, X)
    assert [type(m) for m in model.modules()] == before


def test_an_ambiguous_shape_can_be_told() -> None:
    model = make(Ambiguous)
    grower = esper.attach(model, [SlotAt("own", shape="BTD")], X, policy=None)
    grower.germinate("own", "mlp_small")
    assert model(X).shape == (8, 10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "f1"}, "allowed: accuracy, loss"),
        ({"epochs": 0}, "epochs is 0"),
        ({"policy": "best"}, "policy 'best' is unknown; allowed: auto, heuristic, periodic, plateau"),
        ({"policy": "periodic"}, "attach with epochs="),
        ({"policy": [(1, "layer9", "norm")]}, "slot 'layer9' is unknown .did you mean layer"),
        ({"policy": [(1, "layer1")]}, "is not .epoch, slot, blueprint."),
        ({"blueprints": ["mlp"]}, "blueprint 'mlp' cannot grow in these slots"),
        ({"blueprints": "norm"}, r"blueprints is 'norm', must be a list of names, such as \['norm'\]"),
        ({"blueprints": 3}, "blueprints is 3, must be a list of names"),
        ({"evaluate": 0.5}, "must be a function"),
    ],
)
def test_bad_options_are_refused_and_leave_the_model_as_it_was(options, words) -> None:
    model = make()
    before = [type(m) for m in model.modules()]
    with pytest.raises(EsperError, match=words):
        attach(model, **options)
    assert [type(m) for m in model.modules()] == before
    assert torch.equal(model.eval()(X), make().eval()(X))


def test_models_that_are_attached_wrapped_or_scripted_are_refused() -> None:
    model = make()
    attach(model)
    with pytest.raises(EsperError, match="attached already"):
        attach(model)
    with pytest.raises(EsperError, match="attach to the module first"):
        attach(nn.DataParallel(make()))
    with pytest.raises(EsperError, match="must be a torch"):
        esper.attach(lambda x: x, ["a"], X)  # type: ignore[arg-type]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.out = SmallCNN(), nn.Sequential(nn.Linear(10, 10), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.enc(x))


@pytest.mark.parametrize("slot", ["enc.layer1", "enc.layer2", "out"])
def test_a_model_with_an_attached_part_is_refused(slot: str) -> None:
    model = make(Nested)
    inner = esper.attach(model.enc, ["layer1"], X, policy=None)
    inner.germinate("layer1", "conv_light")
    trained(inner, model.enc, 1)
    before = model.eval()(X)
    with pytest.raises(EsperError, match="'enc', a part of this model, is attached already"):
        esper.attach(model, [slot], X, policy=None)
    assert torch.equal(model(X), before)
    inner.prune("layer1")
    assert not torch.equal(model(X), before)


def test_a_part_of_an_attached_model_is_refused() -> None:
    model = make(Nested)
    outer = esper.attach(model, ["enc.layer1"], X, policy=None)
    outer.germinate("enc.layer1", "conv_light")
    trained(outer, model, 1)
    before = model.eval()(X)
    for part, slot in ((model.enc, "layer1"), (model.enc, "layer2"), (model.enc.layer1, "0")):
        with pytest.raises(EsperError, match="is attached already"):
            esper.attach(part, [slot], X, policy=None)
    assert torch.equal(model(X), before)


def test_a_model_whose_part_was_attached_later_is_not_exported() -> None:
    model = make(Nested)
    outer = esper.attach(model, ["out"], X, policy=None)
    inner = esper.attach(model.enc, ["layer1"], X, policy=None)
    inner.germinate("layer1", "conv_light")
    with pytest.raises(EsperError, match="export: 'enc' was attached later on its own"):
        outer.export()
    assert torch.equal(inner.export().eval()(X), model.enc.eval()(X))


def test_a_directory_that_cannot_be_recorded_in_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    model = make()
    before = [type(m) for m in model.modules()]
    with pytest.raises(EsperError, match="not empty"):
        attach(model, record=tmp_path)
    assert [type(m) for m in model.modules()] == before
    attach(model, record=tmp_path / "new").close()


def test_a_slot_whose_module_was_replaced_is_an_error() -> None:
    model = make()
    grower = attach(model)
    optimizer = trained(grower, model, 1)
    old, model.layer2 = model.layer2, nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
    train_epoch(model, optimizer)
    words = "slot 'layer2': the module of this name is no longer the one that was attached"
    with pytest.raises(EsperError, match=words):
        grower.step(0.5)
    with pytest.raises(EsperError, match=words):
        grower.germinate("layer2", "conv_light")
    with pytest.raises(EsperError, match=words):
        grower.export()
    assert grower.epoch == 1
    assert not grower.reports()
    del model.layer2
    with pytest.raises(EsperError, match=words):
        grower.export()
    model.layer2 = old
    assert grower.step(0.5).epoch == 2


def test_lazy_modules_must_have_run() -> None:
    model = make(lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 10)))
    with pytest.raises(EsperError, match=r"parameter '1\.weight' has no shape yet"):
        esper.attach(model, ["1"], X, policy=None)
    model(X)
    esper.attach(model, ["1"], X, policy=None)


@pytest.mark.parametrize("example", [X[:, :, :, 0], X.long(), (X, X), {"y": X}, None])
def test_an_example_that_the_model_cannot_run_on_is_named(example: object) -> None:
    model = make()
    before = [type(m) for m in model.modules()]
    with pytest.raises(EsperError, match="example: the model cannot run on it") as caught:
        esper.attach(model, ["layer1"], example, policy=None)
    assert caught.value.__cause__ is not None
    assert [type(m) for m in model.modules()] == before


def test_step_before_training_and_metrics_that_are_no_metrics() -> None:
    model = make()
    grower = attach(model)
    with pytest.raises(EsperError, match="no backward pass and no optimizer step"):
        grower.step(0.5)
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.1))
    train_epoch(model, optimizer)
    for metric, words in (
        (float("nan"), "metric is nan; the training has diverged"),
        (float("inf"), "metric is inf"),
        (87.0, "divide percentages by 100"),
        ("good", "must be a number"),
        (None, "metric is missing"),
    ):
        with pytest.raises(EsperError, match=words):
            grower.step(metric)
    assert grower.epoch == 0
    assert grower.step(torch.tensor(0.5)).epoch == 1


def test_growth_by_hand_says_what_is_possible() -> None:
    model = make()
    grower = attach(model)
    with pytest.raises(SlotIdError, match="did you mean layer1"):
        grower.germinate("layer_1", "norm")
    with pytest.raises(EsperError, match="allowed: attention, bottleneck, conv_heavy"):
        grower.germinate("layer1", "mlp")
    grower.germinate("layer1", "norm")
    with pytest.raises(TransitionError, match="GERMINATE is not possible in stage HOLDING"):
        grower.germinate("layer1", "norm")
    grower.fossilize("layer1")
    with pytest.raises(TransitionError, match="PRUNE is not possible in stage FOSSILIZED"):
        grower.prune("layer1")
    with pytest.raises(BlueprintError, match="divisible by 4"):
        esper.attach(make(lambda: TokenNet(6)), ["inner"], X, blueprints=["attention"])


class TokenNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.squeeze(1))).mean(1)


def test_blueprints_that_mix_tokens_must_be_asked_for() -> None:
    model = make(lambda: TokenNet(8))
    grower = esper.attach(model, ["inner"], X, policy=lambda g: ("germinate", "inner", "attention"))
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.1))
    train_epoch(model, optimizer)
    with pytest.raises(BlueprintError, match="allowed: norm, lora, lora_large, mlp_small, mlp"):
        grower.step(0.5)
    asked = esper.attach(
        make(lambda: TokenNet(8)), ["inner"], X, policy=None, blueprints=["attention", "mlp"]
    )
    asked.germinate("inner", "attention")


def test_batches_are_what_the_tests_think() -> None:
    assert [x.shape for x, _ in batches()] == [(32, 1, 8, 8)] * 4
