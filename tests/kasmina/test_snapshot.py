"""Snapshots and saved networks: exact, movable, strict; whatever does not fit is named and changes
nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from esper.kasmina import (
    MorphogeneticModel,
    NetworkRow,
    OptimizerConfig,
    PopulationOptimizer,
    RowSnapshot,
    load_network,
    restore_row,
    save_network,
    snapshot_row,
)
from esper.leyline import (
    AlphaAlgorithm,
    BlueprintError,
    EsperError,
    GateConfig,
    GateLevel,
    Incubation,
    Pacing,
    PopulationError,
    SeedStage,
    SlotIdError,
    StructureError,
)
from helpers import (
    HOSTS,
    all_tensors,
    blueprints,
    bring,
    differing,
    fuse,
    make,
    network_batch,
    population_batch,
    row_tensors,
    train_step,
)

topologies = pytest.mark.parametrize("topology", HOSTS)
kinds = pytest.mark.parametrize("kind", ["sgd", "adamw"])


def grown(
    topology: Any,
    population: int = 8,
    *,
    kind: str = "sgd",
    row: int = 2,
    **options: Any,
) -> tuple[MorphogeneticModel, PopulationOptimizer]:
    """A population in which one row has a seed in every kind of stage, as far as its slots go, and three
    steps of training."""
    model = make(topology, population, **options)
    names, slots = blueprints(topology), list(model.seed_slots)
    stages = [
        SeedStage.FOSSILIZED,
        SeedStage.BLENDING,
        SeedStage.TRAINING,
        SeedStage.HOLDING,
        SeedStage.GERMINATED,
    ]
    for i, (slot_id, stage) in enumerate(zip(slots, stages, strict=False)):
        bring(model, slot_id, names[i], stage, row=row, stir=0.2, algorithm=list(AlphaAlgorithm)[i % 3 - 1])
    if len(slots) > len(stages):
        bring(model, slots[-1], "norm", SeedStage.TRAINING, row=row)
        model.prune(slots[-1], row=row)
    if population > 1:
        bring(model, slots[0], names[0], SeedStage.HOLDING, row=0, stir=0.2)
    optimizer = PopulationOptimizer(model, OptimizerConfig(kind=kind))
    for step in range(3):
        train_step(model, optimizer, *population_batch(model, step))
    return model, optimizer


# -- rows ----------------------------------------------------------------------------------------------------


@topologies
@kinds
def test_a_row_comes_back_bit_for_bit(topology, kind):
    model, optimizer = grown(topology, kind=kind)
    twin, twin_optimizer = grown(topology, kind=kind)
    snapshot, state = snapshot_row(model, 2), optimizer.row_state(2)
    before, reports = row_tensors(model, optimizer, 2), model.reports(2)
    others = {row: row_tensors(model, optimizer, row) for row in range(8) if row != 2}

    for slot_id in model.seed_slots:  # the row goes astray in every way; the others stand still
        if slot_id in model.reports(2) and model.reports(2)[slot_id].stage in (
            SeedStage.BLENDING,
            SeedStage.TRAINING,
        ):
            model.prune(slot_id, row=2)
    optimizer.host_lr[2] = 0.5
    with torch.no_grad():
        for tensor in (*model.host.parameters(), *model.host.buffers()):
            tensor[2] += 1.0
    model.step_epoch([2])

    restore_row(model, snapshot, 2)
    optimizer.load_row_state(2, state)
    assert differing(before, row_tensors(model, optimizer, 2)) == []
    assert model.reports(2) == reports
    assert model.germinations[2] == snapshot.germinations
    for row, tensors in others.items():
        assert differing(tensors, row_tensors(model, optimizer, row)) == []
    for step in range(3):
        x, y = population_batch(model, 50 + step)
        assert torch.equal(train_step(model, optimizer, x, y), train_step(twin, twin_optimizer, x, y))
        model.step_epoch()
        twin.step_epoch()
    for row in range(8):
        assert differing(row_tensors(model, optimizer, row), row_tensors(twin, twin_optimizer, row)) == []


@topologies
def test_a_row_moves_to_another_place_and_population(topology):
    model, optimizer = grown(topology)
    target, target_optimizer = make(topology, 16), None
    bring(target, next(iter(target.seed_slots)), "norm", SeedStage.HOLDING, row=9, stir=0.2)
    restore_row(target, snapshot_row(model, 2), 9)
    target_optimizer = PopulationOptimizer(target)
    target_optimizer.load_row_state(9, optimizer.row_state(2))
    for step in range(5):
        batches = [network_batch(model, 900 + 20 * step + row) for row in range(16)]
        moved = (
            batches[8:10] + batches[2:3] + batches[11:16]
        )  # the population of eight sees the same batch in row 2
        train_step(model, optimizer, *fuse(model, moved))
        train_step(target, target_optimizer, *fuse(target, [*batches[:9], moved[2], *batches[10:]]))
        model.step_epoch()
        target.step_epoch()
        assert differing(row_tensors(model, optimizer, 2), row_tensors(target, target_optimizer, 9)) == []


def test_a_snapshot_is_a_copy():
    model, optimizer = grown("cnn")
    snapshot = snapshot_row(model, 2)
    kept = {name: t.clone() for name, t in snapshot.tensors.items()}
    seeds = json.dumps(snapshot.seeds)
    train_step(model, optimizer, *population_batch(model, 9))
    model.step_epoch()
    assert differing(kept, snapshot.tensors) == []
    assert json.dumps(snapshot.seeds) == seeds
    restore_row(model, snapshot, 2)
    train_step(model, optimizer, *population_batch(model, 9))
    assert differing(kept, snapshot.tensors) == [], "restored rows share nothing with it"


def test_a_restored_row_starts_without_momentum():
    model, optimizer = grown("cnn")
    restore_row(model, snapshot_row(model, 2), 2)
    assert all(not t.any() for name, t in optimizer.row_state(2).items() if not name.startswith("rates."))
    assert any(t.any() for name, t in optimizer.row_state(3).items() if not name.startswith("rates."))


def test_an_empty_snapshot_empties_the_row():
    model, empty = grown("cnn")[0], make("cnn", 8)
    restore_row(model, snapshot_row(empty, 3), 2)
    assert not model.reports(2)
    assert model.total_params(2) == model.host_params
    x, _ = population_batch(model, 1)
    restore_row(empty, snapshot_row(empty, 3), 2)
    assert torch.equal(model.eval()(x)[2], empty.eval()(x)[2])


def test_crippled_rows_stay_crippled():
    model, other = make("cnn", 8), make("cnn", 8)
    model.host.set_centre_tap(2, [True, False, True])
    restore_row(other, snapshot_row(model, 2), 2)
    x, _ = population_batch(model, 1)
    assert torch.equal(model.eval()(x)[2], other.eval()(x)[2])
    restore_row(other, snapshot_row(model, 3), 2)
    assert not other.host.blocks[0].conv.crippled


def test_a_view_saves_and_loads_its_row():
    model, _ = grown("mlp")
    view = NetworkRow(model, 2)
    before = view.snapshot()
    x, _ = network_batch(model, 4)
    out = view(x)
    view.restore(replace(before, tensors={name: torch.zeros_like(t) for name, t in before.tensors.items()}))
    assert not torch.equal(view(x), out)
    view.restore(before)
    assert torch.equal(view(x), out)


SNAPSHOT_DAMAGE: list[tuple[Callable[[RowSnapshot], RowSnapshot], type[EsperError], str]] = [
    (
        lambda s: replace(s, tensors={k: t for k, t in s.tensors.items() if k != "host.head.bias"}),
        StructureError,
        r"missing tensors \['host.head.bias'\]",
    ),
    (
        lambda s: replace(s, tensors=s.tensors | {"host.tail": torch.zeros(1)}),
        StructureError,
        r"unknown tensors \['host.tail'\]",
    ),
    (
        lambda s: replace(s, tensors=s.tensors | {"host.head.bias": torch.zeros(3)}),
        StructureError,
        r"host.head.bias has shape \(3,\), wanted \(10,\)",
    ),
    (lambda s: replace(s, seeds={}), StructureError, r"unknown tensors \['r0c0\."),
    (
        lambda s: replace(s, seeds=s.seeds | {"r7c7": s.seeds["r0c0"]}),
        SlotIdError,
        "slot 'r7c7' is unknown; allowed: r0c0",
    ),
    (
        lambda s: replace(s, seeds=s.seeds | {"r0c0": s.seeds["r0c0"] | {"blueprint_id": "nope"}}),
        BlueprintError,
        "blueprint 'nope' is unknown for topology cnn",
    ),
    (
        lambda s: replace(s, seeds=s.seeds | {"r0c0": s.seeds["r0c0"] | {"stage": 5}}),
        StructureError,
        "stage is 5: invalid enum value",
    ),
    (
        lambda s: replace(s, seeds=s.seeds | {"r0c0": {"stage": 3}}),
        StructureError,
        "seed in r0c0: field seed_id is missing",
    ),
    (lambda s: replace(s, germinations=-1), StructureError, "germinations is -1"),
]


@pytest.mark.parametrize(("damage", "error", "message"), SNAPSHOT_DAMAGE)
def test_a_snapshot_that_does_not_fit_changes_nothing(damage, error, message):
    model, optimizer = grown("cnn")
    broken = damage(snapshot_row(model, 2))
    train_step(model, optimizer, *population_batch(model, 9))
    before, reports = all_tensors(model), [model.reports(row) for row in range(8)]
    state = [optimizer.row_state(row) for row in range(8)]
    with pytest.raises(error, match=message):
        restore_row(model, broken, 2)
    assert differing(before, all_tensors(model)) == []
    assert [model.reports(row) for row in range(8)] == reports
    assert all(differing(a, optimizer.row_state(row)) == [] for row, a in enumerate(state))
    train_step(model, optimizer, *population_batch(model, 10))


def test_snapshots_of_another_host_do_not_fit():
    model = make("cnn", 8)
    for other in ("mlp", "transformer"):
        with pytest.raises(StructureError, match=r"missing tensors .* unknown tensors"):
            restore_row(model, snapshot_row(make(other)), 0)
    with pytest.raises(PopulationError, match="row 8 is out of range"):
        restore_row(model, snapshot_row(model, 0), 8)
    with pytest.raises(PopulationError, match="row 8 is out of range"):
        snapshot_row(model, 8)


# -- directories ---------------------------------------------------------------------------------------------


@topologies
@kinds
@pytest.mark.parametrize("population", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_network_goes_on_exactly(topology, kind, population, dtype, tmp_path):
    model, optimizer = grown(topology, population, kind=kind, row=population // 4, dtype=dtype)
    optimizer.seed_lr[0] = 0.123
    save_network(tmp_path / "deep" / "net", model, optimizer)
    twin, twin_optimizer = load_network(tmp_path / "deep" / "net")
    assert twin.population == population
    assert twin.host.spec() == model.host.spec()
    assert [twin.reports(row) for row in range(population)] == [
        model.reports(row) for row in range(population)
    ]
    for step in range(3):
        x, y = population_batch(model, 40 + step)
        assert torch.equal(model.eval()(x), twin.eval()(x))
        model.train()
        twin.train()
        assert torch.equal(train_step(model, optimizer, x, y), train_step(twin, twin_optimizer, x, y))
        assert model.step_epoch() == twin.step_epoch()
    for row in range(population):
        assert differing(row_tensors(model, optimizer, row), row_tensors(twin, twin_optimizer, row)) == []


def test_settings_come_back(tmp_path):
    model = make(
        "cnn",
        slots=["r0c0", "r1c1"],
        incubation=Incubation.STE,
        gates=GateConfig(min_contribution=3.5),
        pacing=Pacing(embargo_epochs=9, auto_forward_gates=frozenset({GateLevel.G1, GateLevel.G3})),
    )
    config = OptimizerConfig(kind="adamw", beta2=0.95, host_lr=0.3, clip=2.0)
    save_network(tmp_path, model, PopulationOptimizer(model, config))
    twin, optimizer = load_network(tmp_path)
    assert twin.slot_config == model.slot_config
    assert twin.incubation is Incubation.STE
    assert twin.gate_config == model.gate_config
    assert twin.pacing == model.pacing
    assert optimizer.config == config
    assert float(optimizer.host_lr) == pytest.approx(0.3)
    bring_again = model.germinate("r0c0", "norm"), twin.germinate("r0c0", "norm")
    assert bring_again[0] == bring_again[1], "germination streams go on where they stopped"


def test_a_network_can_be_saved_without_an_optimizer_and_again_over_itself(tmp_path):
    model, optimizer = grown("cnn")
    save_network(tmp_path, model)
    assert load_network(tmp_path)[1] is None
    # Killed before the weights were in place: the structure names those that were to take it.
    (tmp_path / "weights.safetensors").rename(tmp_path / "weights.safetensors.next")
    assert load_network(tmp_path)[1] is None
    train_step(model, optimizer, *population_batch(model, 9))
    save_network(tmp_path, model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["structure.json", "weights.safetensors"]
    assert differing(all_tensors(model), all_tensors(load_network(tmp_path)[0])) == []


def test_sick_weights_are_saved_as_they_are(tmp_path):
    model, optimizer = grown("mlp")
    with torch.no_grad():
        next(model.host.parameters())[1] = torch.nan
        next(model.host.parameters())[2] = torch.inf
    save_network(tmp_path, model, optimizer)
    assert differing(all_tensors(model), all_tensors(load_network(tmp_path)[0])) == []


def test_measurements_come_back(tmp_path):
    model, _ = grown("mlp")
    seed = model.seed_in("r0c0", 2)
    seed.update_metrics(gradient_norm=1e-300, contribution_velocity=-0.1, gradient_exploding=True)
    save_network(tmp_path, model)
    assert load_network(tmp_path)[0].seed_in("r0c0", 2) == seed
    assert asdict(seed)["metrics"]["gradient_norm"] == 1e-300


@pytest.mark.parametrize("where", ["file/net", "file"])
def test_a_place_that_cannot_be_written(where, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StructureError, match=f"cannot write the network to .*{where}"):
        save_network(tmp_path / where, make("mlp"))
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_directory_without_permission(tmp_path, monkeypatch):
    """A superuser may write anywhere, so the refusal is staged."""

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    save_network(tmp_path, make("mlp", random_seeds=[1]))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(StructureError, match=r"cannot write the network to .*: Permission denied"):
        save_network(tmp_path, make("mlp", random_seeds=[2]))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before, "no half-written file, no litter"


# -- damage --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    model, optimizer = grown("cnn", 1, row=0)
    save_network(path, model, optimizer)
    return path


def damaged(saved: Path, where: Path, structure: Any = None, weights: bytes | None = None) -> Path:
    """A copy with another structure or other weights; the digest always fits the weights."""
    blob = (saved / "weights.safetensors").read_bytes() if weights is None else weights
    content = json.loads((saved / "structure.json").read_text()) if structure is None else structure
    if weights is not None:
        content["weights"] = blake2b(weights, digest_size=16).hexdigest()
    where.mkdir(exist_ok=True)
    (where / "weights.safetensors").write_bytes(blob)
    (where / "structure.json").write_text(json.dumps(content))
    return where


DELETE = object()
SEED = "rows/0/seeds/r0c0"  # fossilized
BLENDING = "rows/0/seeds/r1c0"
TAMPERING: list[tuple[str, Any, str]] = [
    ("version", 99, "version is 99, written by a newer Esper"),
    (
        "version",
        1,
        "version 1; this Esper reads versions 2 and 3. Load the network with the Esper that wrote it",
    ),
    ("version", DELETE, "format is None and version None"),
    ("colour", "green", "field colour is unknown"),
    ("population", 8, "1 rows for a population of 8"),
    ("population", True, "population is true: expected `int`"),
    ("population", 10**12, "population is 1000000000000"),
    ("slots", ["r0c0"], "slot 'r1c0' is unknown; allowed: r0c0"),
    ("slots", ["r0c0", "r0c9"], "slot 'r0c9' is unknown to this host"),
    ("slots", [], "at least one slot"),
    ("dtype", "int64", "dtype is 'int64': .*allowed: float32, float64"),
    ("dtype", "float64", r"is torch\.float32, wanted torch\.float64"),
    ("gates/min_contribution", -2.0, r"min_contribution is -2\.0"),
    ("gates/min_contribution", DELETE, r"field gates\.min_contribution is missing"),
    ("gates/colour", 1, r"field gates\.colour is unknown"),
    ("pacing/embargo_epochs", -1, "embargo_epochs is -1"),
    ("pacing/auto_forward_gates", [0], "allowed: G1, G2, G3, G5"),
    ("pacing/auto_forward_gates", [99], r"pacing\.auto_forward_gates\[0\] is 99: invalid enum value"),
    ("incubation", "deep", "incubation is 'deep': .*allowed: shadow, ste"),
    ("host/kind", "rnn", "host kind 'rnn' is unknown; allowed: cnn, gpt, mlp"),
    ("host/kind", "mlp", "does not fit a mlp host"),
    ("host/kind", DELETE, "host kind None is unknown"),
    ("host/base", 3, r"host.blocks.0.conv.weight has shape \(2, 1, 3, 3\), wanted \(3, 1, 3, 3\)"),
    ("host/base", -2, "cannot be built|must be"),
    ("host/base", "2", "does not fit a cnn host"),
    ("host/classes", 11, r"host.head.weight has shape \(10, 8\), wanted \(11, 8\)"),
    ("host/blocks", 1, "blocks is 1"),
    ("host/blocks", 5, "pools|missing tensors"),
    ("host/colour", 1, "colour"),
    ("rows", [], "0 rows for a population of 1"),
    ("rows/0", 3, r"rows\[0\] is 3: expected `object`"),
    ("rows/0/germinations", -3, "germinations is -3"),
    (SEED, DELETE, r"unknown tensors \['r0c0\."),
    (SEED, 7, r"rows\[0\]\.seeds\.r0c0 is 7: expected `object`"),
    (f"{SEED}/blueprint_id", "conv_light", "missing tensors .*unknown tensors"),
    (f"{SEED}/blueprint_id", "nope", "blueprint 'nope' is unknown for topology cnn"),
    (f"{SEED}/algorithm", 9, "seed in r0c0: algorithm is 9: invalid enum value"),
    (f"{SEED}/algorithm", 1, r"unknown tensors \['r0c0\._gate"),
    (f"{SEED}/stage", 5, "stage is 5: invalid enum value"),
    (f"{SEED}/stage", 1, "in stage DORMANT: stage is"),
    (f"{SEED}/stage", 0, "in stage UNKNOWN: stage is"),
    (f"{SEED}/stage", 3, "in stage TRAINING: alpha is .* which no seed in this stage can have"),
    (f"{SEED}/stage", DELETE, "field stage is missing"),
    (f"{SEED}/tempo_epochs", -1, "tempo_epochs is -1"),
    (f"{SEED}/alpha_target", 1.0, "field alpha_target is unknown"),
    (f"{SEED}/init_seed", -4, "init_seed is -4"),
    (f"{SEED}/init_seed", 2**63, "64 bits"),
    (f"{SEED}/colour", 1, "field colour is unknown"),
    (f"{SEED}/alpha/alpha", 0.5, "in stage FOSSILIZED: alpha is"),
    (f"{SEED}/alpha/mode", 1, "in stage FOSSILIZED: alpha is"),
    (f"{BLENDING}/alpha/alpha", 1.5, "in stage BLENDING: alpha is"),
    (f"{BLENDING}/alpha/target", -0.1, "in stage BLENDING: alpha is"),
    (f"{BLENDING}/alpha/steps_done", 99, "in stage BLENDING: alpha is"),
    (f"{BLENDING}/alpha/steepness", 0.0, "in stage BLENDING: alpha is"),
    (f"{SEED}/metrics", {}, r"field metrics\.epochs_total is missing"),
    (f"{SEED}/metrics/gradient_exploding", 0, r"metrics\.gradient_exploding is 0: expected `bool`"),
    ("optimizer", None, r"unknown tensors \['optimizer\.0\."),
    ("optimizer/kind", "lion", "optimizer kind 'lion' is unknown"),
    ("optimizer/kind", "adamw", "optimizer state: missing tensors"),
    ("optimizer/host_lr", -1.0, r"host_lr is -1\.0"),
    ("optimizer/newborn_warmup", 1.5, r"newborn_warmup is 1\.5"),
    ("optimizer/newborn_warmup", 3, r"optimizer state: missing tensors .*updates"),
    ("optimizer/newborn_warmup", DELETE, r"field optimizer\.newborn_warmup is missing"),
    ("weights", "00", "digest .*, wanted 00"),
]


def tamper(structure: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = (int(p) if p.isdigit() else p for p in path.split("/"))
    place: Any = structure
    for key in parents:
        place = place[key]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    return structure


def test_the_saved_network_is_what_the_tampering_expects(saved):
    model, optimizer = load_network(saved)
    assert optimizer is not None
    assert [model.seed_in(slot_id).stage.name for slot_id in ("r0c0", "r1c0", "r0c1")] == [
        "FOSSILIZED",
        "BLENDING",
        "TRAINING",
    ]
    assert model.seed_in("r0c0").algorithm is AlphaAlgorithm.GATE
    assert model.seed_in("r1c2").stage is SeedStage.PRUNED


@pytest.mark.parametrize(
    ("path", "value", "message"), TAMPERING, ids=[f"{p}={v!s:.9}" for p, v, _ in TAMPERING]
)
def test_tampered_structures_are_refused_by_name(saved, tmp_path, path, value, message):
    structure = tamper(json.loads((saved / "structure.json").read_text()), path, value)
    with pytest.raises(StructureError, match=message):
        load_network(damaged(saved, tmp_path, structure))


@pytest.mark.parametrize(
    "field",
    [
        "host",
        "population",
        "slots",
        "dtype",
        "gates",
        "pacing",
        "incubation",
        "rows",
        "optimizer",
        "weights",
    ],
)
def test_every_field_of_the_structure_is_needed(saved, tmp_path, field):
    structure = json.loads((saved / "structure.json").read_text())
    del structure[field]
    with pytest.raises(StructureError, match=f"field {field} is missing"):
        load_network(damaged(saved, tmp_path, structure))


def of_version_2(saved: Path) -> dict[str, Any]:
    """The structure as version 2 wrote it: seeds with a target of their first ramp, no warm-up."""
    structure = json.loads((saved / "structure.json").read_text())
    assert structure["version"] == 3
    del structure["optimizer"]["newborn_warmup"]
    for row in structure["rows"]:
        for seed in row["seeds"].values():
            seed["alpha_target"] = 0.7
    return structure | {"version": 2}


def test_a_network_of_version_2_loads_and_goes_on_exactly(saved, tmp_path):
    old, new = load_network(damaged(saved, tmp_path, of_version_2(saved))), load_network(saved)
    assert old[1].config == new[1].config
    assert old[0].reports() == new[0].reports()
    for step in range(2):
        x, y = population_batch(new[0], 30 + step)
        assert torch.equal(train_step(*old, x, y), train_step(*new, x, y))
        assert old[0].step_epoch() == new[0].step_epoch()
    assert differing(row_tensors(*old, 0), row_tensors(*new, 0)) == []


def test_a_network_of_version_2_may_have_no_optimizer(saved, tmp_path):
    model, _ = load_network(saved)
    save_network(tmp_path / "bare", model)
    structure = json.loads((tmp_path / "bare" / "structure.json").read_text())
    twin, optimizer = load_network(damaged(tmp_path / "bare", tmp_path / "old", structure | {"version": 2}))
    assert optimizer is None
    assert twin.reports() == model.reports()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rows", 3, "rows is 3"),
        ("rows/0", [], r"rows\[0\]"),
        ("rows/0/seeds", [1], r"rows\[0\]\.seeds"),
        (SEED, 7, r"rows\[0\]\.seeds\.r0c0 is 7: expected `object`"),
        ("optimizer", "sgd", "optimizer is"),
    ],
)
def test_damage_in_version_2_is_named_too(saved, tmp_path, path, value, message):
    with pytest.raises(StructureError, match=message):
        load_network(damaged(saved, tmp_path, tamper(of_version_2(saved), path, value)))


def test_a_network_with_the_older_name_of_version_2_loads(saved, tmp_path):
    structure = of_version_2(saved)
    del structure["version"]
    load_network(damaged(saved, tmp_path, structure | {"format": "esper-network-2"}))
    with pytest.raises(StructureError, match="format is 'esper-network-1'"):
        load_network(damaged(saved, tmp_path, structure | {"format": "esper-network-1"}))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b'"text"', b"\x00\xff\xfe", b"[" * 5000, b'{"version": 2, "ho']
)
def test_files_that_are_no_structure(saved, tmp_path, content):
    path = damaged(saved, tmp_path)
    (path / "structure.json").write_bytes(content)
    with pytest.raises(StructureError, match=r"structure\.json: (not valid JSON|nested|the content)"):
        load_network(path)


def test_truncated_files(saved, tmp_path):
    whole = (saved / "structure.json").read_bytes()
    path = damaged(saved, tmp_path)
    for size in range(0, len(whole) - 1, 997):
        (path / "structure.json").write_bytes(whole[:size])
        with pytest.raises(StructureError, match=r"structure\.json: not valid JSON"):
            load_network(path)
    path = damaged(saved, tmp_path)
    blob = (saved / "weights.safetensors").read_bytes()
    for size in (0, 1, 8, 100, len(blob) // 2, len(blob) - 1):
        (path / "weights.safetensors").write_bytes(blob[:size])
        with pytest.raises(
            StructureError, match=r"weights\.safetensors is damaged or belongs to another structure: digest"
        ):
            load_network(path)


@pytest.mark.parametrize("position", [0, 9, 200, -1])
def test_a_flipped_bit_in_the_weights_is_noticed(saved, tmp_path, position):
    blob = bytearray((saved / "weights.safetensors").read_bytes())
    blob[position] ^= 1
    path = damaged(saved, tmp_path)
    (path / "weights.safetensors").write_bytes(bytes(blob))
    with pytest.raises(StructureError, match="digest"):
        load_network(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("rows.0.host.head.bias"), r"missing tensors \['host.head.bias'\]"),
        (lambda t: t.update({"rows.0.host.head.bias": torch.zeros(3)}), r"host.head.bias has shape \(3,\)"),
        (
            lambda t: t.update({"rows.0.host.head.bias": torch.zeros(10, dtype=torch.float64)}),
            r"head.bias is torch\.float64",
        ),
        (
            lambda t: t.update({"rows.0.host.head.bias": torch.zeros(10, dtype=torch.int64)}),
            r"head.bias is torch\.int64",
        ),
        (lambda t: t.update({"rows.0.host.tail": torch.zeros(3)}), r"unknown tensors \['host.tail'\]"),
        (
            lambda t: t.update({"rows.1.host.head.bias": torch.zeros(10)}),
            r"unknown tensors \['rows.1.host.head.bias'\]",
        ),
        (lambda t: t.update({"stowaway": torch.zeros(10)}), r"unknown tensors \['stowaway'\]"),
        (lambda t: t.pop("optimizer.0.rates.clip"), r"optimizer state: missing tensors \['rates.clip'\]"),
        (lambda t: t.pop("optimizer.0.host.bias_correction"), r"missing tensors \['host.bias_correction'\]"),
        (
            lambda t: t.update({"optimizer.0.host.head.bias.momentum": torch.zeros(9)}),
            r"head.bias.momentum has shape \(9,\)",
        ),
        (lambda t: t.clear(), "missing tensors"),
    ],
)
def test_other_tensors_are_refused_by_name(saved, tmp_path, change, message):
    tensors = load((saved / "weights.safetensors").read_bytes())
    change(tensors)
    with pytest.raises(StructureError, match=message):
        load_network(damaged(saved, tmp_path, weights=save(tensors)))


def test_garbage_with_the_right_digest(saved, tmp_path):
    for blob in (b"", b"not a tensor file", b"\xff" * 100):
        with pytest.raises(StructureError, match=r"weights\.safetensors is damaged"):
            load_network(damaged(saved, tmp_path, weights=blob))


@pytest.mark.parametrize("missing", ["structure.json", "weights.safetensors"])
def test_missing_files(saved, tmp_path, missing):
    path = damaged(saved, tmp_path)
    (path / missing).unlink()
    with pytest.raises(StructureError, match=f"cannot read .*{missing}: No such file"):
        load_network(path)


def test_missing_directories(tmp_path):
    with pytest.raises(StructureError, match=r"cannot read .*nowhere/structure\.json: No such file"):
        load_network(tmp_path / "nowhere")


def test_weights_of_another_save_do_not_fit(saved, tmp_path):
    path = damaged(saved, tmp_path)
    save_network(tmp_path / "other", make("cnn"))
    (path / "weights.safetensors").write_bytes((tmp_path / "other" / "weights.safetensors").read_bytes())
    with pytest.raises(StructureError, match="belongs to another structure"):
        load_network(path)
