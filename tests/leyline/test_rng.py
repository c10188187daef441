"""Stream seeds: stable for ever, the same in every process, and unrelated to each other."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import Purpose, stream_seed

PURPOSES = get_args(Purpose)
counters = st.integers(0, 2**40)


def test_pinned_values() -> None:
    # Independent of Python: printf '0/init/0/0/0' | b2sum -l 64, halved.
    assert stream_seed(0, "init") == 0xDD432CB9C5A33204 >> 1 == 7971818141109033218
    assert (
        stream_seed(42, "action", episode=7, env=3, counter=11)
        == 0x58081CF1D6585F6F >> 1
        == 3171675950080077751
    )


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_the_same_in_another_process(hash_seed: str) -> None:
    call = "stream_seed(42, 'action', episode=7, env=3, counter=11)"
    code = f"from esper.leyline import stream_seed; print({call})"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(found.stdout) == 3171675950080077751


@given(counters, st.sampled_from(PURPOSES), counters, counters, counters)
def test_63_bits_and_a_pure_function(
    root: int, purpose: Purpose, episode: int, env: int, counter: int
) -> None:
    seed = stream_seed(root, purpose, episode, env, counter)
    assert 0 <= seed < 2**63
    assert stream_seed(root, purpose, episode=episode, env=env, counter=counter) == seed


def test_numpy_integers_name_the_same_stream() -> None:
    assert stream_seed(np.int64(42), "action", np.int32(7), np.int64(3), np.uint8(11)) == 3171675950080077751  # type: ignore[arg-type]


def test_neighbouring_coordinates_do_not_collide() -> None:
    small = range(12)
    seeds = {stream_seed(*place) for place in product(small, PURPOSES, small, small, (0, 1, 11, 111))}
    assert len(seeds) == 12 * len(PURPOSES) * 12 * 12 * 4


def test_streams_are_uncorrelated() -> None:
    envs = [np.random.default_rng(stream_seed(0, "data", env=env)).standard_normal(4096) for env in range(8)]
    correlation = np.corrcoef(envs) - np.eye(8)
    assert np.abs(correlation).max() < 0.08  # five standard errors of 1/√4096


def test_bits_are_balanced() -> None:
    seeds = np.array([stream_seed(1, "augment", counter=i) for i in range(4096)], dtype=np.uint64)
    share = np.array([((seeds >> np.uint64(bit)) & np.uint64(1)).mean() for bit in range(63)])
    assert np.abs(share - 0.5).max() < 0.04  # five standard errors of 0.5/√4096


def test_purposes() -> None:
    assert set(PURPOSES) >= {"init", "data", "augment", "germination", "action"}
