"""`esper by_hand`: grow networks on a fixed schedule, without a policy, in 20 seconds."""

from __future__ import annotations

import sys

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from esper.kasmina import (
    CNNHost,
    MorphogeneticModel,
    NetworkRow,
    OptimizerConfig,
    PopulationOptimizer,
    blended_slots,
    evaluate_coalitions,
    save_network,
)
from esper.leyline import GateConfig, Pacing, stream_seed
from esper.runtime.data import EvalBatches, SharedBatchIterator, load_dataset, test_batches, validation_split
from esper.scripts.karn import reader
from esper.scripts.process import use_one_core
from esper.simic.seed_management import advance_active_seed

ROWS, EPOCHS = 16, 24
GROWN = range(ROWS // 2)
SCHEDULE = {"r0c0": 1, "r0c1": 2, "r0c2": 3}
"""Slot → epoch in which a seed is germinated there."""
BLUEPRINT, TEMPO, TRAINING = "conv_light", 3, 4


def by_hand() -> None:
    """Train sixteen small networks on handwritten digits and grow eight of them on a fixed schedule, without
    a policy. This takes 20 seconds. The test accuracy of grown and static networks is printed, and all
    networks are saved to runs/by_hand."""
    use_one_core()
    console = Console()
    split = validation_split(load_dataset("digits"), 256, 0)
    # Rows i and i + 8 start from the same weights and see the same batches: the comparison is paired.
    batches = SharedBatchIterator(split, [[*GROWN, *GROWN]], 64, steps_per_epoch=15, seed=0, rows=[ROWS])
    model = MorphogeneticModel(
        CNNHost(ROWS, base=4, kernel=1, channels=1, size=8),
        gates=GateConfig(permissive=True),
        pacing=Pacing(min_training_epochs=TRAINING),
        random_seeds=[stream_seed(0, "init", 0, row % len(GROWN)) for row in range(ROWS)],
    )
    optimizer = PopulationOptimizer(model, OptimizerConfig(host_lr=0.05, seed_lr=0.05))
    for epoch in track(range(EPOCHS), "growing", console=console):
        for (batch,) in batches:
            optimizer.zero_grad()
            model.losses(batch.x, batch.y).total().backward()
            optimizer.step()
        model.record_gradients(optimizer.stats)
        for row in GROWN:
            grow(model, row, epoch)
        model.step_epoch()
    accuracy = evaluate(model, test_batches(split, 450))
    table = Table("networks", "test accuracy", "parameters")
    for name, rows in (("static", range(len(GROWN), ROWS)), ("grown", GROWN)):
        values = accuracy[list(rows)]
        error = values.std() / len(values) ** 0.5
        table.add_row(name, f"{values.mean():.1f} % ± {error:.1f}", f"{model.total_params(rows[0]):,}")
    console.print(table)
    save_network("runs/by_hand", model, optimizer)
    console.print("saved to runs/by_hand: structure.json, weights.safetensors")


def grow(model: MorphogeneticModel, row: int, epoch: int) -> None:
    """Germinate the seeds that are due in this epoch, and advance those whose gate is open."""
    for slot, start in SCHEDULE.items():
        if epoch == start:
            model.germinate(slot, BLUEPRINT, row=row, tempo_epochs=TEMPO)
        report = model.reports(row).get(slot)
        if report is not None and report.can_advance:
            advance_active_seed(NetworkRow(model, row), slot)


def evaluate(model: MorphogeneticModel, data: EvalBatches) -> torch.Tensor:
    """Test accuracy of each row, in percent."""
    correct, total = torch.zeros(ROWS), 0
    wanted = {row: [frozenset(blended_slots(model, row))] for row in range(ROWS)}
    for batch in data:
        outputs = evaluate_coalitions(model, batch.x, wanted, shared_input=True).outputs
        correct += (outputs.argmax(-1) == batch.y.view(1, -1)).sum(1)
        total += batch.y.numel()
    return 100 * correct / total


main = reader(by_hand)

if __name__ == "__main__":
    sys.exit(main())
