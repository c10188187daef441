"""Structure is in the files: a grown model loads into a fresh one, strictly, and a stopped run goes on bit
for bit, also after kill −9."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.faults import own_loop
from safetensors.torch import load_file, save_file
from torch import nn

import esper
from esper.grower import Grower
from esper.leyline import EsperError, StructureError
from grower_helpers import SmallCNN, TiedLM, accuracy, attach, digits, make, same, train_epoch

X = digits()[0][:8]
SCRIPT = Path(own_loop.__file__)


def grown(epochs: int = 2) -> Grower:
    model = make()
    grower = attach(model)
    grower.germinate("layer2", "conv_light")
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    for _ in range(epochs):
        train_epoch(model, optimizer)
        grower.step(accuracy(model))
    model.eval()
    return grower


def test_a_saved_model_loads_into_a_fresh_one(tmp_path: Path) -> None:
    grower = grown()
    grower.save(tmp_path / "grown")
    fresh = make(seed=5)
    loaded = esper.load(fresh, tmp_path / "grown")
    assert torch.equal(fresh.eval()(X), grower.model(X))
    assert same(fresh.state_dict(), grower.model.state_dict())
    assert loaded.history == grower.history
    assert {n: r.stage for n, r in loaded.reports().items()} == {
        n: r.stage for n, r in grower.reports().items()
    }
    optimizer = torch.optim.AdamW(loaded.param_groups(lr=0.02))
    fresh.train()
    loaded.germinate("layer1", "norm")
    train_epoch(fresh, optimizer)
    loaded.step(accuracy(fresh))


def test_files_of_version_1_have_square_kernels_on_lines(tmp_path: Path) -> None:
    """Only the middle row of such a kernel ever saw more than padding."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv1d(1, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(60, 4))

    x = torch.randn(3, 1, 10, generator=torch.Generator().manual_seed(0))
    model = build()
    grower = esper.attach(model, ["0"], x, policy=None)
    grower.germinate("0", "conv_heavy")
    with torch.no_grad():
        for p in grower.body.parameters():
            p.add_(0.3)
    grower.save(tmp_path)
    tensors = load_file(tmp_path / "weights.safetensors")
    squared = 0
    for name, tensor in tensors.items():
        if name.startswith("_esper") and tensor.dim() == 4:
            assert tensor.shape[2:] == (1, 3)
            tensors[name] = torch.cat(
                [torch.full_like(tensor, 7.0), tensor, torch.full_like(tensor, -7.0)], 2
            )
            squared += 1
    assert squared == 2
    save_file(tensors, tmp_path / "weights.safetensors")
    structure = json.loads((tmp_path / "structure.json").read_text())
    blob = (tmp_path / "weights.safetensors").read_bytes()
    structure |= {"version": 1, "weights": blake2b(blob, digest_size=16).hexdigest()}
    (tmp_path / "structure.json").write_text(json.dumps(structure))
    fresh = build()
    esper.load(fresh, tmp_path)
    assert same(fresh.state_dict(), model.state_dict())
    assert torch.equal(fresh(x), model(x))


def test_tied_weights_are_saved(tmp_path: Path) -> None:
    model, tokens = make(TiedLM), torch.arange(12).view(2, 6)
    grower = esper.attach(model, ["block1"], tokens, policy=None)
    grower.save(tmp_path)
    fresh = make(TiedLM, 4)
    esper.load(fresh, tmp_path)
    assert torch.equal(fresh(tokens), model(tokens))
    assert fresh.out.weight is fresh.embed.weight


def damaged(path: Path, **changes: Any) -> None:
    content = json.loads((path / "structure.json").read_text())
    (path / "structure.json").write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "esper-network"}, "kind is 'esper-network'"),
        ({"version": 9}, "version is 9, written by a newer Esper"),
        ({"germinations": -1}, "germinations"),
        ({"seeds": {"layer9": {}}}, "slot 'layer9' is unknown"),
        ({"seeds": {}}, "unknown tensors"),
        ({"weights": "0"}, "belongs to another structure"),
        ({"surprise": 1}, "field surprise is unknown"),
        ({"history": [{"epoch": "one"}]}, "history"),
    ],
)
def test_files_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path, changes, words) -> None:
    grown(1).save(tmp_path)
    damaged(tmp_path, **changes)
    model = make(seed=5)
    with pytest.raises(EsperError, match=words):
        esper.load(model, tmp_path)
    assert same(model.state_dict(), make(seed=5).state_dict())
    assert [type(m) for m in model.modules()] == [type(m) for m in make().modules()]


def test_another_model_or_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StructureError, match="cannot read"):
        esper.load(make(), tmp_path)
    grown(1).save(tmp_path)
    with pytest.raises(EsperError, match="the model has no module 'layer1'"):
        esper.load(nn.Linear(2, 2), tmp_path)
    with pytest.raises(StructureError, match="has shape"):
        esper.load(make(lambda: SmallCNN(16)), tmp_path)


