"""Runs side by side: the difference of each run from the first one, with 95 % intervals.

Runs of one task and random seed share their random numbers episode by episode and env by env, so differences
are paired."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper._statistics import Estimate, estimate, paired
from esper.karn.views import Views
from esper.leyline import EVENTS, EsperError, TelemetryEventType, allowed
from esper.leyline.metrics import Metric

METRICS = tuple(
    field
    for field in EVENTS[TelemetryEventType.EPISODE_OUTCOME].fields
    if field.name not in ("task", "episode_idx", "epochs", "host_params")
)
MAX_UNITS = 10_000
"""The bootstrap holds its resamples in memory; more units than this would not fit."""
_KEYS = {"episode": "episode_idx, env_id", "round": "round_idx"}


@dataclass(frozen=True, slots=True)
class Row:
    """One metric: the estimate of each run, and the difference of each later run from the first."""

    task: str | None
    """The task whose episodes are compared; None: all of them."""
    metric: Metric
    runs: tuple[Estimate, ...]
    differences: tuple[Estimate, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    rows: tuple[Row, ...]
    units: int
    """Number of episodes or rounds that every run has: the sample size of each estimate."""
    paired: bool
    """Whether the runs share one random seed; without it there are no differences."""
    notes: tuple[str, ...]
    """Settings, code and versions that differ between the runs."""


def compare_runs(runs: Sequence[Views], *, by: str = "episode", last: int | None = None) -> Comparison:
    """Compare the episodes, or means of rounds, that all runs have; only of the `last` rounds if given."""
    if by not in _KEYS:
        raise EsperError(f"compare: by is {by!r}; {allowed(_KEYS)}")
    if len(runs) < 2:
        raise EsperError(f"compare: {len(runs)} runs are given, must be 2 or more")
    if last is not None and last < 1:
        raise EsperError(f"compare: last is {last}, must be 1 or more")
    starts = [_start(run) for run in runs]
    tasks = [str(start["task"]) for start in starts]
    if len(set(tasks)) > 1:
        raise EsperError(
            f"compare: tasks are {', '.join(tasks)}; only runs of the same tasks can be compared"
        )
    tables = [_units(run, by) for run in runs]
    shared = _shared_units(tables, last)
    if not 0 < len(shared) <= MAX_UNITS:
        raise EsperError(
            f"compare: the runs have {len(shared)} {by}s in common, must be from 1 to {MAX_UNITS}; "
            "see --by and --last"
        )
    origins = {(start["seed"], run.run.config.get("twins")) for start, run in zip(starts, runs, strict=True)}
    is_paired = len(origins) == 1
    rows = _rows(None, tables, shared, is_paired=is_paired)
    names = tasks[0].split()
    if len(names) > 1:
        for task in names:
            tables = [_units(run, by, task) for run in runs]
            rows += _rows(task, tables, _shared_units(tables, last), is_paired=is_paired)
    return Comparison(tuple(rows), len(shared), is_paired, tuple(_notes(runs)))


Units = Mapping[tuple[int, ...], Mapping[str, Any]]


def _rows(
    task: str | None, tables: Sequence[Units], shared: Sequence[tuple[int, ...]], *, is_paired: bool
) -> list[Row]:
    rows = []
    for metric in METRICS:
        columns = [[table[key][metric.name] for key in shared] for table in tables]
        if not shared or any(value is None for column in columns for value in column):
            continue
        first, *others = columns
        differences = tuple(paired(other, first) for other in others) if is_paired else ()
        rows.append(Row(task, metric, tuple(estimate(column) for column in columns), differences))
    return rows


def _start(run: Views) -> Mapping[str, Any]:
    starts = run.rows("SELECT task, seed FROM starts ORDER BY seq DESC LIMIT 1")
    if not starts:
        raise EsperError(f"compare: {run.run.path} has not started")
    return starts[0]


def _units(run: Views, by: str, task: str | None = None) -> dict[tuple[int, ...], Mapping[str, Any]]:
    """Episodes or rounds, of one task if it is named."""
    means = ", ".join(f"avg({metric.name}) AS {metric.name}" for metric in METRICS)
    where = "" if task is None else "WHERE task = '{}'".format(task.replace("'", "''"))
    rows = run.rows(f"""
        SELECT [{_KEYS[by]}] AS key, any_value(round_idx) AS round_idx, {means}
        FROM episodes {where} GROUP BY {_KEYS[by]}""")
    return {tuple(row["key"]): row for row in rows}


def _shared_units(tables: Sequence[Units], last: int | None) -> list[tuple[int, ...]]:
    """Keys that every table has; only of the `last` rounds if given."""
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    if last is None:
        return shared
    first = tables[0]
    rounds = sorted({first[key]["round_idx"] for key in shared})[-last:]
    return [key for key in shared if first[key]["round_idx"] in rounds]


def _notes(runs: Sequence[Views]) -> Iterator[str]:
    """Settings, code, versions and numbers of alerts that are not the same in all runs."""
    facts = [dict(_flatten(_facts(run))) for run in runs]
    for key in dict.fromkeys(key for run_facts in facts for key in run_facts):
        values = [str(run_facts.get(key)) for run_facts in facts]
        if len(set(values)) > 1 and key != "config.telemetry_dir":
            yield f"{key}: {' | '.join(values)}"


def _facts(run: Views) -> Mapping[str, Any]:
    return {
        "config": run.run.config,
        "git": run.run.info.get("git"),
        "versions": run.run.info.get("versions"),
        "alerts": len(run.rows("SELECT seq FROM alerts")),
    }


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
