"""Writes a run's numbers for an experiment tracker, under their names in the metric registry. Nothing leaves
this machine.

Steps count rounds and episodes from 1, as the other readers show them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from esper.karn.views import EVENT_VIEWS, Views
from esper.leyline import EVENTS, EsperError, TelemetryEventType, allowed
from esper.leyline.metrics import ROUND, FieldKind, Metric

_T = TelemetryEventType
_BY_ROUND = (_T.BATCH_COMPLETED, _T.PPO_UPDATE, _T.ACTION_DISTRIBUTION, _T.MASK_HIT_RATES)
_NUMBERS, _MAPS = (FieldKind.FLOAT, FieldKind.INT), (FieldKind.NUMBERS, FieldKind.COUNTS)
SUFFIX = ".esper"
"""Suffix of the event files that this module wrote, and may therefore replace."""


@dataclass(frozen=True, slots=True)
class Point:
    """Numbers of one moment: `axis` is round or episode, `step` the position on it, from 1."""

    axis: str
    step: int
    time: float
    values: Mapping[str, float]


def points(views: Views) -> Iterator[Point]:
    """Rounds, updates, actions, masks, the health of rounds, alerts, and episodes, each in order."""
    for kind in _BY_ROUND:
        yield from _points(
            views.rows(f"SELECT *, round_idx + 1 AS step FROM {EVENT_VIEWS[kind]} ORDER BY seq"),
            "round",
            kind.value,
            EVENTS[kind].fields,
        )
    yield from _points(
        views.rows("""
        SELECT health.*, rounds.t_wall, rounds.round_idx + 1 AS step
        FROM health JOIN rounds USING (round_idx) ORDER BY rounds.seq"""),
        "round",
        "round",
        ROUND,
    )
    for row in views.rows("""
        SELECT code, value, coalesce(round_idx, 0) + 1 AS step, t_wall
        FROM alerts WHERE value IS NOT NULL ORDER BY seq"""):
        yield Point("round", row["step"], row["t_wall"], {f"alert/{row['code']}": row["value"]})
    yield from _points(
        views.rows("""
        SELECT *, episode_idx * (SELECT max(env_id) + 1 FROM episodes) + env_id + 1 AS step
        FROM episodes ORDER BY step"""),
        "episode",
        _T.EPISODE_OUTCOME.value,
        EVENTS[_T.EPISODE_OUTCOME].fields,
    )


def _points(
    rows: Iterable[Mapping[str, Any]], axis: str, prefix: str, fields: Iterable[Metric]
) -> Iterator[Point]:
    fields = tuple(fields)
    for row in rows:
        values: dict[str, float] = {}
        for field in fields:
            value = row[field.name]
            if field.kind in _NUMBERS and value is not None:
                values[f"{prefix}/{field.name}"] = value
            elif field.kind in _MAPS:
                values |= {
                    f"{prefix}/{field.name}/{key}": item
                    for key, item in (value or {}).items()
                    if item is not None
                }
        yield Point(axis, row["step"], row["t_wall"], values)


def _tensorboard(_views: Views, out: Path, series: Iterable[Point]) -> None:
    # Not tensorboard's EventFileWriter: its thread prints a traceback if the disk is full.
    records = _load("tensorboard.summary.writer.record_writer")
    event = import_module("tensorboard.compat.proto.event_pb2")
    summary = import_module("tensorboard.compat.proto.summary_pb2")
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"*{SUFFIX}"):
        old.unlink()
    now = time.time()
    with (out / f"events.out.tfevents.{now:.0f}.{platform.node()}.{os.getpid()}{SUFFIX}").open("wb") as file:
        writer = records.RecordWriter(file)
        writer.write(event.Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        for point in series:
            values = [
                summary.Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            content = summary.Summary(value=values)
            writer.write(
                event.Event(wall_time=point.time, step=point.step, summary=content).SerializeToString()
            )


def _wandb(views: Views, out: Path, series: Iterable[Point]) -> None:
    wandb = _load("wandb")
    out.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project="esper",
        name=views.run.path.resolve().name,
        dir=str(out),
        mode="offline",
        config=dict(views.run.config),
    )
    try:
        for axis in ("round", "episode"):
            run.define_metric(axis, hidden=True)
        for point in series:
            for prefix in {name.split("/")[0] for name in point.values}:
                run.define_metric(f"{prefix}/*", step_metric=point.axis)
            run.log({**point.values, point.axis: point.step})
    finally:
        run.finish()


TRACKERS: Mapping[str, Callable[[Views, Path, Iterable[Point]], None]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


def sync_run(views: Views, tracker: str, out: Path | None = None) -> tuple[Path, int]:
    """Write a run's numbers for a tracker into `out`, by default a directory named for the tracker in the run
    directory. Returns that directory and the number of numbers. A second call replaces the files of the first
    for TensorBoard, and adds a run for W&B."""
    if tracker not in TRACKERS:
        raise EsperError(f"sync: tracker is {tracker!r}; {allowed(TRACKERS)}")
    out = views.run.path / tracker if out is None else out
    series = list(points(views))
    try:
        TRACKERS[tracker](views, out, series)
    except OSError as error:
        raise EsperError(f"sync: cannot write to {out}: {error.strerror or error}") from error
    return out, sum(len(point.values) for point in series)


def _load(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise EsperError(f"{package} is not installed ({error}); to get it: pip install {package}") from error
