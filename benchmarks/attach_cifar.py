"""Does growth help a user? A narrow residual CNN on CIFAR-10, grown in a plain loop at equal training FLOPs.

`python -m benchmarks.attach_cifar` trains each variant with the same random seeds: never grown, periodic,
plateau, heuristic, and the final network (a seed in every slot) from the start. An epoch is an equal part of
the budget, not of the data, so a larger network takes fewer steps. Charged: training passes, and the
evaluations that measure contributions. It prints test accuracy, differences to `never` with 95 % intervals,
and parameters."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import esper
from benchmarks.attach import UserCNN
from esper._statistics import estimate
from esper.runtime.data import load_dataset

VARIANTS = ("never", "periodic", "plateau", "heuristic", "final")
SLOTS = ["layer1", "layer2", "layer3"]
BATCH, VAL = 64, 1000
BACKWARD = 2.0
"""A backward pass counts as this many forward passes."""


@dataclass(frozen=True, slots=True)
class Data:
    x: Tensor
    y: Tensor
    val_x: Tensor
    val_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True, slots=True)
class Result:
    variant: str
    seed: int
    accuracy: float
    parameters: int
    steps: int
    seconds: float


def load(name: str) -> Data:
    data = load_dataset(name)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (data.mean, data.std))

    def normal(x: Tensor) -> Tensor:
        images = (x.float() / data.scale - mean) / std
        return images.expand(-1, 3, -1, -1).contiguous()

    x, y = normal(data.train_x), data.train_y
    return Data(x[VAL:], y[VAL:], x[:VAL], y[:VAL], normal(data.test_x), data.test_y)


@torch.no_grad()
def forward_flops(model: nn.Module, sample: Tensor) -> int:
    """Of one image."""
    was_training = model.training
    with FlopCounterMode(display=False) as counter:
        model.eval()(sample)
    model.train(was_training)
    return counter.get_total_flops()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    was_training = model.training
    model.eval()
    correct = sum(
        int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(500), y.split(500), strict=True)
    )
    model.train(was_training)
    return correct / len(y)


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """A shift of up to four pixels, and every second image mirrored."""
    down, right = torch.randint(-4, 5, (2,), generator=generator).tolist()
    moved = F.pad(x, (4, 4, 4, 4))[:, :, 4 + down : 4 + down + x.shape[2], 4 + right : 4 + right + x.shape[3]]
    flip = torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5
    return torch.where(flip, moved.flip(3), moved)


def run(variant: str, seed: int, data: Data, *, width: int, steps: int, epochs: int, lr: float) -> Result:
    """Train one network for the FLOPs that `steps` steps of the ungrown one take."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = UserCNN(width)
    charged = 0.0

    def evaluate() -> float:
        nonlocal charged
        charged += VAL * forward_flops(model, data.x[:1])
        return accuracy(model, data.val_x, data.val_y)

    policy = None if variant in ("never", "final") else variant
    grower = esper.attach(
        model,
        SLOTS,
        data.x[:2],
        policy=policy,
        epochs=epochs,
        classes=10,
        evaluate=evaluate if variant == "heuristic" else None,
        seed=seed,
    )
    budget = (1 + BACKWARD) * forward_flops(model, data.x[:1]) * BATCH * steps
    if variant == "final":
        for slot in SLOTS:
            grower.germinate(slot, "conv_light")
    optimizer = torch.optim.SGD(grower.param_groups(), lr=lr, momentum=0.9, weight_decay=5e-4)
    spent, taken = 0.0, 0
    while spent < budget:
        each = (1 + BACKWARD) * forward_flops(model, data.x[:1]) * BATCH
        goal = budget * (grower.epoch + 1) / epochs
        while spent < goal:
            share = min(spent / budget, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, 20 * share + 0.05) * 0.5 * (1 + math.cos(math.pi * share))
            rows = torch.randint(len(data.x), (BATCH,), generator=generator)
            F.cross_entropy(model(augmented(data.x[rows], generator)), data.y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            spent, taken = spent + each, taken + 1
        charged = 0.0
        # One validation per epoch is free for all; those beyond it are charged.
        grower.step(accuracy(model, data.val_x, data.val_y))
        spent += charged
        if grower.epoch >= epochs:
            break
    return Result(
        variant,
        seed,
        100 * accuracy(model, data.test_x, data.test_y),
        grower.body.total_params(),
        taken,
        time.perf_counter() - began,
    )


def table(results: list[Result]) -> Table:
    shown = Table("variant", "test accuracy", "minus never", "parameters", "steps", "seconds")
    never = {r.seed: r.accuracy for r in results if r.variant == "never"}
    for variant in dict.fromkeys(r.variant for r in results):
        mine = [r for r in results if r.variant == variant]
        gain = estimate([r.accuracy - never[r.seed] for r in mine]) if never and variant != "never" else None
        shown.add_row(
            variant,
            f"{statistics.fmean(r.accuracy for r in mine):.2f}",
            "" if gain is None else f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]",
            f"{statistics.fmean(r.parameters for r in mine):,.0f}",
            f"{statistics.fmean(r.steps for r in mine):,.0f}",
            f"{statistics.fmean(r.seconds for r in mine):.0f}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attach_cifar", description=__doc__)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--seeds", type=int, default=5, help="number of random seeds, the same for all variants"
    )
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6000, help="steps of the ungrown network: the budget")
    parser.add_argument("--epochs", type=int, default=24, help="equal parts of the budget")
    parser.add_argument("--lr", type=float, default=0.1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = load(given.dataset)
    runs = [(variant, seed) for seed in range(given.seeds) for variant in given.variants]
    results = [
        run(v, s, data, width=given.width, steps=given.steps, epochs=given.epochs, lr=given.lr)
        for v, s in track(runs, "training")
    ]
    Console().print(table(results))


if __name__ == "__main__":
    main()
