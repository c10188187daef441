"""One run as one HTML page that needs no network: every number of the metric registry, as charts, tables and
words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from html import escape
from importlib.resources import files
from statistics import fmean
from typing import Any

import orjson

from esper._charts import Html, Life, Series, lanes, lines, number, stacked, tag, trend
from esper.karn.summary import summarize
from esper.karn.views import EVENT_VIEWS, VIEWS, Views
from esper.leyline import EVENTS, OP_NAMES, PHASES, EsperError, SeedStage, TelemetryEventType
from esper.leyline.metrics import ROUND, FieldKind, Metric

MAX_BARS = 120
"""Longer runs show means of several rounds per bar."""
_NUMERIC = (FieldKind.FLOAT, FieldKind.INT)
Rows = Sequence[Mapping[str, Any]]


def render_report(views: Views, growth_rounds: int = 24) -> str:
    """The page. Growth is drawn for the best and the last round and for others evenly spaced, `growth_rounds`
    or one more."""
    if growth_rounds < 1:
        raise EsperError(f"report: growth_rounds is {growth_rounds}, must be 1 or more")
    sections: dict[str, Callable[[Views], str]] = {
        "Learning": _learning,
        "Growth": lambda v: _growth(v, growth_rounds),
        "Decisions": _decisions,
        "Rewards": _rewards,
        "Attribution": _attribution,
        "Blueprints": _blueprints,
        "PPO": _ppo,
        "Health": _health,
        "Time": _time,
        "Alerts": _alerts,
        "Metrics": _glossary,
        "Settings": _settings,
    }
    body = "".join(
        tag("section", f"<h2>{name}</h2>{make(views)}", id=name.lower()) for name, make in sections.items()
    )
    links = "".join(tag("a", name, href=f"#{name.lower()}") for name in sections)
    style, script = (
        files("esper.karn").joinpath("assets", name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js")
    )
    title = escape(views.run.path.resolve().name)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{style}</style></head><body>"
        f"<header><h1>{title}</h1>{_facts(views)}<nav>{links}</nav></header><main>{body}</main>"
        f"<script>{script}</script></body></html>\n"
    )


# -- pieces --------------------------------------------------------------------------------------------------


def _table(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Numbers to the right; markup stays as it is."""

    def cell(value: object) -> str:
        if isinstance(value, str):
            return f"<td>{value if isinstance(value, Html) else escape(value)}</td>"
        return tag("td", escape(number(value)), css="n")

    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in heads)
    return tag("div", f"<table><tr>{head}</tr>{body}</table>", css="wide")


def _rows_table(rows: Rows, absent: str) -> str:
    return _table(rows[0], [row.values() for row in rows]) if rows else _none(absent)


def _none(what: str) -> str:
    return tag("p", escape(what), css="absent")


def _grid(*figures: str) -> str:
    return tag("div", "".join(figures), css="grid")


def _pivot(rows: Rows) -> tuple[list[float], Series]:
    """Rows of (x, name, value) as one series per name, all over the same x; None where a name has no
    value."""
    cells = {(x, name): value for x, name, value in (row.values() for row in rows)}
    xs = sorted({x for x, _ in cells})
    return xs, {name: [cells.get((x, name)) for x in xs] for name in dict.fromkeys(name for _, name in cells)}


