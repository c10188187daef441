"""Batch size and where the data lives: what the config asks for is what the networks are fed."""

from __future__ import annotations

import pytest
import torch

from esper.leyline import EsperError
from esper.runtime.data import SharedBatchIterator
from esper.runtime.tasks import get_task_spec
from esper.simic import train_ppo_vectorized
from esper.simic.training import vectorized
from run_helpers import SMALL


@pytest.fixture
def shapes(monkeypatch):
    shapes: list[tuple[int, ...]] = []

    class Batches(SharedBatchIterator):
        def __iter__(self):
            for batches in super().__iter__():
                shapes.extend(tuple(batch.y.shape) for batch in batches)
                yield batches

    monkeypatch.setattr(vectorized, "SharedBatchIterator", Batches)
    return shapes


@pytest.mark.parametrize("batch_size", [4, 16, None])
def test_every_network_gets_batches_of_the_size_that_was_asked_for(shapes, batch_size) -> None:
    train_ppo_vectorized(**{**SMALL, "rounds": 1, "episode_length": 2, "batch_size": batch_size})
    expected = batch_size or get_task_spec(SMALL["task"]).batch_size
    assert set(shapes) == {(SMALL["population"], expected)}
    assert len(shapes) == 2 * SMALL["steps_per_epoch"], (
        "the size of a batch does not change how many there are"
    )


def test_preloading_needs_a_gpu() -> None:
    with pytest.raises(EsperError, match="gpu_preload with devices cpu"):
        train_ppo_vectorized(**{**SMALL, "gpu_preload": True})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_preloaded_data_gives_the_same_run() -> None:
    one, other = (
        train_ppo_vectorized(**{**SMALL, "devices": ["cuda:0"], "gpu_preload": preload})[1]
        for preload in (False, True)
    )
    assert one == other


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_has_at_least_one_sample(batch_size) -> None:
    with pytest.raises(EsperError, match=f"batch_size is {batch_size}"):
        train_ppo_vectorized(**{**SMALL, "batch_size": batch_size})
