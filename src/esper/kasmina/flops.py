"""Training FLOPs of a growing network, from forward passes of one network on one sample that torch counts.

Convolutions and matrix products count, two FLOPs for each multiply-add. Norms, activations and pooling count
as 0, and validation and the policy are not included. Training costs three forward passes: the pass itself,
the gradient of its inputs and the gradient of its weights. A seed that incubates on a shadow loss adds its
own training, and a forward and an input-gradient pass through the part of the network behind it. With
straight-through incubation it adds its own training only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.layers import Lanes, Mode
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.seed import GATE_BANK
from esper.leyline import BLENDED_STAGES, AlphaAlgorithm, Incubation, SeedStage, SeedStateReport


def count(call: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """FLOPs of a forward pass, and its result. The fused attention kernel of the CPU is not counted by torch,
    so attention runs as plain matrix products here."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


class FlopMeter:
    """Training FLOPs per sample of networks with one architecture."""

    def __init__(self, model: MorphogeneticModel) -> None:
        """Only the architecture of `model` matters: its population, weights and seeds do not."""
        self._model = model
        host = model.host
        rows = None if model.population == 1 else torch.zeros(1, dtype=torch.int64)
        lanes = Lanes(1, Mode.EVAL, rows)
        x = host.example_input(1)
        if not model.layout.image:
            x = x.unsqueeze(0)
        self.segments: list[int] = []
        """Forward FLOPs of the host between slots, in execution order."""
        self._features: dict[str, Tensor] = {}
        for index, slot_id in enumerate((*host.execution_order(), "")):
            flops, x = count(partial(host.segment, index, x, lanes))
            self.segments.append(flops)
            self._features[slot_id] = x
        self._position = {slot_id: index for index, slot_id in enumerate(host.execution_order())}
        self.seed = cache(self._count_seed)

    def _count_seed(self, slot_id: str, bank: str) -> int:
        """Forward FLOPs of one seed, or of the gate beside it."""
        module = self._model.slot(slot_id).build_bank(bank, 1)
        return count(partial(module, self._features[slot_id], Lanes(1, Mode.EVAL)))[0]

    def _forward(self, slot_id: str, report: SeedStateReport) -> int:
        flops = self.seed(slot_id, report.blueprint_id)
        if report.alpha_algorithm is AlphaAlgorithm.GATE:
            flops += self.seed(slot_id, GATE_BANK)
        return flops

    def per_sample(self, reports: Mapping[str, SeedStateReport]) -> int:
        """FLOPs of training a network with these seeds on one sample."""
        forward = {slot_id: self._forward(slot_id, report) for slot_id, report in reports.items()}
        blended = [
            slot_id
            for slot_id, report in reports.items()
            if report.stage in BLENDED_STAGES and report.alpha > 0.0
        ]
        total = 3 * (sum(self.segments) + sum(forward[slot_id] for slot_id in blended))
        for slot_id, report in reports.items():
            if report.stage is not SeedStage.TRAINING:
                continue
            total += 3 * forward[slot_id]
            if self._model.incubation is Incubation.SHADOW:
                at = self._position[slot_id]
                seeds_behind = sum(forward[other] for other in blended if self._position[other] > at)
                total += 2 * (sum(self.segments[at + 1 :]) + seeds_behind)
        return total
