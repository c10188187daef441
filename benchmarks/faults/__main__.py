"""The fault campaign, as one command:

    python -m benchmarks.faults --out runs/faults

Commands are killed at random moments, the disk gets full at random bytes, files are cut or a bit of them is
flipped, and settings and command lines are made up. What must hold: nothing is lost that was on disk, a
command that goes on ends with the same bits as one that nothing disturbed, nobody sees a traceback, and every
message names the value and what is allowed.

Each case depends on its kind and number alone. A case that is in `--out` already is not run again, so a
campaign can be stopped and continued. `--shard 0/2` and `--shard 1/2` share it between two processes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

# Some virtual machines announce AMX and do not allow it. Read at the first convolution or matrix product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

from benchmarks.faults import damage, disk, fuzz, kills
from benchmarks.faults.world import MESSAGE, Broken, Case, Seen, World, preload

RECORDS = "cases"
"""Files of finished cases: cases.0of1.jsonl."""


@dataclass(frozen=True, slots=True)
class Kind:
    """So many cases of one fault, and what it does to whom."""

    cases: int
    run: Callable[[Case], Seen]
    meaning: str


KINDS: Mapping[str, Kind] = {
    "kill-train": Kind(40, kills.kill_train, "SIGKILL, `esper train`"),
    "kill-ranks": Kind(20, kills.kill_ranks, "SIGKILL, `esper train` in two processes: one of them, or both"),
    "kill-prove": Kind(15, kills.kill_prove, "SIGKILL, `esper prove` with a search"),
    "kill-attach": Kind(15, kills.kill_attach, "SIGKILL, a loop with `esper.attach` that saves and records"),
    "kill-sync": Kind(10, kills.kill_sync, "SIGKILL, `esper sync`"),
    "disk": Kind(20, disk.fill, "disk full: `esper train`, `prove`, `sync`, the loop with `esper.attach`"),
    **{f"damage-{name}": Kind(20, run, f"damaged {what}") for name, (run, what) in damage.KINDS.items()},
    "config": Kind(500, fuzz.config, "made-up settings in a file"),
    "command": Kind(500, fuzz.command, "made-up command line"),
}


def run_case(kind: str, number: int, world: World) -> dict[str, Any]:
    """The record of one case; `broken` says what did not hold, and is empty if all did."""
    directory = world.place / f"{kind}-{number}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    began = _cpu_time()
    seen: Seen = {}
    broken = ""
    try:
        seen = KINDS[kind].run(Case(kind, number, directory, world))
    except (Broken, TimeoutError, OSError) as error:
        broken = f"{type(error).__name__}: {error}"
    else:
        shutil.rmtree(directory, ignore_errors=True)  # what broke stays, to be looked at
    seconds = round(_cpu_time() - began, 2)
    return {"kind": kind, "number": number, "broken": broken, "seconds": seconds, **seen}


def _cpu_time() -> float:
    """Seconds of CPU that this process and its children have used."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def finished(out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The records of all processes. A last line that was cut is ignored."""
    records = {}
    for path in sorted(out.glob(f"{RECORDS}.*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            record = orjson.loads(line)
            records[record["kind"], record["number"]] = record
    return records


def campaign(
    kinds: Sequence[str], cases: int | None, out: Path, shard: tuple[int, int] = (0, 1)
) -> Iterator[dict[str, Any]]:
    """Run the cases that are not finished, and yield their records."""
    done = finished(out)
    wanted = [
        (kind, number)
        for kind in kinds
        for number in range(KINDS[kind].cases if cases is None else min(cases, KINDS[kind].cases))
    ]
    mine = [case for case in wanted[shard[0] :: shard[1]] if case not in done]
    with (
        tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as place,
        (out / f"{RECORDS}.{shard[0]}of{shard[1]}.jsonl").open("ab") as file,
    ):
        preload()
        world = World(Path(place))
        for kind, number in mine:
            record = run_case(kind, number, world)
            file.write(orjson.dumps(record) + b"\n")
            file.flush()
            if record["broken"]:
                name = f"{kind}-{number}"
                shutil.copytree(world.place / name, out / "broken" / name, dirs_exist_ok=True)
            yield record


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A row of Markdown for each kind: cases, those in which something did not hold, and what users saw."""
    lines = ["| fault | cases | broken | what users saw |", "|---|---|---|---|"]
    for name, kind in KINDS.items():
        own = [record for record in records if record["kind"] == name]
        if own:
            broken = sum(bool(record["broken"]) for record in own)
            seen = Counter(_outcome(record["saw"]) for record in own if not record["broken"])
            shown = "; ".join(f"{count}× {text}" for text, count in seen.most_common())
            lines.append(f"| {kind.meaning} | {len(own)} | {broken} | {shown} |")
    return "\n".join(lines)


def _outcome(saw: str) -> str:
    """What users saw, without the words of the message."""
    return "a message that names the culprit" if saw.startswith(MESSAGE) else saw


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND",
                        help=f"kinds of faults: {', '.join(KINDS)} (default: all)")  # fmt: skip
    parser.add_argument("--cases", type=int, help="at most so many cases of each kind (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="where finished cases are kept")
    parser.add_argument("--shard", default="0/1", help="this process and the number of processes: 0/2")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    index, count = (int(part) for part in options.shard.split("/"))
    options.out.mkdir(parents=True, exist_ok=True)
    for record in campaign(options.only, options.cases, options.out.resolve(), (index, count)):
        state = f"BROKEN {record['broken']}" if record["broken"] else record.get("saw", "")
        print(f"{record['kind']} {record['number']}: {record.get('what', '')}: {state}", flush=True)
    records = [r for r in finished(options.out).values() if r["kind"] in options.only]
    print(table(records))
    return 1 if any(record["broken"] for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
