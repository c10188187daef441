"""The state of an Adam optimizer as named tensors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from esper._archive import load_tensors


def adam_tensors(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """Moments and step counts by parameter name; a parameter that was never stepped has none."""
    return {
        f"{key}.{name}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_adam(
    origin: object, optimizer: torch.optim.Optimizer, module: nn.Module, stored: Mapping[str, Tensor]
) -> None:
    """The inverse of `adam_tensors`, for a fresh optimizer. Errors begin with `origin`."""
    if stored:
        named = {name.partition(".")[2] for name in stored}
        for parameter in (p for name, p in module.named_parameters() if name in named):
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    load_tensors(f"{origin} (adam)", adam_tensors(optimizer, module), stored)
