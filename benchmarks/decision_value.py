"""How much do decisions matter? Fixed growth schedules on the embedded tasks, with paired seeds.

A schedule plants up to three seeds (slot, blueprint, epoch), blends each as soon as its gate opens and fossilizes it as soon
as it holds and its leave-one-out contribution is known: one operation per network and epoch, as a policy has it. Networks of
one seed share initial weights, batches and the weights of their first, second, third seed, whatever their schedule.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from esper.kasmina import MorphogeneticModel, blended_slots, evaluate_coalitions
from esper.leyline import LifecycleOp, SeedStage, objective, stream_seed
from esper.runtime.data import EvalBatches, SharedBatchIterator, Split, validation_batches
from esper.runtime.tasks import Condition, TaskSpec, apply_condition, draw_condition

TEMPO = 3
CHUNK = 64
"""Networks per population."""


@dataclass(frozen=True, order=True)
class Planting:
    epoch: int
    slot: str
    blueprint: str


Schedule = tuple[Planting, ...]
STATIC: Schedule = ()
RANDOM = "random"
Plan = Schedule | str
Pair = tuple[Plan, int]
"""A plan, and the env whose random numbers it meets."""


@dataclass(frozen=True)
class Result:
    """One network at the end of its episode."""

    value: float  # J
    accuracy: float  # committed, in [0, 1]
    added: int  # parameters of fossilized seeds
    wasted: int


def run(task: TaskSpec, split: Split, pairs: Sequence[Pair], *, root: int = 0, episode: int = 0,
        conditions: Mapping[int, Condition] | None = None) -> list[Result]:
    """One episode of each (plan, env); envs draw their conditions unless these are given."""
    found: dict[Pair, Result] = {}
    # Networks that grow alike share banks: side by side they cost least.
    order = sorted(set(pairs), key=lambda pair: (str([(p.slot, p.blueprint) for p in pair[0]] if pair[0] != RANDOM else RANDOM), str(pair)))
    for at in range(0, len(order), CHUNK):
        part = order[at:at + CHUNK]
        envs = sorted({env for _, env in part})
        drawn = {env: draw_condition(task, root, episode, env) if conditions is None else conditions[env] for env in envs}
        found |= zip(part, _run(task, split, part, drawn, root, episode), strict=True)
    return [found[pair] for pair in pairs]


def _run(task: TaskSpec, split: Split, pairs: Sequence[Pair], conditions: Mapping[int, Condition], root: int,
         episode: int) -> list[Result]:
    padded = [*pairs, *pairs[:1] * (-len(pairs) % 8)]
    envs, rows = list(conditions), len(padded)
    batches = SharedBatchIterator(split, [envs], task.batch_size, steps_per_epoch=task.steps_per_epoch, seed=root)
    whole = len(split.train)
    batches.begin_episode(episode, train_size=[conditions[env].train_size or whole for env in envs],
                          label_noise=[conditions[env].label_noise for env in envs])
    source = torch.tensor([envs.index(env) for _, env in padded])
    model = task.build_model(rows, [stream_seed(root, "init", episode, env) for _, env in padded])
    optimizer = task.build_optimizer(model)
    for row, (_, env) in enumerate(padded):
        apply_condition(model, optimizer, row, conditions[env])
    rates = optimizer.host_lr.clone(), optimizer.seed_lr.clone()
    validation = validation_batches(split, task.val_size)
    dice = [np.random.default_rng(stream_seed(root, "action", episode, env)) for _, env in pairs]
    for epoch in range(1, task.episode_length + 1):
        optimizer.host_lr, optimizer.seed_lr = (rate * task.lr_factor(epoch) for rate in rates)
        for (batch,) in batches:
            optimizer.zero_grad()
            # Digits have one channel, so that channel i is env i.
            x = batch.x.permute(0, 2, 3, 1).index_select(3, source).permute(0, 3, 1, 2)
            model.losses(x, batch.y.index_select(0, source)).total().backward()
            optimizer.step()
        assert optimizer.stats is not None
        model.record_gradients(optimizer.stats)
        measure_contributions(model, validation, len(pairs))
        for row, (plan, env) in enumerate(pairs):
            step = choose_random(model, task, row, dice[row]) if plan == RANDOM else follow(model, plan, row, epoch)
            if step is not None:
                act(model, row, *step, stream_seed(root, "germination", episode, env, model.germinations[row]))
        model.step_epoch()
    return [conclude(task, model, row, accuracy) for row, accuracy in enumerate(committed_accuracy(model, validation, len(pairs)))]


Step = tuple[LifecycleOp, str, str]


def follow(model: MorphogeneticModel, schedule: Schedule, row: int, epoch: int) -> Step | None:
    """The schedule's next operation: fossilize first, then advance, then plant what is due."""
    reports = model.reports(row)
    for slot, report in reports.items():
        if report.can_fossilize:
            return LifecycleOp.FOSSILIZE, slot, ""
    for slot, report in reports.items():
        if report.can_advance:
            return LifecycleOp.ADVANCE, slot, ""
    for planting in schedule[model.germinations[row]:]:
        if planting.epoch <= epoch:
            return LifecycleOp.GERMINATE, planting.slot, planting.blueprint
    return None


