"""Close looks at a module, for finding out what went wrong. Each brings its numbers from the device in one transfer."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LayerGradientStats:
    """The gradient of one parameter tensor."""

    name: str
    parameters: int
    norm: float
    mean: float
    std: float
    """Of the population."""
    minimum: float
    maximum: float
    zero_fraction: float
    nan_count: int
    inf_count: int


@dataclass(frozen=True, slots=True)
class StabilityReport:
    """What is not finite in a module, and how large the rest is."""

    nan_parameters: tuple[str, ...]
    inf_parameters: tuple[str, ...]
    nan_gradients: tuple[str, ...]
    inf_gradients: tuple[str, ...]
    max_weight: float
    """Largest finite magnitude."""
    max_gradient: float
    loss: float
    loss_finite: bool

    @property
    def is_stable(self) -> bool:
        return self.loss_finite and not (self.nan_parameters or self.inf_parameters or self.nan_gradients or self.inf_gradients)


@torch.no_grad()
def check_numerical_stability(model: nn.Module, loss: Tensor | float) -> StabilityReport:
    """Look for NaN and Inf in every parameter and gradient."""
    parameters = dict(model.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    values = torch.as_tensor(loss, dtype=torch.float64).mean()
    looks = [_look(tensor) for tensor in (*parameters.values(), *gradients.values())]
    table = torch.stack([values.to(looks[0].device).expand(3), *looks]) if looks else values.expand(1, 3)
    (found, _, _), *rows = table.tolist()
    weight_rows = dict(zip(parameters, rows[:len(parameters)], strict=True))
    gradient_rows = dict(zip(gradients, rows[len(parameters):], strict=True))
    return StabilityReport(
        nan_parameters=_named(weight_rows, 0), inf_parameters=_named(weight_rows, 1),
        nan_gradients=_named(gradient_rows, 0), inf_gradients=_named(gradient_rows, 1),
        max_weight=max((row[2] for row in weight_rows.values()), default=0.0),
        max_gradient=max((row[2] for row in gradient_rows.values()), default=0.0),
        loss=found, loss_finite=abs(found) < float("inf"))


def _look(tensor: Tensor) -> Tensor:
    """(has NaN, has Inf, largest finite magnitude)."""
    size = tensor.detach().abs()
    largest = torch.where(size.isfinite(), size, 0.0).max() if size.numel() else size.new_zeros(())
    return torch.stack([size.isnan().any(), size.isinf().any(), largest]).double()


def _named(rows: dict[str, list[float]], column: int) -> tuple[str, ...]:
    return tuple(name for name, row in rows.items() if row[column])
