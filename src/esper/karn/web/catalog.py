"""The runs and proofs below a directory. A look reads only what has changed, and of a log only its first line
and its end, so that a thousand runs are listed at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from esper.karn.summary import LATEST, is_written
from esper.karn.web.feed import is_own
from esper.karn.web.streams import Stream
from esper.leyline import EsperError

DEPTH = 4
"""Directories below the root that are searched."""
_SKIPPED = frozenset({"tables", "checkpoints", "tensorboard", "wandb"})
_ENDS = (1 << 16, 1 << 20, 1 << 24)
"""Bytes of the end of a log that are searched for its last round, one after the other."""


@dataclass(slots=True)
class _Folder:
    """What a directory held when it last changed."""

    stamp: int
    folders: list[Path]
    is_run: bool
    has_proof: bool


@dataclass(slots=True)
class _Run:
    """A run's row in the list, and the state of its files when it was read."""

    row: dict[str, Any] = field(default_factory=dict)
    stamp: tuple[object, ...] = ()
    revision: int = 0


class Catalog(Stream):
    """All runs below a directory."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise EsperError(f"{root} is not a directory; name one that holds runs")
        self.root = root
        super().__init__()

    def begin(self) -> None:
        super().begin()
        self._folders: dict[Path, _Folder] = {}
        self._runs: dict[str, _Run] = {}
        self._proofs: list[str] = []

    # -- looking things up -----------------------------------------------------------------------------------

    def path(self, run: str) -> Path:
        """The directory of a listed run. Names that are not listed are refused, so no path can be made up."""
        with self._lock:
            self.read()
            name = self._latest() if run == LATEST else run
            if name not in self._runs:
                raise LookupError(f"there is no run {run!r}")
            return self.root / name

    def proof(self, name: str) -> Path:
        with self._lock:
            self.read()
            if name not in self._proofs:
                raise LookupError(f"there is no proof {name!r}")
            return self.root / name / "proof.json"

    def _latest(self) -> str | None:
        started = {name: str(run.row.get("started", "")) for name, run in self._runs.items()}
        return max(started, key=lambda name: (started[name], name), default=None)

    # -- messages --------------------------------------------------------------------------------------------

    def everything(self) -> dict[str, Any]:
        return {"runs": [run.row for run in self._runs.values()], **self._rest()}

    def changes(self, revision: int) -> dict[str, Any]:
        return {"runs": [run.row for run in self._runs.values() if run.revision > revision], **self._rest()}

    def _rest(self) -> dict[str, Any]:
        return {"latest": self._latest(), "proofs": self._proofs, "root": str(self.root)}

    # -- reading ---------------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        runs, proofs = [], []
        for path, folder in self._walk(self.root, 0):
            name = str(path.relative_to(self.root))
            runs += [name] * folder.is_run
            proofs += [name] * folder.has_proof
        if self._runs.keys() - set(runs):  # one has gone
            self._runs = {name: replace(self._runs[name], revision=0) for name in runs if name in self._runs}
            super().begin()
        changed = proofs != self._proofs
        self._proofs = proofs
        locked = _locked_inodes()
        for name in runs:
            run = self._runs.setdefault(name, _Run())
            if _read_row(run, self.root / name, name, locked):
                run.revision = self.revision + 1
                changed = True
        self.revision += changed
        return False

    def _walk(self, path: Path, depth: int) -> Iterator[tuple[Path, _Folder]]:
        try:
            stamp = path.stat().st_mtime_ns
            folder = self._folders.get(path)
            if folder is None or folder.stamp != stamp:
                folder = self._folders[path] = _look(path, stamp)
        except OSError:  # deleted meanwhile, or not for us
            self._folders.pop(path, None)
            return
        yield path, folder
        if depth < DEPTH:
            for child in folder.folders:
                yield from self._walk(child, depth + 1)


def _look(path: Path, stamp: int) -> _Folder:
    names, folders = set(), []
    with os.scandir(path) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                names.add(entry.name)
            elif entry.name not in _SKIPPED and not entry.name.startswith("."):
                folders.append(Path(entry.path))
    return _Folder(stamp, sorted(folders), "run.json" in names, "proof.json" in names)


def _locked_inodes() -> set[int] | None:
    """Inodes with a lock on them; None where the system does not list its locks."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    words = [line.split() for line in lines]
    return {int(w[w.index("FLOCK") + 4].rsplit(":", 1)[1]) for w in words if "FLOCK" in w}


def _read_row(run: _Run, path: Path, name: str, locked: set[int] | None) -> bool:
    """Renew a run's row; False if nothing has changed."""
    log = path / "events.jsonl"
    try:
        status = log.stat()
    except OSError as error:
        stamp: tuple[object, ...] = (error.errno,)
        row = {"status": "broken", "problem": f"events.jsonl: {error.strerror}"}
    else:
        running = (locked is None or status.st_ino in locked) and is_written(log)
        stamp = (status.st_size, status.st_mtime_ns, running)
        if stamp == run.stamp:
            return False
        row = _describe(log, running=running)
    if stamp == run.stamp:
        return False
    run.stamp, run.row = stamp, {"id": name, "started": _started(path), **row}
    return True


def _started(path: Path) -> str | None:
    try:
        return str(orjson.loads((path / "run.json").read_bytes())["started"])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return None


def _describe(log: Path, *, running: bool) -> dict[str, Any]:
    """Facts of a run from the first line of its log and the last round in it."""
    try:
        first, done, end, last = _ends_of(log)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"status": "broken", "problem": f"events.jsonl: {error}"}
    if first is None or last is None:
        return {"status": "running" if running else "cut off", "problem": "the run has not started"}
    start, figures = first["data"], done["data"] if done else {}
    return {
        "status": end["data"].get("status") if end else "running" if running else "cut off",
        **{key: start.get(key) for key in ("task", "policy", "seed", "envs")},
        "own": is_own(start),
        "rounds_done": figures["round_idx"] + 1 if done else 0,
        "rounds": figures.get("rounds") or start.get("rounds"),
        "objective": figures.get("avg_objective"),
        "accuracy": figures.get("avg_accuracy"),
        "seconds": last["t_wall"] - first["t_wall"],
    }


Event = dict[str, Any] | None


def _ends_of(log: Path) -> tuple[Event, Event, Event, Event]:
    """The first event, the last finished round, the end of the run if it is the last event but for
    checkpoints, and the last event."""
    with log.open("rb") as file:
        line = file.readline()
        if not line.endswith(b"\n"):
            return None, None, None, None
        first, size = orjson.loads(line), file.seek(0, os.SEEK_END)
        for length in _ENDS:
            file.seek(max(0, size - length))
            tail = file.read()
            tail = tail[: tail.rfind(b"\n") + 1]
            done = _last(tail, b"batch_completed")
            if done is not None or length >= size:
                break
    end, start = _last(tail, b"run_ended"), _last(tail, b"run_started")
    if end is not None and start is not None and start["seq"] > end["seq"]:
        end = None
    lines = tail.splitlines()
    return first, done, end, orjson.loads(lines[-1]) if lines else first


def _last(tail: bytes, kind: bytes) -> Event:
    """The last event of a type. Inside a text its quotes would be escaped, so this matches no text."""
    at = tail.rfind(b'"event_type":"' + kind + b'"')
    begin = tail.rfind(b"\n", 0, at) + 1
    if at < 0 or not tail.startswith(b'{"seq":', begin):
        return None  # none, or its line begins before the tail
    return orjson.loads(tail[begin : tail.index(b"\n", at)])
