"""Searches thresholds for the heuristic on training envs: one set for all embedded tasks together, and one
set for each task.

`python -m benchmarks.tune_heuristic tune` runs some hand-written and some random candidates on the same envs
of every task, then variants of those that are best on all tasks together, then variants of the best of each
task. A set is as good on all tasks together as the mean over tasks of its gain, each relative to the largest
gain that any candidate has on that task. Gains are points of J above networks that never grow. The best sets
ship with the package.

`python -m benchmarks.tune_heuristic table` compares the sets that ship on envs that no threshold was chosen
on. Prints Markdown; differences are paired, intervals are 95 %."""

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

from benchmarks.play import outcomes, show
from esper.leyline import PolicyProtocol, stream_seed
from esper.runtime.tasks import get_task_spec
from esper.scripts.process import use_one_core
from esper.tamiyo import AlwaysWait
from esper.tamiyo.heuristic import Heuristic, HeuristicConfig
from esper.tamiyo.shipped import GENERAL, SHIPPED, THRESHOLDS, THRESHOLDS_VERSION, tuned_thresholds

TASKS = (
    "digits_shift",
    "digits_impaired",
    "digits_baseline",
    "digits_scale",
    "digits_mlp",
    "mnist1d_baseline",
)
"""Tasks whose data are part of the package."""
FIRST, FIRST_UNSEEN = 300_000, 600_000
"""Numbers of the first env for tuning and for the table."""
SPACE: dict[str, tuple[Any, ...]] = {
    "min_progress": (0.0, 0.05, 0.1),
    "max_progress": (0.1, 0.15, 0.2, 0.3, 0.5),
    "max_rank": (0.6, 0.75, 0.9, 1.0),
    "rank_step": (0.7, 0.85, 1.0),
    "blind_ratio": (0.0, 0.6, 0.8, 1.0, 1.2),
    "plateau": (0.15, 0.3, 1.0),
    "space_gain": (0.05, 0.1, 0.2, 0.4, 0.8),
    "channel_gain": (0.0, 0.02, 0.05, 0.1, 0.2),
    "any_gain": (0.0, 0.01, 0.03, 0.06, 0.1),
    "size_power": (0.0, 0.1, 0.25, 0.5),
    "seed_step": (0.4, 0.6, 0.8, 1.0),
    "growth_weight": (0.0, 0.5, 1.0, 2.0),
    "price_weight": (0.5, 0.75, 1.0, 1.5),
    "max_seeds": (2, 3, 5),
    "min_contribution": (-0.3, -0.05, 0.0),
}
EAGER = HeuristicConfig(
    max_progress=0.15, any_gain=0.1, channel_gain=0.1, seed_step=1.0, min_contribution=-0.3
)
"""One seed after the other from the first epoch on."""
BY_HAND = (
    HeuristicConfig(),
    EAGER,
    replace(EAGER, blind_ratio=0.0),
    replace(EAGER, space_gain=0.8, any_gain=0.03, channel_gain=0.02, blind_ratio=0.8),
    HeuristicConfig(max_rank=0.75, rank_step=0.85, space_gain=0.6, min_contribution=-0.3),
)
PARENTS = 3
Table = dict[HeuristicConfig | None, list[float]]
"""J of each env of a task, by configuration; None never grows."""
Scores = dict[HeuristicConfig, float]


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


def objectives(task: str, config: HeuristicConfig | None, envs: range) -> list[float]:
    return [o.objective for o in outcomes(get_task_spec(task), envs, partial(policy_of, config))]


