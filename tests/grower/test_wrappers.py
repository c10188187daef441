"""What wraps a model: torch.compile, DistributedDataParallel, averages of weights."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.optim.swa_utils import AveragedModel

from esper.leyline import EsperError
from grower_helpers import accuracy, attach, digits, make, same, train_epoch

WORKER = Path(__file__).with_name("ddp_worker.py")


# -- compile -------------------------------------------------------------------------------------------------


def test_one_compilation_per_change_of_structure() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return aot_eager(module, inputs)

    model, eager = make(), make()
    compiled = torch.compile(model, backend=count, fullgraph=True)
    grower, other = attach(compiled), attach(eager)
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.05))
    twin = torch.optim.SGD(other.param_groups(lr=0.05))
    changes = [lambda g: None, lambda g: g.germinate("layer1", "conv_light"), lambda g: None]
    counts = []
    for change in changes:
        change(grower)
        change(other)
        train_epoch(compiled, optimizer)
        train_epoch(eager, twin)
        grower.step(0.5)
        other.step(0.5)
        counts.append(len(graphs))
    assert counts == [1, 2, 2]
    for name, tensor in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)


# -- averages ------------------------------------------------------------------------------------------------


def test_an_average_follows_growth_and_a_copy_does_not() -> None:
    model = make()
    grower = attach(model)
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.05))
    average, snapshot = AveragedModel(model, use_buffers=True), copy.deepcopy(model)
    train_epoch(model, optimizer)
    average.update_parameters(model)
    host = copy.deepcopy(average.module.stem.weight)
    grower.germinate("layer1", "conv_light")
    assert torch.equal(average.module.stem.weight, host)
    born = {n: p.detach().clone() for n, p in model.named_parameters() if "_esper" in n}
    train_epoch(model, optimizer)
    average.update_parameters(model)
    grown = {n: p for n, p in model.named_parameters() if "_esper" in n}
    averaged = dict(average.module.named_parameters())
    assert born.keys() <= averaged.keys()
    for name in born:
        torch.testing.assert_close(averaged[name], (born[name] + grown[name]) / 2)
    assert not [n for n, _ in snapshot.named_parameters() if "_esper" in n]
    grower.follow(snapshot)
    assert [n for n, _ in snapshot.named_parameters()] == [n for n, _ in model.named_parameters()]
    grower.prune("layer1")
    assert not [n for n, _ in snapshot.named_parameters() if "_esper" in n]
    assert not [n for n, _ in average.named_parameters() if "_esper" in n]
    with pytest.raises(EsperError, match="is no copy of an attached model"):
        grower.follow(nn.Linear(2, 2))
    with pytest.raises(EsperError, match="the attached model itself"):
        grower.follow(model)


def test_a_slot_that_grows_again_gets_a_new_average() -> None:
    model = make()
    grower = attach(model)
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.05))
    average = AveragedModel(model)
    for number in range(2):
        grower.germinate("layer1", "norm", init_seed=number)
        train_epoch(model, optimizer)
        average.update_parameters(model)
        grower.prune("layer1")
        for _ in range(3):
            train_epoch(model, optimizer)
            average.update_parameters(model)
            grower.step(accuracy(model))
    assert torch.isfinite(average(digits()[0][:2])).all()


# -- DDP -----------------------------------------------------------------------------------------------------


def ranks(directory: Path, mode: str) -> list[Any]:
    processes = [
        subprocess.Popen([sys.executable, str(WORKER), str(rank), str(directory), mode]) for rank in range(2)
    ]
    assert [process.wait(timeout=150) for process in processes] == [0, 0]
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_ranks_grow_alike_and_end_with_the_same_bytes(tmp_path: Path) -> None:
    first, second = ranks(tmp_path, "renew")
    assert same(first["weights"], second["weights"])
    assert same(first["history"], second["history"])
    changes = [change for _, _, changes in first["history"] for change in changes]
    assert changes[0] == "conv_light in layer2 germinated"
    assert "conv_light in layer2 pruned" in changes
    assert first["wrappers"] == 3
    assert (tmp_path / "grew").exists()


@pytest.mark.slow
def test_a_wrapper_that_was_not_renewed_is_an_error(tmp_path: Path) -> None:
    directory = tmp_path
    ranks(directory, "keep")
    assert "ddp = grower.rewrap(ddp)" in (directory / "error0").read_text()
    assert (directory / "error1").exists()
