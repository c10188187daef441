"""Train a host without slots in use on CIFAR-10: the accuracy of a network in which nothing grows.

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
    """Linear warm-up over the first tenth of the steps, then a cosine decay to 0."""
    warmup = steps / 10
    if step < warmup:
        return peak * step / warmup
    progress = (step - warmup) / (steps - warmup)
    return peak * (0.5 + 0.5 * math.cos(math.pi * progress))


@torch.no_grad()
def accuracy(model: MorphogeneticModel, data: Iterable[Batch]) -> float:
    """Accuracy in percent."""
    model.eval()
    correct, total = torch.zeros((), dtype=torch.long), 0
    for x, y in data:
        correct += (model(x).argmax(-1) == y).sum()
        total += y.numel()
    return 100 * correct.item() / total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=int, default=16, help="channels of the first block")
    parser.add_argument(
        "--blocks", type=int, default=4, help="number of blocks; each is twice as wide as the one before"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
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
        loss, seconds = total.item() / steps_per_epoch, time.perf_counter() - start
        print(f"epoch {epoch + 1:2}  train loss {loss:.3f}  seconds {seconds:.0f}", flush=True)
    test = accuracy(model, test_batches(split, 250))
    print(f"test accuracy {test:.2f} %  seconds {time.perf_counter() - start:.0f}")


if __name__ == "__main__":
    main()
