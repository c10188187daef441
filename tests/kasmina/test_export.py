"""Exported networks: the same function, made of nothing but torch, here and in a process that has no
esper."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import MorphogeneticModel, NetworkRow, PopulationOptimizer, export_row
from esper.leyline import AlphaAlgorithm, PopulationError, SeedStage
from helpers import HOSTS, blueprints, bring, fuse, make, network_batch, passed, population_batch, train_step

topologies = pytest.mark.parametrize("topology", HOSTS)
CATALOGUE = [(topology, name) for topology in HOSTS for name in [*blueprints(topology), "noop"]]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def row_output(model: MorphogeneticModel, row: int, x: Tensor) -> Tensor:
    """What the population computes for this row."""
    batch, _ = fuse(model, [(x, torch.zeros(1))] * model.population)
    with torch.no_grad():
        return model.eval()(batch)[row]


def off_by(module: nn.Module, model: MorphogeneticModel, row: int, x: Tensor) -> float:
    """The largest difference between an exported module and its row, by both ways to ask the row."""
    with torch.no_grad():
        out = module(x)
    assert out.shape == row_output(model, row, x).shape
    return max(
        float((out - row_output(model, row, x)).abs().max()),
        float((out - NetworkRow(model, row)(x)).abs().max()),
    )


@pytest.mark.parametrize(("topology", "name"), CATALOGUE)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_seed_under_every_blend(topology, name, dtype):
    model = make(topology, 8, dtype=dtype)
    slot_id = "r0c1"
    for row, algorithm in enumerate(AlphaAlgorithm):
        bring(
            model, slot_id, name, SeedStage.BLENDING, row=row, algorithm=algorithm, stir=0.5, tempo_epochs=3
        )
        bring(model, slot_id, name, SeedStage.FOSSILIZED, row=row + 4, algorithm=algorithm, stir=0.5)
    assert 0.0 < model.reports(0)[slot_id].alpha < 1.0
    x, _ = network_batch(model, 5)
    outputs = []
    rows = (0, 1, 2, 4, 5, 6) if dtype is torch.float64 else (2, 5)
    for row in rows:
        assert off_by(export_row(model, row), model, row, x) < TOLERANCE[dtype]
        outputs.append(row_output(model, row, x))
    if name != "noop":
        host = make(topology, 8, dtype=dtype)
        assert all(
            (out - row_output(host, row, x)).abs().max() > 1e-4
            for row, out in zip(rows, outputs, strict=True)
        )


def grown(topology, dtype: torch.dtype = torch.float32) -> MorphogeneticModel:
    """Row 3 of eight: a seed in every slot, some of which are not blended."""
    model = make(topology, 8, dtype=dtype)
    stages = [
        SeedStage.FOSSILIZED,
        SeedStage.BLENDING,
        SeedStage.TRAINING,
        SeedStage.HOLDING,
        SeedStage.GERMINATED,
    ]
    for i, (slot_id, stage) in enumerate(zip(model.seed_slots, stages, strict=False)):
        bring(
            model,
            slot_id,
            blueprints(topology)[i],
            stage,
            row=3,
            stir=0.3,
            algorithm=list(AlphaAlgorithm)[i % 3],
            tempo_epochs=1,
        )
        if stage is SeedStage.BLENDING:
            passed(model.set_alpha_target(slot_id, 0.6, row=3, steps=0))
    optimizer = PopulationOptimizer(model)
    for step in range(3):  # so that batch norms have seen something
        train_step(model, optimizer, *population_batch(model, step))
    return model


@topologies
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_grown_and_trained_network(topology, dtype):
    model = grown(topology, dtype)
    x, _ = network_batch(model, 5)
    module = export_row(model, 3)
    assert off_by(module, model, 3, x) < TOLERANCE[dtype]
    blended = model.seed_params(3, stages=[SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED])
    assert sum(p.numel() for p in module.parameters()) == model.host_params + blended, (
        "seeds that are not blended are left out"
    )
    larger = torch.cat([x, x, x])
    assert off_by(module, model, 3, larger) < TOLERANCE[dtype], "any batch size will do"


@topologies
@pytest.mark.parametrize("stage", [SeedStage.GERMINATED, SeedStage.TRAINING])
def test_seeds_that_are_not_blended_are_left_out(topology, stage):
    model, host = make(topology), make(topology)
    bring(model, "r0c0", "norm", stage, stir=0.5)
    x, _ = network_batch(model, 5)
    assert torch.equal(export_row(model)(x), export_row(host)(x))
    assert sum(p.numel() for p in export_row(model).parameters()) == model.host_params


def test_a_seed_at_the_foot_of_its_ramp_is_left_out():
    model = make("mlp")
    bring(model, "r0c0", "lora", SeedStage.TRAINING, stir=0.5)
    assert model.advance("r0c0").done
    assert sum(p.numel() for p in export_row(model).parameters()) == model.host_params


def test_a_crippled_row_is_exported_crippled():
    model = make("cnn", 8, dtype=torch.float64)
    model.host.set_centre_tap(2, [True, False, True])
    x, _ = network_batch(model, 5)
    for row in (1, 2):
        assert off_by(export_row(model, row), model, row, x) < 1e-12


@topologies
def test_an_export_shares_nothing_with_the_network(topology):
    model = grown(topology)
    x, _ = network_batch(model, 5)
    module = export_row(model, 3)
    before = module(x)
    train_step(model, PopulationOptimizer(model), *population_batch(model, 9))
    assert torch.equal(module(x), before)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    assert not torch.equal(NetworkRow(model, 3)(x), module(x))


@topologies
def test_an_export_is_made_of_torch_alone(topology):
    module = export_row(grown(topology), 3)
    assert not module.training
    assert {type(part).__module__.split(".")[0] for part in module.modules() if part is not module} == {
        "torch"
    }
    assert "esper" not in module.code


@topologies
def test_an_export_can_be_trained_on(topology):
    model = grown(topology)
    module = export_row(model, 3).train()
    x, y = network_batch(model, 5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_rows_are_checked():
    with pytest.raises(PopulationError, match="row 8 is out of range; allowed: 0 to 7"):
        export_row(make("mlp", 8), 8)


# -- elsewhere -----------------------------------------------------------------------------------------------

ELSEWHERE = """
import sys

