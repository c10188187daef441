"""Detailed checks of a module's parameters and gradients. Each transfers its numbers from the device at
once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class LayerGradientStats:
    """Statistics of the gradient of one parameter tensor."""

    name: str
    zero_fraction: float
    nonfinite_count: int


@torch.no_grad()
def check_numerical_stability(model: nn.Module) -> list[str]:
    """Names of the parameters that hold NaN or Inf, in themselves or in their gradients."""
    parameters = dict(model.named_parameters())
    sound = [
        torch.stack([t.isfinite().all() for t in (p, p.grad) if t is not None]).all()
        for p in parameters.values()
    ]
    flags = torch.stack(sound).tolist() if sound else []
    return sorted(name for name, is_sound in zip(parameters, flags, strict=True) if not is_sound)
