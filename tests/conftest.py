"""How every test process runs: one torch thread, and hypothesis without deadlines.

The fast suite is derandomized, so that a green run stays green. Tests marked `fuzz` run in both suites; under
`-m slow` they try new examples every time, and many more of them (see `helpers.examples`)."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Some virtual machines announce AMX and do not allow it: bf16 then ends the process with an illegal
# instruction. Read at the first convolution or matrix product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Building networks inside a property is slow by hypothesis' measure, and not by ours.
SLOW_TO_BUILD = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    config.addinivalue_line(
        "markers", "fuzz: a property that the slow suite runs too, with many more examples"
    )
    common = {"deadline": None, "print_blob": True, "suppress_health_check": SLOW_TO_BUILD}
    settings.register_profile("fast", derandomize=True, max_examples=100, **common)
    settings.register_profile("slow", max_examples=1000, **common)
    settings.load_profile("slow" if _runs_slow(config) else "fast")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _runs_slow(config):
        for item in items:
            if item.get_closest_marker("fuzz") is not None:
                item.add_marker(pytest.mark.slow)


def _runs_slow(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "slow"
