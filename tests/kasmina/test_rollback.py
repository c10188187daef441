"""Rollback: host and fossils come back bit for bit, whatever was poisoned and when; other networks notice
nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina import MorphogeneticModel, PopulationOptimizer, RowSnapshot, restore_row, snapshot_row
from esper.leyline import PruneCause, SeedStage, StructureError
from helpers import (
    all_tensors,
    bring,
    differing,
    examples,
    make,
    population_batch,
    row_tensors,
    stage_of,
    train_step,
)

ROW, OTHERS = 3, (0, 1, 2, 4, 5, 6, 7)


def grown() -> tuple[MorphogeneticModel, PopulationOptimizer]:
    """Row 3 has a fossil and a blending seed; so do its neighbours, in other slots. All have momentum."""
    model = make("cnn", 8)
    first, second = model.slot_config.slot_ids[:2]
    bring(model, first, "conv_light", SeedStage.FOSSILIZED, row=ROW, stir=0.1)
    bring(model, second, "norm", SeedStage.BLENDING, row=ROW, stir=0.1, tempo_epochs=3)
    bring(model, second, "conv_light", SeedStage.FOSSILIZED, row=2, stir=0.1)
    bring(model, first, "conv_light", SeedStage.BLENDING, row=4, stir=0.1)
    optimizer = PopulationOptimizer(model)
    for step in range(2):
        train_step(model, optimizer, *population_batch(model, step))
    return model, optimizer


def roll_back(model: MorphogeneticModel, optimizer: PopulationOptimizer, snapshot: RowSnapshot) -> None:
    for slot in model.slots():
        seed = slot.seeds[ROW]
        if seed is not None and seed.is_present and seed.stage is not SeedStage.FOSSILIZED:
            model.prune(slot.slot_id, row=ROW, cause=PruneCause.ROLLBACK)
    restore_row(model, snapshot, ROW, committed_only=True)
    optimizer.forget_row(ROW)


def poison_weight(model: MorphogeneticModel, optimizer: PopulationOptimizer) -> None:
    next(model.host.parameters()).data[ROW].fill_(torch.nan)


def poison_buffers(model: MorphogeneticModel, optimizer: PopulationOptimizer) -> None:
    for buffer in model.host.buffers():
        buffer[ROW] = torch.inf


def poison_fossil(model: MorphogeneticModel, optimizer: PopulationOptimizer) -> None:
    for parameter in model.slots()[0].banks["conv_light"].parameters():
        parameter.data[ROW].fill_(torch.nan)


def poison_seed(model: MorphogeneticModel, optimizer: PopulationOptimizer) -> None:
    for parameter in model.slot(model.slot_config.slot_ids[1]).banks["norm"].parameters():
        parameter.data[ROW].fill_(-torch.inf)


def poison_momentum(model: MorphogeneticModel, optimizer: PopulationOptimizer) -> None:
    for tensor in optimizer.groups["host"]["host"].state["momentum"]:
        tensor[ROW] = torch.nan


POISONS = [poison_weight, poison_buffers, poison_fossil, poison_seed, poison_momentum]
Poison = Callable[[MorphogeneticModel, PopulationOptimizer], None]


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("poison", POISONS)
def test_restored_bit_for_bit_and_the_others_untouched(poison: Poison, before: int, after: int) -> None:
    model, optimizer = grown()
    twin, twin_optimizer = grown()
    snapshot = snapshot_row(model, ROW, committed_only=True)
    for step in range(before + after):
        if step == before:
            poison(model, optimizer)
        batch = population_batch(model, 10 + step)
        train_step(model, optimizer, *batch)
        train_step(twin, twin_optimizer, *batch)
    if not after:
        poison(model, optimizer)
    roll_back(model, optimizer, snapshot)
    assert not differing(snapshot_row(model, ROW, committed_only=True).tensors, snapshot.tensors)
    assert all(t.isfinite().all() for t in row_tensors(model, optimizer, ROW).values())
    for row in OTHERS:
        assert not differing(row_tensors(model, optimizer, row), row_tensors(twin, twin_optimizer, row))


@pytest.mark.parametrize("step", range(4))
def test_a_poisoned_batch_is_undone_at_any_position(step: int) -> None:
    model, optimizer = grown()
    snapshot = snapshot_row(model, ROW, committed_only=True)
    for i in range(4):
        x, y = population_batch(model, 20 + i)
        if i == step:
            x[:, ROW] = torch.nan
        losses = train_step(model, optimizer, x, y)
    assert losses[ROW].isnan()
    assert losses[list(OTHERS)].isfinite().all()
    roll_back(model, optimizer, snapshot)
    assert not differing(snapshot_row(model, ROW, committed_only=True).tensors, snapshot.tensors)
    assert train_step(model, optimizer, *population_batch(model, 30)).isfinite().all()


@examples(8)
@given(poison=st.sampled_from(POISONS), steps=st.lists(st.booleans(), max_size=4))
def test_the_restored_network_trains_like_one_that_never_failed(poison: Poison, steps: list[bool]) -> None:
    """After the rollback the row behaves as if it had been built from the snapshot: same losses, bit for
    bit."""
    model, optimizer = grown()
    snapshot = snapshot_row(model, ROW, committed_only=True)
    for i, poisoned in enumerate(steps):
        if poisoned:
            poison(model, optimizer)
        train_step(model, optimizer, *population_batch(model, i))
    roll_back(model, optimizer, snapshot)
    fresh, fresh_optimizer = grown()
    restore_row(fresh, snapshot, ROW)
    for i in range(2):
        batch = population_batch(model, 50 + i)
        assert train_step(model, optimizer, *batch)[ROW] == train_step(fresh, fresh_optimizer, *batch)[ROW]


def test_committed_means_host_and_fossils() -> None:
    model, _ = grown()
    whole, committed = snapshot_row(model, ROW), snapshot_row(model, ROW, committed_only=True)
    first, second = model.slot_config.slot_ids[:2]
    assert set(committed.seeds) == {first}
    assert set(whole.seeds) == {first, second}
    assert set(committed.tensors) == {name for name in whole.tensors if not name.startswith(second)}
    assert not differing(committed.tensors, {name: whole.tensors[name] for name in committed.tensors})


def test_a_snapshot_is_a_copy() -> None:
    model, optimizer = grown()
    snapshot = snapshot_row(model, ROW, committed_only=True)
    copies = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    train_step(model, optimizer, *population_batch(model, 1))
    assert not differing(snapshot.tensors, copies)


def test_cooldown_goes_on_and_germinations_are_not_forgotten() -> None:
    model, optimizer = grown()
    second, third = model.slot_config.slot_ids[1:3]
    snapshot = snapshot_row(model, ROW, committed_only=True)
    bring(model, third, "norm", SeedStage.TRAINING, row=ROW)
    model.prune(third, row=ROW)
    model.step_epoch([ROW])
    cooling, counted = model.seed_in(third, ROW), model.germinations[ROW]
    roll_back(model, optimizer, snapshot)
    assert stage_of(model, third, ROW) is SeedStage.EMBARGOED
    assert model.seed_in(third, ROW) is cooling
    assert stage_of(model, second, ROW) is SeedStage.PRUNED
    assert model.germinations[ROW] == counted > snapshot.germinations
    for _ in range(4):
        model.step_epoch([ROW])
    assert stage_of(model, second, ROW) is stage_of(model, third, ROW) is SeedStage.DORMANT


def test_what_the_snapshot_does_not_name_and_is_not_cooling_goes() -> None:
    """Also without a prune first: a restore never leaves a live seed behind, nor a fossil younger than the
    snapshot."""
    model, _ = grown()
    snapshot = snapshot_row(model, ROW, committed_only=True)
    second, third = model.slot_config.slot_ids[1:3]
    bring(model, third, "norm", SeedStage.FOSSILIZED, row=ROW)
    restore_row(model, snapshot, ROW, committed_only=True)
    assert stage_of(model, second, ROW) is stage_of(model, third, ROW) is SeedStage.DORMANT


def test_a_snapshot_that_does_not_fit_changes_nothing() -> None:
    model, _ = grown()
    before, seeds = all_tensors(model), model.reports(ROW)
    snapshot = snapshot_row(model, ROW, committed_only=True)
    damaged = RowSnapshot(snapshot.seeds, snapshot.germinations, dict(list(snapshot.tensors.items())[1:]))
    with pytest.raises(StructureError, match="missing tensors"):
        restore_row(model, damaged, ROW, committed_only=True)
    assert not differing(all_tensors(model), before)
    assert model.reports(ROW) == seeds
