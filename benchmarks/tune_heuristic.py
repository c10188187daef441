"""Searches thresholds for the heuristic of each task on training envs. `benchmarks.policies` evaluates the
result on others.

`python -m benchmarks.tune_heuristic` runs, for each task, some hand-written and some random candidates on the
same envs, and then two generations of variants of the best. The best of all ships with the package. Gains are
points of J above networks that never grow."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.play import outcomes
from esper.leyline import PolicyProtocol, stream_seed
from esper.runtime.tasks import get_task_spec
from esper.tamiyo import AlwaysWait
from esper.tamiyo.heuristic import Heuristic, HeuristicConfig
from esper.tamiyo.shipped import SHIPPED, THRESHOLDS, THRESHOLDS_VERSION

TASKS = ("digits_shift", "digits_impaired", "digits_baseline", "digits_scale")
"""The order matters: all draw from one random stream."""
FIRST = 300_000
"""Number of the first env."""
SPACE: dict[str, tuple[Any, ...]] = {
    "min_progress": (0.0, 0.05, 0.1, 0.2),
    "max_progress": (0.15, 0.2, 0.3, 0.5),
    "max_rank": (0.35, 0.45, 0.5, 0.55, 0.7, 1.0),
    "rank_step": (0.5, 0.6, 0.8, 1.0),
    "min_tap_ratio": (0.0, 0.6, 0.8, 1.0, 1.2),
    "strong_tap_ratio": (0.0, 0.7, 0.9, 1.1, 1.4),
    "plateau_epochs": (2, 3, 10),
    "growth_weight": (0.0, 1.0, 2.0, 4.0),
    "depth_price": (0.0, 0.2, 0.5, 1.0, 2.0, 8.0),
    "max_seeds": (1, 2, 3),
    "max_live": (1, 2, 3),
    "min_contribution": (-30.0, -5.0, 0.0, 1.0),
    "blueprints": (
        ("conv_light", "depthwise", "mlp_small", "lora", "norm"),
        ("depthwise", "conv_light", "lora", "mlp_small", "norm"),
    ),
}
EAGER = HeuristicConfig(
    min_progress=0.0,
    max_progress=0.15,
    max_rank=1.0,
    rank_step=1.0,
    min_tap_ratio=0.0,
    strong_tap_ratio=0.0,
    plateau_epochs=3,
    growth_weight=2.0,
    depth_price=8.0,
    max_seeds=3,
    max_live=3,
    min_contribution=-30.0,
)
"""One seed after the other from the first epoch on, the first slots first."""
BY_HAND = (
    HeuristicConfig(),
    EAGER,
    replace(EAGER, strong_tap_ratio=0.9),
    replace(EAGER, max_rank=0.5),
    replace(EAGER, max_rank=0.5, rank_step=0.5, depth_price=0.2, growth_weight=4.0, min_tap_ratio=0.8),
)
Table = dict[HeuristicConfig | None, list[float]]
"""J of each env, by configuration; None never grows."""
Gains = dict[HeuristicConfig, float]


def draw(rng: np.random.Generator, names: Iterable[str]) -> dict[str, Any]:
    return {name: SPACE[name][rng.integers(len(SPACE[name]))] for name in names}


def variants(
    parents: Sequence[HeuristicConfig], count: int, rng: np.random.Generator
) -> list[HeuristicConfig]:
    """The parents in turn, each with two thresholds drawn anew."""
    return [
        replace(parents[i % len(parents)], **draw(rng, rng.choice(list(SPACE), 2, replace=False)))
        for i in range(count)
    ]


def policy_of(config: HeuristicConfig | None, envs: Sequence[int]) -> PolicyProtocol:
    return AlwaysWait() if config is None else Heuristic(config, len(envs))


def measure(task: str, configs: Iterable[HeuristicConfig | None], count: int) -> Table:
    table: Table = {}
    for config in dict.fromkeys(configs):
        played = outcomes(get_task_spec(task), range(FIRST, FIRST + count), partial(policy_of, config))
        table[config] = [outcome.objective for outcome in played]
    return table


def gains(table: Table) -> Gains:
    static = statistics.mean(table[None])
    return {
        config: 100 * (statistics.mean(values) - static)
        for config, values in table.items()
        if config is not None
    }


def best(scores: Gains, count: int) -> list[HeuristicConfig]:
    return sorted(scores, key=lambda config: (-scores[config], str(config)))[:count]


def changes(config: HeuristicConfig) -> str:
    """The thresholds that differ from the defaults."""
    default = asdict(HeuristicConfig())
    return (
        ", ".join(f"{name}={value!r}" for name, value in asdict(config).items() if value != default[name])
        or "defaults"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="tasks to search for")
    parser.add_argument("--candidates", type=int, default=10, help="candidates in the first generation")
    parser.add_argument(
        "--children", type=int, default=5, help="variants of the best in each of two more generations"
    )
    parser.add_argument(
        "--envs", type=int, default=16, help="envs per candidate; twice as many where a task draws conditions"
    )
    parser.add_argument("--out", type=Path, default=SHIPPED, help="directory for the thresholds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.process_time()
    rng = np.random.default_rng(stream_seed(0, "sampling"))
    pool = [
        *BY_HAND,
        *(replace(HeuristicConfig(), **draw(rng, SPACE)) for _ in range(options.candidates - len(BY_HAND))),
    ]
    for task in TASKS:
        if task not in options.tasks:  # draw all the same, so that the other tasks draw what they always do
            for _ in range(2):
                variants(pool[:3], options.children, rng)
            continue
        # With drawn conditions, J varies more between envs.
        count = options.envs * (1 if get_task_spec(task).conditions is None else 2)
        table = measure(task, [None, *pool], count)
        for _ in range(2):
            table |= measure(task, variants(best(gains(table), 3), options.children, rng), count)
        scores = gains(table)
        for config in best(scores, 3):
            print(f"{task}: {scores[config]:.1f} with {changes(config)}", flush=True)
        chosen = best(scores, 1)[0]
        command = shlex.join(["python", "-m", "benchmarks.tune_heuristic", *sys.argv[1:]])
        content = {
            "task": task,
            "command": command,
            "envs": count,
            "gain": scores[chosen],
            "config": asdict(chosen),
            "version": THRESHOLDS_VERSION,
        }
        (options.out / f"{task}{THRESHOLDS}").write_text(
            json.dumps(content, indent=2) + "\n", encoding="utf-8"
        )
    print(f"{time.process_time() - start:.0f} s of CPU time; thresholds in {options.out}")


if __name__ == "__main__":
    main()
