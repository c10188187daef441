"""Runs side by side: how much better or worse than the first one each of the others did, with 95 % intervals.

Runs of one task and seed share their random numbers episode by episode and env by env, so differences are taken in pairs.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, variance
from typing import Any

from esper.karn.views import Views
from esper.leyline import EVENTS, EsperError, TelemetryEventType, allowed
from esper.leyline.metrics import Metric

METRICS = tuple(field for field in EVENTS[TelemetryEventType.EPISODE_OUTCOME].fields
                if field.name not in ("episode_idx", "epochs", "host_params"))
_UNITS = {"episode": "episode_idx, env_id", "round": "round_idx"}


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and half the width of its 95 % interval; None from a single value."""

    mean: float
    half: float | None

    @property
    def sign(self) -> int:
        """Which side of 0 the whole interval lies on; 0 where it includes 0 or is unknown."""
        return 0 if self.half is None or abs(self.mean) <= self.half else (1 if self.mean > 0 else -1)


@dataclass(frozen=True, slots=True)
class Row:
    """One metric: each run by itself, and each after the first less the first."""

    metric: Metric
    runs: tuple[Interval, ...]
    differences: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    rows: tuple[Row, ...]
    units: int
    """Episodes or rounds that every run has: the values behind each mean."""
    paired: bool
    notes: tuple[str, ...]
    """What else differs between the runs."""


def compare_runs(runs: Sequence[Views], *, by: str = "episode", last: int | None = None) -> Comparison:
    """Episodes, or means of rounds, that all runs have; of the `last` rounds where that is given."""
    if by not in _UNITS:
        raise EsperError(f"compare: by is {by!r}; {allowed(_UNITS)}")
    if len(runs) < 2 or (last is not None and last < 1):
        raise EsperError(f"compare: {len(runs)} runs, last {last}; needs two runs or more, and rounds from 1 up")
    starts = [_start(run) for run in runs]
    if len({start["task"] for start in starts}) > 1:
        raise EsperError(f"compare: tasks are {', '.join(str(s['task']) for s in starts)}; runs of one task can be compared")
    tables = [_units(run, by) for run in runs]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    if last is not None:
        rounds = sorted({tables[0][key]["round_idx"] for key in shared})[-last:]
        shared = [key for key in shared if tables[0][key]["round_idx"] in rounds]
    if not shared:
        raise EsperError(f"compare: the runs have no {by} in common; they finished {', '.join(str(len(t)) for t in tables)}")
    paired = len({start["seed"] for start in starts}) == 1
    rows = []
    for metric in METRICS:
        values = [[table[key][metric.name] for key in shared] for table in tables]
        if all(value is not None for column in values for value in column):
            compare = _paired if paired else _welch
            rows.append(Row(metric, tuple(map(interval, values)), tuple(compare(values[0], other) for other in values[1:])))
    return Comparison(tuple(rows), len(shared), paired, tuple(_notes(runs)))


def _start(run: Views) -> Mapping[str, Any]:
    found = run.rows("SELECT task, seed FROM starts ORDER BY seq DESC LIMIT 1")
    if not found:
        raise EsperError(f"compare: {run.run.path} has not started")
    return found[0]


def _units(run: Views, by: str) -> dict[tuple[int, ...], Mapping[str, Any]]:
    keys = _UNITS[by]
    means = ", ".join(f"avg({metric.name}) AS {metric.name}" for metric in METRICS)
    rows = run.rows(f"SELECT [{keys}] AS key, any_value(round_idx) AS round_idx, {means} FROM episodes GROUP BY {keys}")
    return {tuple(row["key"]): row for row in rows}


def interval(values: Sequence[float]) -> Interval:
    n = len(values)
    return Interval(fmean(values), t_quantile(n - 1) * math.sqrt(variance(values) / n) if n > 1 else None)


def _paired(first: Sequence[float], other: Sequence[float]) -> Interval:
    return interval([b - a for a, b in zip(first, other, strict=True)])


def _welch(first: Sequence[float], other: Sequence[float]) -> Interval:
    """For runs that share no random numbers, with Welch's degrees of freedom rounded down."""
    mean, n = fmean(other) - fmean(first), len(first)
    if n < 2:
        return Interval(mean, None)
    a, b = variance(first) / n, variance(other) / n
    freedom = math.floor((a + b) ** 2 * (n - 1) / (a * a + b * b)) if a + b else n - 1
    return Interval(mean, t_quantile(freedom) * math.sqrt(a + b))


@cache
def t_quantile(freedom: int) -> float:
    """The 97.5 % point of Student's distribution, by bisection of its exact sum for whole degrees of freedom."""
    low, high = 0.0, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, freedom) < 0.95 else (low, middle)
    return low


def _t_inside(t: float, freedom: int) -> float:
    """P(|T| < t): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= k / (k + 1) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


def _notes(runs: Sequence[Views]) -> Iterator[str]:
    """Settings, code and versions that are not the same everywhere, and alerts."""
    flat = [dict(_flatten({"config": run.run.config, "git": run.run.info.get("git"), "versions": run.run.info.get("versions")}))
            for run in runs]
    for key in dict.fromkeys(key for facts in flat for key in facts):
        values = [str(facts.get(key)) for facts in flat]
        if len(set(values)) > 1 and not key.endswith("telemetry_dir"):
            yield f"{key}: {' | '.join(values)}"
    counts = [len(run.rows("SELECT seq FROM alerts")) for run in runs]
    if any(counts):
        yield f"alerts: {' | '.join(map(str, counts))}"


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    else:
        yield path.removeprefix("config."), value
