"""Seed stages and the one transition table that slots, masks, docs and tests read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType

from esper.leyline.actions import LifecycleOp


class SeedStage(IntEnum):
    """Stage of a seed's life. Value 5 is retired and rejected everywhere."""

    UNKNOWN = 0
    DORMANT = 1
    GERMINATED = 2
    TRAINING = 3
    BLENDING = 4
    HOLDING = 6
    FOSSILIZED = 7
    PRUNED = 8
    EMBARGOED = 9
    RESETTING = 10


STAGES: tuple[SeedStage, ...] = tuple(SeedStage)

LIVE_STAGES = frozenset({SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING})
"""A seed is present and may still be pruned."""
BLENDED_STAGES = frozenset({SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED})
"""The seed's output is part of the network's output (if its alpha is above 0)."""
PRESENT_STAGES = LIVE_STAGES | {SeedStage.FOSSILIZED}
"""The seed has weights. It counts towards the maximum number of seeds of a network."""
COOLDOWN_STAGES = frozenset({SeedStage.PRUNED, SeedStage.EMBARGOED, SeedStage.RESETTING})
"""The seed is gone, the slot is not yet free."""


class GateLevel(IntEnum):
    """Quality gates; each guards one transition. Value 4 is retired."""

    G0 = 0  # germinate
    G1 = 1  # start training
    G2 = 2  # start blending
    G3 = 3  # hold
    G5 = 5  # fossilize


class OnEnter(IntEnum):
    """Work that a transition does on entry, beside the stage change itself."""

    NOTHING = 0
    BUILD = 1  # write the seed's weights into its row
    START_RAMP = 2  # begin the first alpha ramp
    PIN_ALPHA = 3  # alpha is held at exactly 1
    RETARGET = 4  # begin another alpha ramp
    FREE = 5  # drop the seed's weights and optimizer state
    EMPTY = 6  # the slot may be germinated again
    GRAFT = 7  # write the seed's weights into its row and hold alpha at exactly 1


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table: the effect of an operation on a seed in a stage."""

    to: SeedStage
    gate: GateLevel | None
    on_enter: OnEnter


TRANSITIONS: Mapping[tuple[SeedStage, LifecycleOp], Transition] = MappingProxyType(
    {
        (SeedStage.DORMANT, LifecycleOp.GERMINATE): Transition(
            SeedStage.GERMINATED, GateLevel.G0, OnEnter.BUILD
        ),
        (SeedStage.GERMINATED, LifecycleOp.ADVANCE): Transition(
            SeedStage.TRAINING, GateLevel.G1, OnEnter.NOTHING
        ),
        (SeedStage.TRAINING, LifecycleOp.ADVANCE): Transition(
            SeedStage.BLENDING, GateLevel.G2, OnEnter.START_RAMP
        ),
        (SeedStage.BLENDING, LifecycleOp.ADVANCE): Transition(
            SeedStage.HOLDING, GateLevel.G3, OnEnter.PIN_ALPHA
        ),
        (SeedStage.HOLDING, LifecycleOp.FOSSILIZE): Transition(
            SeedStage.FOSSILIZED, GateLevel.G5, OnEnter.PIN_ALPHA
        ),
        (SeedStage.BLENDING, LifecycleOp.SET_ALPHA_TARGET): Transition(
            SeedStage.BLENDING, None, OnEnter.RETARGET
        ),
        # A full target leaves a holding seed in HOLDING: its alpha is already there.
        (SeedStage.HOLDING, LifecycleOp.SET_ALPHA_TARGET): Transition(
            SeedStage.BLENDING, None, OnEnter.RETARGET
        ),
        (SeedStage.GERMINATED, LifecycleOp.PRUNE): Transition(SeedStage.PRUNED, None, OnEnter.FREE),
        (SeedStage.TRAINING, LifecycleOp.PRUNE): Transition(SeedStage.PRUNED, None, OnEnter.FREE),
        # A prune with a speed ramps alpha down in BLENDING first and arrives at PRUNED when the ramp ends.
        (SeedStage.BLENDING, LifecycleOp.PRUNE): Transition(SeedStage.PRUNED, None, OnEnter.FREE),
        (SeedStage.HOLDING, LifecycleOp.PRUNE): Transition(SeedStage.PRUNED, None, OnEnter.FREE),
    }
)
"""Effect of each operation in each stage. A pair that is absent is illegal."""

GRAFT = Transition(SeedStage.HOLDING, GateLevel.G0, OnEnter.GRAFT)
"""Effect of GERMINATE at a tempo of 0 epochs. A newborn seed computes exactly 0, so the network's output does
not change at full alpha either: the seed needs no isolation and no ramp, and trains with its host from the
next batch on."""

CLOCK: Mapping[SeedStage, Transition] = MappingProxyType(
    {
        SeedStage.PRUNED: Transition(SeedStage.EMBARGOED, None, OnEnter.NOTHING),
        SeedStage.EMBARGOED: Transition(SeedStage.RESETTING, None, OnEnter.NOTHING),
        SeedStage.RESETTING: Transition(SeedStage.DORMANT, None, OnEnter.EMPTY),
    }
)
"""Transitions of the epoch clock: the cooldown after a prune."""


def legal_ops(stage: SeedStage) -> tuple[LifecycleOp, ...]:
    """Operations that the table allows in a stage, WAIT aside."""
    return tuple(op for (s, op) in TRANSITIONS if s is stage)


class Veto(StrEnum):
    """Why an operation is not possible now. Except for a non-finite measurement, the action masks exclude the
    same operations."""

    LOSS_NON_FINITE = "loss_non_finite"
    ACCURACY_NON_FINITE = "accuracy_non_finite"
    SLOT_UNKNOWN = "slot_unknown"
    SLOT_OCCUPIED = "slot_occupied"
    SLOT_EMPTY = "slot_empty"
    TOO_MANY_SEEDS = "too_many_seeds"
    BLUEPRINT_UNKNOWN = "blueprint_unknown"
    STAGE_FORBIDS = "stage_forbids"
    GATE_SHUT = "gate_shut"
    ALPHA_MOVING = "alpha_moving"
    TOO_YOUNG = "too_young"
    TOO_LATE = "too_late"
