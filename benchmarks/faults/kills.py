"""SIGKILL at random moments: what had reached the disk is still there, every reader works, and the same
command ends with the same bits as one that nothing disturbed."""

from __future__ import annotations

import shutil
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

import esper
from benchmarks.faults import own_loop
from benchmarks.faults.children import Child, killed_at
from benchmarks.faults.same import assert_same_run, rows, story
from benchmarks.faults.world import (
    LIMIT,
    PROVE,
    SEVERAL,
    TRAIN,
    Broken,
    Case,
    Seen,
    check_clean,
    check_refused,
    files_in,
    reason,
    require,
)
from esper._archive import read_archive
from esper.nissa import RunDirectory
from esper.scripts.cli import main as esper_command
from esper.simic.ranks import fingerprint

T = TypeVar("T")
ATTEMPTS = 8
"""A command that was faster than the kill is started again, and killed earlier."""


def killed(
    case: Case,
    start: Callable[[Path], Sequence[Child]],
    duration: float,
    look: Callable[[Path], T],
    victims: Sequence[int] = (0,),
    log: tuple[str, int] | None = None,
) -> tuple[Path, Sequence[Child], T]:
    """Start children in a new directory and kill some of them at a random moment of their usual CPU time.
    Returns the directory, the children, and what `look` saw there just before.

    Much of that time passes before the work begins. So in every second case the time runs from the moment at
    which a file, the `log`, has a random size below its usual one, and is short."""
    delay, size = case.random.random() * duration, 0
    if log is not None and case.number % 2:
        delay, size = 0.2 * delay, case.random.randrange(1, log[1])
    for attempt in range(ATTEMPTS):
        directory = case.directory / str(attempt)
        directory.mkdir(parents=True)
        children = start(directory)
        file = directory / (log[0] if log else "")
        seen = killed_at(children, _moment(children[0], delay, file, size), victims, partial(look, directory))
        if seen is not None:
            return directory, children, seen
        for child in children:
            child.end(LIMIT)
        delay, size = 0.6 * delay, int(0.6 * size)
    raise Broken(f"the command ended by itself {ATTEMPTS} times")


def _moment(child: Child, delay: float, file: Path, size: int) -> Callable[[], bool]:
    """Whether the child has used `delay` seconds of CPU time since the file had this size, or since its
    start."""
    began: list[float] = [] if size else [0.0]

    def has_come() -> bool:
        if not began and file.exists() and file.stat().st_size >= size:
            began.append(child.used())
        return bool(began) and child.used() - began[0] >= delay

    return has_come


def content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


# -- esper train ---------------------------------------------------------------------------------------------


def kill_train(case: Case) -> Seen:
    reference, duration = case.world.train

    def start(directory: Path) -> list[Child]:
        return [case.world.start(case.name, *TRAIN, "--telemetry-dir", str(directory / "run"))]

    log = ("run/events.jsonl", (reference / "events.jsonl").stat().st_size)
    directory, _, before = killed(case, start, duration, lambda d: content(d / log[0]), log=log)
    shown = check_run(case, directory / "run", reference, before)
    go_on(case, directory / "run", reference, TRAIN)
    return {"what": f"killed with {before.count(10)} events on disk", "saw": shown}


def kill_ranks(case: Case) -> Seen:
    """One of two processes is killed, or both."""
    reference, duration = case.world.several
    victims = case.random.choice([(0,), (1,), (0, 1)])

    def start(directory: Path) -> list[Child]:
        return start_ranks(case, directory, *SEVERAL, "--telemetry-dir", str(directory / "run"))

    log = ("run/events.jsonl", (reference / "events.jsonl").stat().st_size)
    directory, children, before = killed(
        case, start, duration / 2, lambda d: content(d / log[0]), victims, log
    )
    saw = "nothing: all processes were killed"
    for rank, child in enumerate(children):
        if rank not in victims:
            ended = child.end(LIMIT)
            if ended.code == 0:  # the other one had given all that it had to give
                case.world.in_child(
                    f"{case.name}-whole", lambda: assert_same_run(reference, directory / "run")
                )
                saw = "nothing: the run was finished"
                continue
            said = check_refused(ended, codes=(1, 2))
            require(f"rank {victims[0]}" in said, f"the message names no rank: {said[-300:]}")
            saw = reason(said)
    check_run(case, directory / "run", reference, before)
    go_on(case, directory / "run", reference, SEVERAL)
    return {"what": f"killed ranks {victims} with {before.count(10)} events on disk", "saw": saw}


