"""How a seed's output is mixed into its host: the operator, the ramp's direction and its curve."""

from __future__ import annotations

from enum import IntEnum


class AlphaMode(IntEnum):
    HOLD = 0
    UP = 1
    DOWN = 2


class AlphaCurve(IntEnum):
    LINEAR = 1
    COSINE = 2
    SIGMOID = 3


class AlphaAlgorithm(IntEnum):
    """ADD: h + a·δ.  MULTIPLY: h·(1 + a·tanh δ).  GATE: h + a·gate(h)·δ."""

    ADD = 1
    MULTIPLY = 2
    GATE = 3


class Incubation(IntEnum):
    """How a TRAINING seed learns while the host does not feel it.

    SHADOW: from a loss computed at its own output, the host frozen for that pass.
    STE: from the gradient that reaches the host's features, passed straight through.
    """

    SHADOW = 0
    STE = 1
