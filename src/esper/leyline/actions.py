"""The factored action space: eight heads, their values, and which heads matter for which operation; and the
settings of alpha that actions choose from.

Head order, member order and values are a contract: saved policies, buffers and events depend on them.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Literal

from esper.leyline.blueprints import NOOP, blueprint_id, blueprint_ids

Topology = Literal["cnn", "transformer", "mlp"]


class LifecycleOp(IntEnum):
    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


class GerminationStyle(IntEnum):
    """Ramp curve and blend operator in one head, so that a gated ramp always has a gate."""

    LINEAR_ADD = 0
    LINEAR_MULTIPLY = 1
    SIGMOID_ADD = 2
    GATED_GATE = 3


class TempoAction(IntEnum):
    """Length of the first alpha ramp. INSTANT grafts: no isolation and no ramp."""

    FAST = 0
    STANDARD = 1
    SLOW = 2
    INSTANT = 3


class AlphaTargetAction(IntEnum):
    HALF = 0
    SEVENTY = 1
    FULL = 2


class AlphaSpeedAction(IntEnum):
    """Length of a later alpha ramp, in epochs."""

    INSTANT = 0
    FAST = 1
    MEDIUM = 2
    SLOW = 3


class AlphaCurveAction(IntEnum):
    LINEAR = 0
    COSINE = 1
    SIGMOID_GENTLE = 2
    SIGMOID = 3
    SIGMOID_SHARP = 4


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
    """How a TRAINING seed learns without affecting its host.

    SHADOW: from a loss computed at its own output, the host frozen for that pass.
    STE: from the gradient that reaches the host's features, passed straight through.
    """

    SHADOW = 0
    STE = 1


OP_WAIT, OP_GERMINATE, OP_SET_ALPHA_TARGET, OP_PRUNE, OP_FOSSILIZE, OP_ADVANCE = (
    int(op) for op in LifecycleOp
)

# Lookup tables, indexed by the enum's value.
OP_NAMES = tuple(op.name for op in LifecycleOp)
STYLE_BLEND_IDS = ("linear", "linear", "sigmoid", "gated")
STYLE_ALPHA_ALGORITHMS = (
    AlphaAlgorithm.ADD,
    AlphaAlgorithm.MULTIPLY,
    AlphaAlgorithm.ADD,
    AlphaAlgorithm.GATE,
)
STYLE_CURVES = (AlphaCurve.LINEAR, AlphaCurve.LINEAR, AlphaCurve.SIGMOID, AlphaCurve.LINEAR)
"""A gated seed ramps linearly: a sigmoid ramp on top of a sigmoid gate would starve the gate of gradient."""
TEMPO_EPOCHS = (3, 5, 8, 0)
ALPHA_TARGET_VALUES = (0.5, 0.7, 1.0)
ALPHA_SPEED_EPOCHS = (0, 3, 5, 8)
ALPHA_CURVE_VALUES = (
    AlphaCurve.LINEAR,
    AlphaCurve.COSINE,
    AlphaCurve.SIGMOID,
    AlphaCurve.SIGMOID,
    AlphaCurve.SIGMOID,
)
ALPHA_CURVE_STEEPNESS = (12.0, 12.0, 6.0, 12.0, 24.0)

HEAD_NAMES = ("slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve", "op")
NUM_HEADS = len(HEAD_NAMES)
HEAD_ENUMS: tuple[type[IntEnum] | None, ...] = (
    None,
    None,
    GerminationStyle,
    TempoAction,
    AlphaTargetAction,
    AlphaSpeedAction,
    AlphaCurveAction,
    LifecycleOp,
)
"""Two heads have no enum: the number of slots is the network's, and blueprints are open."""

#  op \ head           slot   blueprint style  tempo  target speed  curve  op
RELEVANCE: tuple[tuple[bool, ...], ...] = (
    (False, False, False, False, False, False, False, True),  # WAIT
    (True, True, True, True, False, False, False, True),  # GERMINATE
    (True, False, True, False, True, True, True, True),  # SET_ALPHA_TARGET
    (True, False, False, False, False, True, True, True),  # PRUNE
    (True, False, False, False, False, False, False, True),  # FOSSILIZE
    (True, False, False, False, False, False, False, True),  # ADVANCE
)
"""Which heads carry meaning for which operation; sampling, loss, entropy, events and UI read this one
table. A germination has no alpha target: the first one is always 1, because no seed becomes permanent at a
lower one."""

IRRELEVANT_VALUES = (
    0,
    NOOP,
    GerminationStyle.SIGMOID_ADD,
    TempoAction.INSTANT,
    AlphaTargetAction.FULL,
    AlphaSpeedAction.INSTANT,
    AlphaCurveAction.LINEAR,
    LifecycleOp.WAIT,
)
"""Value of each head, in head order, where it is irrelevant."""


def head_sizes(num_slots: int) -> tuple[int, ...]:
    """Number of choices of each head, in head order, with the blueprints that are registered now."""
    return num_slots, len(blueprint_ids()), *(len(enum) for enum in HEAD_ENUMS if enum is not None)


@dataclass(frozen=True, slots=True)
class FactoredAction:
    """One decision for one network."""

    slot_idx: int
    blueprint: int
    style: GerminationStyle
    tempo: TempoAction
    alpha_target: AlphaTargetAction
    alpha_speed: AlphaSpeedAction
    alpha_curve: AlphaCurveAction
    op: LifecycleOp

    def __post_init__(self) -> None:
        blueprint_id(self.blueprint)

    @classmethod
    def from_indices(
        cls,
        slot: int,
        blueprint: int,
        style: int,
        tempo: int,
        alpha_target: int,
        alpha_speed: int,
        alpha_curve: int,
        op: int,
    ) -> FactoredAction:
        """Build from plain integers in head order; an integer outside its head raises ValueError."""
        if slot < 0:
            raise ValueError(f"slot index {slot} is negative")
        return cls(
            slot,
            blueprint,
            GerminationStyle(style),
            TempoAction(tempo),
            AlphaTargetAction(alpha_target),
            AlphaSpeedAction(alpha_speed),
            AlphaCurveAction(alpha_curve),
            LifecycleOp(op),
        )

    @classmethod
    def wait(cls) -> FactoredAction:
        return cls.from_indices(*(int(v) for v in IRRELEVANT_VALUES))

    def to_indices(self) -> tuple[int, ...]:
        """Plain integers in head order."""
        return tuple(int(v) for v in astuple(self))
