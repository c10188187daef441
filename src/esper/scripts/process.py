"""What a command does with its own process before it trains: one torch thread, and memory that is kept.

The library changes neither by itself: both belong to the process."""

from __future__ import annotations

import ctypes
import platform

import torch

KEPT = 2**31 - 1
"""Bytes that may lie free at the top of the heap before they are given back to the system."""
ON_HEAP = 2**30
"""Allocations below this many bytes come from the heap. Larger ones get pages of their own."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of these settings in glibc's malloc.h."""


def use_one_core() -> None:
    """One torch thread. Freed memory is kept."""
    torch.set_num_threads(1)
    keep_memory()


def keep_memory() -> None:
    """Let glibc keep what is freed. Every training step frees its activations and allocates them anew; pages
    that come back from the system fault one by one, which took up to a third of a step of a small network.
    Other C libraries are left as they are."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, KEPT)
    libc.mallopt(_MMAP_THRESHOLD, ON_HEAP)
