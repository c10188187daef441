"""Growth against networks that have the same seeds from the first epoch, on held-out networks at equal FLOPs.

`python -m benchmarks.schedule_final` plays the best schedule of each embedded task, networks that start with
its seeds and train for the same FLOPs (whole steps, rounded up in their favour), and networks that never
grow. It prints the paired differences with their 95 % intervals.

With `--seeds r0c0:depthwise r0c1:conv_light` it plays that schedule, one graft after each of the first
epochs, instead of the one that ships."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.play import EMBEDDED
from esper._statistics import estimate, paired
from esper.leyline import TempoAction
from esper.proof.cohorts import planned_fossils
from esper.proof.compare import Cohorts, ProofConfig
from esper.proof.policies import simple_makers
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.scripts.process import use_one_core
from esper.simic.training.evaluation import HELD_OUT
from esper.simic.training.probe import task_schedules
from esper.tamiyo import FixedSchedule, Planting
from esper.tamiyo.schedules import Schedule
from esper.tamiyo.shipped import shipped_schedules

FIRST = 10_000
"""Number of the first held-out network: no other comparison uses these."""


def grafts(task: TaskSpec, seeds: Sequence[str]) -> Schedule:
    """The schedule that plants `slot:blueprint` one by one from the first decision on."""
    pairs = [seed.partition(":") for seed in seeds]
    return tuple(
        Planting(epoch, task.slots.index(slot), blueprint, tempo=TempoAction.INSTANT)
        for epoch, (slot, _, blueprint) in enumerate(pairs, 1)
    )


def row(name: str, networks: int, first: int, seeds: Sequence[str] | None = None) -> str:
    """One line of the table."""
    task = get_task_spec(name)
    if seeds is None:
        schedule = task_schedules(task, shipped_schedules(name)).best.schedule
    else:
        schedule = grafts(task, seeds)
    cohorts = Cohorts(task, ProofConfig(networks=networks, first_network=first), lambda *_: lambda _: None)
    cohorts.add("static", simple_makers(task, HELD_OUT)["static"])
    cohorts.add("grown", lambda envs: FixedSchedule([schedule] * len(envs)))
    (grown,) = cohorts.played["grown"]
    fossils = planned_fossils(task, schedule)
    cohorts.add_grown("from_start", grown, {p.network: fossils for p in grown})
    objective = {cohort: 100 * cohorts.values(cohort, "J").T for cohort in cohorts.played}
    flops = {cohort: cohorts.values(cohort, "flops").mean() for cohort in cohorts.played}
    cells = [f"{estimate(values).value:.1f}" for values in objective.values()]
    for a, b in (("from_start", "grown"), ("grown", "static")):
        difference = paired(objective[a], objective[b])
        cells.append(f"{difference.value:.2f} [{difference.low:.2f}, {difference.high:.2f}]")
    cells.append(f"{flops['from_start'] / flops['grown']:.3f}")
    return f"| `{name}` | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=EMBEDDED, default=EMBEDDED, help="tasks to play")
    parser.add_argument("--networks", type=int, default=384, help="networks per task")
    parser.add_argument("--first-network", type=int, default=FIRST, help="number of the first network")
    parser.add_argument("--seeds", nargs="+", metavar="SLOT:BLUEPRINT", help="a schedule of one task")
    options = parser.parse_args()
    if options.seeds and len(options.tasks) != 1:
        parser.error(f"--seeds is a schedule for one task, --tasks names {len(options.tasks)}")
    use_one_core()
    print("| task | never | grown | from the start | from the start − grown | grown − never | FLOPs |")
    print("|---|---|---|---|---|---|---|")
    for name in options.tasks:
        print(row(name, options.networks, options.first_network, options.seeds), flush=True)


if __name__ == "__main__":
    main()
