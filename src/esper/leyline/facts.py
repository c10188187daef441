"""What is known of a host before it is trained: its size, its slots, and what each seed would cost there.

These are facts of the architecture. They are measured once per task (or per attached model) and reach the
policy as part of its observation.

S slots in the order of the slot config, B registered blueprints in the order of their indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

TRAITS = ("reach", "mixes_space", "mixes_channels", "multiplies")
"""What a blueprint does to its input, measured from the module. The means and variances of norms count as
constants: through them every output reads every input, a little.

reach: share of the positions of the map, along its longest side, that one output position reads; of all
    output positions, the one that reads most.
mixes_space: 1 if an output position reads other positions.
mixes_channels: 1 if an output channel reads other channels of the same position.
multiplies: 1 if the output is a product with the input, so that it is 0 wherever the input is.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts of one host with its slots."""

    classes: int | None
    """Number of classes, or size of the vocabulary; None: unknown."""
    val_samples: int | None
    """Number of answers in one validation; None: unknown."""
    params: int
    flops: float
    """Of training on one sample, forward and backward. NaN: unknown."""
    depth: Floats
    """[S] place in the order in which activations pass the slots: 0 first, 1 last."""
    width: Floats
    """[S] channels at the slot over those of the widest slot."""
    resolution: Floats
    """[S] positions at the slot over those of the input; 1 for vectors."""
    params_before: Floats
    """[S] share of the host's parameters before the slot."""
    flops_before: Floats
    """[S] share of the host's FLOPs before the slot. NaN: unknown."""
    seed_params: Floats
    """[S, B] parameters of a seed. NaN: the blueprint cannot grow there."""
    seed_flops: Floats
    """[S, B] training FLOPs of a seed on one sample. NaN: the blueprint cannot grow there, or unknown."""
    traits: Floats
    """[S, B, len(TRAITS)]. NaN: the blueprint cannot grow there."""
