"""Step events as Parquet tables, one file per table and round, and the reader of these tables.

Columns come from the metric registry. A file appears complete or not at all; a process killed at any moment
leaves the rounds that it had written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from esper._files import PARTIAL, replace_file, sync_directory
from esper.leyline import EVENTS, STEP_TABLES, TelemetryEvent, TelemetryEventType, allowed
from esper.leyline.metrics import CONTEXT, FieldKind
from esper.nissa.hub import TelemetryError

_WRITE_AFTER = frozenset({TelemetryEventType.BATCH_COMPLETED, TelemetryEventType.CHECKPOINT})
ARROW_TYPES: Mapping[FieldKind, pa.DataType] = {
    FieldKind.FLOAT: pa.float64(),
    FieldKind.INT: pa.int64(),
    FieldKind.FLAG: pa.bool_(),
    FieldKind.TEXT: pa.string(),
    FieldKind.TEXTS: pa.list_(pa.string()),
    FieldKind.NUMBERS: pa.map_(pa.string(), pa.float64()),
    FieldKind.COUNTS: pa.map_(pa.string(), pa.int64()),
    FieldKind.FLAGS: pa.map_(pa.string(), pa.bool_()),
    FieldKind.LISTS: pa.map_(pa.string(), pa.list_(pa.string())),
    FieldKind.LABELS: pa.map_(pa.string(), pa.string()),
    FieldKind.VECTOR: pa.list_(pa.float32()),
}
SCHEMAS = {
    table: pa.schema([(f.name, ARROW_TYPES[f.kind]) for f in (*CONTEXT, *EVENTS[kind].fields)])
    for kind, table in STEP_TABLES.items()
}
"""Columns of each table: position in the log, time, context of the event, and its payload."""
_EVENT_CONTEXT = tuple(f.name for f in CONTEXT if f.name not in ("seq", "t_wall"))


class ParquetOutput:
    """Keeps step events in memory until their round ends, a checkpoint is announced, or `flush` is called."""

    wants_step_events = True

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise TelemetryError(f"cannot write tables: {self.directory} is not a directory")
        _drop_partial(self.directory)
        self._rows: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def __repr__(self) -> str:
        return f"ParquetOutput({str(self.directory)!r})"

    def emit(self, seq: int, event: TelemetryEvent) -> None:
        table = STEP_TABLES.get(event.event_type)
        if table is not None:
            if event.round_idx is None:
                raise TelemetryError(f"{event.event_type.value} names no round; set the hub's round_idx")
            known = [field.name for field in EVENTS[event.event_type].fields]
            if unknown := event.data.keys() - set(known):
                raise TelemetryError(
                    f"{event.event_type.value} has fields {sorted(unknown)} that the registry "
                    f"does not know; {allowed(known)}"
                )
            context = {name: getattr(event, name) for name in _EVENT_CONTEXT}
            row = {"seq": seq, "t_wall": time.time(), **context, **event.data}
            self._rows.setdefault((table, event.round_idx), []).append(row)
        elif event.event_type in _WRITE_AFTER:
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        for table, round_idx in sorted(self._rows):
            path = _path(self.directory, table, round_idx)
            rows = _columns(table, self._rows[table, round_idx])
            if path.exists():  # a checkpoint within the round wrote the first part of it
                rows = pa.concat_tables([read_file(path, table), rows], promote_options="default")
            _write(path, rows)
            del self._rows[table, round_idx]
        sync_directory(self.directory)

    def close(self) -> None:
        self.flush()


def _columns(table: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    schema = SCHEMAS[table]
    return pa.table(
        [_array(field.name, field.type, [row.get(field.name) for row in rows]) for field in schema],
        schema=schema,
    )


def _array(name: str, kind: pa.DataType, values: list[Any]) -> pa.Array:
    try:
        if kind == pa.int64():  # Arrow would truncate 1.5 to 1
            values = [None if value is None else index(value) for value in values]
        elif kind == ARROW_TYPES[FieldKind.COUNTS]:
            values = [
                None if value is None else {key: index(count) for key, count in value.items()}
                for value in values
            ]
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, AttributeError, OverflowError) as error:
        raise TelemetryError(f"column {name} holds {kind}: {error}") from error


def read_table(directory: str | os.PathLike[str], name: str) -> pa.Table:
    """All rows of a table in order; no rows if none were written. An error names the file that is damaged."""
    if name not in SCHEMAS:
        raise TelemetryError(f"table {name!r} is unknown; {allowed(SCHEMAS)}")
    parts = [read_file(path, name) for path in _files(Path(directory), name)]
    return pa.concat_tables([SCHEMAS[name].empty_table(), *parts], promote_options="default")


def check_tables(directory: Path) -> None:
    """Raise an error that names a damaged file, if there is one. Reads the footers only, which a truncated
    file lacks."""
    for name in SCHEMAS:
        for path in _files(directory, name):
            _open(path, pq.read_schema)


def truncate_tables(directory: Path, seq: int, finished: tuple[int, int] | None = None) -> None:
    """Keep the rows that were emitted before event `seq`; of these only the ones up to epoch `finished`
    (round, epoch), if given. Nothing is changed if a file is damaged."""
    check_tables(directory)
    _drop_partial(directory)
    keep = pc.field("seq") <= seq
    if finished is not None:
        round_idx, epoch = finished
        keep &= (pc.field("round_idx") < round_idx) | (
            (pc.field("round_idx") == round_idx) & (pc.field("epoch") <= epoch)
        )
    for name in SCHEMAS:
        for path in reversed(_files(directory, name)):
            rows = read_file(path, name)
            kept = rows.filter(keep)
            if len(kept) == len(rows):
                break  # positions only grow, so earlier rounds are complete
            if len(kept):
                _write(path, kept)
            else:
                path.unlink()
    sync_directory(directory)


def _path(directory: Path, table: str, round_idx: int) -> Path:
    return directory / f"{table}-{round_idx:05d}.parquet"


def _files(directory: Path, table: str) -> list[Path]:
    """Oldest round first. Sorted by length first, because round 100000 has one digit more."""
    return sorted(directory.glob(f"{table}-*.parquet"), key=lambda path: (len(path.name), path.name))


def read_file(path: Path, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """A file of the table `name`, or some of its columns and `seq`, checked against the registry's types."""
    wanted = None if columns is None else ["seq", *columns]
    table = _open(path, lambda path: pq.ParquetFile(path, page_checksum_verification=True).read(wanted))
    if "seq" not in table.column_names:
        raise TelemetryError(f"{path}: has no column seq, so it is not a table of a run")
    for column in SCHEMAS[name]:
        if column.name not in table.column_names:
            continue  # written by a version that did not have it; it reads as null
        stored = table.schema.field(column.name).type
        if stored != column.type and not pa.types.is_null(stored):
            raise TelemetryError(f"{path}: column {column.name} holds {stored}, must hold {column.type}")
    return table


def _open(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TelemetryError(
            f"{path}: not a readable Parquet file, so it is damaged ({error}); "
            "move it away to read the rest of the run"
        ) from error


def _write(path: Path, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    replace_file(path, sink.getvalue())


def _drop_partial(directory: Path) -> None:
    for path in directory.glob(f".*{PARTIAL}"):
        path.unlink()