def _bars(title: str, x: Sequence[float], series: Series, *, note: str, total: bool = False) -> str:
    """Stacked bars over rounds, thinned to means where there are too many to see."""
    size = -(-len(x) // MAX_BARS)
    if size > 1:
        series = {
            name: [fmean(v or 0.0 for v in values[i : i + size]) for i in range(0, len(values), size)]
            for name, values in series.items()
        }
        x, note = x[::size], f"{note} Each bar is the mean of {size} rounds."
    return stacked(title, x, series, note=note, total=total)


def _sound(metric: Metric) -> str:
    limits = [
        f"{side} {limit:g}"
        for side, limit in (("at least", metric.low), ("at most", metric.high))
        if limit is not None
    ]
    return f" Sound: {' and '.join(limits)}." if limits else ""


def _charts(views: Views, view: str, metrics: Iterable[Metric]) -> list[str]:
    """Numbers, or maps of numbers, over rounds."""
    rows = views.rows(f"SELECT * FROM {view} WHERE round_idx IS NOT NULL ORDER BY round_idx")
    figures = []
    for metric in metrics:
        values = [row[metric.name] for row in rows]
        series: Series = {metric.name: values}
        if metric.kind not in _NUMERIC:
            keys = dict.fromkeys(key for value in values for key in value or ())
            series = {key: [(value or {}).get(key) for value in values] for key in keys}
        note = f"{f'({metric.unit}) ' if metric.unit else ''}{metric.meaning}{_sound(metric)}"
        figures.append(
            lines(
                metric.name,
                [row["round_idx"] for row in rows],
                series,
                note=note,
                limits=[limit for limit in (metric.low, metric.high) if limit is not None],
            )
        )
    return figures


# -- sections ------------------------------------------------------------------------------------------------


def _facts(views: Views) -> str:
    run = summarize(views)
    facts = {
        "status": run.status,
        "task": run.task,
        "policy": run.policy,
        "seed": run.seed,
        "envs": run.envs,
        "rounds": f"{run.rounds_done} of {number(run.rounds)}",
        "last J": run.objective,
        "best J": run.best,
        "alerts": run.alerts,
        "time": timedelta(seconds=round(run.seconds)),
        "started": run.started,
    }
    items = "".join(
        f"<div><dt>{name}</dt><dd>{escape(number(value))}</dd></div>" for name, value in facts.items()
    )
    return tag("dl", items, css="facts")


def _learning(views: Views) -> str:
    rounds = views.rows("""WITH spread AS (SELECT round_idx, quantile_cont(objective, 0.1) AS low,
        quantile_cont(objective, 0.9) AS high FROM episodes GROUP BY round_idx)
        SELECT rounds.*, low, high FROM rounds LEFT JOIN spread USING (round_idx) ORDER BY round_idx""")
    if not rounds:
        return _none("No round was finished.")
    x = [row["round_idx"] for row in rounds]

    def series(*names: str) -> Series:
        return {name: [row[name] for row in rounds] for name in names}

    fates = _pivot(
        views.rows("""UNPIVOT (SELECT round_idx, avg(fossilized) AS fossilized, avg(pruned) AS pruned,
        avg(germinated - fossilized - pruned) AS unfinished FROM episodes GROUP BY ALL) ON COLUMNS(* EXCLUDE round_idx)""")
    )
    band = series("low", "high")
    return _grid(
        lines(
            "Objective J",
            x,
            series("avg_objective"),
            band=(band["low"], band["high"]),
            note="Mean over the envs; shaded from the 10th to the 90th percentile of episodes.",
        ),
        lines(
            "Accuracy",
            x,
            series("avg_accuracy", "avg_committed_accuracy", "avg_val_accuracy"),
            note="(points) At the last epoch with all blended seeds, with fossilized ones only, and the mean over all epochs.",
        ),
        lines("Reward", x, series("avg_reward"), note="Mean total of an episode."),
        lines(
            "Added parameters", x, series("avg_added_params"), note="Of fossilized seeds, mean over the envs."
        ),
        _bars("Seeds", *fates, note="What became of those germinated in an episode, mean over the envs."),
    )


def _growth(views: Views, count: int) -> str:
    envs = views.rows("SELECT round_idx, env_id, max(epoch) AS epochs FROM steps GROUP BY ALL ORDER BY ALL")
    if not envs:
        return _none(
            "No steps were recorded: they are from telemetry level normal on, at the end of each round."
        )
    rounds = list(dict.fromkeys(env["round_idx"] for env in envs))
    ranked = views.rows("SELECT round_idx FROM rounds ORDER BY avg_objective DESC NULLS LAST LIMIT 1")
    best = ranked[0]["round_idx"] if ranked else rounds[-1]
    spaced = {rounds[-1 - round(i * (len(rounds) - 1) / max(count - 1, 1))] for i in range(count)}
    chosen = [r for r in rounds if r in spaced or r == best]
    outcomes = {(row["round_idx"], row["env_id"]): row for row in views.rows("SELECT * FROM episodes")}
    lives: dict[tuple[int, int], dict[str, list[Life]]] = {}
    start = next(iter(views.rows("SELECT slots FROM starts ORDER BY seq DESC LIMIT 1")), {})
    for env in envs:
        lives[env["round_idx"], env["env_id"]] = {name: [] for name in start.get("slots") or ()}
    for row in views.rows(
        f"SELECT * FROM slots WHERE round_idx IN ({', '.join(map(str, chosen))}) ORDER BY epoch"
    ):
        life = row["epoch"], row["stage"], row["blueprint"], row["alpha"]
        lives[row["round_idx"], row["env_id"]].setdefault(row["slot"], []).append(life)
    epochs = max(env["epochs"] for env in envs)
    pages = {
        r: "".join(
            lanes(f"env {env}", _outcome(outcomes.get((at, env))), epochs, slots)
            for (at, env), slots in lives.items()
            if at == r
        )
        for r in chosen
    }
    options = "".join(
        tag("option", f"{r}{' (best J)' * (r == best)}{' (last)' * (r == rounds[-1])}", value=r)
        for r in reversed(chosen)
    )
    legend = "".join(
        f"<span>{tag('i', css=stage.name)}{stage.name.lower()}</span>" for stage in SeedStage if stage
    )
    left_out = f" {len(chosen)} of {len(rounds)} rounds are in this page." * (len(chosen) < len(rounds))
    return (
        f"<p>Round {tag('select', options, id='round')} Bands are stages; the line is alpha, from 0 at the bottom of a lane "
        f"to 1 at its top.{left_out}</p>{tag('div', legend, css='legend')}"
        f"{tag('div', pages[rounds[-1]], css='grid', id='lanes')}"
        + "".join(tag("template", page, data_round=r) for r, page in pages.items())
    )


def _outcome(end: Mapping[str, Any] | None) -> str:
    if end is None:
        return "not finished"
    rollbacks = f", rollbacks: {end['rollbacks']}" if end["rollbacks"] else ""
    return (
        f"J {number(end['objective'])}, committed accuracy {number(end['committed_accuracy'])} of "
        f"{number(end['final_accuracy'])}, +{number(end['added_params'])} parameters{rollbacks}"
    )


def _decisions(views: Views) -> str:
    def by_op(sql: str) -> tuple[list[float], Series]:
        """Every operation in order, so that each has its colour in all charts."""
        x, found = _pivot(views.rows(sql))
        return x, {op: found.get(op, [None] * len(x)) for op in OP_NAMES}

    mix = by_op("""SELECT round_idx, e.key, e.value / total FROM (SELECT round_idx, unnest(map_entries(action_counts)) AS e,
        nullif(list_sum(map_values(action_counts)), 0) AS total FROM actions)""")
    when = by_op("""SELECT epoch, op, count(*) FROM steps WHERE op <> 'WAIT'
        AND round_idx = (SELECT max(round_idx) FROM steps) GROUP BY ALL""")
    masked = by_op(
        "SELECT round_idx, e.key, e.value FROM (SELECT round_idx, unnest(map_entries(hit_rates)) AS e FROM masks)"
    )
    refused = views.rows("""SELECT op AS operation, count(*) AS times,
        coalesce(veto, nullif(array_to_string(gate_failures, ', '), ''), '—') AS "why it was not carried out"
        FROM steps WHERE NOT executed AND op <> 'WAIT' GROUP BY ALL ORDER BY times DESC, op LIMIT 12""")
    return _grid(
        _bars("Action mix", *mix, note="Share of each operation among a round's decisions."),
        stacked(
            "When it acts",
            *when,
            note="Decisions of the last round by epoch, WAIT left out.",
            x_label="epoch",
        ),
        lines("Forbidden operations", *masked, note="Share of decisions at which each was masked."),
    ) + _rows_table(refused, "Every operation on record was carried out.")


def _rewards(views: Views) -> str:
    paid = _pivot(
        views.rows("SELECT round_idx, term, sum(amount) / count(DISTINCT env_id) FROM terms GROUP BY ALL")
    )
    when = _pivot(
        views.rows("""SELECT epoch, term, avg(amount) FROM terms
        WHERE round_idx = (SELECT max(round_idx) FROM terms) GROUP BY ALL""")
    )
    return _grid(
        _bars("Reward terms", *paid, note="Mean of an episode, by term; the mark is their sum.", total=True),
        stacked(
            "Reward terms by epoch", *when, note="Mean step of the last round.", x_label="epoch", total=True
        ),
    )


def _attribution(views: Views) -> str:
    def by_slot(value: str) -> tuple[list[float], Series]:
        return _pivot(
            views.rows(f"SELECT round_idx, slot, {value} FROM shares GROUP BY ALL ORDER BY slot, round_idx")
        )

    made = views.rows("""SELECT slot, blueprint, count(*) AS episodes, avg(shapley) AS mean_shapley,
        avg(leave_one_out) AS mean_leave_one_out FROM shares GROUP BY ALL ORDER BY mean_shapley DESC NULLS LAST""")
    pairs = views.rows("""SELECT e.key AS pair_of_slots, count(*) AS episodes, avg(e.value) AS mean_interaction
        FROM (SELECT unnest(map_entries(interactions)) AS e FROM attribution) GROUP BY ALL ORDER BY ALL""")
    return (
        _grid(
            lines(
                "Shapley value",
                *by_slot("avg(shapley)"),
                note="(points) Of each slot's seed at the end of episodes, mean.",
            ),
            lines(
                "Leave one out",
                *by_slot("avg(leave_one_out)"),
                note="(points) What networks would lose without it, mean.",
            ),
            stacked("Blended seeds", *by_slot("count(*)"), note="Episodes that ended with one, by slot."),
        )
        + _rows_table(made, "No episode ended with a blended seed.")
        + (_rows_table(pairs, "") if pairs else "")
    )


def _blueprints(views: Views) -> str:
    return _rows_table(
        views.rows("SELECT * FROM blueprints"), "No seed was germinated, or lifecycles were not recorded."
    )


def _ppo(views: Views) -> str:
    if not views.rows("SELECT seq FROM updates LIMIT 1"):
        return _none(
            "No update was recorded: the policy does not learn, or the first round was not finished."
        )
    return _grid(
        *_charts(
            views,
            "updates",
            [
                f
                for f in EVENTS[TelemetryEventType.PPO_UPDATE].fields
                if f.kind in (*_NUMERIC, FieldKind.NUMBERS) and f.name != "update"
            ],
        )
    )


def _health(views: Views) -> str:
    drops = [
        f
        for f in EVENTS[TelemetryEventType.BATCH_COMPLETED].fields
        if f.name in ("accuracy_drop", "rollbacks")
    ]
    return _grid(*_charts(views, "health", ROUND), *_charts(views, "rounds", drops))


def _time(views: Views) -> str:
    phases = ", ".join(f"{phase}_seconds AS {phase}" for phase in PHASES)
    spent = _pivot(
        views.rows(f"UNPIVOT (SELECT round_idx, {phases} FROM rounds) ON COLUMNS(* EXCLUDE round_idx)")
    )
    speed = _pivot(
        views.rows("""SELECT round_idx, 'samples', sum(speed) FROM (SELECT round_idx, env_id,
        avg(samples_per_second) AS speed FROM throughput GROUP BY ALL) GROUP BY round_idx""")
    )
    return _grid(
        _bars("Time of a round", *spent, note="(s) By phase."),
        lines("Training speed", *speed, note="(samples/s) All envs together."),
    )


def _alerts(views: Views) -> str:
    alerts = views.rows("""SELECT round_idx AS round, severity, code, message, metric, value, "limit", streak AS "times in a row"
        FROM alerts ORDER BY seq""")
    for alert in alerts:
        alert["severity"] = tag("b", escape(str(alert["severity"])), css=alert["severity"])
    rollbacks = views.rows("""SELECT round_idx AS round, env_id AS env, epoch, reason, loss, "limit", amount
        FROM rollbacks ORDER BY seq""")
    return _rows_table(alerts, "No alert was raised.") + _rows_table(rollbacks, "No network was rolled back.")


def _glossary(views: Views) -> str:
    """Every metric: its last value, its course over rounds, and what it means."""
    parts = []
    for name, fields in (
        *((EVENT_VIEWS[kind], spec.fields) for kind, spec in EVENTS.items()),
        ("health", ROUND),
    ):
        order = "round_idx" if name == "health" else "seq"
        last = views.rows(
            f"SELECT {', '.join(f'arg_max({_quote(f)}, {order}) AS {_quote(f)}' for f in fields)} FROM {name}"
        )[0]
        numeric = [f for f in fields if f.kind in _NUMERIC and f.name != "round_idx"]
        means = "".join(f", avg({_quote(f)}) AS {_quote(f)}" for f in numeric)
        course = views.rows(f"SELECT round_idx AS at{means} FROM {name} GROUP BY 1 ORDER BY 1")
        rows = [
            (
                tag("code", f.name),
                f.unit,
                f"{f.better}{_sound(f)}".strip(),
                _plain(last[f.name]),
                trend([row[f.name] for row in course], 24) if f in numeric else "",
                f.meaning,
            )
            for f in fields
        ]
        parts.append(
            f"<details><summary><b>{name}</b> {escape(VIEWS[name].meaning)}</summary>"
            f"{_table(('field', 'unit', 'better', 'last', 'last rounds', 'meaning'), rows)}</details>"
        )
    unknown = (
        f"Recorded, but unknown to this version: {', '.join(sorted(views.unknown))}." if views.unknown else ""
    )
    return (_none(unknown) if unknown else "") + "".join(parts)


def _quote(field: Metric) -> str:
    return f'"{field.name}"'


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number(item)}" for key, item in value.items()) or "—"
    return (", ".join(map(str, value)) or "—") if isinstance(value, list) else value


def _settings(views: Views) -> str:
    saved = views.rows(
        "SELECT path AS checkpoint, finished_rounds, finished_epochs, best FROM checkpoints ORDER BY seq"
    )
    parts = []
    for name, content in (("config.json", views.run.config), ("run.json", views.run.info)):
        text = escape(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
        parts.append(f"<details><summary><b>{name}</b></summary><pre>{text}</pre></details>")
    return "".join(parts) + _rows_table(saved, "No checkpoint was saved.")
