"""What a run has come to, in one row, and where runs are."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from esper.karn.views import Views
from esper.nissa import RunDirectory, TelemetryError

RECENT = 120.0
"""Seconds within which an unfinished log must have grown to count as running, where the system does not list
locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run's state. What is not known yet is None."""

    path: Path
    started: str
    status: str
    """finished, stopped or failed as the run itself said, running while it is being written, else cut off."""
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
    """Time of all its rounds."""
    alerts: int
    idle: float
    """Seconds since the log last grew."""

    @property
    def seconds_left(self) -> float | None:
        """If the rounds to come take as long as those before."""
        if self.rounds is None or not self.rounds_done:
            return None
        return self.seconds / self.rounds_done * (self.rounds - self.rounds_done)


def summarize(views: Views) -> RunSummary:
    run = views.run
    start = next(iter(views.rows("SELECT * FROM starts ORDER BY seq DESC LIMIT 1")), {})
    done = views.rows("""SELECT count(*) AS n, arg_max(avg_objective, seq) AS last, max(avg_objective) AS best,
                         coalesce(sum(seconds), 0) AS seconds, arg_max(rounds, seq) AS planned FROM rounds""")[
        0
    ]
    end = views.rows(
        "SELECT status FROM ends WHERE seq > coalesce((SELECT max(seq) FROM starts), -1) ORDER BY seq DESC LIMIT 1"
    )
    status = end[0]["status"] if end else "running" if is_written(run.log) else "cut off"
    return RunSummary(
        path=run.path,
        started=str(run.info.get("started", "")),
        status=status,
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
    """Whether a process holds the log's lock. Asked of the kernel's list, because to try the lock could make
    a run fail that wants it at that moment."""
    locks, found = Path("/proc/locks"), log.stat()
    if not locks.exists():
        return time.time() - found.st_mtime < RECENT
    held = [line.split() for line in locks.read_text().splitlines() if " FLOCK " in line]
    return any(words[words.index("FLOCK") + 4].rsplit(":", 1)[-1] == str(found.st_ino) for words in held)


def find_runs(root: str | os.PathLike[str]) -> list[Path]:
    """Directories at or below `root` that hold a run.json, sorted by name."""
    root = Path(root)
    if not root.is_dir():
        raise TelemetryError(f"{root} is not a directory; name one that holds runs")
    found = sorted(path.parent for path in root.rglob("run.json"))
    if not found:
        raise TelemetryError(f"{root} holds no run; a run directory has a run.json")
    return found


def open_run(path: str | os.PathLike[str]) -> Views:
    """The run in a directory, ready to be queried."""
    return Views(RunDirectory.open(path))
