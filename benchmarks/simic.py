"""Rows `simic.*` and `telemetry.*`: the share of learning and recording in a round of 16 envs on
digits_impaired, and what networks cost whose budget is spent."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Row, interleave
from benchmarks.play import make_env
from esper.leyline import TelemetryEvent
from esper.nissa import TelemetryHub
from esper.runtime.tasks import get_task_spec
from esper.simic.telemetry.telemetry_config import TelemetryConfig, TelemetryLevel
from esper.simic.training import vectorized
from esper.simic.training.config import TrainingConfig

ROUNDS = 4


class TimedHub(TelemetryHub):
    """Counts the time inside emit, encode and flush."""

    seconds = 0.0

    def emit(self, event: TelemetryEvent) -> None:
        start = time.perf_counter()
        super().emit(event)
        self.seconds += time.perf_counter() - start

    def flush(self) -> None:
        start = time.perf_counter()
        super().flush()
        self.seconds += time.perf_counter() - start


def one_run(
    level: TelemetryLevel = TelemetryLevel.NORMAL, **changes: int
) -> tuple[list[float], list[float], float]:
    """Seconds of each round and of its update, and the share of time inside the hub."""
    config = TrainingConfig(
        task="digits_impaired",
        rounds=ROUNDS,
        envs=changes.pop("envs", 16),
        population=changes.pop("population", 16),
        seed=0,
        telemetry=TelemetryConfig(level=level),
        **changes,
    )
    hub, rounds, updates = TimedHub(), [], []
    with tempfile.TemporaryDirectory() as place:
        config = config.replace(telemetry_dir=str(Path(place) / "run"), checkpoint_every=0)
        with vectorized.open_trainer(
            config, vectorized.resolve_task(config, get_task_spec(config.task)), hub
        ) as trainer:
            hub.seconds = 0.0
            for until in range(1, ROUNDS + 1):
                trainer.run(until=until)
                rounds.append(sum(trainer.seconds.values()))
                updates.append(trainer.seconds["update"])
            return rounds, updates, hub.seconds / sum(rounds)


class Epochs:
    """Trains and validates one epoch of digits_flops per call, of the first 32 networks of a population."""

    def __init__(self, population: int) -> None:
        task = get_task_spec("digits_flops:budget_steps=100000")  # none of them ends
        self.env, self.epoch = make_env(task, range(population)), 0
        self.env.begin_round(0)
        for member in self.env.envs[32:]:
            member.done = True

    def __call__(self) -> None:
        self.epoch += 1
        self.env.train_epoch(self.epoch)
        self.env.validate(self.epoch)


def rows() -> Iterator[Row]:
    ratio, half_over, half_as_wide = interleave(Epochs(64), Epochs(32))
    yield Row("simic.epoch_half_over_ms", half_over * 1e3)
    yield Row("simic.epoch_half_as_wide_ms", half_as_wide * 1e3)
    yield Row("simic.finished_rows", ratio, 1.15)
    rounds, updates, normal = one_run()
    yield Row("simic.round_ms", statistics.median(rounds) * 1e3)
    yield Row("simic.update_ms", statistics.median(updates) * 1e3)
    yield Row(
        "simic.update_share", statistics.median(u / r for u, r in zip(updates, rounds, strict=True)), 0.20
    )
    reference = statistics.median(updates)
    for name, changes in (
        ("envs_16_to_64", {"envs": 64, "population": 64}),
        ("steps_24_to_48", {"episode_length": 48}),
    ):
        _, longer, _ = one_run(steps_per_epoch=1, val_size=32, **changes)
        yield Row(f"simic.update_growth.{name}", statistics.median(longer) / reference)
    yield Row("telemetry.normal_share", normal, 0.02)
    yield Row("telemetry.debug_share", one_run(TelemetryLevel.DEBUG)[2], 0.05)