def choose_random(model: MorphogeneticModel, task: TaskSpec, row: int, dice: np.random.Generator) -> Step | None:
    """Any operation that is possible now, WAIT included, each with the same probability."""
    reports = model.reports(row)
    places = {
        LifecycleOp.WAIT: [""],
        LifecycleOp.GERMINATE: [slot for slot in task.slots if slot not in reports],
        LifecycleOp.ADVANCE: [slot for slot, report in reports.items() if report.can_advance],
        LifecycleOp.FOSSILIZE: [slot for slot, report in reports.items() if report.can_fossilize],
        LifecycleOp.PRUNE: [slot for slot, report in reports.items() if report.can_prune],
    }
    possible = [op for op, slots in places.items() if slots]
    op = possible[dice.integers(len(possible))]
    slot = places[op][dice.integers(len(places[op]))]
    blueprint = task.blueprints[dice.integers(len(task.blueprints))]
    return None if op is LifecycleOp.WAIT else (op, slot, blueprint)


def act(model: MorphogeneticModel, row: int, op: LifecycleOp, slot: str, blueprint: str, init_seed: int) -> None:
    if op is LifecycleOp.GERMINATE:
        model.germinate(slot, blueprint, row=row, tempo_epochs=TEMPO, init_seed=init_seed)
    else:
        operation = {LifecycleOp.ADVANCE: model.advance, LifecycleOp.FOSSILIZE: model.fossilize, LifecycleOp.PRUNE: model.prune}[op]
        operation(slot, row=row)


def measure_contributions(model: MorphogeneticModel, validation: EvalBatches, rows: int) -> None:
    """Leave-one-out of the seeds that hold or are about to: nothing else waits for it."""
    wanted = {}
    for row in range(rows):
        on = frozenset(blended_slots(model, row))
        held = [slot for slot in on if model.seed_in(slot, row).stage is SeedStage.HOLDING]  # type: ignore[union-attr]
        if held:
            wanted[row] = [on, *(on - {slot} for slot in held)]
    if not wanted:
        return
    accuracy = accuracies(model, validation, wanted)
    for row, (on, *without) in wanted.items():
        full = accuracy[row, on]
        model.record_epoch(row, full, contributions={next(iter(on - c)): full - accuracy[row, c] for c in without})


def accuracies(model: MorphogeneticModel, data: EvalBatches, wanted: dict[int, list[frozenset[str]]]) -> dict[tuple[int, frozenset[str]], float]:
    """Percentage points by (row, coalition)."""
    correct, total, table = 0, 0, None
    for batch in data:
        table = evaluate_coalitions(model, batch.x, wanted, shared_input=True)
        correct = correct + (table.outputs.argmax(-1) == batch.y.view(1, -1)).sum(1)
        total += batch.y.numel()
    assert table is not None
    return dict(zip(zip(table.rows, table.coalitions, strict=True), (100 * correct / total).tolist(), strict=True))  # type: ignore[union-attr]


def committed_accuracy(model: MorphogeneticModel, data: EvalBatches, rows: int) -> list[float]:
    wanted = {row: [frozenset(slot.slot_id for slot in model.slots()
                              if (seed := slot.seeds[row]) is not None and seed.stage is SeedStage.FOSSILIZED)] for row in range(rows)}
    found = accuracies(model, data, wanted)
    return [found[row, coalitions[0]] / 100 for row, coalitions in wanted.items()]


def conclude(task: TaskSpec, model: MorphogeneticModel, row: int, accuracy: float) -> Result:
    fossils = sum(report.stage is SeedStage.FOSSILIZED for report in model.reports(row).values())
    added, wasted = model.seed_params(row, stages=[SeedStage.FOSSILIZED]), model.germinations[row] - fossils
    value = objective(task.objective, committed_accuracy=accuracy, added_params=added, host_params=model.host_params,
                      wasted_seeds=wasted, rollbacks=0)
    return Result(value, accuracy, added, wasted)
