"""Counter-based random streams: every source of randomness has a name, so no stream depends on what was drawn
before it.

The random seed of a stream is a hash of its coordinates. Two runs that share (root, purpose, episode, env)
draw the same numbers from it, whatever else they do. Comparisons of policies are paired by this, and an env
draws the same numbers beside any number of others."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, get_args

from esper.leyline.errors import EsperError, allowed

Purpose = Literal[
    "init",
    "data",
    "augment",
    "germination",
    "action",
    "condition",
    "split",
    "policy",
    "sampling",
    "values",
    "world",
]


def stream_seed(root: int, purpose: Purpose, episode: int = 0, env: int = 0, counter: int = 0) -> int:
    """A 63-bit random seed for the stream at these coordinates; the same in every process and on every
    machine."""
    if purpose not in get_args(Purpose):
        raise EsperError(f"random stream {purpose!r} is unknown; {allowed(get_args(Purpose))}")
    text = f"{root}/{purpose}/{episode}/{env}/{counter}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
