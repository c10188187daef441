"""A disk that gets full at a random byte: the command says so, and once there is space it ends as if nothing
had happened.

One half of the cases runs on a small file system of its own, if this process may mount one. In the other half
no file may grow beyond a random size, which needs no rights."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults import kills, own_loop
from benchmarks.faults.children import CRASHED
from benchmarks.faults.world import (
    LIMIT,
    PROVE,
    TRAIN,
    Case,
    Seen,
    check_refused,
    files_in,
    reason,
    require,
)

TARGETS = ("train", "loop", "train", "prove", "train", "sync", "train", "loop", "train", "prove")
FULL = re.compile("No space left|File too large|failed writing file|unexpected pos")
"""What the system says; the last two are torch's words for it, in `torch.save`."""
LEAST = 4096
"""Bytes: a page, and room for what the command prints."""


@dataclass
class Disk:
    """A place for a command's files, full before they are complete."""

    place: Path
    mounted: bool
    size: int
    options: dict[str, object] = field(default_factory=dict)
    """For the process that is to feel it."""

    def free(self) -> None:
        """Make space."""
        if self.mounted:
            _mount("-o", "remount,size=256m", str(self.place))
        self.options = {}


def _mount(*words: str) -> bool:
    if shutil.which("mount") is None:
        return False
    return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0


@contextmanager
def small_disk(case: Case, reference: Path) -> Iterator[Disk]:
    """A disk on which the files of `reference` do not fit."""
    place = case.directory / "disk"
    place.mkdir()
    sizes = [path.stat().st_size for path in reference.rglob("*") if path.is_file()]
    total = case.random.randrange(LEAST, max(sum(sizes), 2 * LEAST))
    mounted = case.number >= len(TARGETS) and _mount(
        "-t", "tmpfs", "-o", f"size={total}", "tmpfs", str(place)
    )
    try:
        if mounted:
            yield Disk(place, mounted, total)
        else:
            largest = case.random.randrange(LEAST, max(*sizes, 2 * LEAST))
            yield Disk(place, mounted, largest, {"largest_file": largest})
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=False)


def fill(case: Case) -> Seen:
    target = TARGETS[case.number % len(TARGETS)]
    reference = getattr(case.world, target)[0]
    with small_disk(case, reference) as disk:
        message = {"train": _train, "loop": _loop, "prove": _prove, "sync": _sync}[target](
            case, disk, reference
        )
    require(FULL.search(message), f"the message does not say that the disk is full: {message[-400:]}")
    way = f"a disk of {disk.size} bytes" if disk.mounted else f"files of {disk.size} bytes at most"
    return {"what": f"{target} with {way}", "saw": reason(message)}


def _train(case: Case, disk: Disk, reference: Path) -> str:
    run = disk.place / "run"
    ended = case.world.esper(case.name, *TRAIN, "--telemetry-dir", str(run), **disk.options)
    message = check_refused(ended, codes=(1, 2))
    disk.free()
    kills.check_run(case, run, reference, b"")
    kills.go_on(case, run, reference, TRAIN)
    return message


def _prove(case: Case, disk: Disk, reference: Path) -> str:
    words = (*PROVE, "--out", str(disk.place / "out"))
    message = check_refused(case.world.esper(case.name, *words, **disk.options), codes=(1, 2))
    disk.free()
    whole, left = files_in(reference), kills.results(disk.place / "out")
    require(left.items() <= whole.items(), f"unfinished results: {sorted(left.items() - whole.items())}")
    ended = case.world.esper(f"{case.name}-again", *words)
    require(ended.code == 0, f"with space it fails too: {ended.message[-400:]}")
    require(kills.results(disk.place / "out") == whole, "other results")
    return message


def _sync(case: Case, disk: Disk, reference: Path) -> str:
    words = kills.sync_words(case.world.train[0], disk.place / "board")
    message = check_refused(case.world.esper(case.name, *words, **disk.options), codes=(1, 2))
    disk.free()
    ended = case.world.esper(f"{case.name}-again", *words)
    require(ended.code == 0, f"with space it fails too: {ended.message[-400:]}")
    require(kills.numbers(disk.place / "board") == kills.numbers(reference), "other numbers")
    return message


def _loop(case: Case, disk: Disk, reference: Path) -> str:
    """The user's loop ends with an exception, because it does not catch any."""
    directory = disk.place / "own"
    ended = case.world.start_loop(case.name, directory, **disk.options).end(LIMIT)
    require(ended.code == CRASHED, f"exit code {ended.code}")
    disk.free()
    kills.check_grown(case, directory / own_loop.GROWN, reference, ended.out.count("saved"))
    kills.finish_loop(case, directory, reference)
    return ended.err.strip().splitlines()[-1]
