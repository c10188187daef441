"""The run directory: everything that a run leaves behind, and all that readers need.

run.json        when, where, with which code and command
config.json     every setting
events.jsonl    the log, one event per line
tables/         step events as Parquet
checkpoints/    states to go on from
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

from esper._files import replace_file, sync_directory
from esper.nissa.hub import TelemetryError
from esper.nissa.outputs import JsonlOutput, read_events, truncate_log
from esper.nissa.tables import ParquetOutput, check_tables, read_table, truncate_tables

FORMAT = 1
_PACKAGES = ("esper-grow", "torch", "numpy", "pyarrow", "duckdb", "safetensors", "orjson")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """One run's directory; `info` and `config` are what run.json and config.json hold."""

    path: Path
    info: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], *, config: Mapping[str, Any], command: Sequence[str] | None = None
    ) -> RunDirectory:
        """A new run; its command is this process's where none is given. The directory may exist if it is
        empty."""
        path = Path(path)
        info = {
            "format": FORMAT,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": list(sys.argv if command is None else command),
            "git": _git_state(),
            "versions": _versions(),
            "machine": _machine(),
        }
        try:
            path.mkdir(parents=True, exist_ok=True)
            if found := sorted(p.name for p in path.iterdir()):
                raise TelemetryError(
                    f"run directory {path} is not empty, it holds {', '.join(found[:5])}; name a new one, "
                    "or resume the run that is there"
                )
            for name in ("tables", "checkpoints"):
                (path / name).mkdir()
            (path / "events.jsonl").touch()
            replace_file(path / "config.json", _pretty(config))
            replace_file(path / "run.json", _pretty(info))  # last: what has it is complete
            sync_directory(path)
            sync_directory(path.parent)
        except OSError as error:
            raise TelemetryError(
                f"cannot create the run directory {path}: {error.strerror or error}"
            ) from error
        return cls.open(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """A run that exists, finished or not."""
        path = Path(path)
        info = _read_json(path, "run.json")
        if info.get("format") != FORMAT:
            raise TelemetryError(
                f"{path / 'run.json'}: format is {info.get('format')!r}, this version reads {FORMAT}"
            )
        run = cls(path, info, _read_json(path, "config.json"))
        for part in (run.log, run.tables, run.checkpoints):
            if not part.exists():
                raise TelemetryError(f"{path} is not a whole run directory: {part.name} is missing")
        return run

    @classmethod
    def resume(
        cls, path: str | os.PathLike[str], seq: int, finished: tuple[int, int] | None = None
    ) -> RunDirectory:
        """A run to go on with from a checkpoint: log and tables forget what came after it. `seq` is the hub's
        next_seq when it was taken, which is the number of its announcement. One that was not announced must
        say which epoch (round, epoch) was `finished`, because steps on either side of it may have the same
        position."""
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
        """For `TelemetryHub.attached`; one writer at a time."""
        return JsonlOutput(self.log), ParquetOutput(self.tables)

    # -- reading ---------------------------------------------------------------------------------------------

    def events(self) -> Iterator[dict[str, Any]]:
        """The log's complete events in order."""
        return read_events(self.log)

    def table(self, name: str) -> pa.Table:
        """All rows of `steps`, `rewards` or `throughput`."""
        return read_table(self.tables, name)


def _pretty(content: Mapping[str, Any]) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    try:
        content = orjson.loads((directory / name).read_bytes())
    except OSError as error:
        raise TelemetryError(f"{directory} is not a run directory: {name}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise TelemetryError(f"{directory / name}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TelemetryError(f"{directory / name}: holds {type(content).__name__}, must hold an object")
    return content


@cache
def _git_state() -> dict[str, Any] | None:
    """Commit of the code that runs, and whether it was changed since; None where it is not under git."""
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
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _machine() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
    }
