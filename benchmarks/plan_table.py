"""J of every plan in every world, measured once: algorithms that choose plans are then compared in seconds.

A *world* is a numbered training network of a task; of a family of tasks, for example `worlds_small`, it is
network 0 of the task with that number. A *plan* says which seed grows in which slot. Its seeds are planted
from the first decision on, one per epoch, in the order of the slots. The table also holds what is observed at
that decision, so that a policy sees what it would see in the real environment.

`python -m benchmarks.plan_table digits_shift` measures all 64 plans in 128 worlds. Every finished plan (of a
family: every finished world) is kept at once, so a job that was stopped goes on where it was; `--shard 0/2`
and `--shard 1/2` divide the work between two processes. The last process to finish writes the table,
`benchmarks/tables/TASK.safetensors`. `--blueprints` leaves out some of the task's blueprints: with three of
them in three slots all 64 plans can be measured, and a learner may choose any.

P plans, W worlds, S slots, B blueprints of the task."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import torch
from torch import Tensor

from esper._archive import read_archive, require_equal, write_archive
from esper.kasmina import FlopMeter
from esper.leyline import EpisodeOutcome, EsperError, blueprint_index, stream_seed
from esper.leyline.errors import allowed
from esper.proof.episodes import finish_round, play
from esper.runtime.tasks import TaskSpec, draw_condition, parse_task
from esper.runtime.worlds import FAMILIES
from esper.scripts.process import use_one_core
from esper.simic.agent.plan_values import Sight
from esper.simic.training.evaluation import TRAINING, in_populations, open_env
from esper.simic.training.vector_env import VectorEnv
from esper.tamiyo import FixedSchedule, Planting, features

TABLES = Path(__file__).parent / "tables"
KIND, VERSION = "plan-table", 2
FIGURES = ("objective", "accuracy", "added_params")
ROWS = 8
"""A population has a multiple of this many networks."""
Array = npt.NDArray[np.float64]
Plan = tuple[str | None, ...]
"""The blueprint in each slot of the task; None: nothing grows there."""
Figures = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class PlanTable:
    """Figures of one task, [P, W] each, and what is seen of each world before anything grows in it."""

    task: str
    blueprints: tuple[str, ...]
    plans: tuple[Plan, ...]
    """The first grows nothing."""
    first_world: int
    env_steps: int
    """Env-steps that one episode counts: the epochs of the longest one."""
    waste_price: float
    """κ of the first world: what J loses for a seed that is not kept."""
    objective: Array
    """J in [0, 1]."""
    accuracy: Array
    """Committed validation accuracy in percent."""
    added_params: Array
    sight: Sight
    """Of W worlds; the quotes are those of `blueprints`."""
    crippled: npt.NDArray[np.bool_]
    """[W, blocks]: the blocks of each host that are crippled; no columns if the task draws none."""

    def __post_init__(self) -> None:
        if any(blueprint is not None for blueprint in self.plans[0]):
            raise EsperError(f"table of {self.task}: the first plan is {self.plans[0]}, must grow nothing")

    def rows(self) -> npt.NDArray[np.int64]:
        """[P, S]: the plans as indices into `blueprints`, −1 where nothing grows."""
        index = {None: -1, **{name: i for i, name in enumerate(self.blueprints)}}
        return np.array([[index[blueprint] for blueprint in plan] for plan in self.plans])


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


def restrict(task: TaskSpec, blueprints: Sequence[str]) -> TaskSpec:
    """The task with these of its blueprints only; all of them if none is named."""
    unknown = [name for name in blueprints if name not in task.blueprints]
    if unknown:
        raise EsperError(f"{task.name}: {unknown[0]!r} is no blueprint of it; {allowed(task.blueprints)}")
    return replace(task, blueprints=tuple(blueprints)) if blueprints else task


def schedule(task: TaskSpec, plan: Plan) -> tuple[Planting, ...]:
    """The plantings of a plan, one per epoch from the first on."""
    seeds = [(slot, blueprint) for slot, blueprint in enumerate(plan) if blueprint is not None]
    return tuple(
        Planting(1 + i, slot, blueprint, tempo=task.tempo) for i, (slot, blueprint) in enumerate(seeds)
    )


def _figures(outcomes: Sequence[EpisodeOutcome]) -> Figures:
    return {
        "objective": [outcome.objective for outcome in outcomes],
        "accuracy": [outcome.committed_accuracy for outcome in outcomes],
        "added_params": [outcome.added_params for outcome in outcomes],
    }


def first_sight(env: VectorEnv, task: TaskSpec) -> Sight:
    """What is seen of fresh networks after their first epoch."""
    env.begin_round(0)
    env.train_epoch(1)
    env.validate(1)
    obs, _ = env.observe(env.sense(1))
    sight = Sight.of(obs, torch.arange(len(obs.base)))
    offered = [blueprint_index(name) for name in task.blueprints]
    return sight._replace(quotes=sight.quotes[:, :, offered])


class OneTask:
    """Worlds are networks of one task. A piece of work is one plan in all worlds."""

    def __init__(self, task: TaskSpec, plans: int, worlds: range, blueprints: Sequence[str] = ()) -> None:
        self.task, self.worlds, self.name = restrict(task, blueprints), worlds, task.name
        self.plans = draw_plans(self.task, plans)
        self.pieces = [[*plan] for plan in self.plans]

    def measure(self, piece: int) -> Figures:
        plantings = schedule(self.task, self.plans[piece])
        played = play(
            self.task,
            lambda envs: FixedSchedule([plantings] * len(envs)),
            root_seed=TRAINING,
            networks=self.worlds,
        )
        return _figures([one.outcome for one in played])

    def figures(self, finished: dict[int, Figures]) -> dict[str, Tensor]:
        return {name: torch.tensor([finished[i][name] for i in range(len(self.pieces))]) for name in FIGURES}

    def sight(self) -> Sight:
        size = self.task.population
        parts = [
            first_sight(open_env(self.task, networks, root_seed=TRAINING, rows=size), self.task)
            for networks in in_populations(self.worlds, size)
        ]
        return Sight(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def crippled(self) -> Tensor:
        if self.task.conditions is None:
            return torch.zeros(len(self.worlds), 0, dtype=torch.bool)
        drawn = [draw_condition(self.task, TRAINING, 0, world).crippled for world in self.worlds]
        return torch.tensor(drawn, dtype=torch.bool)


class Family:
    """Worlds are tasks of one family, which have the same number of slots and the same blueprints. A piece of
    work is one world with all plans: one population of equal networks."""

    def __init__(self, name: str, plans: int, worlds: range, blueprints: Sequence[str] = ()) -> None:
        self.name, self.worlds, self.blueprints = name, worlds, blueprints
        self.task = self._task(0)
        self.plans = draw_plans(self.task, plans)
        self.pieces = [[f"{name}:{world}"] for world in worlds]

    def _task(self, piece: int) -> TaskSpec:
        return restrict(parse_task(f"{self.name}:{self.worlds[piece]}"), self.blueprints)

    def _open(self, task: TaskSpec, networks: int) -> VectorEnv:
        rows = -(-networks // ROWS) * ROWS
        return open_env(task, range(networks), root_seed=TRAINING, rows=rows, twins=rows)

    def measure(self, piece: int) -> Figures:
        task = self._task(piece)
        env = self._open(task, len(self.plans))
        env.begin_round(0)
        policy = FixedSchedule([schedule(task, plan) for plan in self.plans])
        played = finish_round(env, task, policy, FlopMeter(task.build_model(1, [0])))
        return _figures([one.outcome for one in played])

    def figures(self, finished: dict[int, Figures]) -> dict[str, Tensor]:
        return {
            name: torch.tensor([finished[i][name] for i in range(len(self.pieces))]).T for name in FIGURES
        }

    def sight(self) -> Sight:
        tasks = [self._task(piece) for piece in range(len(self.pieces))]
        parts = [first_sight(self._open(task, 1), task) for task in tasks]
        return Sight(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def crippled(self) -> Tensor:
        return torch.zeros(len(self.worlds), 0, dtype=torch.bool)


Work = OneTask | Family


def digest(work: Work) -> str:
    """Of all plans and worlds of a table."""
    return sha256(orjson.dumps([work.plans, [*work.worlds]])).hexdigest()[:16]


def finished_pieces(parts: Path, work: Work) -> dict[int, Figures]:
    """Figures of the pieces that any process has finished, by number. A last line that was cut is ignored. A
    piece of another table, with other plans or worlds, is refused."""
    finished = {}
    for path in sorted(parts.glob(f"{work.name}.*of*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            record = orjson.loads(line)
            for name, mine in (("table", digest(work)), ("piece", work.pieces[record["number"]])):
                require_equal(path, f"{name} of piece {record['number']}", record[name], mine)
            finished[record["number"]] = record["figures"]
    return finished


def write_table(path: Path, work: Work, finished: dict[int, Figures]) -> None:
    tensors = {name: figure.float() for name, figure in work.figures(finished).items()}
    tensors |= {f"sight.{name}": part for name, part in work.sight()._asdict().items()}
    tensors["crippled"] = work.crippled()
    header = {
        "kind": KIND,
        "version": VERSION,
        "task": work.name,
        "features": features.schema(),
        "blueprints": list(work.task.blueprints),
        "plans": list(work.plans),
        "first_world": work.worlds[0],
        "env_steps": work.task.episode_length,
        "waste_price": work.task.objective.waste_price,
    }
    path.parent.mkdir(exist_ok=True)
    write_archive(path, tensors, header)


def load_table(name: str) -> PlanTable:
    """The table of a task."""
    path = TABLES / f"{name}.safetensors"
    if not path.exists():
        raise EsperError(f"{path} is missing; `python -m benchmarks.plan_table {name}` makes it")
    tensors, header = read_archive(path, kind=KIND)
    require_equal(path, "version", header["version"], VERSION)
    require_equal(path, "features", header["features"], features.schema())
    wanted: dict[str, Any] = {figure: tensors[figure].double().numpy() for figure in FIGURES}
    return PlanTable(
        task=header["task"],
        blueprints=tuple(header["blueprints"]),
        plans=tuple(tuple(plan) for plan in header["plans"]),
        first_world=header["first_world"],
        env_steps=header["env_steps"],
        waste_price=header["waste_price"],
        sight=Sight(*(tensors[f"sight.{part}"] for part in Sight._fields)),
        crippled=tensors["crippled"].numpy(),
        **wanted,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", help="a task, or a family of tasks")
    parser.add_argument("--plans", type=int, default=128, help="largest number of plans, the empty one too")
    parser.add_argument("--worlds", type=int, default=128, help="number of worlds")
    parser.add_argument("--first-world", type=int, default=0, help="number of the first world")
    parser.add_argument("--blueprints", nargs="+", default=[], help="of the task's; default: all")
    parser.add_argument("--shard", default="0/1", help="this process and the number of processes: 0/2")
    parser.add_argument("--parts", type=Path, default=Path("runs/plan_table"), help="where pieces are kept")
    options = parser.parse_args()
    use_one_core()
    shard, shards = (int(number) for number in options.shard.split("/"))
    worlds = range(options.first_world, options.first_world + options.worlds)
    work: Work
    if options.task in FAMILIES:
        work = Family(options.task, options.plans, worlds, options.blueprints)
    else:
        work = OneTask(parse_task(options.task), options.plans, worlds, options.blueprints)
    options.parts.mkdir(parents=True, exist_ok=True)
    done = finished_pieces(options.parts, work)
    mine = [number for number in islice(range(len(work.pieces)), shard, None, shards) if number not in done]
    began = time.perf_counter()
    with (options.parts / f"{work.name}.{shard}of{shards}.jsonl").open("ab") as out:
        for count, number in enumerate(mine, 1):
            piece, figures = work.pieces[number], work.measure(number)
            record = {"number": number, "table": digest(work), "piece": piece, "figures": figures}
            out.write(orjson.dumps(record) + b"\n")
            out.flush()
            each = (time.perf_counter() - began) / count
            mean = 100 * np.mean(figures["objective"])
            print(
                f"{work.name}: {', '.join(map(str, piece))}: J {mean:.1f}; "
                f"{count} of {len(mine)}, {each * (len(mine) - count) / 60:.0f} min left",
                flush=True,
            )
    done = finished_pieces(options.parts, work)
    if len(done) == len(work.pieces):
        path = TABLES / f"{work.name}.safetensors"
        write_table(path, work, done)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
