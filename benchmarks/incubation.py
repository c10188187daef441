"""Compares the two ways to incubate a seed, on real digits: paired networks, same data and initial weights.

`python -m benchmarks.incubation` prints, for each seed blueprint, validation accuracy (%) right after alpha
has reached 1, at the end, and at the end with the seed switched off; and the paired difference shadow − ste
with its 95 % interval."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.play import interval
from esper.kasmina import (
    CNNHost,
    MorphogeneticModel,
    OptimizerConfig,
    PopulationOptimizer,
    evaluate_coalitions,
)
from esper.leyline import GateConfig, Incubation, Pacing, stream_seed
from esper.runtime.data import SharedBatchIterator, load_dataset, validation_batches, validation_split

SLOT = "r0c1"
TEMPO = 3


def run(
    incubation: Incubation,
    blueprint: str,
    *,
    rows: int,
    kernel: int,
    warm: int,
    training: int,
    after: int,
    steps: int,
) -> dict[str, torch.Tensor]:
    """Accuracies [rows] of `rows` networks that each grow one seed on the same schedule."""
    split = validation_split(load_dataset("digits"), 256, 0)
    batches = SharedBatchIterator(split, [list(range(rows))], 64, steps_per_epoch=steps, seed=0, rows=[rows])
    model = MorphogeneticModel(
        CNNHost(rows, base=4, kernel=kernel, channels=1, size=8),
        gates=GateConfig(permissive=True),
        pacing=Pacing(min_training_epochs=0),
        incubation=incubation,
        random_seeds=[stream_seed(0, "init", 0, row) for row in range(rows)],
    )
    optimizer = PopulationOptimizer(model, OptimizerConfig(host_lr=0.05, seed_lr=0.05))
    results = {}
    for epoch in range(warm + training + TEMPO + after):
        if epoch == warm:
            for row in range(rows):
                model.germinate(
                    SLOT,
                    blueprint,
                    row=row,
                    tempo_epochs=TEMPO,
                    init_seed=stream_seed(0, "germination", 0, row),
                )
                model.advance(SLOT, row=row)
        if epoch == warm + training:
            for row in range(rows):
                seed = model.seed_in(SLOT, row)
                assert seed is not None
                # The gate's measurements are the trainer's business; here every seed blends on schedule.
                seed.update_metrics(gradient_health=1.0, gradient_ratio=1.0)
                assert model.advance(SLOT, row=row).done
        if warm + training <= epoch < warm + training + TEMPO:
            model.step_epoch()
        if epoch == warm + training + TEMPO - 1:
            results["at alpha 1"] = accuracy(model, split, on=True)
        for (batch,) in batches:
            optimizer.zero_grad()
            model.losses(batch.x, batch.y).total().backward()
            optimizer.step()
    results["end"] = accuracy(model, split, on=True)
    results["seed off"] = accuracy(model, split, on=False)
    return results


def accuracy(model: MorphogeneticModel, split: object, *, on: bool) -> torch.Tensor:
    correct, total = torch.zeros(model.population), 0
    wanted = {row: [frozenset({SLOT} if on else ())] for row in range(model.population)}
    for batch in validation_batches(split, 256):  # type: ignore[arg-type]
        outputs = evaluate_coalitions(model, batch.x, wanted, shared_input=True).outputs
        correct += (outputs.argmax(-1) == batch.y.view(1, -1)).sum(1)
        total += batch.y.numel()
    return 100 * correct / total


def shown(values: list[float]) -> str:
    mean, half = interval(values)
    return f"{mean:+.2f} ± {half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("kernel", "blueprint", "moment", "shadow", "ste", "shadow − ste")
    for kernel in (1, 3):
        for blueprint in ("conv_light", "depthwise", "bottleneck", "conv_heavy"):
            results = {
                mode: run(
                    mode,
                    blueprint,
                    rows=arguments.rows,
                    kernel=kernel,
                    warm=4,
                    training=6,
                    after=6,
                    steps=arguments.steps,
                )
                for mode in Incubation
            }
            for moment in ("at alpha 1", "end", "seed off"):
                shadow, ste = results[Incubation.SHADOW][moment], results[Incubation.STE][moment]
                table.add_row(
                    str(kernel),
                    blueprint,
                    moment,
                    f"{shadow.mean():.2f}",
                    f"{ste.mean():.2f}",
                    shown((shadow - ste).tolist()),
                )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