class Search:
    """Everything that was measured on the tuning envs."""

    def __init__(self, tasks: Sequence[str], envs: int) -> None:
        # With drawn conditions, J varies more between envs.
        self.envs = {task: envs * (1 if get_task_spec(task).conditions is None else 2) for task in tasks}
        self.tables: dict[str, Table] = {task: {} for task in tasks}
        self.measure(tasks, [None])

    def measure(self, tasks: Iterable[str], configs: Sequence[HeuristicConfig | None]) -> None:
        for task in tasks:
            table, envs = self.tables[task], range(FIRST, FIRST + self.envs[task])
            table |= {c: objectives(task, c, envs) for c in dict.fromkeys(configs) if c not in table}

    def gains(self, task: str) -> Scores:
        """Points above never growing."""
        table = self.tables[task]
        static = statistics.mean(table[None])
        return {c: 100 * (statistics.mean(j) - static) for c, j in table.items() if c is not None}

    def together(self) -> Scores:
        """Mean share of the largest gain, of the sets that were measured on every task."""
        gains = [self.gains(task) for task in self.tables]
        common = [config for config in gains[0] if all(config in scores for scores in gains)]
        largest = [max(*scores.values(), 1e-9) for scores in gains]
        return {
            c: statistics.mean(scores[c] / most for scores, most in zip(gains, largest, strict=True))
            for c in common
        }


def best(scores: Scores, count: int) -> list[HeuristicConfig]:
    return sorted(scores, key=lambda config: (-scores[config], str(config)))[:count]


def changes(config: HeuristicConfig) -> str:
    """The thresholds that differ from the defaults."""
    default = asdict(HeuristicConfig())
    return (
        ", ".join(f"{name}={value!r}" for name, value in asdict(config).items() if value != default[name])
        or "defaults"
    )


def tune(options: argparse.Namespace) -> None:
    start = time.process_time()
    rng = np.random.default_rng(stream_seed(0, "sampling"))
    search = Search(options.tasks, options.envs)
    drawn = options.candidates - len(BY_HAND)
    search.measure(
        options.tasks, [*BY_HAND, *(replace(HeuristicConfig(), **draw(rng, SPACE)) for _ in range(drawn))]
    )
    for _ in range(options.generations):
        search.measure(options.tasks, variants(best(search.together(), PARENTS), options.children, rng))
    for task in options.tasks:
        search.measure([task], variants(best(search.gains(task), PARENTS), options.children, rng))
    chosen = best(search.together(), 1)[0]
    gains = {task: search.gains(task)[chosen] for task in options.tasks}
    print(f"{GENERAL}: {changes(chosen)}", flush=True)
    write(options.out, GENERAL, chosen, sum(search.envs.values()), statistics.mean(gains.values()))
    for task in options.tasks:
        own = best(search.gains(task), 1)[0]
        gain = search.gains(task)[own]
        print(f"{task}: general {gains[task]:.1f}, its own {gain:.1f} with {changes(own)}", flush=True)
        write(options.out, task, own, search.envs[task], gain)
    print(f"{time.process_time() - start:.0f} s of CPU time; thresholds in {options.out}")


def write(directory: Path, name: str, config: HeuristicConfig, envs: int, gain: float) -> None:
    content = {
        "task": name,
        "command": shlex.join(["python", "-m", "benchmarks.tune_heuristic", *sys.argv[1:]]),
        "envs": envs,
        "gain": gain,
        "config": asdict(config),
        "version": THRESHOLDS_VERSION,
    }
    (directory / f"{name}{THRESHOLDS}").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def table(options: argparse.Namespace) -> None:
    """One set for all tasks against one set for each, in points of J."""
    envs = range(FIRST_UNSEEN, FIRST_UNSEEN + options.envs)
    print(
        "| task | never grow | general − never | its own − never | its own − general |\n|---|---|---|---|---|"
    )
    for task in options.tasks:
        never, general, own = (
            np.array(objectives(task, config, envs))
            for config in (None, tuned_thresholds(), tuned_thresholds(task))
        )
        cells = [show(values.tolist()) for values in (never, general - never, own - never, own - general)]
        print(f"| {task} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("tune", "table"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="tasks to search for")
    parser.add_argument("--candidates", type=int, default=12, help="candidates in the first generation")
    parser.add_argument("--generations", type=int, default=2, help="generations of variants for all tasks")
    parser.add_argument("--children", type=int, default=4, help="variants in a generation")
    parser.add_argument(
        "--envs", type=int, default=16, help="envs per candidate; twice as many where a task draws conditions"
    )
    parser.add_argument("--out", type=Path, default=SHIPPED, help="directory for the thresholds")
    options = parser.parse_args()
    use_one_core()
    (tune if options.command == "tune" else table)(options)


if __name__ == "__main__":
    main()
