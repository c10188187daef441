"""The other side of the ratios: the same hosts as anyone would write them in plain torch."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def plain_cnn(*, base: int, kernel: int, channels: int, blocks: int = 3, pools: int = 3, classes: int = 10) -> nn.Module:
    layers: list[nn.Module] = []
    width = channels
    for i in range(blocks):
        layers += [nn.Conv2d(width, base << i, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(base << i), nn.ReLU()]
        if i < pools:
            layers.append(nn.MaxPool2d(2))
        width = base << i
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    return nn.Sequential(*layers, *head).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class PlainTrainer:
    """One network, SGD with momentum and decay, gradient clipping: one `step` is one batch."""

    def __init__(self, model: nn.Module, lr: float = 0.01) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss
