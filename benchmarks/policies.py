"""Policies that do not learn, side by side on the embedded tasks: what a learned one has to beat.

`python -m benchmarks.policies` plays the same fresh envs with each: never growing, random valid actions, the heuristic, and the
fixed schedule that `benchmarks.decision_value` found best. Prints Markdown; differences are paired, intervals are 95 %.
"""
from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.play import EMBEDDED, outcomes, show
from esper.leyline import EpisodeOutcome, PolicyProtocol
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.simic.proof.policies import tuned_thresholds
from esper.tamiyo import AlwaysWait, FixedSchedule, Planting, RandomValid
from esper.tamiyo.heuristic import Heuristic

FIRST = 600_000
"""First env: none of these had a part in choosing a schedule or a threshold."""
SCHEDULES = {
    "digits_baseline": "conv_light r0c0 @1 + norm r0c1 @2 + depthwise r1c0 @3",
    "digits_impaired": "conv_light r0c0 @1 + conv_light r0c1 @2 + depthwise r0c2 @3",
    "digits_scale": "conv_light r0c0 @1 + conv_light r0c1 @2 + conv_light r0c2 @3",
    "digits_shift": "conv_light r0c0 @1",
}
"""The best by J, as decision_value prints them."""
Maker = Callable[[Sequence[int]], PolicyProtocol]


def schedule(task: TaskSpec, text: str) -> list[Planting]:
    """`blueprint slot @epoch`, joined by +."""
    found = re.findall(r"(\w+) (\w+) @(\d+)", text)
    return [Planting(int(epoch), task.slots.index(slot), blueprint) for blueprint, slot, epoch in found]


def makers(task: TaskSpec) -> dict[str, Maker]:
    return {
        "never grow": lambda _: AlwaysWait(),
        "random": lambda envs: RandomValid(0, envs),
        "fixed schedule": lambda envs: FixedSchedule([schedule(task, SCHEDULES[task.name])] * len(envs)),
        "heuristic": lambda envs: Heuristic(tuned_thresholds(task.name), len(envs)),
    }


def table(played: Mapping[str, Sequence[EpisodeOutcome]]) -> str:
    lines = ["| policy | J | − never grow | − fixed schedule | accuracy | added | germinated | fossilized | pruned | rollbacks |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for label, rows in played.items():
        gains = [show([r.objective - o.objective for r, o in zip(rows, played[other], strict=True)]) if other != label else ""
                 for other in ("never grow", "fixed schedule")]
        means = [statistics.mean(getattr(r, field) for r in rows)
                 for field in ("added_params", "germinated", "fossilized", "pruned", "rollbacks")]
        lines.append(f"| {label} | {show([r.objective for r in rows])} | {' | '.join(gains)} | "
                     f"{show([r.committed_accuracy for r in rows], 1)} | {means[0]:.0f} | "
                     f"{' | '.join(f'{mean:.2f}' for mean in means[1:])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=EMBEDDED)
    parser.add_argument("--envs", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for task in map(get_task_spec, options.tasks):
        start = time.process_time()
        played = {label: outcomes(task, range(FIRST, FIRST + options.envs), make) for label, make in makers(task).items()}
        print(f"\n**{task.name}**, {options.envs} envs; fixed schedule: {SCHEDULES[task.name]}\n\n{table(played)}\n\n"
              f"{time.process_time() - start:.0f} s of CPU time", flush=True)


if __name__ == "__main__":
    main()
