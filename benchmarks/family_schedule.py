"""The best fixed schedule for a family of worlds, as a rival of policies.

`python -m benchmarks.family_schedule worlds_small` takes the plan with the highest mean J over all worlds of
the family's table (`python -m benchmarks.plan_table`), which are training worlds. In the table a plan names
slots in the order of the task; here in the order in which activations pass them, which means the same in
every host. The result is written to the file that `esper prove --worlds` reads."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from benchmarks.plan_table import Array, Plan, PlanTable, load_table
from benchmarks.table_compare import mean_error
from esper._files import write_atomic
from esper.runtime.tasks import parse_task
from esper.tamiyo.schedules import FamilySchedule, RelativePlanting
from esper.tamiyo.shipped import shipped_schedules


def by_place(table: PlanTable) -> dict[Plan, Array]:
    """J [W] of every plan whose slots are named in the order of execution."""
    worlds = range(table.objective.shape[1])
    places = []  # of each slot of the task, world by world
    for world in worlds:
        task = parse_task(f"{table.task}:{table.first_world + world}")
        passed = [slot for slot in task.outline.execution_order() if slot in task.slots]
        places.append([passed.index(slot) for slot in task.slots])
    row = {plan: i for i, plan in enumerate(table.plans)}
    return {
        plan: table.objective[[row[tuple(plan[place] for place in own)] for own in places], worlds]
        for plan in table.plans
    }


def best_first(objective: Mapping[Plan, Array]) -> list[Plan]:
    return sorted(objective, key=lambda plan: -objective[plan].mean())


def plantings(plan: Plan) -> list[RelativePlanting]:
    """The plan as a schedule that starts at the first decision."""
    return [
        RelativePlanting(place=place, share=0.0, blueprint=name)
        for place, name in enumerate(plan, 1)
        if name is not None
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.family_schedule", description=__doc__)
    parser.add_argument("family")
    parser.add_argument("--out", type=Path, help="file of the schedule (default: the one that ships)")
    given = parser.parse_args(arguments)
    table = load_table(given.family)
    objective = by_place(table)
    ranked, never = best_first(objective), objective[table.plans[0]]
    print("| plan, first slot first | J above never growing |\n|---|---|")
    for plan in ranked[:5]:
        gain = mean_error(100 * (objective[plan] - never))
        print(f"| {', '.join(name or '–' for name in plan)} | {gain} |")
    content = FamilySchedule(
        kind="esper-family-schedule",
        family=given.family,
        command=f"python -m benchmarks.family_schedule {given.family}",
        schedule=plantings(ranked[0]),
    )
    path = given.out or shipped_schedules(given.family)
    write_atomic(path, orjson.dumps(asdict(content), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
