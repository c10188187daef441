"""What commands do with their own process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from esper.scripts.process import use_one_core
{before}
for _ in range(30):
    torch.ones(10_000_000)
start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(10_000_000)
print(torch.get_num_threads(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start)
"""


def measure(before: str) -> tuple[int, int]:
    """Torch threads, and page faults of ten allocations of 40 MB one after the other, once the heap has
    grown."""
    command = [sys.executable, "-c", FAULTS.format(before=before)]
    threads, faults = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(threads), int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_one_thread_and_memory_that_is_freed_is_kept() -> None:
    threads, faults = measure("use_one_core()")
    assert threads == 1
    assert faults < measure("")[1] / 10
