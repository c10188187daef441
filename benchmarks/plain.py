"""The other side of the ratios: the same hosts in plain torch."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def plain_cnn(
    *, base: int, kernel: int, channels: int, blocks: int = 3, pools: int = 3, classes: int = 10
) -> nn.Module:
    layers: list[nn.Module] = []
    width = channels
    for i in range(blocks):
        layers += [
            nn.Conv2d(width, base << i, kernel, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(base << i),
            nn.ReLU(),
        ]
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


class PlainSeed(nn.Module):
    """conv_light in plain torch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(max(channels // 16, 1), channels)
        self.gamma = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * F.relu(self.norm(self.conv(x)))


class PlainGrowing(nn.Module):
    """A CNN with a place for one seed after each block."""

    def __init__(self, *, base: int, kernel: int, channels: int, blocks: int = 3, classes: int = 10) -> None:
        super().__init__()
        widths = [channels, *(base << i for i in range(blocks))]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU()
            )
            for a, b in pairwise(widths)
        )
        self.seeds = nn.ModuleDict()
        self.widths = widths[1:]
        self.head = nn.Linear(widths[-1], classes)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def add_seed(self, block: int) -> PlainSeed:
        seed = PlainSeed(self.widths[block]).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.seeds[str(block)] = seed
        return seed

    def forward(self, x: Tensor, on: Collection[int]) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i in on:
                x = x + self.seeds[str(i)](x)
            x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))
