"""Real devices: one population per stream, populations in turn over the devices. Skipped where there is
none."""

from __future__ import annotations

import pytest
import torch

from esper.simic import train_ppo_vectorized
from run_helpers import SMALL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def devices() -> list[str]:
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def test_populations_take_turns_on_all_devices() -> None:
    agent, history = train_ppo_vectorized(**{**SMALL, "envs": 8 * len(devices()) + 1, "devices": devices()})
    assert len(history) == SMALL["rounds"]
    assert agent.policy.device == torch.device("cuda:0")
    assert all(torch.isfinite(p).all() for p in agent.policy.network.parameters())


@pytest.mark.parametrize(
    "changes", [{"amp": "bf16"}, {"amp": "fp16", "population": 1}, {"gpu_preload": True}]
)
def test_precisions_and_preloading(changes) -> None:
    _, history = train_ppo_vectorized(**{**SMALL, "devices": ["cuda:0"], **changes})
    assert len(history) == SMALL["rounds"]


def test_two_runs_on_one_device_are_the_same() -> None:
    one, other = (train_ppo_vectorized(**{**SMALL, "devices": ["cuda:0"]})[1] for _ in range(2))
    assert one == other
