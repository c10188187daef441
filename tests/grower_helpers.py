"""What the tests of grower share: small models that know nothing of Esper, real data, and a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import esper
from esper.grower import Grower
from esper.runtime.data import load_dataset

BATCH = 32


class SmallCNN(nn.Module):
    """Two blocks with batch norm and in-place activations on 8×8 digits."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layer1 = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.layer2 = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class TiedLM(nn.Module):
    """A bag of next tokens: embedding and output share their weight."""

    def __init__(self, vocabulary: int = 20, features: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, features)
        self.block1 = nn.Sequential(nn.Linear(features, features), nn.GELU(), nn.Linear(features, features))
        self.block2 = nn.Sequential(nn.Linear(features, features), nn.GELU(), nn.Linear(features, features))
        self.out = nn.Linear(features, vocabulary, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = h + self.block1(h)
        return self.out(h + self.block2(h))


class Lion(torch.optim.Optimizer):
    """A public optimizer that torch does not ship, by its paper."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(torch.sign(0.9 * momentum + 0.1 * p.grad), alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)


OPTIMIZERS = {
    "SGD": lambda g: torch.optim.SGD(g, momentum=0.9),
    "SGD nesterov": lambda g: torch.optim.SGD(g, momentum=0.9, nesterov=True),
    "Adam amsgrad": lambda g: torch.optim.Adam(g, amsgrad=True),
    "AdamW foreach": lambda g: torch.optim.AdamW(g, foreach=True),
    "AdamW fused": lambda g: torch.optim.AdamW(g, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "Adagrad fused": lambda g: torch.optim.Adagrad(g, fused=True),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda g: torch.optim.RMSprop(g, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "Lion": Lion,
}
SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 30),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, 0.05, total_steps=60, cycle_momentum=bool({"momentum", "betas"} & o.defaults.keys())
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
}


def make(kind: Callable[[], nn.Module] = SmallCNN, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


@cache
def digits(count: int = 256) -> tuple[Tensor, Tensor]:
    data = load_dataset("digits")
    x = (data.train_x[:count].float() / data.scale - data.mean[0]) / data.std[0]
    return x.contiguous(), data.train_y[:count]


def batches(count: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = digits()
    for i in range(count):
        yield x[i * BATCH : (i + 1) * BATCH], y[i * BATCH : (i + 1) * BATCH]


def attach(model: nn.Module, **options: Any) -> Grower:
    options = {"policy": None, **options}
    return esper.attach(model, options.pop("slots", ["layer1", "layer2"]), digits()[0][:2], **options)


def accuracy(model: nn.Module) -> float:
    x, y = digits()
    was_training = model.training
    with torch.no_grad():
        share = (model.eval()(x).argmax(1) == y).float().mean().item()
    model.train(was_training)
    return share


def train_epoch(model: Callable[[Tensor], Tensor], *optimizers: Any, scheduler: Any = None) -> float:
    loss = torch.zeros(())
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return loss.item()


def same(a: Any, b: Any) -> bool:
    """Whether two nested values are equal, tensors bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
