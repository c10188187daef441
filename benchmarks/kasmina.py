"""Rows `kasmina.*`: the cost of slots, coalitions, germination, populations and growth; and env-steps per
second of the cheapest task."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import Row, interleave
from benchmarks.plain import PlainTrainer, plain_cnn
from benchmarks.play import make_env, play
from esper.kasmina import (
    CNNHost,
    MorphogeneticModel,
    OptimizerConfig,
    PopulationOptimizer,
    all_coalitions,
    blended_slots,
    evaluate_coalitions,
)
from esper.leyline import GateConfig, GateLevel, Pacing, PolicyProtocol
from esper.proof.search import draw_schedules
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.tamiyo import AlwaysWait, FixedSchedule, RandomValid

NETWORKS = 16
ENVS = 64
REPEATS = 3
"""Envs of a whole round, and how often each kind of round is timed."""


@dataclass(frozen=True, slots=True)
class Case:
    """The host, batch size and population of a task."""

    base: int
    kernel: int
    channels: int
    size: int
    batch: int
    population: int
    goal: float


CASES = {
    "digits_impaired": Case(base=2, kernel=1, channels=1, size=8, batch=64, population=16, goal=0.18),
    "cifar_impaired": Case(base=1, kernel=1, channels=3, size=32, batch=32, population=8, goal=0.33),
    "cifar_baseline": Case(base=8, kernel=3, channels=3, size=32, batch=32, population=1, goal=1.05),
}


def population(case: Case, rows: int) -> tuple[MorphogeneticModel, PopulationOptimizer]:
    host = CNNHost(rows, base=case.base, kernel=case.kernel, channels=case.channels, size=case.size)
    model = MorphogeneticModel(
        host,
        gates=GateConfig(permissive=True),
        pacing=Pacing(min_training_epochs=0, auto_forward_gates=frozenset({GateLevel.G1})),
    )
    return model, PopulationOptimizer(model, OptimizerConfig(host_lr=0.01))


def batch(case: Case, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.batch, rows * case.channels, case.size, case.size, generator=generator)
    return x.contiguous(memory_format=torch.channels_last), torch.randint(
        0, 10, (rows, case.batch), generator=generator
    )


def train_step(model: MorphogeneticModel, optimizer: PopulationOptimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    model.losses(x, y).total().backward()
    optimizer.step()


def grown(case: Case, slots: tuple[str, ...] = ("r0c0", "r0c1", "r0c2")) -> MorphogeneticModel:
    """A network with a blended conv_light in each of three slots."""
    model, _ = population(case, 1)
    for slot in slots:
        model.germinate(slot, "conv_light", tempo_epochs=1)
        model.advance(slot)
        seed = model.seed_in(slot)
        assert seed is not None
        seed.update_metrics(gradient_health=1.0, gradient_ratio=1.0)
        model.advance(slot)
    model.step_epoch()
    return model.eval()


def rows() -> Iterator[Row]:
    yield from _empty_slots()
    yield from _coalitions()
    yield from _germination()
    for name, case in CASES.items():
        yield from _population(name, case)
        yield from _sizes(name, case)
    yield from _growth()
    yield from _cheapest()


def _empty_slots() -> Iterator[Row]:
    case = CASES["cifar_baseline"]
    model, optimizer = population(case, 1)
    plain = PlainTrainer(plain_cnn(base=case.base, kernel=case.kernel, channels=case.channels))
    x, y = batch(case, 1)
    ratio, ours, _ = interleave(lambda: train_step(model, optimizer, x, y), lambda: plain.step(x, y[0]))
    yield Row("kasmina.empty_slots_vs_plain", ratio, 1.03)
    yield Row("kasmina.step_ms", ours * 1e3)


def _coalitions() -> Iterator[Row]:
    case = CASES["cifar_baseline"]
    model = grown(case)
    x, _ = batch(case, 1)
    wanted = {0: all_coalitions(blended_slots(model, 0))}

    def one_pass() -> None:
        with torch.no_grad():
            model(x)

    ratio, ours, _ = interleave(lambda: evaluate_coalitions(model, x, wanted), one_pass)
    yield Row("kasmina.coalitions8_vs_one_pass", ratio, 3.5)
    yield Row("kasmina.coalitions8_ms", ours * 1e3)


def _germination() -> Iterator[Row]:
    case = CASES["digits_impaired"]
    model, optimizer = population(case, case.population)
    x, y = batch(case, case.population)

    def germinate() -> None:
        model.germinate("r0c1", "conv_light", row=3)
        optimizer.sync()
        model.slot("r0c1").clear_row(3)
        model.changed()

    ratio, ours, _ = interleave(germinate, lambda: train_step(model, optimizer, x, y))
    yield Row("kasmina.germinate_vs_step", ratio, 3.0)
    yield Row("kasmina.germinate_ms", ours * 1e3)


def _population(name: str, case: Case) -> Iterator[Row]:
    groups = [population(case, case.population) for _ in range(NETWORKS // case.population)]
    x, y = batch(case, case.population)
    trainers = [
        PlainTrainer(plain_cnn(base=case.base, kernel=case.kernel, channels=case.channels))
        for _ in range(NETWORKS)
    ]
    single_x, single_y = batch(case, 1)

    def fused() -> None:
        for model, optimizer in groups:
            train_step(model, optimizer, x, y)

    def loop() -> None:
        for trainer in trainers:
            trainer.step(single_x, single_y[0])

    ratio, ours, _ = interleave(fused, loop, rounds=25)
    yield Row(f"kasmina.population16_vs_loop.{name}", ratio, case.goal)
    yield Row(f"kasmina.population16_ms.{name}", ours * 1e3)


def _sizes(name: str, case: Case) -> Iterator[Row]:
    """Milliseconds per training step of one network, by population size."""
    for size in (1, 8, 16):
        model, optimizer = population(case, size)
        x, y = batch(case, size)
        work = partial(train_step, model, optimizer, x, y)
        _, ours, _ = interleave(work, work, rounds=9)
        yield Row(f"kasmina.step_ms.{name}.population{size}", ours * 1e3 / size)


def policies(task: TaskSpec) -> dict[str, PolicyProtocol]:
    """Never grow; one plan of grafts for each env, as a search draws them; random operations of all kinds."""
    return {
        "static": AlwaysWait(),
        "growth": FixedSchedule(draw_schedules(task, ENVS, root_seed=0)[1:]),  # the first is not to grow
        "lifecycle": RandomValid(0, range(ENVS)),
    }


def round_seconds(task: TaskSpec, policy: PolicyProtocol) -> float:
    """CPU seconds of one round: training, validation, decisions and actions."""
    env = make_env(task, range(ENVS))
    start = time.process_time()
    play(env, policy)
    return time.process_time() - start


def _growth() -> Iterator[Row]:
    """Each kind of round against the one beside it in which nothing grows."""
    task = get_task_spec("digits_shift")
    rounds = [
        {kind: round_seconds(task, policy) for kind, policy in policies(task).items()} for _ in range(REPEATS)
    ]
    for kind, goal in (("growth", 2.2), ("lifecycle", 3.0)):
        ratio = statistics.median(spent[kind] / spent["static"] for spent in rounds)
        yield Row(f"kasmina.{kind}_vs_static", ratio, goal)
    for kind in rounds[0]:
        seconds = statistics.median(spent[kind] for spent in rounds)
        yield Row(f"kasmina.env_steps_per_core_second.{kind}", ENVS * task.episode_length / seconds)


def _cheapest() -> Iterator[Row]:
    task = get_task_spec("mnist1d_baseline")
    seconds = statistics.median(round_seconds(task, AlwaysWait()) for _ in range(REPEATS))
    yield Row("mnist1d.env_steps_per_core_second", ENVS * task.episode_length / seconds)
