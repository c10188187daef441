"""Thresholds for the heuristic: a search on training envs, the choice judged on others.

`python -m benchmarks.tune_heuristic`: a few thought-out candidates and as many random ones play the same envs of each task; then,
task by task, variants of the best do, twice. The best of each task, and the best over all tasks, play more envs; what then
leads is judged on fresh ones beside a network that never grows. Gains are points of J over that network; over all tasks each
counts as a share of the largest gain seen in it.
"""
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.play import EMBEDDED, outcomes, show
from esper.leyline import PolicyProtocol, stream_seed
from esper.runtime.tasks import get_task_spec
from esper.simic.proof.policies import SHIPPED, THRESHOLDS
from esper.tamiyo import AlwaysWait
from esper.tamiyo.heuristic import Heuristic, HeuristicConfig

SCREEN, NARROW, JUDGE = 300_000, 400_000, 500_000
"""First envs of the three parts."""
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
    "min_contribution": (0.0, 1.0, 2.0, 5.0),
    "blueprints": (("conv_light", "depthwise", "mlp_small", "lora", "norm"),
                   ("depthwise", "conv_light", "lora", "mlp_small", "norm")),
}
EAGER = HeuristicConfig(min_progress=0.0, max_progress=0.15, max_rank=1.0, rank_step=1.0, min_tap_ratio=0.0, strong_tap_ratio=0.0,
                        plateau_epochs=3, growth_weight=2.0, depth_price=8.0, max_seeds=3, max_live=3, min_contribution=0.0)
"""One seed after the other from the first epoch on, the first slots first."""
THOUGHT_OUT = (HeuristicConfig(), EAGER, replace(EAGER, strong_tap_ratio=0.9), replace(EAGER, max_rank=0.5),
               replace(EAGER, max_rank=0.5, rank_step=0.5, depth_price=0.2, growth_weight=4.0, min_tap_ratio=0.8))
Table = dict[HeuristicConfig | None, list[float]]
"""J of each env, by configuration; None never grows."""
Gains = dict[HeuristicConfig, float]


def draw(rng: np.random.Generator, names: Iterable[str]) -> dict[str, Any]:
    return {name: SPACE[name][rng.integers(len(SPACE[name]))] for name in names}


def variants(parents: Sequence[HeuristicConfig], count: int, rng: np.random.Generator) -> list[HeuristicConfig]:
    """The parents in turn, each with two thresholds drawn anew."""
    return [replace(parents[i % len(parents)], **draw(rng, rng.choice(list(SPACE), 2, replace=False))) for i in range(count)]


def policy_of(config: HeuristicConfig | None, envs: Sequence[int]) -> PolicyProtocol:
    return AlwaysWait() if config is None else Heuristic(config, len(envs))


def measure(task: str, configs: Iterable[HeuristicConfig | None], first: int, count: int) -> Table:
    found: Table = {}
    for config in dict.fromkeys(configs):
        played = outcomes(get_task_spec(task), range(first, first + count), partial(policy_of, config))
        found[config] = [outcome.objective for outcome in played]
    return found


def gains(table: Table) -> Gains:
    static = statistics.mean(table[None])
    return {config: 100 * (statistics.mean(values) - static) for config, values in table.items() if config is not None}


def joint(by_task: dict[str, Gains]) -> Gains:
    """Of what every task has seen: the mean over tasks of each gain as a share of the task's largest."""
    shared = set.intersection(*(set(scores) for scores in by_task.values()))
    return {config: statistics.mean(scores[config] / max(max(scores.values()), 1.0) for scores in by_task.values())
            for config in shared}


def best(scores: Gains, count: int) -> list[HeuristicConfig]:
    return sorted(scores, key=lambda config: (-scores[config], str(config)))[:count]


def screen(tasks: Sequence[str], *, candidates: int, children: int, envs: int) -> dict[str, Gains]:
    """Gains on few envs of the first candidates in all tasks, and of each task's own variants in it."""
    rng = np.random.default_rng(stream_seed(0, "sampling"))
    pool = [*THOUGHT_OUT, *(replace(HeuristicConfig(), **draw(rng, SPACE)) for _ in range(candidates - len(THOUGHT_OUT)))]
    found: dict[str, Gains] = {}
    for task in tasks:
        # Drawn conditions differ more than anything else does.
        count = envs * (1 if get_task_spec(task).conditions is None else 2)
        table = measure(task, [None, *pool], SCREEN, count)
        for _ in range(2):
            table |= measure(task, variants(best(gains(table), 3), children, rng), SCREEN, count)
        found[task] = gains(table)
        for config in best(found[task], 3):
            print(f"{task}: {found[task][config]:.1f} with {changes(config)}", flush=True)
    return found


def changes(config: HeuristicConfig) -> str:
    """What differs from the defaults."""
    default = asdict(HeuristicConfig())
    return ", ".join(f"{name}={value!r}" for name, value in asdict(config).items() if value != default[name]) or "defaults"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=EMBEDDED)
    parser.add_argument("--candidates", type=int, default=10, help="that meet all tasks")
    parser.add_argument("--children", type=int, default=5, help="variants of the best in each task, twice")
    parser.add_argument("--screen", type=int, default=16, help="envs that they meet; twice as many with conditions")
    parser.add_argument("--keep", type=int, default=3, help="finalists of each task, and over all tasks")
    parser.add_argument("--narrow", type=int, default=32, help="envs that the finalists meet")
    parser.add_argument("--judge", type=int, default=64, help="fresh envs that judge")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="where each task's thresholds go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.process_time()
    screened = screen(options.tasks, candidates=options.candidates, children=options.children, envs=options.screen)
    everywhere = dict.fromkeys([*best(joint(screened), options.keep), *(best(scores, 1)[0] for scores in screened.values())])
    narrowed = {task: gains(measure(task, [None, *everywhere, *best(scores, options.keep)], NARROW, options.narrow))
                for task, scores in screened.items()}
    default = best(joint(narrowed), 1)[0]
    print(f"\nfor all tasks: {changes(default)}\n\n| task | chosen for | changes | J | J − static |\n|---|---|---|---|---|")
    for task, scores in narrowed.items():
        own = best(scores, 1)[0]
        judged = measure(task, [None, default, own], JUDGE, options.judge)
        for label, config in (("all tasks", default), ("this task", own)):
            gain = [value - still for value, still in zip(judged[config], judged[None], strict=True)]
            print(f"| {task} | {label} | {changes(config)} | {show(judged[config])} | {show(gain)} |", flush=True)
        content = {"task": task, "command": f"python -m benchmarks.tune_heuristic --tasks {' '.join(options.tasks)}",
                   "gain": scores[own], "config": asdict(own)}
        (options.out / f"{task}{THRESHOLDS}").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"\n{time.process_time() - start:.0f} s of CPU time; thresholds in {options.out}")


if __name__ == "__main__":
    main()
