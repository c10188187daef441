"""Facts of a user's model: stand-in until they are measured."""

from __future__ import annotations

import math

import numpy as np
import torch

from esper.grower.body import Body
from esper.leyline import EsperError, blueprint_ids
from esper.leyline.facts import TRAITS, HostFacts


def attached_facts(body: Body, *, classes: int | None) -> HostFacts:
    slots = list(body)
    shape = (len(slots), len(blueprint_ids()))
    params = np.full(shape, np.nan)
    traits = np.full((*shape, len(TRAITS)), np.nan)
    for s, slot in enumerate(slots):
        for b, name in enumerate(blueprint_ids()):
            if b == 0:
                continue
            try:
                with torch.device("meta"):
                    bank = slot.build_bank(name, 1)
            except EsperError:
                continue
            params[s, b] = sum(p.numel() for p in bank.parameters())
            traits[s, b] = (0.5, 1.0, 1.0, 0.0) if "conv" in name else (0.0, 0.0, 0.0, 0.0)
    depth = np.array(body.slot_depths)
    return HostFacts(
        classes=classes,
        val_samples=None,
        params=body.host_params,
        flops=math.nan,
        depth=depth,
        width=np.ones(len(slots)),
        resolution=np.ones(len(slots)),
        params_before=depth,
        flops_before=np.full(len(slots), np.nan),
        seed_params=params,
        seed_flops=np.full(shape, np.nan),
        traits=traits,
    )
