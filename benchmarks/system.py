"""Rows `system.vs_bare.*`: a whole round of 16 envs against a bare loop of plain torch modules.

The bare side trains and validates the same hosts on the same batches, one after the other, data cost included; it evaluates
each coalition by a full pass, and trains its seeds within the ordinary pass, without incubating them. The two sides take
turns epoch by epoch; each row is the worse of empty slots and of a scripted growth schedule.
"""
from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import torch
from torch import nn

from benchmarks.harness import Row
from benchmarks.plain import PlainGrowing
from esper.kasmina import blended_slots
from esper.leyline import AlphaTargetAction, BlueprintAction, FactoredAction, GerminationStyle, LifecycleOp, TempoAction
from esper.runtime.data import SharedBatchIterator, load_dataset, validation_batches, validation_split
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.simic.training.env_factory import action_rules, create_env_group
from esper.simic.training.vector_env import Observation, VectorEnv

ENVS = 16
VALIDATION_BATCH = 128
GOALS = {"digits_impaired": 0.35, "cifar_impaired": 0.65, "cifar_baseline": 1.1}
BUDGETS = {"digits_impaired": {}, "cifar_impaired": {"steps_per_epoch": 10, "val_size": 256, "episode_length": 14},
           "cifar_baseline": {"steps_per_epoch": 10, "val_size": 256, "episode_length": 14}}
SCHEDULE = {1: "r0c0", 2: "r0c1", 3: "r0c2"}
"""Epoch → slot in which every env germinates a conv_light."""


def make_env(task: TaskSpec) -> VectorEnv:
    split = validation_split(load_dataset(task.dataset), task.val_size, 0)
    rows = task.population
    ids = [list(range(first, first + rows)) for first in range(0, ENVS, rows)]
    batches = SharedBatchIterator(split, ids, task.batch_size, steps_per_epoch=task.steps_per_epoch, seed=0,
                                  rows=[rows] * len(ids))
    groups = [create_env_group(task, group, population=rows, device="cpu", root_seed=0) for group in ids]
    return VectorEnv(task, groups, batches, validation_batches(split, VALIDATION_BATCH), action_rules(task, root_seed=0))


def scripted(seen: Observation, slots: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Germinate on schedule, then advance and fossilize as soon as the gates open."""
    actions = []
    for reports in seen.reports:
        op, slot = LifecycleOp.WAIT, slots[0]
        for candidate, report in reports.items():
            if report.can_fossilize:
                op, slot = LifecycleOp.FOSSILIZE, candidate
            elif report.can_advance:
                op, slot = LifecycleOp.ADVANCE, candidate
        if seen.epoch in SCHEDULE:
            op, slot = LifecycleOp.GERMINATE, SCHEDULE[seen.epoch]
        actions.append(replace(FactoredAction.wait(), op=op, slot_idx=slots.index(slot), blueprint=BlueprintAction.CONV_LIGHT,
                               style=GerminationStyle.LINEAR_ADD, tempo=TempoAction.FAST,
                               alpha_target=AlphaTargetAction.FULL).to_indices())
    return actions


class Bare:
    """Sixteen plain networks, trained and validated one after the other."""

    def __init__(self, task: TaskSpec) -> None:
        self.split = validation_split(load_dataset(task.dataset), task.val_size, 0)
        self.batches = SharedBatchIterator(self.split, [[i] for i in range(ENVS)], task.batch_size,
                                           steps_per_epoch=task.steps_per_epoch, seed=0, rows=[1] * ENVS)
        self.validation = list(validation_batches(self.split, VALIDATION_BATCH))
        host = task.host
        self.nets = [PlainGrowing(base=host["base"], kernel=host.get("kernel", 3), channels=host.get("channels", 3))
                     for _ in range(ENVS)]
        self.optimizers = [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4) for net in self.nets]
        self.active: list[int] = []

    def germinate(self, block: int) -> None:
        for net, optimizer in zip(self.nets, self.optimizers, strict=True):
            optimizer.add_param_group({"params": list(net.add_seed(block).parameters())})
        self.active.append(block)

    def epoch(self, blended: list[int]) -> None:
        for batches in self.batches:
            for net, optimizer, batch in zip(self.nets, self.optimizers, batches, strict=True):
                net.train()
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(batch.x, self.active), batch.y[0]).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
        coalitions = [c for size in range(len(blended) + 1) for c in combinations(blended, size)]
        with torch.no_grad():
            for net in self.nets:
                net.eval()
                for coalition in coalitions:
                    loss, correct = torch.zeros(()), torch.zeros(())
                    for batch in self.validation:
                        outputs = net(batch.x, coalition)
                        loss += nn.functional.cross_entropy(outputs, batch.y[0], reduction="sum")
                        correct += (outputs.argmax(-1) == batch.y[0]).sum()
                    loss.item(), correct.item()


def one_round(task: TaskSpec, *, grow: bool) -> tuple[float, float]:
    """Seconds that a whole round took on each side, their epochs in turn."""
    env, bare = make_env(task), Bare(task)
    env.begin_round(0)
    slots = env.rules.slot_config.slot_ids
    ours = other = 0.0
    blended: list[int] = []
    for epoch in range(1, task.episode_length + 1):
        start = time.perf_counter()
        env.train_epoch(epoch)
        env.validate(epoch)
        seen = env.sense(epoch)
        env.act(seen, scripted(seen, slots) if grow else [FactoredAction.wait().to_indices()] * ENVS)
        middle = time.perf_counter()
        bare.epoch(blended)
        other += time.perf_counter() - middle
        ours += middle - start
        if grow and epoch in SCHEDULE:
            bare.germinate(slots.index(SCHEDULE[epoch]))
        blended = [slots.index(slot) for slot in blended_slots(env.groups[0].model, 0)]
    if grow:
        assert len(blended) == len(SCHEDULE), f"the schedule did not finish: blended slots {blended}"
    return ours, other


def rows() -> Iterator[Row]:
    for name, goal in GOALS.items():
        task = replace(get_task_spec(name), **BUDGETS[name])
        ratios = []
        for grow in (False, True):
            times = [one_round(task, grow=grow) for _ in range(2 if name.startswith("cifar") else 3)]
            ratios.append(statistics.median(a / b for a, b in times))
            yield Row(f"system.round_ms.{name}.{'growing' if grow else 'empty'}", statistics.median(a for a, _ in times) * 1e3)
            yield Row(f"system.ratio.{name}.{'growing' if grow else 'empty'}", ratios[-1])
        yield Row(f"system.vs_bare.{name}", max(ratios), goal)
