"""The ladder table: which static network is best in which world, at equal FLOPs and without prices.

`python -m benchmarks.ladder` trains every rung of the ladder in 96 training worlds, 4 networks each. Every
finished world is kept at once in `runs/ladder`, so a job that was stopped goes on where it was; `--shard 0/2`
and `--shard 1/2` divide the worlds between two processes. `--table` prints the table of the worlds that are
finished. The best rung of a world is chosen for each network by the validation accuracy of the other
networks of that world, and judged by the test accuracy of this one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import orjson

from esper._statistics import Estimate, estimate
from esper.proof.ladder import hindsight, ladder, train_ladder
from esper.runtime.tasks import get_task_spec
from esper.runtime.worlds import draw_world
from esper.scripts.process import use_one_core
from esper.simic.training.evaluation import TRAINING

TEST_SIZE = 2000
"""Test samples of each network: their error is small beside the luck of a network."""
Record = dict[str, Any]


def measure(family: str, number: int, networks: int) -> Record:
    """The figures of all rungs in one world, [rungs, networks]."""
    began = time.process_time()
    task = get_task_spec(f"{family}:{number}")
    rungs = ladder(task)
    played = train_ladder(task, range(networks), root_seed=TRAINING, rungs=rungs, test_size=TEST_SIZE)
    return {
        "world": asdict(draw_world(number)),
        "budget_steps": task.budget_steps,
        "rungs": [rung.name for rung in rungs],
        "params": [one[0].outcome.host_params + one[0].outcome.added_params for one in played],
        "validation": [[p.outcome.committed_accuracy for p in one] for one in played],
        "test": [[p.test_accuracy for p in one] for one in played],
        "seconds": time.process_time() - began,
    }


def finished(parts: Path, family: str) -> dict[int, Record]:
    """What any process has finished, by the number of the world. A last line that was cut is ignored."""
    records = {}
    for path in sorted(parts.glob(f"{family}.*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            record = orjson.loads(line)
            records[record["world"]["number"]] = record
    return records


# -- the table -----------------------------------------------------------------------------------------------


def gaps(records: Sequence[Record]) -> tuple[np.ndarray, int, np.ndarray]:
    """Per world: mean test accuracy of its best rung in hindsight; the best single rung; [worlds, rungs] mean
    test accuracies."""
    test = np.array([record["test"] for record in records])
    validation = np.array([record["validation"] for record in records])
    chosen = np.array(
        [
            fmean(t[rung, network] for network, rung in enumerate(hindsight(v)))
            for v, t in zip(validation, test, strict=True)
        ]
    )
    means = test.mean(2)
    return chosen, int(means.mean(0).argmax()), means


def text(value: Estimate) -> str:
    return f"{value.value:.1f} [{value.low:.1f}, {value.high:.1f}]"


def table(records: Sequence[Record]) -> Iterator[str]:
    chosen, single, means = gaps(records)
    names = records[0]["rungs"]
    best = np.bincount(means.argmax(1), minlength=len(names)) / len(records)
    yield f"{len(records)} worlds, {len(records[0]['test'][0])} networks each; test accuracy in %"
    yield f"{'rung':12}{'accuracy':>22}{'best in':>10}{'parameters':>12}"
    for rung, name in enumerate(names):
        size = fmean(record["params"][rung] for record in records)
        yield f"{name:12}{text(estimate(means[:, rung])):>22}{best[rung]:10.2f}{size:12,.0f}"
    yield f"{'hindsight':12}{text(estimate(chosen)):>22}"
    for name, rung in (("best single", single), ("nothing", 0), ("largest", len(names) - 1)):
        yield f"hindsight − {name} ({names[rung]}): {text(estimate(chosen - means[:, rung]))}"
    spread = np.array([record["test"] for record in records]).std(2, ddof=1).mean()
    yield f"standard deviation between networks of one rung and world: {spread:.1f}"
    yield f"{fmean(record['seconds'] for record in records):.0f} CPU seconds per world"
    yield ""
    gap_head = f"hindsight − {names[single]}"
    yield f"{'part':20}{'worlds':>7}{'nothing':>9}{'light':>7}{'heavy':>7}{gap_head:>30}"
    for part, keep in PARTS.items():
        inside = [i for i, record in enumerate(records) if keep(record["world"])]
        if inside:
            shares = np.bincount(means[inside].argmax(1), minlength=len(names)) / len(inside)
            half = 1 + len(names) // 2
            gap = text(estimate((chosen - means[:, single])[inside]))
            yield (
                f"{part:20}{len(inside):7}{shares[0]:9.2f}{shares[1:half].sum():7.2f}"
                f"{shares[half:].sum():7.2f}{gap:>30}"
            )


PARTS: dict[str, Callable[[Record], bool]] = {
    **{
        name: lambda world, name=name: world["dataset"] == name
        for name in ("digits", "mnist1d", "mnist14", "fashion14")
    },
    "no block crippled": lambda world: not world["crippled"],
    "some crippled": lambda world: 0 < len(world["crippled"]) < world["depth"],
    "all crippled": lambda world: len(world["crippled"]) == world["depth"],
    "width 2": lambda world: world["width"] == 2,
    "width 3": lambda world: world["width"] == 3,
    "width 4": lambda world: world["width"] == 4,
    "budget below 45": lambda world: world["largest_steps"] < 45,
    "budget from 45": lambda world: world["largest_steps"] >= 45,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ladder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--family", default="worlds_small", choices=("worlds_small", "worlds_mixed"))
    parser.add_argument("--worlds", type=int, default=96, help="number of worlds")
    parser.add_argument("--first-world", type=int, default=0, help="number of the first world")
    parser.add_argument("--networks", type=int, default=4, help="networks of each world")
    parser.add_argument("--shard", default="0/1", help="this process and the number of processes: 0/2")
    parser.add_argument("--parts", type=Path, default=Path("runs/ladder"), help="where worlds are kept")
    parser.add_argument("--table", action="store_true", help="only print the table of what is finished")
    options = parser.parse_args()
    use_one_core()
    shard, shards = (int(number) for number in options.shard.split("/"))
    worlds = range(options.first_world, options.first_world + options.worlds)
    options.parts.mkdir(parents=True, exist_ok=True)
    done = finished(options.parts, options.family)
    mine = [number for number in islice(worlds, shard, None, shards) if number not in done]
    began = time.perf_counter()
    if not options.table:
        with (options.parts / f"{options.family}.{shard}of{shards}.jsonl").open("ab") as out:
            for count, number in enumerate(mine, 1):
                record = measure(options.family, number, options.networks)
                out.write(orjson.dumps(record) + b"\n")
                out.flush()
                each = (time.perf_counter() - began) / count
                print(
                    f"world {number}: {count} of {len(mine)}, {each * (len(mine) - count) / 60:.0f} min left",
                    flush=True,
                )
    records = [
        one for number, one in sorted(finished(options.parts, options.family).items()) if number in worlds
    ]
    if len(records) == len(worlds) or options.table:
        print("\n".join(table(records)))


if __name__ == "__main__":
    main()
