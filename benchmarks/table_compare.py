"""Learners against each other on a table of plans: J against env-steps, one curve per algorithm.

`python -m benchmarks.table_compare digits_shift` runs every algorithm with 20 random seeds and 60,000
env-steps. Each random seed also draws which worlds are learned in and which are judged in, the same for all
algorithms, so differences are paired. Every finished run is kept at once; a job that was stopped goes on
where it was, and `--shard 0/2` and `--shard 1/2` divide the runs between two processes. At the end, or with
`--show`, the table is printed and written to `benchmarks/tables/TASK.md`, the plot to `TASK.svg` beside it.

Figures are J in points above never growing, means over random seeds with their standard error."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

from benchmarks.curves import Line, draw
from benchmarks.plan_table import TABLES, PlanTable, load_table
from benchmarks.table_learners import (
    ENVS,
    Learned,
    Split,
    best_single,
    chosen_objective,
    halve,
    learn_ppo,
    learn_values,
    oracle,
    ppo_variants,
    search,
    search_at_random,
    values_variants,
)
from esper.scripts.process import use_one_core

POINTS = 8
"""Points of a curve."""
Array = npt.NDArray[np.float64]
Run = Callable[[PlanTable, Split, int], Learned]


@dataclass(frozen=True, slots=True)
class Budget:
    """What each run may spend."""

    rounds: int
    every: int
    """Rounds between two points of a curve."""
    steps: tuple[int, ...]
    """Env-steps at the points; a search spends each of them alone."""

    @classmethod
    def of(cls, table: PlanTable, env_steps: int) -> Budget:
        each = ENVS * table.env_steps
        rounds = max(1, env_steps // each)
        every = max(1, rounds // POINTS)
        ends = sorted({*range(every, rounds + 1, every), rounds})
        return cls(rounds, every, tuple(end * each for end in ends))


def algorithms(table: PlanTable, budget: Budget) -> dict[str, Run]:
    """All algorithms by name, in the order of the table."""
    runs: dict[str, Run] = {}
    for name, variant in ppo_variants(budget.rounds).items():
        runs[name] = lambda t, s, seed, variant=variant: learn_ppo(  # type: ignore[misc]
            t, s, variant, seed=seed, rounds=budget.rounds, every=budget.every
        )
    for name, own in values_variants().items():
        runs[name] = lambda t, s, seed, own=own: learn_values(  # type: ignore[misc]
            t, s, own, seed=seed, rounds=budget.rounds, every=budget.every
        )
    searches = {"random plan search": search_at_random, "successive halving": halve}
    for name, find in searches.items():
        runs[name] = partial(_search, find, budget.steps, False)
    if table.crippled.shape[1]:
        runs["successive halving with labels"] = partial(_search, halve, budget.steps, True)
    return runs


def _search(
    find: Callable[[PlanTable, npt.NDArray[np.int64], int, np.random.Generator], int],
    budgets: Sequence[int],
    labels: bool,
    table: PlanTable,
    split: Split,
    seed: int,
) -> Learned:
    return search(table, split, find, seed=seed, budgets=budgets, labels=labels)


# -- figures -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curve:
    """One algorithm over all random seeds, in points of J above never growing."""

    steps: list[int]
    greedy: Array  # [seeds, points]
    sampled: Array  # [seeds, points]
    explained: Array  # [seeds, updates]; no columns without a critic
    value_ratio: Array  # [seeds, updates]


def above_never(table: PlanTable, runs: Mapping[int, Learned]) -> Curve:
    """The curves of one algorithm, by random seed."""
    seeds = sorted(runs)
    never = np.array([chosen_objective(table, Split.drawn(table, seed).test, 0) for seed in seeds])[:, None]
    curves = np.array([runs[seed].curve for seed in seeds])
    return Curve(
        steps=[int(step) for step in curves[0, :, 0]],
        greedy=100 * (curves[:, :, 1] - never),
        sampled=100 * (curves[:, :, 2] - never),
        explained=np.array([runs[seed].explained for seed in seeds]),
        value_ratio=np.array([runs[seed].value_ratio for seed in seeds]),
    )


def mean_error(values: Array) -> str:
    """Mean and standard error over random seeds."""
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{values.mean():.1f} ± {error:.1f}"


def markdown(table: PlanTable, curves: Mapping[str, Curve], seeds: Sequence[int]) -> str:
    """One row per algorithm: half and full budget, greedy and sampled; health of the critic."""
    splits = [Split.drawn(table, seed) for seed in seeds]
    never = np.array([chosen_objective(table, split.test, 0) for split in splits])
    title = (
        f"Table of {table.task}: {len(table.plans)} plans, {table.objective.shape[1]} worlds, "
        f"{len(seeds)} random seeds. J of never growing {mean_error(100 * never)}. Points of J above never "
        "growing on worlds that were not learned in; ± is the standard error over random seeds."
    )
    columns = (
        "algorithm",
        "env-steps",
        "half the budget",
        "whole budget",
        "sampled",
        "explained variance from update 3",
        "returns within a factor of 2 of V's scale",
    )
    lines = [title, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, curve in curves.items():
        half = int(np.argmin(np.abs(np.array(curve.steps) - curve.steps[-1] / 2)))
        health = "– | –"
        if curve.explained.size:
            late, ratio = curve.explained[:, 2:], curve.value_ratio
            share = ((ratio >= 0.5) & (ratio <= 2)).mean()
            health = f"{late.mean():.2f} (above 0.5 in {100 * (late > 0.5).mean():.0f} %) | {share:.2f}"
        lines.append(
            f"| {name} | {curve.steps[-1]:,} | {mean_error(curve.greedy[:, half])} | "
            f"{mean_error(curve.greedy[:, -1])} | {mean_error(curve.sampled[:, -1])} | {health} |"
        )
    for name, reference in (("best single plan", best_single), ("best plan of each world", oracle)):
        gains = 100 * (np.array([reference(table, split) for split in splits]) - never)
        lines.append(f"| {name}, in hindsight | – | – | {mean_error(gains)} | – | – | – |")
    return "\n".join(lines) + "\n"


def svg(table: PlanTable, curves: Mapping[str, Curve], seeds: Sequence[int]) -> str:
    """The curves as a drawing."""
    title = (
        f"{table.task}: J above never growing, points ({len(seeds)} random seeds, band: one standard error)"
    )
    return draw(title, {name: Line(curve.steps, curve.greedy) for name, curve in curves.items()})


# -- the command ---------------------------------------------------------------------------------------------


def finished_runs(parts: Path, table: PlanTable, env_steps: int) -> dict[tuple[str, int], Learned]:
    """Runs that any process has finished on a table of this size with this budget, by algorithm and random
    seed. A last line that was cut is ignored."""
    finished = {}
    for path in sorted(parts.glob(f"{table.task}.*of*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            record = orjson.loads(line)
            if record["env_steps"] == env_steps and record["table"] == list(table.objective.shape):
                finished[record["algorithm"], record["seed"]] = Learned(**record["learned"])
    return finished


def show(table: PlanTable, finished: Mapping[tuple[str, int], Learned], names: Sequence[str]) -> str:
    """Write table and plot of the random seeds that every algorithm has finished; returns the table."""
    seeds = sorted(set.intersection(*({seed for name, seed in finished if name == own} for own in names)))
    if not seeds:
        return "no random seed is finished with all algorithms\n"
    curves = {name: above_never(table, {seed: finished[name, seed] for seed in seeds}) for name in names}
    text = markdown(table, curves, seeds)
    (TABLES / f"{table.task}.md").write_text(text)
    (TABLES / f"{table.task}.svg").write_text(svg(table, curves, seeds))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.table_compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task")
    parser.add_argument("--seeds", type=int, default=20, help="number of random seeds")
    parser.add_argument("--env-steps", type=int, default=60_000, help="budget of each run")
    parser.add_argument("--only", nargs="+", help="names of some algorithms")
    parser.add_argument("--shard", default="0/1", help="this process and the number of processes: 0/2")
    parser.add_argument("--parts", type=Path, default=Path("runs/table_compare"), help="where runs are kept")
    parser.add_argument("--show", action="store_true", help="run nothing; show what is finished")
    options = parser.parse_args()
    use_one_core()
    shard, shards = (int(number) for number in options.shard.split("/"))
    table = load_table(options.task)
    runs = algorithms(table, Budget.of(table, options.env_steps))
    options.parts.mkdir(parents=True, exist_ok=True)
    done = finished_runs(options.parts, table, options.env_steps)
    if not options.show:
        wanted = product(range(options.seeds), options.only or runs)
        todo = [run for run in islice(wanted, shard, None, shards) if (run[1], run[0]) not in done]
        with (options.parts / f"{table.task}.{shard}of{shards}.jsonl").open("ab") as out:
            for count, (seed, name) in enumerate(todo, 1):
                began = time.process_time()
                learned = runs[name](table, Split.drawn(table, seed), seed)
                record = {
                    "algorithm": name,
                    "seed": seed,
                    "env_steps": options.env_steps,
                    "table": table.objective.shape,
                    "learned": asdict(learned),
                }
                out.write(orjson.dumps(record) + b"\n")
                out.flush()
                print(
                    f"{name}, random seed {seed}: J {100 * learned.curve[-1][1]:.1f}, "
                    f"{time.process_time() - began:.0f} s; {count} of {len(todo)}",
                    flush=True,
                )
        done = finished_runs(options.parts, table, options.env_steps)
    print(show(table, done, options.only or list(runs)))


if __name__ == "__main__":
    main()
