"""A run as SQL: one view per event type, with the columns of the metric registry, and views that join these.

The database is in memory and has no access to files, so a query can neither change a run nor read anything
else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]

from esper.leyline import EVENTS, STEP_TABLES, EsperError, SeedStage, TelemetryEventType
from esper.leyline.metrics import CONTEXT, ROUND, FieldKind, Metric, integer, text
from esper.nissa import BlueprintAnalytics, RunDirectory, TelemetryError
from esper.nissa.alerts import AlertEngine, event_parts
from esper.nissa.tables import ARROW_TYPES, SCHEMAS

_T = TelemetryEventType
EVENT_VIEWS: Mapping[TelemetryEventType, str] = {
    _T.RUN_STARTED: "starts",
    _T.RUN_ENDED: "ends",
    _T.BATCH_COMPLETED: "rounds",
    _T.PPO_UPDATE: "updates",
    _T.ACTION_DISTRIBUTION: "actions",
    _T.MASK_HIT_RATES: "masks",
    _T.SEED_LIFECYCLE: "lifecycle",
    _T.ATTRIBUTION: "attribution",
    _T.CF_UNAVAILABLE: "unmeasured",
    _T.EPISODE_OUTCOME: "episodes",
    _T.ROLLBACK: "rollbacks",
    _T.ALERT: "alerts",
    _T.CHECKPOINT: "checkpoints",
    **STEP_TABLES,
}
"""The view that shows each event type."""
_NONFINITE = Metric(
    "nonfinite_fields", "", "Fields that are null because they were NaN or Inf.", FieldKind.TEXTS
)
_ROUND_IDX, _ENV_ID, _EPOCH = (
    column for column in CONTEXT if column.name in ("round_idx", "env_id", "epoch")
)
_SLOT = text("slot", "Name of the slot.")
_BLUEPRINT = text("blueprint", "Blueprint of the seed.")


@dataclass(frozen=True, slots=True)
class View:
    """A view and its columns. A `query` derives it from other views; without one it is filled directly."""

    name: str
    meaning: str
    columns: tuple[Metric, ...]
    query: str = ""


def _event_view(kind: TelemetryEventType, name: str) -> View:
    payload = EVENTS[kind].fields
    payload_names = {field.name for field in payload}
    context = CONTEXT if kind in STEP_TABLES else (*CONTEXT, _NONFINITE)
    columns = (*(field for field in context if field.name not in payload_names), *payload)
    return View(name, EVENTS[kind].meaning, columns)


_STAGE_NAME = (
    "CASE stage " + " ".join(f"WHEN {stage.value} THEN '{stage.name}'" for stage in SeedStage) + " END"
)
_SLOTS = View(
    "slots",
    "State of each seed after each step. An empty slot has no row.",
    (
        _ROUND_IDX,
        _ENV_ID,
        _EPOCH,
        _SLOT,
        text("stage", "Stage of the seed."),
        _BLUEPRINT,
        Metric("alpha", "alpha", "Blending weight of the seed."),
        Metric("contribution", "points", "Accuracy lost without the seed; null if it is not blended."),
    ),
    f"""
    WITH lives AS (
        SELECT *, entry.key AS name, entry.value AS stage
        FROM (SELECT *, unnest(map_entries(stages)) AS entry FROM steps)
    ),
    births AS (
        SELECT round_idx, env_id, slot_id, epoch, blueprint_id FROM lifecycle WHERE kind = 'germinated'
    )
    SELECT lives.round_idx, lives.env_id, lives.epoch, name AS slot, {_STAGE_NAME} AS stage,
        blueprint_id AS blueprint, alphas[name] AS alpha, contributions[name] AS contribution
    FROM lives ASOF LEFT JOIN births
        ON lives.round_idx = births.round_idx AND lives.env_id = births.env_id
        AND lives.name = births.slot_id AND lives.epoch >= births.epoch
    ORDER BY lives.round_idx, lives.env_id, name, lives.epoch""",
)
_TERMS = View(
    "terms",
    "Each named term of each step's reward.",
    (
        _ROUND_IDX,
        _ENV_ID,
        _EPOCH,
        text("term", "Name of the term."),
        Metric("amount", "reward", "Value of the term."),
    ),
    """
    SELECT round_idx, env_id, epoch, entry.key AS term, entry.value AS amount
    FROM (SELECT *, unnest(map_entries(components)) AS entry FROM rewards)""",
)
_OBSERVATIONS = View(
    "observations",
    "Each feature that a policy saw at each step, scaled as it saw it. Those of a quote begin with the name "
    "of its blueprint.",
    (
        _ROUND_IDX,
        _ENV_ID,
        _EPOCH,
        text("slot", "Name of the slot; null for a feature of the whole network."),
        text("feature", "Name of the feature."),
        Metric("value", "", "Number that the policy's network read; null if it was not measured."),
    ),
    """
    WITH each AS (
        SELECT unnest(map_entries(envs_by_task)) AS entry,
            generate_subscripts(map_entries(envs_by_task), 1) AS number, observed_by_task, slots_by_task
        FROM (SELECT * FROM starts ORDER BY seq DESC LIMIT 1)
    ),
    tasked AS (
        SELECT observed_by_task[entry.key] AS observed, slots_by_task[entry.key] AS slots,
            sum(entry.value) OVER (ORDER BY number) AS beyond, beyond - entry.value AS first_env
        FROM each
    ),
    named AS (
        SELECT round_idx, env_id, epoch, observation, observed, first_env,
            unnest(range(1, len(observation) + 1)) AS i
        FROM steps JOIN tasked ON env_id >= first_env AND env_id < beyond
        WHERE len(observation) = len(observed)
    ),
    split AS (
        SELECT named.*, slot
        FROM named LEFT JOIN (SELECT first_env, unnest(slots) AS slot FROM tasked) AS each_slot
            ON named.first_env = each_slot.first_env AND starts_with(observed[i], slot || ' ')
        WHERE NOT ends_with(observed[i], ' known')
    )
    SELECT round_idx, env_id, epoch, slot,
        CASE WHEN slot IS NULL THEN observed[i] ELSE observed[i][len(slot) + 2:] END AS feature,
        CASE WHEN observed[i + 1] = observed[i] || ' known' AND observation[i + 1] = 0 THEN NULL
            ELSE observation[i] END AS value
    FROM split""",
)
_SHARES = View(
    "shares",
    "Contribution of each blended seed at the end of an episode.",
    (
        _ROUND_IDX,
        _ENV_ID,
        _SLOT,
        _BLUEPRINT,
        Metric("leave_one_out", "points", "Accuracy that the network would lose without the seed."),
        Metric("shapley", "points", "Shapley value of the seed."),
        Metric("shapley_error", "points", "Standard error of the Shapley value."),
    ),
    """
    WITH each AS (SELECT *, unnest(slots) AS slot FROM attribution)
    SELECT each.round_idx, each.env_id, slot, arg_max(blueprint_id, born.seq) AS blueprint,
        any_value(leave_one_out[slot]) AS leave_one_out, any_value(shapley[slot]) AS shapley,
        any_value(shapley_error[slot]) AS shapley_error
    FROM each LEFT JOIN lifecycle AS born
        ON each.round_idx = born.round_idx AND each.env_id = born.env_id
        AND slot = born.slot_id AND born.kind = 'germinated'
    GROUP BY ALL ORDER BY ALL""",
)
_BLUEPRINTS = View(
    "blueprints",
    "Fate of the seeds of each blueprint. A mean over no seeds is null.",
    (
        text("blueprint_id", "Name of the blueprint."),
        integer("germinated", "seeds", "Seeds germinated."),
        integer("fossilized", "seeds", "Seeds made permanent."),
        integer("pruned", "seeds", "Seeds removed."),
        Metric("survival", "share", "Share fossilized, of the seeds that were fossilized or pruned."),
        Metric("mean_contribution", "points", "Mean last measured contribution of the fossilized seeds."),
        Metric("mean_pruned_contribution", "points", "Mean last measured contribution of the pruned seeds."),
        Metric("mean_params", "parameters", "Mean parameters of a fossilized seed."),
        Metric("mean_age", "epochs", "Mean epochs from germination to fossilization."),
    ),
)
_TASKS = View(
    "tasks",
    "Figures of each task in each round, means over its envs.",
    (
        _ROUND_IDX,
        text("task", "Name of the task."),
        integer("episodes", "episodes", "Number of episodes."),
        Metric("objective", "J", "Objective J."),
        Metric("low", "J", "10th percentile of J."),
        Metric("high", "J", "90th percentile of J."),
        Metric("final_accuracy", "points", "Accuracy with all blended seeds."),
        Metric("committed_accuracy", "points", "Accuracy with fossilized seeds only."),
        Metric("total_reward", "reward", "Sum of an episode's rewards."),
        Metric("added_params", "parameters", "Parameters of the fossilized seeds."),
        Metric("epochs", "epochs", "Length of an episode."),
        Metric("germinated", "seeds", "Seeds germinated in an episode."),
        Metric("fossilized", "seeds", "Seeds made permanent in an episode."),
        integer("rollbacks", "rollbacks", "Number of rollbacks."),
    ),
    """
    SELECT round_idx, task, count(*) AS episodes, avg(objective) AS objective,
        quantile_cont(objective, 0.1) AS low, quantile_cont(objective, 0.9) AS high,
        avg(final_accuracy) AS final_accuracy, avg(committed_accuracy) AS committed_accuracy,
        avg(total_reward) AS total_reward, avg(added_params) AS added_params, avg(epochs) AS epochs,
        avg(germinated) AS germinated, avg(fossilized) AS fossilized,
        CAST(sum(rollbacks) AS BIGINT) AS rollbacks
    FROM episodes GROUP BY round_idx, task ORDER BY round_idx, min(env_id)""",
)
_HEALTH = View("health", "Figures of a round that the alert rules judge.", (_ROUND_IDX, *ROUND))
_EVENT_VIEWS = (_event_view(kind, name) for kind, name in EVENT_VIEWS.items())
VIEWS: Mapping[str, View] = {
    view.name: view
    for view in (*_EVENT_VIEWS, _HEALTH, _TASKS, _SLOTS, _TERMS, _OBSERVATIONS, _SHARES, _BLUEPRINTS)
}
"""Every view, by name."""
_LIST_OF_VIEWS = f"Views: {', '.join(VIEWS)}. `esper sql RUN` lists their columns."


_NEEDED_BY = {
    "steps": r"\b(steps|slots|observations)\b",
    "rewards": r"\b(rewards|terms)\b",
    "throughput": r"\bthroughput\b",
}
"""A table of steps is read with the first query that matches its pattern."""


@dataclass(frozen=True, slots=True)
class EnvTask:
    """One task of a run."""

    name: str
    envs: range
    """Numbers of its envs."""
    slots: tuple[str, ...]


class Views:
    """One run, ready to be queried. The log is read at once, each table of steps when a query first needs
    it."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.unknown: set[str] = set()
        """Recorded fields that the registry does not know; no view shows them."""
        self._unread = set(_NEEDED_BY)
        self._db = duckdb.connect(":memory:", config={"threads": 1, "python_enable_replacements": False})
        events: dict[TelemetryEventType, list[dict[str, Any]]] = {kind: [] for kind in EVENT_VIEWS}
        engine, rounds = AlertEngine(), []
        for event in run.events():
            try:
                kind, data, nonfinite = event_parts(event)
                engine.observe(kind, data, nonfinite)
            except (TelemetryError, TypeError, ValueError, AttributeError) as error:  # values of a wrong type
                raise TelemetryError(f"{run.log}, line {event['seq'] + 1}: {error}") from error
            events[kind].append(event)
            if kind is _T.BATCH_COMPLETED:
                rounds.append({"round_idx": data.get("round_idx"), **engine.round})
        for kind, name in EVENT_VIEWS.items():
            if kind in STEP_TABLES:
                self._db.register(name, SCHEMAS[name].empty_table())
            else:
                self._db.register(name, self._event_table(kind, events[kind]))
        self._db.register("health", _table("health", _HEALTH.columns, rounds))
        self._db.register("blueprints", _blueprint_table(events[_T.SEED_LIFECYCLE]))
        for view in VIEWS.values():
            if view.query:
                self._db.execute(f"CREATE VIEW {view.name} AS {view.query}")
        self._db.execute("SET enable_external_access = false; SET lock_configuration = true")

    def query(self, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Names of the columns, and the rows."""
        for table in sorted(self._unread):
            if re.search(_NEEDED_BY[table], sql, re.IGNORECASE):
                self._db.register(table, self.run.table(table))
                self._unread.remove(table)
        try:
            result = self._db.execute(sql)
            if result is None:
                raise EsperError(f"query: {sql!r} holds no statement. {_LIST_OF_VIEWS}")
            return [column[0] for column in result.description or ()], result.fetchall()
        except (duckdb.Error, RuntimeError, OverflowError) as error:  # the latter two from DuckDB's bindings
            reason = str(error).split("\nTraceback")[0]
            raise EsperError(f"query: {reason}\n{_LIST_OF_VIEWS}") from error

    def rows(self, sql: str) -> list[dict[str, Any]]:
        names, rows = self.query(sql)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def tasks(self) -> list[EnvTask]:
        """The tasks of the run in order, with their envs and slots; none if the log does not name them."""
        start = next(iter(self.rows("SELECT * FROM starts ORDER BY seq DESC LIMIT 1")), {})
        counts, slots = start.get("envs_by_task") or {}, start.get("slots_by_task") or {}
        ends = accumulate(counts.values())
        return [
            EnvTask(name, range(end - count, end), tuple(slots.get(name) or ()))
            for (name, count), end in zip(counts.items(), ends, strict=True)
        ]

    def _event_table(self, kind: TelemetryEventType, events: Sequence[dict[str, Any]]) -> pa.Table:
        owner = f"{self.run.log}: {kind.value}"
        fields = EVENTS[kind].fields
        payloads = [event["data"] for event in events]
        known = {field.name for field in fields}
        self.unknown |= {f"{kind.value}.{name}" for name in set().union(*payloads) - known}
        context = _columns(owner, [column for column in CONTEXT if column.name not in known], events)
        nonfinite = [[path.removeprefix("data.") for path in event.get("nonfinite", ())] for event in events]
        context["nonfinite_fields"] = pa.array(nonfinite, pa.list_(pa.string()))
        return pa.table(context | _columns(owner, fields, payloads))


def _blueprint_table(events: Iterable[Mapping[str, Any]]) -> pa.Table:
    analytics = BlueprintAnalytics()
    for event in events:
        analytics.observe(event["data"])
    return _table("blueprints", _BLUEPRINTS.columns, [asdict(score) for score in analytics.scoreboard()])


def _table(name: str, columns: Sequence[Metric], rows: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.table(_columns(name, columns, rows))


def _columns(owner: str, columns: Sequence[Metric], rows: Sequence[dict[str, Any]]) -> dict[str, pa.Array]:
    """Fields of dictionaries as arrays; a missing field is null."""
    kind = pa.struct([(column.name, ARROW_TYPES[column.kind]) for column in columns])
    try:
        arrays = pa.array(rows, kind).flatten()
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if len(columns) > 1:  # Arrow does not say which column is wrong
            for column in columns:
                _columns(owner, [column], rows)
        raise TelemetryError(f"{owner}: {columns[0].name} holds {columns[0].kind.value}: {error}") from error
    return {column.name: array for column, array in zip(columns, arrays, strict=True)}
