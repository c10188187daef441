"""Train an ordinary, seedless host on CIFAR-10: what a network reaches here before anything grows in it.

esper data get cifar10
python examples/cifar_host.py
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable

import torch

from esper.kasmina import CNNHost, MorphogeneticModel, OptimizerConfig, PopulationOptimizer
from esper.runtime.data import Batch, SharedBatchIterator, load_dataset, test_batches, validation_split


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A rise over the first tenth, then half a cosine down to nothing."""
    rise = steps / 10
    return peak * (
        step / rise if step < rise else 0.5 + 0.5 * math.cos(math.pi * (step - rise) / (steps - rise))
    )


@torch.no_grad()
def accuracy(model: MorphogeneticModel, data: Iterable[Batch]) -> float:
    """Share of right answers, in percent."""
    model.eval()
    right, total = torch.zeros((), dtype=torch.long), 0
    for x, y in data:
        right += (model(x).argmax(-1) == y).sum()
        total += y.numel()
    return 100 * right.item() / total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=int, default=16, help="channels of the first block")
    parser.add_argument("--blocks", type=int, default=4, help="blocks, each twice as wide as the last")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    split = validation_split(load_dataset("cifar10"), 1000, args.seed)
    steps_per_epoch = len(split.train) // args.batch_size
    batches = SharedBatchIterator(
        split, [[0]], args.batch_size, steps_per_epoch=steps_per_epoch, seed=args.seed
    )
    model = MorphogeneticModel(CNNHost(1, base=args.base, blocks=args.blocks), random_seeds=[args.seed])
    optimizer = PopulationOptimizer(model, OptimizerConfig(host_lr=args.lr))
    print(f"{model.host_params:,} parameters, {args.epochs} epochs of {steps_per_epoch} batches")
    step, steps = 0, args.epochs * steps_per_epoch
    for epoch in range(args.epochs):
        model.train()
        total = torch.zeros(())
        for (batch,) in batches:
            optimizer.host_lr.fill_(learning_rate(step, steps, args.lr))
            optimizer.zero_grad()
            losses = model.losses(batch.x, batch.y)
            losses.total().backward()
            optimizer.step()
            total += losses.main.detach().sum()
            step += 1
        print(
            f"epoch {epoch + 1:2}  train loss {total.item() / steps_per_epoch:.3f}  seconds {time.perf_counter() - start:.0f}",
            flush=True,
        )
    print(
        f"test accuracy {accuracy(model, test_batches(split, 250)):.2f} %  seconds {time.perf_counter() - start:.0f}"
    )


if __name__ == "__main__":
    main()
