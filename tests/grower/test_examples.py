"""The examples, small: models that this project did not write, on real data. Each is at most ten lines longer
than without Esper, which is shown by running it without those lines."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.grower import Grower
from esper.grower.places import run_example, undisturbed

EXAMPLES = Path(__file__).parents[2] / "examples"
MARK = "# esper"
NEEDS = {
    "grow_mlp": (),
    "grow_encoder": (),
    "grow_gpt2": ("transformers",),
    "grow_vit": ("transformers",),
    "grow_resnet": ("transformers",),
    "grow_monai": ("monai",),
    "grow_lightning": ("lightning",),
    "grow_trainer": ("transformers", "accelerate"),
}
SMALL: dict[str, dict[str, Any]] = {
    "grow_resnet": {"dataset": "digits"},
    "grow_lightning": {"enable_progress_bar": False, "enable_model_summary": False},
}

# Other people's packages warn about their own future.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    sys.modules.pop("data", None)


def available(name: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in NEEDS[name])


def load(name: str, source: str | None = None) -> Any:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    module = type(sys)(f"example_{name}")
    module.__file__ = str(EXAMPLES / f"{name}.py")
    sys.modules[module.__name__] = module
    exec(compile(source or (EXAMPLES / f"{name}.py").read_text(), module.__file__, "exec"), vars(module))
    return module


def plain_source(name: str) -> str:
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if MARK not in line)


def small(name: str, path: Path) -> dict[str, Any]:
    options = {"epochs": 4, "train": 192, **SMALL.get(name, {})}
    if name == "grow_lightning":
        options["default_root_dir"] = str(path)
    return options


class Attached:
    """Passes `esper.attach` on and remembers what it did to the model's output."""

    def __init__(self) -> None:
        self.attach = esper.attach
        self.growers: list[Grower] = []
        self.examples: list[Any] = []

    def __call__(self, model: nn.Module, slots: Any, example: Any, **options: Any) -> Grower:
        keys, before = list(model.state_dict()), self.output(model, example)
        grower = self.attach(model, slots, example, **options)
        assert list(model.state_dict()) == keys
        assert all(map(torch.equal, before, self.output(model, example)))
        self.growers.append(grower)
        self.examples.append(example)
        return grower

    def output(self, model: nn.Module, example: Any) -> list[Tensor]:
        with undisturbed(model), torch.no_grad():
            out = run_example(model.eval(), example)
        return [out] if isinstance(out, Tensor) else [t for t in out.values() if isinstance(t, Tensor)]


@pytest.mark.parametrize("name", NEEDS)
def test_grows_learns_and_exports(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(name)
    attached = Attached()
    monkeypatch.setattr(esper, "attach", attached)
    result = module.main(**small(name, tmp_path))
    (grower,), (example,) = attached.growers, attached.examples
    assert any("germinated" in change for step in grower.history for change in step.changes)
    metrics = [step.metric for step in grower.history]
    assert metrics[-1] < metrics[0] if grower.metric_name == "loss" else metrics[-1] > metrics[0]
    plain = grower.export()
    assert not [m for m in plain.modules() if type(m).__module__.startswith("esper")]
    for ours, theirs in zip(
        attached.output(grower.model, example), attached.output(plain, example), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert isinstance(result, nn.Module)


@pytest.mark.parametrize("name", NEEDS)
def test_is_at_most_ten_lines_longer_than_without_esper(name: str) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert sum(MARK in line for line in lines) <= 10
    source = plain_source(name)
    assert "grower." not in source
    assert "esper.attach" not in source
    compile(source, name, "exec")


@pytest.mark.parametrize("name", ["grow_mlp", "grow_gpt2", "grow_trainer"])
def test_runs_without_those_lines(name: str, tmp_path: Path) -> None:
    module = load(name, plain_source(name))
    assert isinstance(module.main(**{**small(name, tmp_path), "epochs": 1}), nn.Module)


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("grow_*.py")} == set(NEEDS)


# -- adapters ------------------------------------------------------------------------------------------------


def test_lightning_resumes_a_grown_module(tmp_path: Path) -> None:
    module = load("grow_lightning")
    options = small("grow_lightning", tmp_path)
    first = module.main(**options, max_steps=6)  # two epochs of three steps
    (checkpoint,) = (tmp_path / "checkpoints").glob("*.ckpt")
    stored = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert [name for name in stored if "_esper" in name]
    second = module.main(**options, resume=str(checkpoint))
    assert second.grower.history[:2] == first.grower.history
    assert second.grower.epoch == 4
    assert second.grower.reports().keys() == {"layer1", "layer2"}


def test_lightning_names_metrics_that_were_not_logged(tmp_path: Path) -> None:
    module = load("grow_lightning")
    kind = module.GrowthCallback
    module.GrowthCallback = lambda grower, monitor: kind(grower, "val_accuracy")
    with pytest.raises(esper.leyline.EsperError, match="which the module has not logged; allowed: val_acc"):
        module.main(**small("grow_lightning", tmp_path))


def test_transformers_resumes_a_grown_model(tmp_path: Path) -> None:
    module = load("grow_trainer")
    options = {**small("grow_trainer", tmp_path), "output_dir": str(tmp_path), "save_strategy": "epoch"}
    whole = module.main(**options)
    checkpoint = tmp_path / "checkpoint-12"  # two of four epochs, six steps each
    again = module.main(**options, resume=str(checkpoint))
    ours, theirs = again.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if name.startswith("_esper.")]
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, msg=name)
