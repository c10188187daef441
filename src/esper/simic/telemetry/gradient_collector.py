"""Gradient statistics of networks in training. Functions named `async` return device tensors without waiting
for the device; the caller transfers them together with other values.

Shapes: P is the number of rows of a population.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.kasmina.optim import GradientStats, PopulationOptimizer
from esper.kasmina.seed import MAX_GRADIENT_RATIO
from esper.leyline import EsperError
from esper.simic.telemetry.debug_telemetry import LayerGradientStats


@torch.no_grad()
def collect_per_layer_gradients(model: nn.Module) -> list[LayerGradientStats]:
    """Statistics of the gradient of every parameter that has one. One transfer for all layers."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.numel()}
    if not gradients:
        return []
    rows = torch.stack(
        [
            torch.stack([(grad == 0).double().mean(), (~grad.isfinite()).double().sum()])
            for grad in gradients.values()
        ]
    ).tolist()
    return [
        LayerGradientStats(name, zero, int(nonfinite))
        for name, (zero, nonfinite) in zip(gradients, rows, strict=True)
    ]


def collect_host_gradients_async(optimizer: PopulationOptimizer) -> Tensor:
    """[P] norm of each host's gradient in the last step, before clipping."""
    return _stats(optimizer).host_norm


def collect_seed_gradients_only_async(optimizer: PopulationOptimizer) -> dict[str, Tensor]:
    """[P] norm of the seeds' gradients in the last step, before clipping, by slot; 0 in rows without a
    training seed."""
    return _stats(optimizer).norm


def collect_seed_gradients_async(optimizer: PopulationOptimizer) -> dict[str, Tensor]:
    """[P] ratio of seed to host gradient norm in the last step, each divided by the square root of its number
    of parameters, by slot; 0 if either has no gradient."""
    model, host_norm = optimizer.model, collect_host_gradients_async(optimizer)
    ratios = {}
    for slot_id, norm in collect_seed_gradients_only_async(optimizer).items():
        params = torch.tensor(
            [model.slot(slot_id).params(row) for row in range(model.population)],
            dtype=host_norm.dtype,
            device=host_norm.device,
        )
        ratio = (norm / host_norm * (model.host_params / params).sqrt()).clamp(max=MAX_GRADIENT_RATIO)
        ratios[slot_id] = torch.where((params > 0) & (host_norm > 0) & norm.isfinite(), ratio, 0.0)
    return ratios


def _stats(optimizer: PopulationOptimizer) -> GradientStats:
    # Not from p.grad: the step clips it and adds weight decay, in place.
    if optimizer.stats is None:
        raise EsperError("no gradient was measured yet; take an optimizer step first")
    return optimizer.stats
