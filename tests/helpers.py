"""What the tests of kasmina share: small networks of every topology, their data, and shortcuts through the
lifecycle.

P rows of the population, B batch. Images of a population are `[B, P·C, H, W]`, everything else is `[P, B,
…]`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from esper.kasmina import (
    CNNHost,
    GPTHost,
    MLPHost,
    MorphogeneticModel,
    PopulationOptimizer,
    RowSnapshot,
    all_coalitions,
    blended_slots,
    blueprint_names,
    register_blueprint,
    snapshot_row,
)
from esper.kasmina.blueprints import FACTORIES
from esper.kasmina.hosts import Host
from esper.leyline import (
    GateConfig,
    OpResult,
    Pacing,
    SeedStage,
    Topology,
    blueprint_ids,
)
from esper.leyline import blueprints as leyline_blueprints
from esper.runtime.data import load_dataset

TOKENS = 17
"""Vocabulary of the small transformer: the grey levels of the digits."""

EAGER: dict[str, Any] = {
    "gates": GateConfig(permissive=True, min_gradient_health=0.0),
    "pacing": Pacing(min_training_epochs=0, min_blending_epochs=0, min_prune_age=0, embargo_epochs=1),
}
"""Options of a model whose seeds may advance as soon as they are measured."""

HOSTS: dict[Topology, Callable[[int], Host]] = {
    "cnn": lambda population: CNNHost(population, base=2, channels=1, size=8),
    "transformer": lambda population: GPTHost(
        population, vocabulary=TOKENS, features=8, heads=2, layers=2, context=16, segments=2
    ),
    "mlp": lambda population: MLPHost(population, inputs=16, features=8),
}
LINE: dict[str, Callable[[int], Host]] = {
    "line": lambda population: CNNHost(population, base=2, channels=1, size=12, height=1)
}
"""A CNN host on images of height 1, under a name of its own."""


def examples(fast: int) -> settings:
    """So many examples in the fast suite, and ten times as many in the slow one."""
    return settings(max_examples=fast * settings().max_examples // 100)


def make(
    topology: str, population: int = 1, *, dtype: torch.dtype = torch.float32, **options: Any
) -> MorphogeneticModel:
    """A small network that lets seeds advance eagerly."""
    return MorphogeneticModel((LINE | HOSTS)[topology](population), **(EAGER | options)).to(dtype)


def blueprints(topology: str) -> list[str]:
    """All seeds that do something, in a stable order; `conv_1d` grows on lines only."""
    idle = {"noop"} if topology == "line" else {"noop", "conv_1d"}
    return sorted({*blueprint_names("cnn" if topology == "line" else topology)} - idle)


@contextmanager
def registered(name: str, topologies: Any, factory: Any) -> Iterator[str]:
    """A blueprint of one's own, for the length of a test. The registry itself has no way back."""
    ids = blueprint_ids()
    register_blueprint(name, topologies, factory)
    try:
        yield name
    finally:
        for topology in (topologies,) if isinstance(topologies, str) else topologies:
            del FACTORIES[topology, name]
        leyline_blueprints._IDS[:] = ids


# -- data ----------------------------------------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network_batch(model: MorphogeneticModel, seed: int, batch: int = 6) -> tuple[Tensor, Tensor]:
    """Random input and targets of one network, the same whatever population asks."""
    g, dtype = generator(seed), next(model.host.parameters()).dtype
    if model.host.topology == "transformer":
        tokens = torch.randint(0, TOKENS, (batch, 9), generator=g)
        return tokens[:, :-1], tokens[:, 1:]
    shape = model.host.example_input(batch).shape
    return torch.randn(shape, generator=g).to(dtype), torch.randint(0, 10, (batch,), generator=g)


