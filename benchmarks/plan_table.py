"""J of every plan in every world, measured once: algorithms that choose plans are then compared in seconds.

A *world* is a numbered training network of a task. A *plan* says which seed grows in which slot. Its seeds
are planted from the first decision on, one per epoch, in the order of the slots.

`python -m benchmarks.plan_table digits_shift` measures 64 plans in 128 worlds. Every finished plan is kept
at once, so a job that was stopped goes on where it was; `--shard 0/2` and `--shard 1/2` divide the plans
between two processes. The last process to finish writes the table, `benchmarks/tables/TASK.safetensors`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

import numpy as np
import orjson
import torch

from esper._archive import read_archive, write_archive
from esper.leyline import EsperError, stream_seed
from esper.proof.episodes import play
from esper.runtime.tasks import TaskSpec, parse_task
from esper.simic.training.evaluation import TRAINING
from esper.tamiyo import FixedSchedule, Planting

TABLES = Path(__file__).parent / "tables"
KIND = "plan-table"
FIGURES = ("objective", "accuracy", "added_params")
Plan = tuple[str | None, ...]
"""The blueprint in each slot of the task; None: nothing grows there."""


@dataclass(frozen=True, slots=True)
class PlanTable:
    """Figures of one task, [plans, worlds] each."""

    task: str
    plans: tuple[Plan, ...]
    first_world: int
    objective: np.ndarray
    """J in [0, 1]."""
    accuracy: np.ndarray
    """Committed validation accuracy in percent."""
    added_params: np.ndarray


def draw_plans(task: TaskSpec, number: int) -> tuple[Plan, ...]:
    """Not to grow, and `number` − 1 other plans: all of them, in order, or as many drawn without
    replacement."""
    choices: tuple[str | None, ...] = (None, *task.blueprints)
    total = len(choices) ** len(task.slots)
    if total <= number:
        return tuple(product(choices, repeat=len(task.slots)))
    rng = np.random.default_rng(stream_seed(TRAINING, "sampling"))
    drawn: dict[Plan, None] = {(None,) * len(task.slots): None}
    while len(drawn) < number:
        drawn[tuple(choices[i] for i in rng.integers(len(choices), size=len(task.slots)))] = None
    return tuple(drawn)


def schedule(task: TaskSpec, plan: Plan) -> tuple[Planting, ...]:
    """The plantings of a plan, one per epoch from the first on."""
    seeds = [(slot, blueprint) for slot, blueprint in enumerate(plan) if blueprint is not None]
    return tuple(
        Planting(1 + i, slot, blueprint, tempo=task.tempo) for i, (slot, blueprint) in enumerate(seeds)
    )


def measure(task: TaskSpec, plan: Plan, worlds: Sequence[int]) -> dict[str, list[float]]:
    """The figures of one plan in these worlds."""
    plantings = schedule(task, plan)
    outcomes = [
        played.outcome
        for played in play(
            task,
            lambda envs: FixedSchedule([plantings] * len(envs)),
            root_seed=TRAINING,
            networks=worlds,
        )
    ]
    return {
        "objective": [outcome.objective for outcome in outcomes],
        "accuracy": [outcome.committed_accuracy for outcome in outcomes],
        "added_params": [outcome.added_params for outcome in outcomes],
    }


def finished_plans(parts: Path, name: str) -> dict[int, dict[str, list[float]]]:
    """Figures of the plans that any process has finished, by number. A last line that was cut is ignored."""
    finished = {}
    for path in sorted(parts.glob(f"{name}.*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            record = orjson.loads(line)
            finished[record["plan"]] = record["figures"]
    return finished


def write_table(
    path: Path,
    task: TaskSpec,
    plans: Sequence[Plan],
    first: int,
    finished: dict[int, dict[str, list[float]]],
) -> None:
    tensors = {
        name: torch.tensor([finished[i][name] for i in range(len(plans))], dtype=torch.float32)
        for name in FIGURES
    }
    header = {"kind": KIND, "version": 1, "task": task.name, "first_world": first, "plans": list(plans)}
    path.parent.mkdir(exist_ok=True)
    write_archive(path, tensors, header)


def load_table(name: str) -> PlanTable:
    """The table of a task."""
    path = TABLES / f"{name}.safetensors"
    if not path.exists():
        raise EsperError(f"{path} is missing; `python -m benchmarks.plan_table {name}` makes it")
    tensors, header = read_archive(path, kind=KIND)
    figures = {figure: tensors[figure].double().numpy() for figure in FIGURES}
    plans = tuple(tuple(plan) for plan in header["plans"])
    return PlanTable(header["task"], plans, header["first_world"], **figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task")
    parser.add_argument("--plans", type=int, default=64, help="number of plans, the empty one included")
    parser.add_argument("--worlds", type=int, default=128, help="number of worlds")
    parser.add_argument("--first-world", type=int, default=0, help="number of the first world")
    parser.add_argument("--shard", default="0/1", help="this process and the number of processes: 0/2")
    parser.add_argument("--parts", type=Path, default=Path("runs/plan_table"), help="where plans are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shard, shards = (int(number) for number in options.shard.split("/"))
    task = parse_task(options.task)
    plans = draw_plans(task, options.plans)
    worlds = range(options.first_world, options.first_world + options.worlds)
    options.parts.mkdir(parents=True, exist_ok=True)
    done = finished_plans(options.parts, task.name)
    mine = [number for number in islice(range(len(plans)), shard, None, shards) if number not in done]
    began = time.perf_counter()
    with (options.parts / f"{task.name}.{shard}of{shards}.jsonl").open("ab") as out:
        for count, number in enumerate(mine, 1):
            figures = measure(task, plans[number], worlds)
            out.write(orjson.dumps({"plan": number, "figures": figures}) + b"\n")
            out.flush()
            each = (time.perf_counter() - began) / count
            mean = 100 * np.mean(figures["objective"])
            print(
                f"{task.name}: plan {number} ({', '.join(map(str, plans[number]))}): J {mean:.1f}; "
                f"{count} of {len(mine)}, {each * (len(mine) - count) / 60:.0f} min left",
                flush=True,
            )
    done = finished_plans(options.parts, task.name)
    if len(done) == len(plans):
        path = TABLES / f"{task.name}.safetensors"
        write_table(path, task, plans, options.first_world, done)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
