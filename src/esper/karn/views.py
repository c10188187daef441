"""A run as SQL: one view per kind of event, its columns as the metric registry describes them, and some that
join these.

The database lives in memory and reaches no file, so a query can neither harm a run nor read anything else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]

from esper.leyline import EVENTS, STEP_TABLES, EsperError, SeedStage, TelemetryEventType
from esper.leyline.metrics import CONTEXT, ROUND, FieldKind, Metric, integer, text
from esper.nissa import RunDirectory, TelemetryError
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
_STAGES = "CASE stage " + " ".join(f"WHEN {stage.value} THEN '{stage.name}'" for stage in SeedStage) + " END"
_ROUND_IDX, _ENV_ID, _EPOCH = (
    column for column in CONTEXT if column.name in ("round_idx", "env_id", "epoch")
)
_SLOT, _BLUEPRINT = text("slot", "Name of the slot."), text("blueprint", "What the seed is made from.")
_NONFINITE = Metric(
    "nonfinite_fields", "", "Fields that are null because they were NaN or Inf.", FieldKind.TEXTS
)


@dataclass(frozen=True, slots=True)
class View:
    """A view and its columns; `query` makes it from others, where it is not filled directly."""

    name: str
    meaning: str
    columns: tuple[Metric, ...]
    query: str = ""


def _event_view(kind: TelemetryEventType, name: str) -> View:
    payload = EVENTS[kind].fields
    context = CONTEXT if kind in STEP_TABLES else (*CONTEXT, _NONFINITE)
    names = {field.name for field in payload}
    return View(
        name, EVENTS[kind].meaning, (*(field for field in context if field.name not in names), *payload)
    )


VIEWS: Mapping[str, View] = {
    view.name: view
    for view in (
        *(_event_view(kind, name) for kind, name in EVENT_VIEWS.items()),
        View("health", "What the alert rules read from the events of a round.", (_ROUND_IDX, *ROUND)),
        View(
            "slots",
            "Each seed after each step; a free slot has no row.",
            (
                _ROUND_IDX,
                _ENV_ID,
                _EPOCH,
                _SLOT,
                text("stage", "Its stage."),
                _BLUEPRINT,
                Metric("alpha", "alpha", "How much of it is mixed in."),
                Metric("contribution", "points", "Accuracy lost without it; null where it is not blended."),
            ),
            f"""
        WITH lives AS (SELECT *, e.key AS name, e.value AS stage FROM (SELECT *, unnest(map_entries(stages)) AS e FROM steps)),
        births AS (SELECT round_idx, env_id, slot_id, epoch, blueprint_id FROM lifecycle WHERE kind = 'germinated')
        SELECT lives.round_idx, lives.env_id, lives.epoch, name AS slot, {_STAGES} AS stage, blueprint_id AS blueprint,
            alphas[name] AS alpha, contributions[name] AS contribution
        FROM lives ASOF LEFT JOIN births ON lives.round_idx = births.round_idx AND lives.env_id = births.env_id
            AND lives.name = births.slot_id AND lives.epoch >= births.epoch
        ORDER BY lives.round_idx, lives.env_id, name, lives.epoch""",
        ),
        View(
            "terms",
            "Each named term of each step's reward.",
            (
                _ROUND_IDX,
                _ENV_ID,
                _EPOCH,
                text("term", "Name of the term."),
                Metric("amount", "reward", "What it paid."),
            ),
            """SELECT round_idx, env_id, epoch, e.key AS term, e.value AS amount
        FROM (SELECT *, unnest(map_entries(components)) AS e FROM rewards)""",
        ),
        View(
            "shares",
            "What each seed contributes at the end of an episode.",
            (
                _ROUND_IDX,
                _ENV_ID,
                _SLOT,
                _BLUEPRINT,
                Metric("leave_one_out", "points", "What the network would lose without it."),
                Metric("shapley", "points", "Its Shapley value."),
                Metric("shapley_error", "points", "The standard error of that."),
            ),
            """
        WITH each AS (SELECT *, unnest(slots) AS slot FROM attribution)
        SELECT each.round_idx, each.env_id, slot, arg_max(blueprint_id, born.seq) AS blueprint,
            any_value(leave_one_out[slot]) AS leave_one_out, any_value(shapley[slot]) AS shapley,
            any_value(shapley_error[slot]) AS shapley_error
        FROM each LEFT JOIN lifecycle AS born ON each.round_idx = born.round_idx AND each.env_id = born.env_id
            AND slot = born.slot_id AND born.kind = 'germinated' GROUP BY ALL ORDER BY ALL""",
        ),
        View(
            "blueprints",
            "What became of the seeds of each blueprint; a mean over no seeds is null.",
            (
                text("blueprint_id", "What the seeds are made from."),
                integer("germinated", "seeds", "Seeds germinated."),
                integer("fossilized", "seeds", "Seeds made permanent."),
                integer("pruned", "seeds", "Seeds removed."),
                Metric("survival", "share", "Share fossilized, of those fossilized or pruned."),
                Metric(
                    "mean_contribution", "points", "What the fossilized ones contributed, as last measured."
                ),
                Metric("mean_pruned_contribution", "points", "What the pruned ones contributed."),
                Metric("mean_params", "parameters", "Parameters of a fossilized one."),
                Metric("mean_age", "epochs", "From germination to fossilization."),
            ),
            """
        SELECT blueprint_id, count_if(kind = 'germinated') AS germinated, count_if(kind = 'fossilized') AS fossilized,
            count_if(kind = 'pruned') AS pruned, fossilized / nullif(fossilized + pruned, 0) AS survival,
            avg(contribution) FILTER (kind = 'fossilized') AS mean_contribution,
            avg(contribution) FILTER (kind = 'pruned') AS mean_pruned_contribution,
            avg(params) FILTER (kind = 'fossilized') AS mean_params, avg(epochs_total) FILTER (kind = 'fossilized') AS mean_age
        FROM lifecycle GROUP BY blueprint_id ORDER BY fossilized DESC, germinated DESC, blueprint_id""",
        ),
    )
}
"""Every view, by name."""


_NEEDED_BY = {
    "steps": r"\b(steps|slots)\b",
    "rewards": r"\b(rewards|terms)\b",
    "throughput": r"\bthroughput\b",
}
"""Queries that mention these are about a table of steps."""


class Views:
    """One run, to be queried. The log is read at once, a table of steps with the first query that may need
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
            except TelemetryError as error:
                raise TelemetryError(f"{run.log}, line {event['seq'] + 1}: {error}") from error
            events[kind].append(event)
            engine.observe(kind, data, nonfinite)
            if kind is _T.BATCH_COMPLETED:
                rounds.append({"round_idx": data.get("round_idx"), **engine.round})
        for kind, name in EVENT_VIEWS.items():
            self._db.register(
                name,
                SCHEMAS[name].empty_table() if kind in STEP_TABLES else self._event_table(kind, events[kind]),
            )
        self._db.register("health", pa.table(_columns("health", VIEWS["health"].columns, rounds)))
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
            return [column[0] for column in result.description or ()], result.fetchall()
        except duckdb.Error as error:
            raise EsperError(f"query: {error}") from error

    def rows(self, sql: str) -> list[dict[str, Any]]:
        names, rows = self.query(sql)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _event_table(self, kind: TelemetryEventType, events: Sequence[dict[str, Any]]) -> pa.Table:
        fields, payloads, owner = (
            EVENTS[kind].fields,
            [event["data"] for event in events],
            f"{self.run.log}: {kind.value}",
        )
        known = {field.name for field in fields}
        self.unknown |= {f"{kind.value}.{name}" for name in set().union(*payloads) - known}
        context = _columns(owner, [c for c in CONTEXT if c.name not in known], events)
        broken = [[path.removeprefix("data.") for path in event.get("nonfinite", ())] for event in events]
        context["nonfinite_fields"] = pa.array(broken, pa.list_(pa.string()))
        return pa.table(context | _columns(owner, fields, payloads))


def _columns(owner: str, columns: Sequence[Metric], rows: Sequence[dict[str, Any]]) -> dict[str, pa.Array]:
    """Fields of dictionaries as arrays; one that is missing is null."""
    try:
        arrays = pa.array(
            rows, pa.struct([(column.name, ARROW_TYPES[column.kind]) for column in columns])
        ).flatten()
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if len(columns) > 1:  # Arrow does not say which
            for column in columns:
                _columns(owner, [column], rows)
        raise TelemetryError(f"{owner}: {columns[0].name} holds {columns[0].kind.value}: {error}") from error
    return {column.name: array for column, array in zip(columns, arrays, strict=True)}
