"""Action masks for all networks and slots at once, read from the legality flags of their reports and from the
time that is left. Masks say what is possible, not what is wise.

E envs, S slots, B registered blueprints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from esper.leyline import (
    HEAD_ENUMS,
    HEAD_NAMES,
    LIVE_STAGES,
    OP_GERMINATE,
    PRESENT_STAGES,
    ActionMasks,
    BlueprintError,
    ReportArray,
    allowed,
    blueprint_ids,
    blueprint_index,
)
from esper.leyline.errors import near

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SlotStates:
    """The part of the reports that masks are made of."""

    legal: Bools  # [E, S, 6], in the order of LifecycleOp
    present: Bools  # [E, S], a seed that counts towards the maximum number of seeds
    live: Bools  # [E, S], a seed that is not yet permanent


def build_slot_states(reports: ReportArray) -> SlotStates:
    """The legality flags of stacked reports [E, S]."""
    stage = reports["stage"]
    return SlotStates(
        reports["legal"], np.isin(stage, tuple(PRESENT_STAGES)), np.isin(stage, tuple(LIVE_STAGES))
    )


def blueprint_mask(blueprints: Sequence[str]) -> Bools:
    """[B] flags of the blueprints that a policy may germinate; noop never is one."""
    known = blueprint_ids()
    mask = np.zeros(len(known), bool)
    for name in blueprints:
        if name not in known or name == "noop":
            offers = [b for b in known if b != "noop"]
            raise BlueprintError(
                f"blueprint {name!r} cannot be offered{near(name, offers)}; {allowed(offers)}"
            )
        mask[blueprint_index(name)] = True
    if not mask.any():
        raise BlueprintError("no blueprint is offered; name at least one")
    return mask


def compute_action_masks(
    states: SlotStates,
    blueprints: Bools,
    *,
    epochs_left: int | Sequence[int],
    epochs_needed: Sequence[int],
    max_seeds: int = 0,
) -> ActionMasks:
    """Masks of all heads. `epochs_left` after this decision, of all networks or of each; `epochs_needed` by
    tempo: from a germination to the decision that makes the seed permanent. At most one seed of a network
    becomes permanent per epoch, so each live seed may take one epoch more. `max_seeds` 0 means no limit."""
    envs = len(states.legal)
    by_op = np.swapaxes(states.legal, 1, 2).copy()  # [E, 6, S]
    needed = np.asarray(epochs_needed) + states.live.sum(1, keepdims=True)  # [E, tempos]
    in_time = needed <= np.reshape(epochs_left, (-1, 1))
    cannot = ~in_time.any(1)
    if max_seeds:
        cannot |= states.present.sum(1) >= max_seeds
    by_op[cannot, OP_GERMINATE] = False
    free = {
        name: torch.ones(envs, len(enum), dtype=torch.bool)
        for name, enum in zip(HEAD_NAMES, HEAD_ENUMS, strict=True)
        if enum is not None and name not in ("op", "blueprint", "tempo")
    }
    return ActionMasks(
        op=torch.from_numpy(by_op.any(2)),
        slot_by_op=torch.from_numpy(by_op),
        blueprint=torch.from_numpy(np.tile(blueprints, (envs, 1))),
        tempo=torch.from_numpy(in_time),
        **free,
    )
