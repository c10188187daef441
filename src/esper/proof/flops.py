"""Training FLOPs of a growing network, from forward passes that torch counts on one network and one sample.

Convolutions and matrix products count, two for each multiply-add; norms, activations and pooling are free,
and so are validation and the policy. Training costs three forward passes: the pass itself, the gradient of
its inputs and that of its weights. A seed that incubates on a loss of its own adds its own training, and a
forward and an input-gradient pass through the part of its network that comes after it; straight through, it
adds its own training only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.layers import Lanes, Mode
from esper.kasmina.slot import GATE_BANK
from esper.leyline import BLENDED_STAGES, AlphaAlgorithm, Incubation, SeedStage, SeedStateReport
from esper.runtime.tasks import TaskSpec

_ONE = Lanes(1, Mode.EVAL)


def count(call: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """FLOPs of a forward pass, and its result. Attention is taken apart: its fused kernel on the CPU is not
    counted."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


class FlopMeter:
    """Prices of one task's networks, per training sample."""

    def __init__(self, task: TaskSpec) -> None:
        self.incubation = task.incubation
        self._model = task.build_model(1, [0])
        host = self._model.host
        x = host.example_input(1)
        x = x if self._model.layout.image else x.unsqueeze(0)
        self.segments: list[int] = []
        """Forward FLOPs of the host between slots, in execution order."""
        self._features: dict[str, Tensor] = {}
        for index, slot_id in enumerate((*host.execution_order(), "")):
            flops, x = count(lambda index=index, x=x: host.segment(index, x, _ONE))  # type: ignore[misc]
            self.segments.append(flops)
            self._features[slot_id] = x
        self._position = {slot_id: index for index, slot_id in enumerate(host.execution_order())}
        self.seed = cache(self._count_seed)

    def _count_seed(self, slot_id: str, bank: str) -> int:
        """Forward FLOPs of one seed, or of the gate beside it."""
        module = self._model.slot(slot_id).build_bank(bank, 1)
        return count(lambda: module(self._features[slot_id], _ONE))[0]

    def per_sample(self, reports: Mapping[str, SeedStateReport]) -> int:
        """FLOPs of training a network with these seeds on one sample."""
        forward = {
            slot_id: self.seed(slot_id, report.blueprint_id)
            + (self.seed(slot_id, GATE_BANK) if report.alpha_algorithm is AlphaAlgorithm.GATE else 0)
            for slot_id, report in reports.items()
        }
        blended = {
            slot_id
            for slot_id, report in reports.items()
            if report.stage in BLENDED_STAGES and report.alpha > 0.0
        }
        total = 3 * (sum(self.segments) + sum(forward[slot_id] for slot_id in blended))
        for slot_id, report in reports.items():
            if report.stage is SeedStage.TRAINING:
                at = self._position[slot_id]
                after = sum(self.segments[at + 1 :]) + sum(
                    forward[s] for s in blended if self._position[s] > at
                )
                total += 3 * forward[slot_id] + (2 * after if self.incubation is Incubation.SHADOW else 0)
        return total
