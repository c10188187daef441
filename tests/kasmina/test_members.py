"""Rows that rest keep every bit and cost nothing; those that train do what they do in a full population."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.kasmina import MorphogeneticModel, OptimizerConfig, PopulationOptimizer
from esper.leyline import AlphaAlgorithm, Incubation, PopulationError, SeedStage
from helpers import HOSTS, LINE, blueprints, bring, differing, make, population_batch, row_tensors, train_step

WIDTH = 16
MEMBERS = [1, 2, 5, 8, 9, 10, 11, 12, 15]
"""Nine rows: more than eight lanes, so seven are padding."""
SEEDED = {1: SeedStage.TRAINING, 3: SeedStage.TRAINING, 5: SeedStage.HOLDING, 8: SeedStage.TRAINING}


def population(topology: str, incubation: Incubation) -> tuple[MorphogeneticModel, PopulationOptimizer]:
    """Some rows incubate a seed, in one of them behind a blended one; row 5 has a gate."""
    model = make(topology, WIDTH, incubation=incubation)
    optimizer = PopulationOptimizer(model, OptimizerConfig(kind="adamw", host_lr=0.02, seed_lr=0.02))
    first, *_, last = model.seed_slots
    kind = blueprints(topology)[0]
    for row, stage in SEEDED.items():
        how = AlphaAlgorithm.GATE if row == 5 else AlphaAlgorithm.ADD
        bring(model, last, kind, stage, row=row, stir=0.1, init_seed=row, algorithm=how)
    bring(model, first, kind, SeedStage.FOSSILIZED, row=8, stir=0.1, init_seed=8)
    train_step(model, optimizer, *population_batch(model, 0))
    return model, optimizer


def lanes_of(model: MorphogeneticModel, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    rows = model.training_lanes.rows
    return (x, y) if rows is None else (model.layout.take(x, WIDTH, rows), y.index_select(0, rows))


@pytest.mark.parametrize("incubation", Incubation)
@pytest.mark.parametrize("topology", LINE | HOSTS)
def test_rows_that_train_and_rows_that_rest(topology: str, incubation: Incubation) -> None:
    whole, whole_optimizer = population(topology, incubation)
    part, optimizer = population(topology, incubation)
    before = [row_tensors(part, optimizer, row) for row in range(WIDTH)]
    part.train_only(MEMBERS)
    for step in range(1, 4):
        x, y = population_batch(whole, step)
        losses = train_step(whole, whole_optimizer, x, y)
        own = train_step(part, optimizer, *lanes_of(part, x, y))
        assert torch.equal(own, losses[MEMBERS])
    for row in range(WIDTH):
        now = row_tensors(part, optimizer, row)
        same = row_tensors(whole, whole_optimizer, row) if row in MEMBERS else before[row]
        assert not differing(now, same), row
    assert part.training_lanes.count == 16
    part.train_only(MEMBERS[:8])
    assert (part.training_lanes.count, part.training_lanes.padding) == (8, 0)
    part.train_only(None)
    x, y = population_batch(part, 9)
    assert len(train_step(part, optimizer, x, y)) == WIDTH


@pytest.mark.parametrize("rows", [[], [3, 1], [1, 1], [0, 16]])
def test_rows_must_be_in_order(rows: list[int]) -> None:
    with pytest.raises(PopulationError, match=r"rows that train|out of range"):
        make("mlp", WIDTH).train_only(rows)
