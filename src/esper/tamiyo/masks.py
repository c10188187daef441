"""What is legal now, for all networks and slots at once. Hard legality only: no opinion about what is wise.

E envs, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from esper.leyline import (
    BLUEPRINT_ID_TO_INDEX,
    HEAD_ENUMS,
    HEAD_NAMES,
    OP_ADVANCE,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_PRUNE,
    OP_SET_ALPHA_TARGET,
    OP_WAIT,
    ActionMasks,
    BlueprintError,
    LifecycleOp,
    ReportArray,
    SeedStage,
    allowed,
)

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SlotStates:
    """What legality depends on, [E, S] each."""

    occupied: Bools
    can_advance: Bools
    can_fossilize: Bools
    can_retarget: Bools
    can_prune: Bools
    present: Bools
    """A seed with weights: it counts against the number of seeds that a network may have."""


def build_slot_states(reports: ReportArray) -> SlotStates:
    """Read the legality bits of stacked reports [E, S]."""
    cooling = np.isin(reports["stage"], (SeedStage.PRUNED, SeedStage.EMBARGOED, SeedStage.RESETTING))
    return SlotStates(
        reports["occupied"],
        reports["can_advance"],
        reports["can_fossilize"],
        reports["can_retarget"],
        reports["can_prune"],
        reports["occupied"] & ~cooling,
    )


def blueprint_mask(blueprints: Sequence[str]) -> Bools:
    """[13] flags of the blueprints that a policy may germinate; noop never is one."""
    mask = np.zeros(len(BLUEPRINT_ID_TO_INDEX), bool)
    for name in blueprints:
        if name not in BLUEPRINT_ID_TO_INDEX or name == "noop":
            offers = [b for b in BLUEPRINT_ID_TO_INDEX if b != "noop"]
            raise BlueprintError(f"blueprint {name!r} cannot be offered; {allowed(offers)}")
        mask[BLUEPRINT_ID_TO_INDEX[name]] = True
    if not mask.any():
        raise BlueprintError("no blueprint is offered; name at least one")
    return mask


def compute_action_masks(states: SlotStates, blueprints: Bools, *, max_seeds: int = 0) -> ActionMasks:
    """Masks of all heads. `max_seeds` 0 means no limit. ADVANCE and FOSSILIZE are offered only where the gate
    is open."""
    envs, slots = states.occupied.shape
    by_op = np.zeros((envs, len(LifecycleOp), slots), bool)
    by_op[:, OP_WAIT] = True
    room = states.present.sum(1) < max_seeds if max_seeds else np.ones(envs, bool)
    by_op[:, OP_GERMINATE] = ~states.occupied & room[:, None]
    by_op[:, OP_SET_ALPHA_TARGET] = states.can_retarget
    by_op[:, OP_PRUNE] = states.can_prune
    by_op[:, OP_FOSSILIZE] = states.can_fossilize
    by_op[:, OP_ADVANCE] = states.can_advance
    free = {
        name: torch.ones(envs, len(enum), dtype=torch.bool)
        for name, enum in zip(HEAD_NAMES, HEAD_ENUMS, strict=True)
        if enum is not None and name not in ("op", "blueprint")
    }
    return ActionMasks(
        op=torch.from_numpy(by_op.any(2)),
        slot_by_op=torch.from_numpy(by_op),
        blueprint=torch.from_numpy(np.tile(blueprints, (envs, 1))),
        **free,
    )
