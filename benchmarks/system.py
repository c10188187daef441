"""Rows `system.vs_bare.*`: a whole round of 16 envs against a bare loop of plain torch modules.

The bare side trains and validates the same hosts on the same batches, one after the other, including the
cost of data. It evaluates each coalition by a full pass, and trains its seeds in the ordinary pass, without
incubation. The two sides alternate epoch by epoch; each row is the worse of empty slots and of a scripted
growth schedule. Times are processor times of one thread each, so other processes do not count."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Datasets, Row
from benchmarks.plain import PlainGrowing
from esper.kasmina import blended_slots
from esper.leyline import (
    AlphaTargetAction,
    FactoredAction,
    GerminationStyle,
    LifecycleOp,
    TempoAction,
    blueprint_index,
)
from esper.nissa import TelemetryHub
from esper.runtime.data import SharedBatchIterator, load_dataset, validation_batches, validation_split
from esper.runtime.tasks import TaskSpec, get_task_spec, parse_task
from esper.simic.training import vectorized
from esper.simic.training.action_execution import ActionResult
from esper.simic.training.config import TrainingConfig
from esper.simic.training.task_envs import Moment, TaskEnvs
from esper.simic.training.vector_env import Observation
from esper.simic.training.vectorized_trainer import VectorizedPPOTrainer

ENVS = 16
VALIDATION_BATCH = 128
GOALS = {"digits_impaired": 0.35, "cifar_impaired": 0.65, "cifar_baseline": 1.1}
SHORT = {
    "empty": {"episode_length": 3},
    "growing": {"steps_per_epoch": 10, "val_size": 256, "episode_length": 14},
}
"""Shorter than the tasks' own 75 epochs of 50 steps, but long enough for the schedule to finish."""
BUDGETS: dict[str, dict[str, Any]] = {
    "digits_impaired": {"empty": {"population": ENVS}, "growing": {"population": ENVS}},
    "cifar_impaired": SHORT,
    "cifar_baseline": SHORT,
}
SCHEDULE = {1: "r0c0", 2: "r0c1", 3: "r0c2"}
"""Epoch → slot in which every env germinates a conv_light."""


def open_run(task_name: str, kind: str, directory: Path) -> AbstractContextManager[VectorizedPPOTrainer]:
    """A run as a user starts it, with policy, update, telemetry and checkpoint. The last epoch is validated
    like the others: its larger sample, once per episode, would weigh too much in an episode of few epochs."""
    config = TrainingConfig(
        task=f"{task_name}:final_val_size=0",
        envs=ENVS,
        rounds=1,
        seed=0,
        telemetry_dir=str(directory),
        **BUDGETS[task_name][kind],
    )
    task = vectorized.resolve_task(config, parse_task(f"{task_name}:final_val_size=0"))
    return vectorized.open_trainer(config, task, TelemetryHub())


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
        actions.append(
            replace(
                FactoredAction.wait(),
                op=op,
                slot_idx=slots.index(slot),
                blueprint=blueprint_index("conv_light"),
                style=GerminationStyle.LINEAR_ADD,
                tempo=TempoAction.FAST,
                alpha_target=AlphaTargetAction.FULL,
            ).to_indices()
        )
    return actions


class Bare:
    """Sixteen plain networks, trained and validated one after the other."""

    def __init__(self, task: TaskSpec) -> None:
        self.split = validation_split(load_dataset(task.dataset), task.val_size, 0)
        self.batches = SharedBatchIterator(
            self.split,
            [[i] for i in range(ENVS)],
            task.batch_size,
            steps_per_epoch=task.steps_per_epoch,
            seed=0,
            rows=[1] * ENVS,
        )
        self.validation = list(validation_batches(self.split, VALIDATION_BATCH))
        host = task.host
        self.nets = [
            PlainGrowing(base=host["base"], kernel=host.get("kernel", 3), channels=host.get("channels", 3))
            for _ in range(ENVS)
        ]
        self.optimizers = [
            torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4) for net in self.nets
        ]
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


