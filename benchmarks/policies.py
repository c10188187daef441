"""Policies that do not learn, compared on the embedded tasks: the rivals of a learned policy.

`python -m benchmarks.policies` runs each on the same new envs: never growing, random valid actions, the
heuristic, and the fixed schedule that ships for the task. Prints Markdown; differences are paired, intervals
are 95 %."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.play import EMBEDDED, outcomes, show
from esper.leyline import EpisodeOutcome, PolicyProtocol
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.tamiyo import AlwaysWait, FixedSchedule, RandomValid
from esper.tamiyo.heuristic import Heuristic
from esper.tamiyo.schedules import Schedule, load_schedules
from esper.tamiyo.shipped import shipped_schedules, tuned_thresholds

FIRST = 600_000
"""Number of the first env. No schedule or threshold was chosen on these envs."""
Maker = Callable[[Sequence[int]], PolicyProtocol]


def makers(task: TaskSpec, plan: Schedule) -> dict[str, Maker]:
    return {
        "never grow": lambda _: AlwaysWait(),
        "random": lambda envs: RandomValid(0, envs),
        "fixed schedule": lambda envs: FixedSchedule([plan] * len(envs)),
        "heuristic": lambda envs: Heuristic(tuned_thresholds(task.name), len(envs)),
    }


def table(played: Mapping[str, Sequence[EpisodeOutcome]]) -> str:
    columns = (
        "policy",
        "J",
        "− never grow",
        "− fixed schedule",
        "accuracy",
        "added",
        "germinated",
        "fossilized",
        "pruned",
        "rollbacks",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for label, rows in played.items():
        gains = [
            show([r.objective - o.objective for r, o in zip(rows, played[other], strict=True)])
            if other != label
            else ""
            for other in ("never grow", "fixed schedule")
        ]
        means = [
            statistics.mean(getattr(r, field) for r in rows)
            for field in ("added_params", "germinated", "fossilized", "pruned", "rollbacks")
        ]
        lines.append(
            f"| {label} | {show([r.objective for r in rows])} | {' | '.join(gains)} | "
            f"{show([r.committed_accuracy for r in rows], 1)} | {means[0]:.0f} | "
            f"{' | '.join(f'{mean:.2f}' for mean in means[1:])} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=EMBEDDED)
    parser.add_argument("--envs", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for task in map(get_task_spec, options.tasks):
        start = time.process_time()
        plan = load_schedules(
            shipped_schedules(task.name), task.name, slots=task.slots, blueprints=task.blueprints
        ).best.schedule
        played = {
            label: outcomes(task, range(FIRST, FIRST + options.envs), make)
            for label, make in makers(task, plan).items()
        }
        words = " + ".join(f"{p.blueprint} {task.slots[p.slot]} @{p.epoch}" for p in plan) or "nothing"
        print(
            f"\n**{task.name}**, {options.envs} envs; fixed schedule: {words}\n\n{table(played)}\n\n"
            f"{time.process_time() - start:.0f} s of CPU time",
            flush=True,
        )


if __name__ == "__main__":
    main()
