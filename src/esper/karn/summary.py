"""Finding runs, opening them, and the state of a run in one row."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from esper.karn.views import Views
from esper.nissa import RunDirectory, TelemetryError

RUNS = Path("runs")
"""Where runs are recorded, and therefore looked up, if no directory is named."""
LATEST = "latest"
"""Stands for the run under `runs/` that was started last."""
RECENT = 120.0
"""An unfinished log that has grown within this many seconds counts as running. Used only on systems that do
not list their locks."""


# -- finding runs --------------------------------------------------------------------------------------------


def find_runs(root: str | os.PathLike[str]) -> list[Path]:
    """Directories at or below `root` that hold a run.json, sorted by name."""
    root = Path(root)
    if not root.is_dir():
        raise TelemetryError(f"{root} is not a directory; name one that holds runs")
    runs = sorted(path.parent for path in root.rglob("run.json"))
    if not runs:
        raise TelemetryError(f"{root} holds no run; a run directory has a run.json")
    return runs


def locate_run(name: str | os.PathLike[str]) -> Path:
    """The directory of a run: a path, a name under `runs/`, or "latest"."""
    path = Path(name)
    if "\0" in str(path):
        raise TelemetryError(f"run {str(path)!r}: a path cannot hold a NUL character")
    if (path / "run.json").is_file():
        return path
    if not path.is_absolute() and (RUNS / path / "run.json").is_file():
        return RUNS / path
    if str(path) == LATEST and not path.exists():
        return max(find_runs(RUNS), key=_start_time)
    if path.exists() or path.is_absolute():
        return path  # opening it says what is wrong with it
    raise TelemetryError(f"there is no run {path} or {RUNS / path}; {_known_runs()}")


def _start_time(path: Path) -> tuple[str, int]:
    """Sorts runs by their start; a run that cannot be opened comes first."""
    try:
        started = str(RunDirectory.open(path).info.get("started", ""))
    except TelemetryError:
        started = ""
    return started, (path / "run.json").stat().st_mtime_ns


def _known_runs(count: int = 8) -> str:
    try:
        runs = find_runs(RUNS)
    except TelemetryError as error:
        return str(error)
    newest = sorted(runs, key=_start_time, reverse=True)[:count]
    names = ", ".join(str(run.relative_to(RUNS)) for run in newest)
    return f"allowed: a run directory, {LATEST}, or a run under {RUNS}/, the newest of which are {names}"


def open_run(name: str | os.PathLike[str]) -> Views:
    """A run, ready to be queried. `name` is what `locate_run` accepts."""
    return Views(RunDirectory.open(locate_run(name)))


# -- state of a run ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The state of a run. A value that is not known yet is None."""

    path: Path
    started: str
    status: str
    """finished, stopped or failed if the log says so; otherwise running while a process writes the log, else
    cut off."""
    task: str | None
    policy: str | None
    seed: int | None
    envs: int | None
    rounds_done: int
    rounds: int | None
    objective: float | None
    """J of the last round."""
    best: float | None
    seconds: float
    """Total time of its rounds."""
    alerts: int
    idle: float
    """Seconds since the log last grew."""

    @property
    def seconds_left(self) -> float | None:
        """Expected time to the end, if the remaining rounds take as long as those before."""
        if self.rounds is None or not self.rounds_done:
            return None
        return self.seconds / self.rounds_done * (self.rounds - self.rounds_done)


def summarize(views: Views) -> RunSummary:
    run = views.run
    start = next(iter(views.rows("SELECT * FROM starts ORDER BY seq DESC LIMIT 1")), {})
    done = views.rows("""
        SELECT count(*) AS n, arg_max(avg_objective, seq) AS last, max(avg_objective) AS best,
            coalesce(sum(seconds), 0) AS seconds, arg_max(rounds, seq) AS planned
        FROM rounds""")[0]
    ends = views.rows("""
        SELECT status FROM ends WHERE seq > coalesce((SELECT max(seq) FROM starts), -1)
        ORDER BY seq DESC LIMIT 1""")
    unfinished = "running" if is_written(run.log) else "cut off"
    return RunSummary(
        path=run.path,
        started=str(run.info.get("started", "")),
        status=str(ends[0]["status"]) if ends else unfinished,
        rounds_done=done["n"],
        objective=done["last"],
        best=done["best"],
        seconds=done["seconds"],
        alerts=len(views.rows("SELECT seq FROM alerts")),
        rounds=done["planned"] or start.get("rounds"),
        **{name: start.get(name) for name in ("task", "policy", "seed", "envs")},
        idle=max(0.0, time.time() - run.log.stat().st_mtime),
    )


def is_written(log: Path) -> bool:
    """Whether a process holds the log's lock. Read from the kernel's list of locks: trying to take the lock
    could make a run fail that wants it at that moment."""
    locks, status = Path("/proc/locks"), log.stat()
    if not locks.exists():
        return time.time() - status.st_mtime < RECENT
    devices = {(os.major(status.st_dev), os.minor(status.st_dev)), *_mount_device(log)}
    return is_locked(locks.read_text(), devices, status.st_ino)


def is_locked(locks: str, devices: Collection[tuple[int, int]], inode: int) -> bool:
    """Whether the kernel's list of locks has one on an inode of one of these (major, minor) devices. Inode
    numbers are unique only within a device."""
    for line in locks.splitlines():
        words = line.split()
        if "FLOCK" not in words:
            continue
        major, minor, locked = words[words.index("FLOCK") + 4].split(":")
        if int(locked) == inode and (int(major, 16), int(minor, 16)) in devices:
            return True
    return False


def _mount_device(path: Path) -> list[tuple[int, int]]:
    """The device of the mount that holds a file. The list of locks names this one; on btrfs and overlayfs
    `stat` reports another, of the subvolume or layer."""
    try:
        with path.open("rb") as file:
            facts = Path(f"/proc/self/fdinfo/{file.fileno()}").read_text().split()
        mount = facts[facts.index("mnt_id:") + 1]
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except (OSError, ValueError):
        return []
    devices = [words[2].split(":") for words in mounts if words[0] == mount]
    return [(int(major), int(minor)) for major, minor in devices]
