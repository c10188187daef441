"""Files that were cut, or in which one bit was flipped: a command refuses them and names the file, or reads
what was written. Text files without a checksum may be read with the changed text; a case says so."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
import torch

import esper
from benchmarks import plan_table
from benchmarks.faults import kills, own_loop
from benchmarks.faults.children import Child, Ended
from benchmarks.faults.world import (
    LIMIT,
    TASK,
    TRAIN,
    Case,
    Seen,
    check_clean,
    check_refused,
    reason,
    require,
)
from esper._archive import read_archive, write_archive
from esper.leyline import EsperError
from esper.nissa.tables import read_table
from esper.runtime.data.sources import get_dataset, load_cached
from esper.scripts.cli import main as esper_command

UNCHANGED, CHANGED = (
    "read; what it holds is unchanged",
    "read, with the changed text: the file has no checksum",
)


def spoil(path: Path, rng: random.Random) -> str:
    """Cut a file, or flip one bit of it."""
    data = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        size = rng.randrange(len(data))
        path.write_bytes(data[:size])
        return f"{path.name} cut to {size} of {len(data)} bytes"
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"{path.name} with bit {bit} of byte {at} of {len(data)} flipped"


def judged(
    case: Case, what: str, ended: Ended, name: str, unchanged: Callable[[], bool], *, checked: bool = True
) -> Seen:
    """Refused with the name of the file, or read as it was written. `checked`: the file has a checksum."""
    if ended.code:
        message = check_refused(ended, codes=(1, 2))
        require(name in message, f"{what}: the message does not name {name}: {message[-300:]}")
        return {"what": what, "saw": reason(message)}
    check_clean(ended)
    same = case.world.in_child(f"{case.name}-unchanged", unchanged).strip() == "True"
    require(same or not checked, f"{what}: accepted, but it holds something else")
    return {"what": what, "saw": UNCHANGED if same else CHANGED}


def same_archive(one: Path, other: Path, kind: str) -> bool:
    (tensors, meta), (other_tensors, other_meta) = (read_archive(path, kind=kind) for path in (one, other))
    equal = tensors.keys() == other_tensors.keys() and all(
        torch.equal(tensors[name], other_tensors[name]) for name in tensors
    )
    return equal and meta == other_meta


def same_json(one: Path, other: Path) -> bool:
    return bool(orjson.loads(one.read_bytes()) == orjson.loads(other.read_bytes()))


def said(case: Case, work: Callable[[], object]) -> Ended:
    """A function of the library, its error printed as the commands do."""

    def run() -> int:
        try:
            work()
        except EsperError as error:
            print(f"error: {error}")
            return 2
        return 0

    return Child(run, case.world.place / "output" / case.name).end(LIMIT)


# -- the kinds of files --------------------------------------------------------------------------------------


def checkpoint(case: Case) -> Seen:
    """In every second case the run is told to look for a checkpoint itself, and goes on from the one
    before."""
    reference, run = case.world.train[0], case.directory / "run"
    shutil.copytree(reference, run)
    newest = sorted((run / "checkpoints").glob("round-*"))[-1]
    what, log = spoil(newest, case.random), (run / "events.jsonl").read_bytes()
    where = ("--telemetry-dir", str(run), "--resume")
    if case.number % 2:
        ended = case.world.esper(case.name, *TRAIN, *where, "auto")
        check_clean(ended)
        require(ended.code == 0, f"{what}: {ended.message[-300:]}")
        case.world.in_child(f"{case.name}-same", lambda: kills.assert_same_run(reference, run))
        warned = newest.name in ended.err and "damaged checkpoint" in ended.err
        return {"what": what, "saw": "resume auto: goes on" + (" from the one before, and says so" * warned)}
    ended = case.world.esper(case.name, *TRAIN, *where, str(newest))
    if ended.code:
        require((run / "events.jsonl").read_bytes() == log, "a refused resume changed the log")
    original = reference / "checkpoints" / newest.name
    return judged(case, what, ended, newest.name, lambda: same_archive(newest, original, "run"))


def policy(case: Case) -> Seen:
    original = case.world.train[0] / "checkpoints" / "best.safetensors"
    file = Path(shutil.copy(original, case.directory))
    what = spoil(file, case.random)
    words = ("grow", "--task", TASK, "--policy", str(file), "--out", str(case.directory / "grown"))
    ended = case.world.esper(case.name, *words)
    return judged(case, what, ended, file.name, lambda: same_archive(file, original, "policy"))


def run_directory(case: Case) -> Seen:
    """run.json, config.json, the log or a table."""
    reference, run = case.world.train[0], case.directory / "run"
    shutil.copytree(reference, run)
    tables = sorted(run.glob("tables/*.parquet"))
    names = ["run.json", "config.json", "events.jsonl", str(case.random.choice(tables).relative_to(run))]
    file = run / names[case.number % len(names)]
    what = spoil(file, case.random)
    ended = _commands(
        case,
        [
            ["report", str(run), "--out", str(case.directory / "report.html")],
            ["sql", str(run), "SELECT count(*) FROM steps, rewards, throughput"],
        ],
    )
    if file.suffix == ".parquet":
        table = file.name.split("-")[0]

        def same_table() -> bool:
            return bool(read_table(run / "tables", table).equals(read_table(reference / "tables", table)))

        return judged(case, what, ended, file.name, same_table, checked=False)
    original = reference / file.name
    if file.suffix == ".jsonl":
        return judged(case, what, ended, file.name, lambda: run_events_equal(file, original), checked=False)
    return judged(case, what, ended, file.name, lambda: same_json(file, original), checked=False)


def run_events_equal(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


def _commands(case: Case, lines: Sequence[Sequence[str]]) -> Ended:
    """Several commands in one process; the exit code is the worst."""
    work = lambda: max(esper_command(list(words)) for words in lines)  # noqa: E731
    return Child(work, case.world.place / "output" / case.name).end(LIMIT)


def schedule(case: Case) -> Seen:
    original = Path(str(files("esper") / "policies" / "digits_impaired.schedule.json"))
    file = Path(shutil.copy(original, case.directory))
    what = spoil(file, case.random)
    words = (*TRAIN, "--rounds", "1", "--teacher", str(file), "--teacher-rounds", "1", "--telemetry-dir")
    ended = case.world.esper(case.name, *words, str(case.directory / "run"))
    return judged(case, what, ended, file.name, lambda: same_json(file, original), checked=False)


def grown(case: Case) -> Seen:
    """A network of `esper grow`: its record, structure or weights."""
    reference, directory = case.world.grown[0], case.directory / "grown"
    shutil.copytree(reference, directory)
    file = directory / ("grown.json", "structure.json", "weights.safetensors")[case.number % 3]
    what = spoil(file, case.random)
    ended = case.world.esper(case.name, "eval", str(directory))
    original = reference / file.name
    if file.suffix == ".json":
        return judged(case, what, ended, "grown", lambda: same_json(file, original), checked=False)
    return judged(case, what, ended, file.name, lambda: False)


def model(case: Case) -> Seen:
    """A model that `grower.save` wrote: its structure or weights."""
    reference, directory = case.world.loop[0] / own_loop.GROWN, case.directory / "grown"
    shutil.copytree(reference, directory)
    file = directory / ("structure.json", "weights.safetensors")[case.number % 2]
    what = spoil(file, case.random)
    ended = said(case, lambda: esper.load(own_loop.SmallCNN(), directory))
    if file.suffix == ".json":
        original = reference / file.name
        return judged(case, what, ended, "grown", lambda: same_json(file, original), checked=False)
    return judged(case, what, ended, file.name, lambda: False)


def dataset(case: Case) -> Seen:
    """The file that a dataset was converted into."""
    root = case.directory / "data"
    root.mkdir()
    (root / "tinystories.txt").write_text("Once upon a time there was a seed. " * 40)
    case.world.in_child(f"{case.name}-get", lambda: get_dataset("tinystories", root))
    (root / "tinystories.txt").unlink()
    file = root / "tinystories.safetensors"
    original = shutil.copy(file, case.directory / "original.safetensors")
    what = spoil(file, case.random)
    ended = said(case, lambda: load_cached("tinystories", root))

    def same() -> bool:
        arrays, facts = load_cached("tinystories", root)
        shutil.copy(original, file)
        first_arrays, first_facts = load_cached("tinystories", root)
        return facts == first_facts and all((arrays[k] == first_arrays[k]).all() for k in first_arrays)

    return judged(case, what, ended, file.name, same)


def table(case: Case) -> Seen:
    """A table of plans, which learners of growth are compared on."""
    stored = next(iter(sorted(plan_table.TABLES.glob("*.safetensors"))))
    original, file = case.directory / "original" / stored.name, case.directory / stored.name
    case.world.in_child(
        f"{case.name}-write", lambda: write_archive(original, *read_archive(stored, kind=plan_table.KIND))
    )
    shutil.copy(original, file)
    what = spoil(file, case.random)

    def load() -> Any:
        plan_table.TABLES = case.directory  # in the child
        return plan_table.load_table(file.stem)

    ended = said(case, load)
    return judged(case, what, ended, file.name, lambda: same_archive(file, original, plan_table.KIND))


KINDS: dict[str, tuple[Callable[[Case], Seen], str]] = {
    "checkpoint": (checkpoint, "checkpoint"),
    "policy": (policy, "policy file"),
    "run": (run_directory, "run.json, config.json, log or table of a run"),
    "schedule": (schedule, "schedule"),
    "grown": (grown, "network of `esper grow`"),
    "model": (model, "model of `grower.save`"),
    "dataset": (dataset, "dataset"),
    "table": (table, "table of plans"),
}
