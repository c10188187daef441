"""The run directory: the complete record of a run, and all that readers need.

run.json        format version, start time, machine, code and command
config.json     every setting
events.jsonl    the log, one event per line
tables/         step events as Parquet
checkpoints/    states to resume from, and the best policy
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa  # type: ignore[import-untyped]

from esper._files import PARTIAL, check_version, decode, replace_file, sync_directory
from esper.leyline import StructureError
from esper.nissa.hub import TelemetryError
from esper.nissa.outputs import JsonlOutput, lock, read_events, truncate_log
from esper.nissa.tables import ParquetOutput, check_tables, read_table, truncate_tables

VERSION = 1
"""Of the run directory's format. Older directories call the same version `format`."""
_PACKAGES = ("esper-grow", "torch", "numpy", "pyarrow", "duckdb", "safetensors", "orjson")


@dataclass(frozen=True, slots=True)
class _RunInfo:
    """The content of run.json."""

    version: int
    started: str
    command: list[str]
    git: dict[str, Any] | None
    versions: dict[str, str | None]
    machine: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """One run's directory; `info` and `config` are the contents of run.json and config.json."""

    path: Path
    info: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], *, config: Mapping[str, Any], command: Sequence[str] | None = None
    ) -> RunDirectory:
        """Begin a new run. The directory may exist if it is empty. `command` defaults to the command line of
        this process."""
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = sorted(p.name for p in path.iterdir())
            if names:
                _refuse_if_in_use(path)
                raise TelemetryError(
                    f"run directory {path} is not empty, it holds {', '.join(names[:5])}; name a new one, "
                    "or resume the run that is there"
                )
            try:
                (path / "events.jsonl").touch(exist_ok=False)
            except FileExistsError:  # of two runs that start together, one creates the log
                raise TelemetryError(f"{path} is in use: another run has just started in it") from None
            _write_descriptions(path, config, command)
            sync_directory(path.parent)
        except OSError as error:
            raise TelemetryError(
                f"cannot create the run directory {path}: {error.strerror or error}"
            ) from error
        return cls.open(path)

    @classmethod
    def restart(
        cls, path: str | os.PathLike[str], *, config: Mapping[str, Any], command: Sequence[str] | None = None
    ) -> RunDirectory:
        """Begin a run anew in the directory of one that was killed before its first checkpoint. Its log and
        tables are deleted."""
        path = Path(path)
        if (path / "run.json").exists():
            cls.open(path)
        else:
            _check_unfinished_creation(path)
        stored = sorted(p.name for p in (path / "checkpoints").glob("round-*"))
        if stored:
            raise TelemetryError(f"{path} has checkpoints ({', '.join(stored[:3])}); resume from one of them")
        try:
            with (path / "events.jsonl").open("ab") as log:
                lock(log, path / "events.jsonl")
                log.truncate(0)
                for part in (path / "tables", path / "checkpoints"):
                    for leftover in part.glob("*"):
                        leftover.unlink()
                _write_descriptions(path, config, command)
        except OSError as error:
            raise TelemetryError(f"cannot start over in {path}: {error.strerror or error}") from error
        return cls.open(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Open an existing run, finished or not."""
        path = Path(path)
        info, origin = _read_json(path, "run.json"), path / "run.json"
        if "version" not in info and "format" in info:
            info["version"] = info.pop("format")
        try:
            check_version(info, VERSION, origin)
            decode(_RunInfo, info, origin, complete=True)
        except StructureError as error:
            raise TelemetryError(str(error)) from None
        if info["version"] != VERSION:
            raise TelemetryError(f"{origin}: version is {info['version']}, this Esper reads {VERSION}")
        run = cls(path, info, _read_json(path, "config.json"))
        for part in (run.log, run.tables, run.checkpoints):
            if not part.exists():
                raise TelemetryError(f"{path} is not a complete run directory: {part.name} is missing")
        return run

    @classmethod
    def resume(
        cls, path: str | os.PathLike[str], seq: int, finished: tuple[int, int] | None = None
    ) -> RunDirectory:
        """Open a run to continue it from a checkpoint. Log and tables are cut back to the checkpoint.

        `seq` is the hub's next_seq when it was taken, which is the number of its announcement. A checkpoint
        that was not announced needs `finished`, its (round, epoch), because steps before and after it may
        have the same position in the log."""
        run = cls.open(path)
        check_tables(run.tables)
        truncate_log(run.log, seq)
        truncate_tables(run.tables, seq, finished)
        return run

    @property
    def log(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def tables(self) -> Path:
        return self.path / "tables"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    # -- writing ---------------------------------------------------------------------------------------------

    def outputs(self) -> tuple[JsonlOutput, ParquetOutput]:
        """The outputs for `TelemetryHub.attached`; one writer at a time."""
        return JsonlOutput(self.log), ParquetOutput(self.tables)

    # -- reading ---------------------------------------------------------------------------------------------

    def events(self) -> Iterator[dict[str, Any]]:
        """The log's complete events in order."""
        return read_events(self.log)

    def table(self, name: str) -> pa.Table:
        """All rows of `steps`, `rewards` or `throughput`."""
        return read_table(self.tables, name)


def _write_descriptions(path: Path, config: Mapping[str, Any], command: Sequence[str] | None) -> None:
    """Write everything but the log. run.json comes last: a directory that has it is complete."""
    info = {
        "version": VERSION,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv if command is None else command),
        "git": _git_state(),
        "versions": _versions(),
        "machine": _machine(),
    }
    for name in ("tables", "checkpoints"):
        (path / name).mkdir(exist_ok=True)
    replace_file(path / "config.json", _pretty(config))
    replace_file(path / "run.json", _pretty(info))
    sync_directory(path)


def _refuse_if_in_use(path: Path) -> None:
    log = path / "events.jsonl"
    if log.is_file():
        with log.open("rb") as file:
            lock(file, log)


def _check_unfinished_creation(path: Path) -> None:
    """A process that was killed in `create` leaves an empty directory, or an empty log and perhaps empty
    directories, without run.json."""
    parts = [p for p in path.iterdir() if not p.name.endswith(PARTIAL)]
    known = all(p.name in ("events.jsonl", "config.json", "tables", "checkpoints") for p in parts)
    log = path / "events.jsonl"
    if not known or (parts and not log.is_file()) or (log.exists() and log.stat().st_size > 0):
        raise TelemetryError(f"{path} is not a run directory: it has no run.json, so it is left as it is")


def _pretty(content: Mapping[str, Any]) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    try:
        return decode(dict[str, Any], (directory / name).read_bytes(), directory / name)
    except OSError as error:
        raise TelemetryError(f"{directory} is not a run directory: {name}: {error.strerror}") from error
    except StructureError as error:
        raise TelemetryError(str(error)) from None


@cache
def _git_state() -> dict[str, Any] | None:
    """Commit of the running code, and whether it has uncommitted changes; None if it is not under git."""
    if not _git("ls-files", "."):
        return None
    return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(_git("status", "--porcelain"))}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def _machine() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
    }
