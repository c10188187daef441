"""Runs side by side: how much better or worse than the first one each of the others did, with 95 % intervals.

Runs of one task and seed share their random numbers episode by episode and env by env, so differences are
taken in pairs."""

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
    if field.name not in ("episode_idx", "epochs", "host_params")
)
MAX_UNITS = 10_000
"""More than this the bootstrap does not hold in memory."""
_KEYS = {"episode": "episode_idx, env_id", "round": "round_idx"}


@dataclass(frozen=True, slots=True)
class Row:
    """One metric: each run by itself, and each after the first less the first."""

    metric: Metric
    runs: tuple[Estimate, ...]
    differences: tuple[Estimate, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    rows: tuple[Row, ...]
    units: int
    """Episodes or rounds that every run has: the values behind each estimate."""
    paired: bool
    """Without one seed in common there are no differences."""
    notes: tuple[str, ...]
    """What else differs between the runs."""


def compare_runs(runs: Sequence[Views], *, by: str = "episode", last: int | None = None) -> Comparison:
    """Episodes, or means of rounds, that all runs have; of the `last` rounds where that is given."""
    if by not in _KEYS:
        raise EsperError(f"compare: by is {by!r}; {allowed(_KEYS)}")
    if len(runs) < 2 or (last is not None and last < 1):
        raise EsperError(
            f"compare: {len(runs)} runs, last {last}; needs two runs or more, and rounds from 1 up"
        )
    starts = [_start(run) for run in runs]
    if len({start["task"] for start in starts}) > 1:
        raise EsperError(
            f"compare: tasks are {', '.join(str(s['task']) for s in starts)}; runs of one task can be compared"
        )
    tables = [_units(run, by) for run in runs]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    if last is not None:
        rounds = sorted({tables[0][key]["round_idx"] for key in shared})[-last:]
        shared = [key for key in shared if tables[0][key]["round_idx"] in rounds]
    if not 0 < len(shared) <= MAX_UNITS:
        raise EsperError(
            f"compare: the runs have {len(shared)} {by}s in common, must be from 1 to {MAX_UNITS}; see --by, --last"
        )
    is_paired = (
        len({(start["seed"], run.run.config.get("twins")) for start, run in zip(starts, runs, strict=True)})
        == 1
    )
    rows = []
    for metric in METRICS:
        first, *others = ([table[key][metric.name] for key in shared] for table in tables)
        if not any(value is None for column in (first, *others) for value in column):
            rows.append(
                Row(
                    metric,
                    tuple(estimate(column) for column in (first, *others)),
                    tuple(paired(other, first) for other in others) if is_paired else (),
                )
            )
    return Comparison(tuple(rows), len(shared), is_paired, tuple(_notes(runs)))


def _start(run: Views) -> Mapping[str, Any]:
    found = run.rows("SELECT task, seed FROM starts ORDER BY seq DESC LIMIT 1")
    if not found:
        raise EsperError(f"compare: {run.run.path} has not started")
    return found[0]


def _units(run: Views, by: str) -> dict[tuple[int, ...], Mapping[str, Any]]:
    means = ", ".join(f"avg({metric.name}) AS {metric.name}" for metric in METRICS)
    rows = run.rows(
        f"SELECT [{_KEYS[by]}] AS key, any_value(round_idx) AS round_idx, {means} FROM episodes GROUP BY {_KEYS[by]}"
    )
    return {tuple(row["key"]): row for row in rows}


def _notes(runs: Sequence[Views]) -> Iterator[str]:
    """Settings, code and versions that are not the same everywhere, and alerts."""
    flat = [
        dict(
            _flatten(
                {
                    "config": run.run.config,
                    "git": run.run.info.get("git"),
                    "versions": run.run.info.get("versions"),
                    "alerts": len(run.rows("SELECT seq FROM alerts")),
                }
            )
        )
        for run in runs
    ]
    for key in dict.fromkeys(key for facts in flat for key in facts):
        values = [str(facts.get(key)) for facts in flat]
        if len(set(values)) > 1 and key != "config.telemetry_dir":
            yield f"{key}: {' | '.join(values)}"


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
