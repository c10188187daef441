"""Grafts: seeds that are blended in from their first step. What holds for other seeds holds for them; and the
clock that makes a holding seed permanent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from esper.kasmina import (
    MorphogeneticModel,
    OptimizerConfig,
    PopulationOptimizer,
    all_coalitions,
    evaluate_coalitions,
    load_network,
    save_network,
)
from esper.leyline import (
    AlphaAlgorithm,
    EsperError,
    FossilizeCause,
    GateLevel,
    LifecycleKind,
    SeedStage,
    Topology,
    TransitionError,
)
from helpers import (
    EAGER,
    HOSTS,
    blueprints,
    differing,
    distance,
    fuse,
    make,
    measure,
    network_batch,
    passed,
    population_batch,
    row_tensors,
)

SLOT: dict[Topology, str] = {"cnn": "r0c1", "transformer": "r0c1", "mlp": "r0c0"}
EVERY = [(topology, name) for topology in HOSTS for name in blueprints(topology)]
ALGORITHMS = list(AlphaAlgorithm)
AUTOMATIC = EAGER | {"pacing": replace(EAGER["pacing"], auto_forward_gates=frozenset({GateLevel.G5}))}


def graft(model: MorphogeneticModel, name: str, *, row: int = 0, **options: Any) -> None:
    passed(model.germinate(SLOT[model.host.topology], name, row=row, tempo_epochs=0, **options))


def step(model: MorphogeneticModel, optimizer: PopulationOptimizer, number: int) -> float:
    """One training step; the loss before it."""
    optimizer.zero_grad()
    total = model.losses(*population_batch(model, number)).total()
    total.backward()
    optimizer.step()
    return total.item()


def test_a_graft_is_held_at_once_and_says_so_in_one_record() -> None:
    model = make("cnn")
    [record] = passed(model.germinate("r0c1", "conv_light", tempo_epochs=0)).records
    assert (record.kind, record.stage_from, record.stage_to, record.alpha) == (
        LifecycleKind.GERMINATED,
        SeedStage.DORMANT,
        SeedStage.HOLDING,
        1.0,
    )
    report = model.reports()["r0c1"]
    assert (report.stage, report.alpha, report.tempo_epochs) == (SeedStage.HOLDING, 1.0, 0)
    with pytest.raises(TransitionError, match="not possible in stage HOLDING"):
        model.germinate("r0c1", "conv_light", tempo_epochs=0)


def test_a_bad_graft_is_refused_and_changes_nothing() -> None:
    model = make("cnn")
    with pytest.raises(EsperError, match="tempo of -1 epochs"):
        model.germinate("r0c1", "conv_light", tempo_epochs=-1)
    assert model.reports() == {}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("topology", "name"), EVERY)
def test_a_graft_is_an_identity_at_birth_and_has_a_gradient(
    topology: Topology, name: str, algorithm: AlphaAlgorithm
) -> None:
    model = make(topology)
    x, y = population_batch(model, 1)
    before = model.train()(x).detach()
    graft(model, name, algorithm=algorithm)
    assert torch.equal(model(x), before)
    model.losses(x, y).total().backward()
    gradients = [p.grad for p in model.slot(SLOT[topology]).parameters() if p.grad is not None]
    assert any(g.abs().sum() > 0 for g in gradients)


@pytest.mark.parametrize("topology", list(HOSTS))
def test_a_graft_leaves_the_hosts_optimizer_state_as_it_is(topology: Topology) -> None:
    model = make(topology)
    optimizer = PopulationOptimizer(model)
    for number in range(3):
        step(model, optimizer, number)
    before = optimizer.row_state(0)
    weights = {name: p.detach().clone() for name, p in model.host.named_parameters()}
    graft(model, blueprints(topology)[0])
    after = optimizer.row_state(0)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(torch.equal(p, weights[name]) for name, p in model.host.named_parameters())
    born = after.keys() - before.keys()
    assert born
    assert not any(after[name].any() for name in born)


@pytest.mark.parametrize("topology", list(HOSTS))
def test_a_graft_trains_with_its_host_from_the_next_batch_on(topology: Topology) -> None:
    model = make(topology)
    optimizer = PopulationOptimizer(model)
    graft(model, blueprints(topology)[0])
    before = [p.detach().clone() for p in model.slot(SLOT[topology]).parameters()]
    step(model, optimizer, 0)
    after = list(model.slot(SLOT[topology]).parameters())
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(("topology", "name"), EVERY)
def test_a_graft_touches_no_other_row_and_equals_a_network_of_its_own(topology: Topology, name: str) -> None:
    row, runs, optimizers = 5, {}, {}
    for grafted in (True, False):
        model = make(topology, 8, dtype=torch.float64)
        optimizer = PopulationOptimizer(model)
        if grafted:
            graft(model, name, row=row, init_seed=7)
        for number in range(5):
            step(model, optimizer, number)
        runs[grafted], optimizers[grafted] = model, optimizer
    for other in set(range(8)) - {row}:
        with_it, without = (row_tensors(runs[is_in], optimizers[is_in], other) for is_in in (True, False))
        assert differing(with_it, without) == []
    alone = make(topology, 1, dtype=torch.float64)
    alone.reset_row(0, row)
    optimizer = PopulationOptimizer(alone)
    graft(alone, name, init_seed=7)
    for number in range(5):
        optimizer.zero_grad()
        alone.losses(*fuse(alone, [network_batch(alone, 1000 * number + row)])).total().backward()
        optimizer.step()
    assert distance(row_tensors(runs[True], optimizers[True], row), row_tensors(alone, optimizer, 0)) < 1e-9


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize(("topology", "name"), EVERY)
def test_save_load_next_step_is_identical(topology: Topology, name: str, kind: str, tmp_path) -> None:
    model = make(topology)
    optimizer = PopulationOptimizer(model, OptimizerConfig(kind=kind))
    graft(model, name, algorithm=AlphaAlgorithm.GATE)
    for number in range(3):
        step(model, optimizer, number)
    save_network(tmp_path / "grown", model, optimizer)
    other, other_optimizer = load_network(tmp_path / "grown")
    assert other.reports() == model.reports()
    assert step(model, optimizer, 9) == step(other, other_optimizer, 9)
    assert step(model, optimizer, 10) == step(other, other_optimizer, 10)
    assert differing(row_tensors(model, optimizer, 0), row_tensors(other, other_optimizer, 0)) == []


@pytest.mark.parametrize(("topology", "name"), EVERY)
def test_coalitions_of_grafts_equal_separate_evaluations(topology: Topology, name: str) -> None:
    model = make(topology)
    optimizer = PopulationOptimizer(model)
    for slot_id in ("r0c0", "r0c1"):
        passed(model.germinate(slot_id, name, tempo_epochs=0))
    for number in range(5):
        step(model, optimizer, number)
    x, _ = population_batch(model, 3)
    wanted = all_coalitions(["r0c0", "r0c1"])
    table = evaluate_coalitions(model, x, {0: wanted})
    assert set(table.coalitions) == set(wanted)
    for coalition, outputs in zip(table.coalitions, table.outputs, strict=True):
        separate = make(topology)
        separate.host.load_state_dict(model.host.state_dict())
        for slot_id in coalition:
            passed(separate.germinate(slot_id, name, tempo_epochs=0))
            separate.slot(slot_id).load_state_dict(model.slot(slot_id).state_dict())
        assert torch.equal(separate.eval()(x)[0], outputs)


# -- the clock -----------------------------------------------------------------------------------------------


def test_the_clock_makes_a_measured_seed_permanent_after_one_epoch() -> None:
    model = MorphogeneticModel(HOSTS["cnn"](1), **AUTOMATIC)
    graft(model, "conv_light")
    assert model.step_epoch() == []
    measure(model)
    [record] = model.step_epoch()
    assert (record.kind, record.stage_to, record.cause) == (
        LifecycleKind.FOSSILIZED,
        SeedStage.FOSSILIZED,
        FossilizeCause.CLOCK,
    )
    assert record.contribution == 5.0


def test_the_clock_waits_for_a_measurement() -> None:
    model = MorphogeneticModel(HOSTS["cnn"](1), **AUTOMATIC)
    graft(model, "conv_light")
    for _ in range(3):
        assert model.step_epoch() == []
    assert model.reports()["r0c1"].stage is SeedStage.HOLDING


def test_the_clock_makes_one_seed_permanent_per_epoch_in_slot_order() -> None:
    model = MorphogeneticModel(HOSTS["cnn"](1), **AUTOMATIC)
    slots = model.slot_config.slot_ids
    for slot_id in reversed(slots):
        passed(model.germinate(slot_id, "conv_light", tempo_epochs=0))
    model.step_epoch()
    measure(model)
    order = [record.slot_id for _ in slots for record in model.step_epoch()]
    assert order == list(slots)


def test_the_clock_leaves_the_epoch_to_an_action() -> None:
    model = MorphogeneticModel(HOSTS["cnn"](1), **AUTOMATIC)
    first, second = model.slot_config.slot_ids[:2]
    for slot_id in (first, second):
        passed(model.germinate(slot_id, "conv_light", tempo_epochs=0))
    model.step_epoch()
    measure(model)
    [record] = passed(model.fossilize(second)).records
    assert record.cause is FossilizeCause.POLICY
    assert model.step_epoch() == []
    assert [r.slot_id for r in model.step_epoch()] == [first]


def test_a_pruned_seed_does_not_become_permanent() -> None:
    model = MorphogeneticModel(HOSTS["cnn"](1), **AUTOMATIC)
    graft(model, "conv_light")
    model.step_epoch()
    measure(model)
    passed(model.schedule_prune("r0c1", steps=2))
    kinds = [record.kind for _ in range(4) for record in model.step_epoch()]
    assert LifecycleKind.PRUNED in kinds
    assert LifecycleKind.FOSSILIZED not in kinds
