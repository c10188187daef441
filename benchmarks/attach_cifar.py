"""Does growth help a user? A narrow residual CNN on CIFAR-10, grown in a plain loop at equal training FLOPs.

`python -m benchmarks.attach_cifar` trains each variant with the same random seeds: never grown, periodic,
plateau, heuristic, and the final network (what `periodic` ends with: `conv_light` in every slot) from the
start. An epoch is an equal part of the budget, not of the data, so a larger network takes fewer steps.
Charged: training passes, and the evaluations that measure contributions. Not charged: one validation per
epoch, which all variants have, and sensors. It prints test accuracy, differences to `never` and to `final`
with 95 % intervals, parameters and what grew. With `--out` every run is written when it ends, and a run that
the file has is not repeated."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import esper
from benchmarks.attach import UserCNN
from benchmarks.play import interval
from esper.runtime.data import load_dataset
from esper.scripts.process import use_one_core

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
    flops: float
    """Charged FLOPs, as a share of the budget."""
    grown: tuple[str, ...]
    """`epoch slot blueprint` of every seed that was planted."""
    pruned: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs share."""

    width: int
    stem_stride: int
    steps: int
    """Steps of the ungrown network: the budget."""
    epochs: int
    """Equal parts of the budget."""
    lr: float


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


def run(variant: str, seed: int, data: Data, setting: Setting) -> Result:
    """Train one network for the FLOPs that the ungrown one takes."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = UserCNN(setting.width, stem_stride=setting.stem_stride)
    epochs, lr = setting.epochs, setting.lr
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
    budget = (1 + BACKWARD) * forward_flops(model, data.x[:1]) * BATCH * setting.steps
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
    planted = [s for s in grower.history if s.op == "GERMINATE" and s.executed]
    return Result(
        variant,
        seed,
        100 * accuracy(model, data.test_x, data.test_y),
        grower.body.total_params(),
        taken,
        spent / budget,
        tuple(f"{s.epoch} {s.slot} {s.blueprint}" for s in planted),
        sum(s.op == "PRUNE" and s.executed for s in grower.history),
        time.perf_counter() - began,
    )


def table(results: Sequence[Result]) -> list[str]:
    """Markdown. Differences are paired over random seeds, with the interval of Student's t: a bootstrap of
    five values is too narrow."""
    lines = [
        "| variant | test accuracy | − never | − final | parameters | steps | FLOPs | planted | pruned |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    by_variant = {v: {r.seed: r for r in results if r.variant == v} for v in VARIANTS}

    def difference(variant: str, other: str) -> str:
        mine, theirs = by_variant[variant], by_variant[other]
        values = [mine[seed].accuracy - theirs[seed].accuracy for seed in mine.keys() & theirs.keys()]
        if variant == other or len(values) < 2:
            return ""
        mean, half = interval(values)
        return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"

    for variant, mine in by_variant.items():
        if not mine:
            continue

        def mean(figure: Callable[[Result], float], mine: dict[int, Result] = mine) -> float:
            return statistics.fmean(map(figure, mine.values()))

        lines.append(
            f"| `{variant}` | {mean(lambda r: r.accuracy):.2f} | {difference(variant, 'never')} "
            f"| {difference(variant, 'final')} | {mean(lambda r: r.parameters):,.0f} "
            f"| {mean(lambda r: r.steps):,.0f} | {mean(lambda r: r.flops):.3f} "
            f"| {mean(lambda r: len(r.grown)):.1f} | {mean(lambda r: r.pruned):.1f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attach_cifar", description=__doc__)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--seeds", type=int, default=5, help="number of random seeds, the same for all variants"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--stem-stride", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1200, help="steps of the ungrown network: the budget")
    parser.add_argument("--epochs", type=int, default=24, help="equal parts of the budget")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--out", type=Path, help="JSON of all runs; those that it has are kept")
    given = parser.parse_args()
    use_one_core()
    setting = Setting(
        width=given.width,
        stem_stride=given.stem_stride,
        steps=given.steps,
        epochs=given.epochs,
        lr=given.lr,
    )
    results: list[Result] = []
    if given.out is not None and given.out.exists():
        kept = json.loads(given.out.read_text())
        if kept["setting"] != asdict(setting):
            raise SystemExit(f"{given.out} has runs with {kept['setting']}, not {asdict(setting)}")
        results = [Result(**result | {"grown": tuple(result["grown"])}) for result in kept["results"]]
    data = load(given.dataset)
    known = {(result.variant, result.seed) for result in results}
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for variant in given.variants:
            if (variant, seed) in known:
                continue
            results.append(run(variant, seed, data, setting))
            print(results[-1], flush=True)
            if given.out is not None:
                runs = {"setting": asdict(setting), "results": [asdict(result) for result in results]}
                given.out.write_text(json.dumps(runs))
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