def one_round(name: str, *, grow: bool) -> tuple[float, float, Mapping[str, float]]:
    """Seconds of a whole round on each side, alternating by epoch; and ours by phase."""
    kind = "growing" if grow else "empty"
    task = replace(get_task_spec(name), **BUDGETS[name][kind])
    bare, spent = Bare(task), [0.0]
    with tempfile.TemporaryDirectory() as place, open_run(name, kind, Path(place) / "run") as trainer:
        env, slots = trainer.env, trainer.env.parts[0].rules.slot_config.slot_ids
        act, begin_epoch = env.act, trainer.recorder.begin_epoch

        def steered(seen: Moment, _actions: Sequence[Sequence[int]], **kwargs: bool) -> ActionResult:
            """Replaces the policy's actions by the schedule's, so that both sides grow alike."""
            wait = [FactoredAction.wait().to_indices()] * ENVS
            return act(seen, scripted(seen.parts[0], slots) if grow else wait, **kwargs)

        def bare_first(env: TaskEnvs, epoch: int) -> None:
            start = time.process_time()
            if grow and epoch - 1 in SCHEDULE:
                bare.germinate(slots.index(SCHEDULE[epoch - 1]))
            bare.epoch([slots.index(slot) for slot in blended_slots(env.groups[0].model, 0)])
            spent[0] += time.process_time() - start
            begin_epoch(env, epoch)

        env.act, trainer.recorder.begin_epoch = steered, bare_first  # type: ignore[method-assign]
        start = time.process_time()
        trainer.run()
        total = time.process_time() - start
        blended = blended_slots(env.groups[0].model, 0)
        assert len(blended) == (len(SCHEDULE) if grow else 0), (
            f"the schedule did not finish: blended slots {blended}"
        )
        return total - spent[0], spent[0], dict(trainer.seconds)


def rows(datasets: Datasets) -> Iterator[Row]:
    for name, goal in GOALS.items():
        if reason := datasets.why_missing(get_task_spec(name).dataset):
            yield Row(f"system.vs_bare.{name}", None, goal, skipped=reason)
        else:
            yield from _against_bare(name, goal)
    yield from growth_in_envs()


def _against_bare(name: str, goal: float) -> Iterator[Row]:
    ratios = []
    for grow in (False, True):
        repeats = 2 if grow and name.startswith("cifar") else 3
        times = [one_round(name, grow=grow) for _ in range(repeats)]
        ratios.append(statistics.median(ours / bare for ours, bare, _ in times))
        kind = "growing" if grow else "empty"
        yield Row(f"system.round_ms.{name}.{kind}", statistics.median(ours for ours, _, _ in times) * 1e3)
        yield Row(f"system.ratio.{name}.{kind}", ratios[-1])
        ours, _, phases = times[-1]
        for phase, seconds in phases.items():
            yield Row(f"system.share.{name}.{kind}.{phase}", seconds / ours)
    yield Row(f"system.vs_bare.{name}", max(ratios), goal)


def growth_in_envs() -> Iterator[Row]:
    """Time of an epoch per env on digits without growth, for 16 to 64 envs in populations of 16; the best of
    three interleaved repeats."""
    times = dict.fromkeys((16, 32, 64), math.inf)
    for envs in [*times] * 3:
        config = TrainingConfig(
            task="digits_impaired", envs=envs, population=16, rounds=1, policy="wait", episode_length=12
        )
        task = vectorized.resolve_task(config, get_task_spec(config.task))
        with vectorized.open_trainer(config, task, TelemetryHub()) as trainer:
            start = time.process_time()
            trainer.run()
            times[envs] = min(times[envs], (time.process_time() - start) / envs)
    for envs, seconds in times.items():
        yield Row(f"system.env_ms.{envs}", seconds * 1e3)
    yield Row("system.growth_in_envs", times[64] / times[16], 1.1)
