"""Counter-based random streams: every source of randomness is named, so that nothing depends on what ran
before it.

The seed of a stream is a hash of its coordinates. Two runs that share (root, purpose, episode, env) share its
numbers, whatever else they do: this is what makes paired comparisons paired, and env i independent of how
many envs run."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, get_args

from esper.leyline.errors import EsperError, allowed

Purpose = Literal[
    "init", "data", "augment", "germination", "action", "condition", "split", "policy", "sampling"
]


def stream_seed(root: int, purpose: Purpose, episode: int = 0, env: int = 0, counter: int = 0) -> int:
    """A 63-bit seed for the stream at these coordinates; stable across processes and machines."""
    if purpose not in get_args(Purpose):
        raise EsperError(f"random stream {purpose!r} is unknown; {allowed(get_args(Purpose))}")
    text = f"{root}/{purpose}/{episode}/{env}/{counter}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
