"""The model factory: a task's networks on the wanted device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from esper.kasmina import CNNHost, MorphogeneticModel
from esper.leyline import EsperError
from esper.tolaria import create_model


@dataclass(frozen=True)
class Task:
    """As much of a task as the factory knows of."""

    name: str = "small"
    slots: tuple[str, ...] = ("r0c0", "r0c1", "r0c2")

    def build_model(self, population: int, seeds: Sequence[int]) -> MorphogeneticModel:
        return MorphogeneticModel(
            CNNHost(population, base=2, channels=1, size=8), self.slots, random_seeds=seeds
        )


TASK = Task()


def test_builds_what_the_task_says() -> None:
    model = create_model(TASK, "cpu", population=8, seeds=range(8))
    assert model.population == 8
    assert model.slot_config.slot_ids == TASK.slots
    assert all(p.device == torch.device("cpu") for p in model.parameters())


def test_rows_come_from_their_seeds() -> None:
    a = create_model(TASK, "cpu", population=8, seeds=[5, *range(10, 17)])
    b = create_model(TASK, torch.device("cpu"), population=1, seeds=[5])
    assert all(torch.equal(p[0], q[0]) for p, q in zip(a.host.parameters(), b.host.parameters(), strict=True))


def test_the_device_is_checked_before_anything_is_built() -> None:
    with pytest.raises(EsperError, match="device 'gpu' is malformed"):
        create_model(TASK, "gpu", population=3, seeds=[])
