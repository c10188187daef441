"""The event log of a run as JSONL, and its reader. Outputs copy events and never change them.

A log holds one JSON object per line; `seq` counts the lines from 0. A line is complete once its newline is
written, so a process killed at any moment leaves a valid log and at most one incomplete last line."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from esper.leyline import TelemetryEvent, TelemetryEventType
from esper.nissa.hub import TelemetryError

_FIELDS = tuple(field.name for field in fields(TelemetryEvent) if field.name != "data")
_LINE_START = b'{"seq":'


class JsonlOutput:
    """Appends events to a file. Events emitted before the last `flush` survive kill −9.

    Floats that are not finite become null, and `nonfinite` lists their dotted paths.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("ab")
        except OSError as error:
            raise TelemetryError(
                f"cannot write the event log {self.path}: {error.strerror or error}"
            ) from error
        try:
            lock(self._file, self.path)
            self.next_seq = _repair(self.path)
        except TelemetryError:
            self._file.close()
            raise

    def __repr__(self) -> str:
        return f"JsonlOutput({str(self.path)!r})"

    def emit(self, seq: int, event: TelemetryEvent) -> None:
        if seq != self.next_seq:
            raise TelemetryError(
                f"expected event {self.next_seq}, got {seq}: an earlier event was not recorded, "
                "or the hub did not start at this log's next_seq"
            )
        nonfinite: list[str] = []
        line: dict[str, Any] = {"seq": seq, "t_wall": time.time()}
        for name in _FIELDS:
            value = _plain(getattr(event, name), name, nonfinite)
            if value is not None:
                line[name] = value
        line["data"] = _plain(event.data, "data", nonfinite)
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))
        self.next_seq += 1

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of a log in order. An incomplete last line is skipped; any other damage or gap raises a
    TelemetryError."""
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                return
            event = _decode(line, f"{path}, line {number + 1}")
            if event["seq"] != number:
                raise TelemetryError(
                    f"{path}, line {number + 1}: event {event['seq']} where event {number} was expected"
                )
            yield event


def truncate_log(path: Path, seq: int) -> None:
    """Keep the events below number `seq`, and event `seq` if it announces a checkpoint. A log in which one is
    missing is not changed."""
    with path.open("r+b") as file:
        lock(file, path)
        end = 0
        for number in range(seq):
            line = file.readline()
            if not line.endswith(b"\n") or _decode(line, f"{path}, line {number + 1}")["seq"] != number:
                raise TelemetryError(
                    f"{path}: event {number} is missing, but the checkpoint needs events 0 to {seq - 1}"
                )
            end += len(line)
        line = file.readline()
        if (
            line.endswith(b"\n")
            and _decode(line, f"{path}, line {seq + 1}").get("event_type") == TelemetryEventType.CHECKPOINT
        ):
            end += len(line)
        file.truncate(end)
        os.fsync(file.fileno())


def lock(file: IO[bytes], path: Path) -> None:
    """Allow one writer at a time. The lock is released when the process that holds it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TelemetryError(f"{path.parent} is in use: another run is writing {path.name}") from error


def _repair(path: Path) -> int:
    """Remove an incomplete last line from an existing log, and return the next event's number."""
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
            last = content[content.rfind(b"\n", 0, max(end - 1, 0)) + 1 : end]
            rest = content[end : end + len(_LINE_START)]
        next_seq = _decode(last, f"{path}, last complete line")["seq"] + 1 if last else 0
        if not _LINE_START.startswith(rest):
            raise TelemetryError(
                f"{path}: the last line starts with {rest!r}, which is not an event; nothing was changed"
            )
        file.truncate(end)
    return int(next_seq)


def _decode(line: bytes, where: str) -> dict[str, Any]:
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TelemetryError(f"{where}: not JSON: {error}") from error
    if not isinstance(event, dict) or type(event.get("seq")) is not int:
        raise TelemetryError(f"{where}: {line[:80]!r} is not an event, it has no seq")
    return event


def _plain(value: Any, path: str, nonfinite: list[str]) -> Any:
    """The same value in JSON's types. `nonfinite` collects the paths of floats that JSON cannot represent."""
    kind = type(value)
    if kind is float:
        if math.isfinite(value):
            return value
        nonfinite.append(path)
        return None
    if value is None or kind is str or kind is int or kind is bool:
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{path}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}.{i}", nonfinite) for i, item in enumerate(value)]
    if isinstance(value, Enum):
        return _plain(value.value, path, nonfinite)
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist(), path, nonfinite)
    # Tensors end here on purpose: converting one would make the recorder wait for the device.
    raise TypeError(
        f"{path} is a {kind.__name__}, which the event log cannot hold; pass numbers, strings, enums, "
        "mappings, lists, tuples or numpy values"
    )
