"""Facts of a host: stand-in until they are measured."""

from __future__ import annotations

import numpy as np
import torch

from esper.kasmina.flops import FlopMeter
from esper.kasmina.model import MorphogeneticModel
from esper.leyline import EsperError, blueprint_ids
from esper.leyline.facts import TRAITS, HostFacts

_KNOWN = {"conv_light": (1, 1, 0), "depthwise": (1, 0, 0), "conv_small": (1, 1, 0), "norm": (0, 0, 0)}


def host_facts(model: MorphogeneticModel, *, classes: int | None, val_samples: int | None) -> HostFacts:
    meter = FlopMeter(model)
    slots = model.slot_config.slot_ids
    shape = (len(slots), len(blueprint_ids()))
    params, flops = np.full(shape, np.nan), np.full(shape, np.nan)
    traits = np.full((*shape, len(TRAITS)), np.nan)
    for s, slot_id in enumerate(slots):
        for b, name in enumerate(blueprint_ids()):
            if b == 0:
                continue
            try:
                with torch.device("meta"):
                    bank = model.slot(slot_id).build_bank(name, 1)
            except EsperError:
                continue
            params[s, b] = sum(p.numel() for p in bank.parameters())
            flops[s, b] = meter.bank(slot_id, name).training
            space, channels, multiplies = _KNOWN.get(name, (1, 1, 0))
            traits[s, b] = (0.5 * space, space, channels, multiplies)
    depth = np.array(model.slot_depths)
    host = meter.per_sample({})
    return HostFacts(
        classes=classes,
        val_samples=val_samples,
        params=model.host_params,
        flops=float(host),
        depth=depth,
        width=np.ones(len(slots)),
        resolution=np.ones(len(slots)),
        params_before=depth,
        flops_before=depth,
        seed_params=params,
        seed_flops=flops,
        traits=traits,
    )
