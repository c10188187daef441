"""Rows `data.*`: the share of a training epoch that is spent on preparing its batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness import Datasets, Row, interleave
from benchmarks.kasmina import CASES, Case, population, train_step
from esper.runtime.data import SharedBatchIterator, load_dataset, validation_split


@dataclass(frozen=True, slots=True)
class DataCase:
    """A task's dataset, its steps per epoch, and the share that batches may cost."""

    dataset: str
    steps: int
    goal: float


DATA = {
    "digits_impaired": DataCase(dataset="digits", steps=15, goal=0.06),
    "cifar_baseline": DataCase(dataset="cifar10", steps=50, goal=0.10),
}


def rows(datasets: Datasets) -> Iterator[Row]:
    for name, data in DATA.items():
        if reason := datasets.why_missing(data.dataset):
            yield Row(f"data.pipeline_share.{name}", None, data.goal, skipped=reason)
        else:
            yield from _share(name, CASES[name], data)


def batches(case: Case, data: DataCase) -> SharedBatchIterator:
    """The iterator of one population, with the dataset's usual augmentation."""
    split = validation_split(load_dataset(data.dataset), 256, 0)
    return SharedBatchIterator(
        split, [list(range(case.population))], case.batch, steps_per_epoch=data.steps, seed=0
    )


def _share(name: str, case: Case, data: DataCase) -> Iterator[Row]:
    for_data_alone, for_training = batches(case, data), batches(case, data)
    model, optimizer = population(case, case.population)

    def produce() -> None:
        deque(for_data_alone, maxlen=0)

    def train() -> None:
        for (batch,) in for_training:
            train_step(model, optimizer, batch.x, batch.y)

    ratio, ours, _ = interleave(produce, train, rounds=9)
    yield Row(f"data.pipeline_share.{name}", ratio, data.goal)
    yield Row(f"data.epoch_ms.{name}", ours * 1e3)