class NoEsper:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "esper":
            raise ModuleNotFoundError(f"{name} is not here")

sys.meta_path.insert(0, NoEsper())
try:
    import esper
except ModuleNotFoundError:
    pass
else:
    sys.exit("esper was found after all")

import pickle
import torch

torch.set_num_threads(1)
for topology in ("cnn", "transformer", "mlp"):
    x, expected = torch.load(f"{topology}.data")
    with open(f"{topology}.pickle", "rb") as file:
        modules = [pickle.load(file)]
    modules.append(torch.load(f"{topology}.pt", weights_only=False))
    if "pt2" in sys.argv:
        modules.append(torch.export.load(f"{topology}.pt2").module())
    for module in modules:
        with torch.no_grad():
            assert torch.allclose(module(x), expected, rtol=0, atol=1e-5), topology
assert not [name for name in sys.modules if name.split(".")[0] == "esper"]
print("done")
"""


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", script.name, *arguments]
    return subprocess.run(command, cwd=script.parent, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "kinds", [(), pytest.param(("pt2",), marks=pytest.mark.slow)], ids=["pickled", "exported"]
)
def test_exports_load_and_run_where_there_is_no_esper(tmp_path, kinds):
    for topology in HOSTS:
        model = grown(topology)
        module = export_row(model, 3)
        x, _ = network_batch(model, 5)
        torch.save((x, NetworkRow(model, 3)(x)), tmp_path / f"{topology}.data")
        (tmp_path / f"{topology}.pickle").write_bytes(pickle.dumps(module))
        torch.save(module, tmp_path / f"{topology}.pt")
        if kinds:
            torch.export.save(torch.export.export(module, (x,)), tmp_path / f"{topology}.pt2")
    script = tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE)
    result = run(script, *kinds)
    assert result.stdout.strip() == "done", result.stderr


@topologies
def test_torch_export_with_any_batch_size(topology):
    model = grown(topology)
    x, _ = network_batch(model, 5)
    program = torch.export.export(
        export_row(model, 3), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    for seed, batch in ((6, 3), (7, 11)):
        x, _ = network_batch(model, seed, batch)
        assert off_by(program.module(), model, 3, x) < 1e-5


def test_the_subprocess_really_lacks_esper(tmp_path):
    """The blocker above blocks: an object of ours cannot be loaded behind it."""
    (tmp_path / "host.pickle").write_bytes(pickle.dumps(make("mlp").host))
    script = tmp_path / "blocked.py"
    script.write_text(
        ELSEWHERE.split("import pickle")[0] + "import pickle\npickle.load(open('host.pickle', 'rb'))\n"
    )
    assert "ModuleNotFoundError: esper" in run(script).stderr