def fuse(model: MorphogeneticModel, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One batch of each row as the population's batch."""
    inputs, targets = [x for x, _ in batches], torch.stack([y for _, y in batches])
    if model.host.topology == "cnn":
        return torch.cat(inputs, 1).contiguous(memory_format=torch.channels_last), targets
    return torch.stack(inputs), targets


def population_batch(model: MorphogeneticModel, seed: int, batch: int = 6) -> tuple[Tensor, Tensor]:
    """Random input and targets for all rows, each row its own."""
    return fuse(model, [network_batch(model, 1000 * seed + row, batch) for row in range(model.population)])


@cache
def digits(topology: Topology, count: int) -> tuple[Tensor, Tensor]:
    """Real images and what to say about them: as pixels, as a sequence of grey levels to continue, or as
    features."""
    data = load_dataset("digits")
    pixels, labels = data.train_x[:count], data.train_y[:count]
    if topology == "transformer":
        tokens = pixels.flatten(1).long()[:, 16:25]
        return tokens[:, :-1].unsqueeze(0), tokens[:, 1:].unsqueeze(0)
    x = (pixels.float() / data.scale - data.mean[0]) / data.std[0]
    return (x if topology == "cnn" else x.flatten(1).unsqueeze(0)), labels.unsqueeze(0)


# -- lifecycle -----------------------------------------------------------------------------------------------


def measure(model: MorphogeneticModel, row: int = 0, *, contribution: float = 5.0) -> None:
    """Give the row's seeds the measurements that the gates want."""
    model.record_epoch(row, 50.0, contributions=dict.fromkeys(model.reports(row), contribution))
    for slot_id in model.reports(row):
        seed = model.seed_in(slot_id, row)
        assert seed is not None
        seed.update_metrics(gradient_health=1.0, gradient_ratio=1.0, gradient_norm=1.0)


def stage_of(model: MorphogeneticModel, slot_id: str, row: int = 0) -> SeedStage:
    seed = model.seed_in(slot_id, row)
    return SeedStage.DORMANT if seed is None else seed.stage


def passed(result: OpResult) -> OpResult:
    assert result.done, result
    return result


PATH = (SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED)


def bring(
    model: MorphogeneticModel,
    slot_id: str,
    blueprint_id: str,
    stage: SeedStage,
    *,
    row: int = 0,
    stir: float = 0.0,
    **options: Any,
) -> None:
    """Germinate a seed and take it to a stage; BLENDING means one tick into its ramp. With `stir` its weights
    are moved."""
    passed(
        model.germinate(
            slot_id,
            blueprint_id,
            row=row,
            **{"tempo_epochs": 5 if stage is SeedStage.BLENDING else 1} | options,
        )
    )
    for wanted in PATH[1 : PATH.index(stage) + 1]:
        measure(model, row)
        step = model.fossilize if wanted is SeedStage.FOSSILIZED else model.advance
        passed(step(slot_id, row=row))
        if wanted is SeedStage.BLENDING:
            model.step_epoch([row])
    assert stage_of(model, slot_id, row) is stage
    if stir:
        stir_seed(model, slot_id, row, stir)


def stir_seed(model: MorphogeneticModel, slot_id: str, row: int, amount: float) -> None:
    """Move a seed's weights, γ above all, so that it changes what the network computes."""
    slot = model.slot(slot_id)
    for name, bank in slot.banks.items():
        if slot.live_rows(name)[row]:
            for i, parameter in enumerate(bank.parameters()):
                noise = torch.randn(parameter.shape[1:], generator=generator(i + 100), dtype=torch.float64)
                with torch.no_grad():
                    parameter[row] += (amount * noise).to(parameter)


def train_step(model: MorphogeneticModel, optimizer: PopulationOptimizer, x: Tensor, y: Tensor) -> Tensor:
    """One batch; the main losses of all rows."""
    optimizer.zero_grad()
    losses = model.losses(x, y)
    losses.total().backward()
    optimizer.step()
    return losses.main.detach()


# -- comparing -----------------------------------------------------------------------------------------------


def all_tensors(model: MorphogeneticModel) -> dict[str, Tensor]:
    """Copies of every parameter and buffer."""
    return {
        name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, a NaN where the other has one."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names whose tensors are not bit for bit the same."""
    return sorted(
        {name for name in (*a, *b) if name not in a or name not in b or not same_bits(a[name], b[name])}
    )


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between tensors of the same names."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    return max(float((a[name] - b[name]).abs().max()) for name in a if a[name].numel())


def without(snapshot: RowSnapshot, slots: Iterable[str]) -> RowSnapshot:
    """The same network if the seeds of these slots had never been."""
    off = tuple(slots)
    return RowSnapshot(
        {s: seed for s, seed in snapshot.seeds.items() if s not in off},
        snapshot.germinations,
        {name: t for name, t in snapshot.tensors.items() if name.split(".")[0] not in off},
    )


def wanted_coalitions(model: MorphogeneticModel) -> dict[int, list[frozenset[str]]]:
    """Every coalition of every row."""
    return {row: all_coalitions(blended_slots(model, row)) for row in range(model.population)}


def row_tensors(model: MorphogeneticModel, optimizer: PopulationOptimizer, row: int) -> dict[str, Tensor]:
    """Everything that is the row's: weights, buffers and optimizer state."""
    state = {f"optimizer.{name}": tensor for name, tensor in optimizer.row_state(row).items()}
    return snapshot_row(model, row).tensors | state
