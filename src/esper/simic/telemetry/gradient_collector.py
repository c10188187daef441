"""Gradients of training networks. Functions named `async` return device tensors and never wait; the caller transfers them
together with whatever else it needs.

P rows of a population, S slots that had a gradient.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.kasmina.optim import GradientStats, PopulationOptimizer
from esper.leyline import EsperError
from esper.leyline.reports import MAX_GRADIENT_RATIO
from esper.simic.telemetry.debug_telemetry import LayerGradientStats


@torch.no_grad()
def collect_per_layer_gradients(model: nn.Module) -> list[LayerGradientStats]:
    """Statistics of every parameter's gradient, those without one left out; in float64, because squares of large float32
    numbers overflow. One transfer for all layers."""
    layers = [(name, p, p.grad) for name, p in model.named_parameters() if p.grad is not None and p.numel()]
    if not layers:
        return []
    rows = torch.stack([_statistics(grad) for _, _, grad in layers]).tolist()
    return [LayerGradientStats(name, p.numel(), norm, mean, std, low, high, zero, int(nans), int(infs))
            for (name, p, _), (norm, mean, std, low, high, zero, nans, infs) in zip(layers, rows, strict=True)]


def _statistics(grad: Tensor) -> Tensor:
    values = grad.detach().double().flatten()
    size = values.abs()
    low, high = values.aminmax()
    std, mean = torch.std_mean(values, correction=0)
    return torch.stack([
        torch.linalg.vector_norm(values), mean, std, low, high, (size == 0).double().mean(),
        size.isnan().sum().double(), size.isinf().sum().double()])


@dataclass(frozen=True, slots=True)
class SeedGradients:
    """Gradients of the seeds, before clipping; 0 and healthy in rows whose slot holds no learning seed."""

    slots: tuple[str, ...]
    norm: Tensor  # [S, P]
    health: Tensor  # [S, P], 1 − 0.5·share of vanishing − 0.8·share of exploding tensors, 0 if the norm is not finite


@dataclass(frozen=True, slots=True)
class DualGradients:
    """Seeds beside their hosts."""

    host_norm: Tensor  # [P]
    seeds: SeedGradients
    ratio: Tensor  # [S, P], seed to host norm, each per square root of its parameters; 0 where either has none


def collect_host_gradients_async(optimizer: PopulationOptimizer) -> Tensor:
    """[P] norm of each host's gradient in the last step, before clipping."""
    return _stats(optimizer).host_norm


def collect_seed_gradients_only_async(optimizer: PopulationOptimizer) -> SeedGradients:
    """What the last step measured of the seeds' gradients."""
    stats = _stats(optimizer)
    slots = tuple(stats.norm)
    norm, vanishing, exploding = (_stacked([by_slot[s] for s in slots], stats.host_norm)
                                  for by_slot in (stats.norm, stats.vanishing, stats.exploding))
    health = (1.0 - 0.5 * vanishing - 0.8 * exploding).clamp(min=0.0)
    return SeedGradients(slots, norm, torch.where(norm.isfinite(), health, 0.0))


def collect_seed_gradients_async(optimizer: PopulationOptimizer) -> DualGradients:
    """What the last step measured of seeds and hosts, and how they compare."""
    seeds, host_norm = collect_seed_gradients_only_async(optimizer), collect_host_gradients_async(optimizer)
    model = optimizer.model
    params = torch.tensor([[model.slot(slot_id).params(row) for row in range(model.population)] for slot_id in seeds.slots],
                          dtype=host_norm.dtype, device=host_norm.device).view(seeds.norm.shape)
    ratio = (seeds.norm / host_norm * (model.host_params / params).sqrt()).clamp(max=MAX_GRADIENT_RATIO)
    measurable = (params > 0) & (host_norm > 0) & seeds.norm.isfinite()
    return DualGradients(host_norm, seeds, torch.where(measurable, ratio, 0.0))


def _stats(optimizer: PopulationOptimizer) -> GradientStats:
    # p.grad would not do: the step clips it and adds the decay, in place.
    if optimizer.stats is None:
        raise EsperError("no gradient was measured yet; take an optimizer step first")
    return optimizer.stats


def _stacked(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(rows).to(like) if rows else like.new_zeros(0, len(like))