def test_a_state_of_other_slots_is_refused() -> None:
    state = grown(1).state_dict()
    other = attach(make(), slots=["layer1"])
    with pytest.raises(StructureError, match=r"grown in slots layer1 .*, layer2 .*, this model has layer1"):
        other.load_state_dict(state)
    with pytest.raises(EsperError, match="no state of a grower"):
        other.load_state_dict({"structure": state["structure"]})


def learning(**options: Any) -> tuple[Grower, Any]:
    model = make(lambda: SmallCNN(4))
    grower = attach(model, **options)
    return grower, torch.optim.AdamW(grower.param_groups(lr=0.02))


SCHEDULE = [(1, "layer2", "conv_light"), (2, "layer1", "norm")]


@pytest.mark.parametrize(
    ("saved", "loaded", "changes", "words"),
    [
        (
            {"policy": "plateau"},
            {"policy": "heuristic"},
            {},
            "policy was 'plateau', this grower has 'heuristic'; attach with the policy of the run",
        ),
        ({"policy": SCHEDULE}, {"policy": None}, {}, "policy was a schedule, this grower has None"),
        ({"policy": None}, {"policy": "plateau"}, {}, "policy was None, this grower has 'plateau'"),
        ({"policy": SCHEDULE}, {"policy": SCHEDULE[:1]}, {}, r"\(a schedule\) cannot go on from it"),
        (
            {"metric": "loss"},
            {},
            {},
            "metric was loss, this grower has accuracy; attach with the metric of the run",
        ),
        (
            {},
            {},
            {"version": 1},
            "version is 1, this Esper reads version 2 .*go on with the Esper that saved",
        ),
        ({}, {}, {"version": 3}, "version is 3, this Esper reads version 2"),
        ({"policy": "plateau"}, {"policy": "plateau", "slots": ["layer1"]}, {}, "grown in slots layer1"),
        ({"policy": "plateau"}, {"policy": "plateau"}, {"tracker": {}}, "tracker"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(saved, loaded, changes, words) -> None:
    """Not even the weights that a rebuilt structure would lose."""
    source, optimizer = learning(**saved)
    train_epoch(source.model, optimizer)
    source.step(0.5)
    other, optimizer = learning(**loaded)
    other.germinate("layer1", "norm")
    train_epoch(other.model, optimizer)
    other.step(0.25)
    before = {"grower": other.state_dict(), "model": dict(other.model.state_dict())}
    with pytest.raises(EsperError, match=words):
        other.load_state_dict(source.state_dict() | changes)
    assert same({"grower": other.state_dict(), "model": dict(other.model.state_dict())}, before)


def test_a_save_that_was_cut_off_leaves_the_old_model_or_the_new_one(tmp_path: Path) -> None:
    """A process may be killed before the structure of the new model is written, or before its weights are in
    place."""
    old, new = grown(1), grown(3)
    for name, grower in (("here", old), ("old", old), ("new", new)):
        grower.save(tmp_path / name)
    assert not same(old.model.state_dict(), new.model.state_dict())
    for file, into, left in (
        ("weights.safetensors", "weights.safetensors.next", old),
        ("structure.json", "structure.json", new),
    ):
        shutil.copy(tmp_path / "new" / file, tmp_path / "here" / into)
        model = make(seed=5)
        esper.load(model, tmp_path / "here")
        assert same(model.state_dict(), left.model.state_dict())
    old.save(tmp_path / "here")
    esper.load(model := make(seed=5), tmp_path / "here")
    assert same(model.state_dict(), old.model.state_dict())
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == ["structure.json", "weights.safetensors"]


# -- exact resume --------------------------------------------------------------------------------------------


def run(directory: Path, *options: str, kill_after: float | None = None) -> int:
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(directory), *options])
    if kill_after is not None:
        time.sleep(kill_after)
        process.kill()
    return process.wait(timeout=120)


def final(directory: Path) -> dict[str, Any]:
    return torch.load(directory / "last.pt", weights_only=True)


@pytest.mark.parametrize(("policy", "stops"), [("schedule", (1, 4)), ("periodic", (3,))])
def test_stopped_and_resumed_equals_never_stopped(
    tmp_path: Path, policy: str, stops: tuple[int, ...]
) -> None:
    whole = own_loop.loop(tmp_path / "whole", policy=policy)
    for stop in stops:
        own_loop.loop(tmp_path / str(stop), policy=policy, stop=stop)
        torch.manual_seed(99)
        assert same(own_loop.loop(tmp_path / str(stop), policy=policy), whole)
    assert whole["grower"]["structure"]["seeds"]


@pytest.mark.slow
def test_kill_at_ten_random_moments(tmp_path: Path) -> None:
    assert run(tmp_path / "whole") == 0
    moments = random.Random(0)
    interrupted = 0
    for number in range(10):
        directory = tmp_path / str(number)
        interrupted += run(directory, kill_after=moments.uniform(2.0, 6.0)) != 0
        assert run(directory) == 0
        assert same(final(directory), final(tmp_path / "whole"))
    assert interrupted >= 3
