"""A seed with buffers: batch norm in a blueprint is right at every population, and nothing of a seed outlives
it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina import NetworkRow, OptimizerConfig, PopulationOptimizer
from esper.kasmina.blueprints import ImageSeed
from esper.kasmina.layers import BatchNorm2d, Conv2d
from esper.leyline import AlphaAlgorithm, Incubation, SeedStage
from helpers import bring, distance, fuse, make, network_batch, registered, row_tensors, train_step

SLOT, ROW, STEPS = "r0c0", 5, 5
NAME = "batch_norm"
NEIGHBOURS = {"alone": (), "some": (2, 9, 14), "everyone": tuple(row for row in range(16) if row != ROW)}


class BatchNormSeed(ImageSeed):
    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        self.conv = Conv2d(population, channels, channels, 3)
        self.norm = BatchNorm2d(population, channels)

    def body(self, x, lanes):
        return F.relu(self.norm(self.conv(x, lanes), lanes))


class BatchNormModule(nn.Module):
    """The same in ordinary torch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


@pytest.fixture(autouse=True, params=[BatchNormSeed, BatchNormModule])
def batch_norm_seed(request) -> Iterator[None]:
    with registered(NAME, "cnn", request.param):
        yield


def norm_of(model) -> nn.Module:
    """What holds the stacked statistics."""
    return next(m for name, m in model.slot(SLOT).banks[NAME].named_modules() if name.endswith("norm"))


def grown(population: int, rows: dict[int, int], stage: SeedStage, incubation: Incubation):
    """A population in which `rows` (row → number of a network) have a seed with batch norm, after a few
    steps."""
    numbers = [rows.get(row, 99) for row in range(population)]
    model = make(
        "cnn", population, dtype=torch.float64, incubation=incubation, random_seeds=[n + 40 for n in numbers]
    )
    optimizer = PopulationOptimizer(model, OptimizerConfig(host_lr=0.02, seed_lr=0.02))
    for row, number in rows.items():
        how = list(AlphaAlgorithm)[number % 3]
        bring(model, SLOT, NAME, stage, row=row, init_seed=number, algorithm=how, stir=0.2)
    for step in range(STEPS):
        batches = [network_batch(model, 100 * number + step) for number in numbers]
        train_step(model, optimizer, *fuse(model, batches))
    return model, optimizer


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@pytest.mark.parametrize(
    ("stage", "incubation"),
    [
        (SeedStage.TRAINING, Incubation.SHADOW),
        (SeedStage.TRAINING, Incubation.STE),
        (SeedStage.HOLDING, Incubation.SHADOW),
    ],
)
def test_batch_norm_in_a_seed_is_the_same_in_any_population(stage, incubation, neighbours) -> None:
    single, single_optimizer = grown(1, {0: ROW}, stage, incubation)
    model, optimizer = grown(16, {row: row for row in (ROW, *NEIGHBOURS[neighbours])}, stage, incubation)
    expected, actual = row_tensors(single, single_optimizer, 0), row_tensors(model, optimizer, ROW)
    assert distance(expected, actual) < 1e-9
    for name, at_birth in (("running_mean", 0.0), ("running_var", 1.0)):
        statistic = next(t for key, t in actual.items() if key.startswith(SLOT) and key.endswith(name))
        assert (statistic - at_birth).abs().max() > 0.01, "statistics were recorded"
    x, _ = network_batch(model, 7)
    assert (NetworkRow(model, ROW)(x) - NetworkRow(single)(x)).abs().max() < 1e-9


def test_statistics_of_other_rows_stay() -> None:
    model, _ = grown(16, {0: 0, 3: 3}, SeedStage.HOLDING, Incubation.SHADOW)
    norm = norm_of(model)
    idle = [row for row in range(16) if row not in (0, 3)]
    assert (norm.running_mean[idle] == 0).all()
    assert (norm.running_mean[[0, 3]] != 0).all()


def test_a_freed_row_keeps_no_buffers_and_a_new_seed_starts_afresh() -> None:
    model, _ = grown(8, {0: 0, 3: 3}, SeedStage.HOLDING, Incubation.SHADOW)
    norm = norm_of(model)
    model.prune(SLOT, row=3)
    assert (norm.running_mean[3] == 0).all()
    assert (norm.running_var[3] == 0).all()
    assert (norm.running_var[0] != 0).all(), "the other seed keeps its own"
    while model.seed_in(SLOT, 3) is not None:
        model.step_epoch([3])
    model.germinate(SLOT, NAME, row=3, tempo_epochs=5)
    assert (norm.running_mean[3] == 0).all()
    assert (norm.running_var[3] == 1).all()