def start_ranks(case: Case, directory: Path, *words: str) -> list[Child]:
    """`esper` as two ranks, in the environment that a launcher would give them."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "ESPER_RANK_TIMEOUT": "90"}
    return [
        case.world.start(
            f"{case.name}-{directory.name}-{rank}", *words, environment={**group, "RANK": str(rank)}
        )
        for rank in range(2)
    ]


def check_run(case: Case, run: Path, reference: Path, before: bytes) -> str:
    """Everything that was on disk before the kill is there, is what an undisturbed run would have written,
    and can be read. Returns what `esper runs` says of the run."""
    require(content(run / "events.jsonl").startswith(before), "the log lost what it held before the kill")
    if not (run / "run.json").exists():
        require(not before, "events without run.json")
        return "no run yet"
    case.world.in_child(f"{case.name}-left", lambda: check_prefix(run, reference))
    finished = content(run / "events.jsonl").count(b'"batch_completed"')
    name = str(run)
    ended = Child(
        lambda: max(
            esper_command(list(words))
            for words in (
                ("runs", str(run.parent)),
                ("report", name, "--out", str(run.parent / "report.html")),
                ("sql", name, "SELECT count(*) FROM rounds"),
                ("compare", name, name),
                ("watch", name),
            )
        ),
        case.world.place / "output" / f"{case.name}-readers",
    ).end(LIMIT)
    check_clean(ended)
    require(ended.code == 0 or (ended.code == 2 and not finished), f"readers: {ended.message[-300:]}")
    return next((word for word in ("cut off", "failed", "finished") if word in ended.out), "?")


def check_prefix(run: Path, reference: Path) -> None:
    """The events are the first ones of the reference, and the tables hold all rounds but the last one."""
    events, whole = story(run), story(reference)
    ended = [event for event in events if event["event_type"] == "run_ended"]  # by another rank's failure
    same = events[:-1] if ended and events[-1] != whole[len(events) - 1] else events
    assert same == whole[: len(same)], "the log tells another story than that of an undisturbed run"
    finished = sum(event["event_type"] == "batch_completed" for event in events)
    for table in ("steps", "rewards"):
        kept = [row for row in rows(run, table) if row["round_idx"] < finished - 1]
        assert kept == [row for row in rows(reference, table) if row["round_idx"] < finished - 1], table
    for path in RunDirectory.open(run).checkpoints.glob("round-*.safetensors"):
        assert read_archive(path, kind="run")[1]["seq"] <= len(events), f"{path.name} is ahead of the log"


def go_on(case: Case, run: Path, reference: Path, words: Sequence[str]) -> None:
    """The run goes on, and ends as one that nothing disturbed."""
    again = (*words, "--telemetry-dir", str(run), "--resume", "auto")
    ended = case.world.esper(f"{case.name}-again", *again)
    require(ended.code == 0, f"resuming failed: {ended.message[-600:]}")
    case.world.in_child(f"{case.name}-same", lambda: assert_same_run(reference, run))


# -- esper prove ---------------------------------------------------------------------------------------------


def kill_prove(case: Case) -> Seen:
    """In every second case the directory holds the results of an earlier comparison."""
    reference, duration = case.world.prove
    whole = files_in(reference)
    again = case.number % 2 == 1

    def start(directory: Path) -> list[Child]:
        if again:
            shutil.copytree(reference, directory / "out")
        return [case.world.start(case.name, *PROVE, "--out", str(directory / "out"))]

    directory, _, _ = killed(case, start, duration, lambda _: True)
    left = results(directory / "out")
    require(left.items() <= whole.items(), f"unfinished results: {sorted(left.items() - whole.items())}")
    require(left.keys() == whole.keys() or not again, f"lost {sorted(whole.keys() - left.keys())}")
    ended = case.world.esper(f"{case.name}-again", *PROVE, "--out", str(directory / "out"))
    require(ended.code == 0, f"the second comparison failed: {ended.message[-600:]}")
    require(results(directory / "out") == whole, "the second comparison has other results")
    return {"what": f"killed with {len(left)} of {len(whole)} files", "saw": "run again: the same results"}


def results(directory: Path) -> dict[str, str]:
    """The files of a directory that the user sees."""
    return {name: digest for name, digest in files_in(directory).items() if not name.startswith(".")}


# -- a loop of the user's own --------------------------------------------------------------------------------


def kill_attach(case: Case) -> Seen:
    reference, duration = case.world.loop

    def start(directory: Path) -> list[Child]:
        return [case.world.start_loop(f"{case.name}-{directory.name}", directory)]

    directory, children, before = killed(
        case, start, duration, lambda d: content(d / own_loop.RUN / "events.jsonl")
    )
    log = content(directory / own_loop.RUN / "events.jsonl")
    require(log.startswith(before), "the log lost what it held before the kill")
    saved = children[0].out.read_text().splitlines()
    check_grown(case, directory / own_loop.GROWN, reference, len(saved))
    finish_loop(case, directory, reference)
    return {"what": f"killed after {len(saved)} saves", "saw": "run again: goes on from the last epoch"}


def check_grown(case: Case, grown: Path, reference: Path, saves: int) -> None:
    """`esper.load` gives the model of the last `grower.save` that returned, or of the one under way."""
    digests = [line.split()[-1] for line in (reference / "digests.txt").read_text().splitlines()]

    def check() -> None:
        if not saves and not (grown / "structure.json").exists():
            return
        model = own_loop.SmallCNN()
        esper.load(model, grown)
        wanted = digests[max(saves - 1, 0) : saves + 1]
        assert fingerprint(model.state_dict()) in wanted, f"not the model of save {saves}"

    case.world.in_child(f"{case.name}-load", check)


def finish_loop(case: Case, directory: Path, reference: Path) -> None:
    """The loop goes on and ends as one that nothing disturbed."""
    ended = case.world.start_loop(f"{case.name}-again", directory).end(LIMIT)
    require(ended.code == 0, f"the loop does not go on: {ended.err[-600:]}")

    def check() -> None:
        one, other = (
            torch.load(place / own_loop.STATE, weights_only=True) for place in (directory, reference)
        )
        assert same(one, other), "another state at the end"
        assert story(directory / own_loop.RUN) == story(reference / own_loop.RUN), "another record"

    case.world.in_child(f"{case.name}-same", check)


def same(one: object, other: object) -> bool:
    """Whether two nested values are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


# -- esper sync ----------------------------------------------------------------------------------------------


def kill_sync(case: Case) -> Seen:
    reference, duration = case.world.sync
    run = case.world.train[0]
    whole, scalars = files_in(run), numbers(reference)

    def start(directory: Path) -> list[Child]:
        return [case.world.start(case.name, *sync_words(run, directory / "board"))]

    directory, _, _ = killed(case, start, duration, lambda _: True)
    require(files_in(run) == whole, "the run has changed")
    ended = case.world.esper(f"{case.name}-again", *sync_words(run, directory / "board"))
    require(ended.code == 0, f"the second sync failed: {ended.message[-600:]}")
    require(numbers(directory / "board") == scalars, "the second sync wrote other numbers")
    return {"what": "killed while it wrote", "saw": "run again: the same numbers"}


def sync_words(run: Path, out: Path) -> tuple[str, ...]:
    return ("sync", str(run), "--to", "tensorboard", "--out", str(out))


def numbers(board: Path) -> bytes:
    """The one event file of a directory, without its first record, which holds the time of writing."""
    (file,) = board.iterdir()
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 + 4 + length + 4 :]
