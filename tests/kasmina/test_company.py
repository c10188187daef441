"""A network is the same bits whatever grows beside it: every blueprint, alpha algorithm and stage, alone and
in company, at the same width of the population."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
from torch import Tensor

from esper.kasmina import MorphogeneticModel, OptimizerConfig, PopulationOptimizer, evaluate_coalitions
from esper.leyline import AlphaAlgorithm, Incubation, SeedStage
from helpers import (
    HOSTS,
    LINE,
    blueprints,
    bring,
    differing,
    make,
    population_batch,
    row_tensors,
    train_step,
    wanted_coalitions,
)

WIDTHS = (8, 16, 24, 64)
STAGES = (
    (SeedStage.TRAINING, Incubation.SHADOW),
    (SeedStage.TRAINING, Incubation.STE),
    (SeedStage.BLENDING, Incubation.SHADOW),
    (SeedStage.HOLDING, Incubation.SHADOW),
    (SeedStage.FOSSILIZED, Incubation.SHADOW),
)
COMPANIES = ("alone", "same", "others")
ROW = 3
STEPS = 3


def company(name: str, blueprint: str, model: MorphogeneticModel) -> dict[int, str]:
    """The blueprints of the other rows: none, the same everywhere, or all kinds in turn."""
    others = [row for row in range(model.population) if row != ROW]
    if name == "alone":
        return {}
    if name == "same":
        return dict.fromkeys(others, blueprint)
    return dict(zip(others, cycle(blueprints(model.host.topology)), strict=False))


def life(
    topology: str,
    blueprint: str,
    algorithm: AlphaAlgorithm,
    stage: SeedStage,
    incubation: Incubation,
    width: int,
    neighbours: str,
) -> dict[str, Tensor]:
    """Everything that is the row's after a few steps: weights, optimizer state, losses, gradient norms and
    coalitions."""
    model = make(topology, width, incubation=incubation)
    optimizer = PopulationOptimizer(model, OptimizerConfig(kind="adamw", host_lr=0.02, seed_lr=0.02))
    slots = list(model.seed_slots)
    planted = {ROW: (blueprint, algorithm, stage)}
    kinds = cycle(product(AlphaAlgorithm, (SeedStage.TRAINING, SeedStage.HOLDING, stage)))
    for row, other in company(neighbours, blueprint, model).items():
        planted[row] = (other, *next(kinds))
    for row, (name, how, until) in planted.items():
        for slot_id in (slots[0], slots[-1]):
            bring(model, slot_id, name, until, row=row, stir=0.1, init_seed=row, algorithm=how)
    losses = {}
    for step in range(STEPS):
        losses[f"loss {step}"] = train_step(model, optimizer, *population_batch(model, step))[ROW]
    assert optimizer.stats is not None
    norms = {f"norm {slot}": norm[ROW] for slot, norm in optimizer.stats.norm.items()}
    table = evaluate_coalitions(model, population_batch(model, STEPS)[0], wanted_coalitions(model))
    outputs = {
        str(sorted(coalition)): output
        for row, coalition, output in zip(table.rows, table.coalitions, table.outputs, strict=True)
        if row == ROW
    }
    assert len(outputs) == (1 if stage is SeedStage.TRAINING else 4)
    return row_tensors(model, optimizer, ROW) | losses | norms | outputs


def cases() -> list[Any]:
    """The whole product; of each blueprint one case is in the fast suite, so that every algorithm, stage and
    width is in it too."""
    kinds = [(topology, name) for topology in (*HOSTS, *LINE) for name in blueprints(topology)]
    params = []
    for number, (topology, name) in enumerate(kinds):
        fast = (
            list(AlphaAlgorithm)[number % len(AlphaAlgorithm)],
            STAGES[number % len(STAGES)],
            WIDTHS[number % len(WIDTHS)],
        )
        for algorithm, (stage, incubation), width in product(AlphaAlgorithm, STAGES, WIDTHS):
            label = f"{topology}-{name}-{algorithm.name}-{stage.name}-{incubation.name}-{width}".lower()
            marks = () if (algorithm, (stage, incubation), width) == fast else pytest.mark.slow
            params.append(
                pytest.param(topology, name, algorithm, stage, incubation, width, id=label, marks=marks)
            )
    return params


@pytest.mark.parametrize(("topology", "blueprint", "algorithm", "stage", "incubation", "width"), cases())
def test_a_row_does_not_depend_on_its_neighbours(
    topology, blueprint, algorithm, stage, incubation, width
) -> None:
    alone, *others = (
        life(topology, blueprint, algorithm, stage, incubation, width, neighbours) for neighbours in COMPANIES
    )
    for neighbours, trace in zip(COMPANIES[1:], others, strict=True):
        assert differing(alone, trace) == [], neighbours
