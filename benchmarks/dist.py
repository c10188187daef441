"""Rows `dist.*`: a run in two processes against two independent runs of one process each, side by side on the
same two cores.

`python -m benchmarks.dist worker …` is one of those processes. It prints its seconds and bytes as JSON."""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row
from esper.nissa import TelemetryHub
from esper.runtime.tasks import get_task_spec
from esper.simic.ranks import Joined, joined
from esper.simic.training import vectorized
from esper.simic.training.config import TrainingConfig

ENVS, REPEATS, GOAL = 128, 3, 0.92


def worker(envs: int, epochs: int | None, population: int | None) -> dict[str, Any]:
    """One warm-up round of digits_shift, then one that counts."""
    with tempfile.TemporaryDirectory() as place, joined({}) as ranks:
        config = TrainingConfig(
            task="digits_shift",
            rounds=2,
            envs=envs,
            episode_length=epochs,
            population=population,
            seed=0,
            checkpoint_every=0,
            telemetry_dir=str(Path(place) / "run"),
        )
        task = vectorized.resolve_task(config, get_task_spec(config.task))
        with vectorized.open_trainer(config, task, TelemetryHub()) as trainer:
            trainer.run(until=1)
            sent = dict(ranks.traffic) if isinstance(ranks, Joined) else {}
            start, cpu = time.perf_counter(), time.process_time()
            trainer.run(until=2)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            after = ranks.traffic if isinstance(ranks, Joined) else {}
            return {
                "env_steps": trainer.progress.history[-1].env_steps - trainer.progress.history[0].env_steps,
                "seconds": seconds,
                "cpu_seconds": cpu,
                "phases": trainer.seconds,
                "bytes": {name: after[name] - sent.get(name, 0) for name in after},
            }


def start(count: int, *flags: str, ranks: bool) -> list[dict[str, Any]]:
    """What this many workers measured, as ranks of one run or each with a run of its own."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(count):
        place = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "localhost"}
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if ranks:
            environment |= place | {"MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "benchmarks.dist", "worker", *flags]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("a worker failed; its message is above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def rows() -> Iterator[Row]:
    """Env-steps per second of two ranks / of two independent runs at the same time."""
    flags = ("--envs", str(ENVS))
    efficiencies, per_step = [], 0.0
    for _ in range(REPEATS):
        together = start(2, *flags, ranks=True)
        apart = start(2, *flags, ranks=False)
        of_ranks = together[0]["env_steps"] / max(one["seconds"] for one in together)
        efficiencies.append(of_ranks / sum(one["env_steps"] / one["seconds"] for one in apart))
        per_step = sum(together[1]["bytes"].values()) / (together[1]["env_steps"] / 2)
    yield Row("dist.efficiency_2", statistics.median(efficiencies), GOAL, at_least=True)
    yield Row("dist.kilobytes_per_env_step", per_step / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dist", description=__doc__)
    parser.add_argument("role", choices=["worker", "ranks", "apart"], help="ranks, apart: start workers")
    parser.add_argument("--count", type=int, default=2, help="number of workers")
    parser.add_argument("--envs", type=int, default=ENVS)
    parser.add_argument("--epochs", type=int, help="length of an episode; the task's by default")
    parser.add_argument("--population", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.role == "worker":
        print(json.dumps(worker(given.envs, given.epochs, given.population)))
        return
    flags = [
        word
        for name in ("envs", "epochs", "population")
        if (value := getattr(given, name)) is not None
        for word in (f"--{name}", str(value))
    ]
    for measured in start(given.count, *flags, ranks=given.role == "ranks"):
        print(json.dumps(measured))


if __name__ == "__main__":
    main()
