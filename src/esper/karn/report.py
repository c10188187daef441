"""One run as one HTML page that needs no network: every number of the metric registry, as charts, tables and words."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from html import escape
from importlib.resources import files
from itertools import groupby
from statistics import fmean
from typing import Any

import orjson

from esper.karn.charts import Life, Values, figure, lanes, lines, number, spark, stacked
from esper.karn.summary import summarize
from esper.karn.views import EVENT_VIEWS, VIEWS, Views
from esper.leyline import EVENTS, METRICS, PHASES, EsperError, SeedStage, TelemetryEventType
from esper.leyline.metrics import ROUND, FieldKind, Metric

MAX_BARS = 120
"""Longer runs show means of several rounds per bar."""
_NUMERIC = (FieldKind.FLOAT, FieldKind.INT)
Rows = Sequence[Mapping[str, Any]]


def render_report(views: Views, growth_rounds: int = 24) -> str:
    """The page. Growth is drawn for the first, the best, the last and evenly spaced rounds between, `growth_rounds` in all."""
    if growth_rounds < 1:
        raise EsperError(f"report: growth_rounds is {growth_rounds}, must be 1 or more")
    sections: dict[str, Callable[[Views], str]] = {
        "Learning": _learning, "Growth": lambda v: _growth(v, growth_rounds), "Decisions": _decisions, "Rewards": _rewards,
        "Attribution": _attribution, "Blueprints": _blueprints, "PPO": _ppo, "Health": _health, "Time": _time,
        "Alerts": _alerts, "Metrics": _glossary, "Settings": _settings}
    body = "".join(f'<section id="{name.lower()}"><h2>{name}</h2>{make(views)}</section>' for name, make in sections.items())
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in sections)
    style, script = (files("esper.karn").joinpath("assets", name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    title = escape(views.run.path.resolve().name)
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f'<title>{title}</title><style>{style}</style></head><body><header><h1>{title}</h1>{_facts(views)}<nav>{links}</nav></header>'
            f'<main>{body}</main><script>{script}</script></body></html>\n')


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Numbers to the right; a cell that starts with `<` is HTML already."""
    def cell(value: object) -> str:
        if isinstance(value, str) and value.startswith("<"):
            return f"<td>{value}</td>"
        right = isinstance(value, int | float) and not isinstance(value, bool)
        return f'<td{" class=n" if right else ""}>{escape(number(value))}</td>'

    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{escape(h)}</th>" for h in heads)}</tr>{body}</table></div>'


def _none(what: str) -> str:
    return f'<p class="absent">{escape(what)}</p>'


def _grid(*figures: str) -> str:
    return f'<div class="grid">{"".join(figures)}</div>'


def _facts(views: Views) -> str:
    run = summarize(views)
    facts = {"status": run.status, "task": run.task, "policy": run.policy, "seed": run.seed, "envs": run.envs,
             "rounds": f"{run.rounds_done} of {number(run.rounds)}", "last J": run.objective, "best J": run.best, "alerts": run.alerts,
             "time": timedelta(seconds=round(run.seconds)), "started": run.started}
    return f'<dl class="facts">{"".join(f"<div><dt>{k}</dt><dd>{escape(number(v))}</dd></div>" for k, v in facts.items())}</dl>'


def _pivot(rows: Rows, x: str, name: str, value: str) -> tuple[list[float], dict[str, Values]]:
    """Long rows as one series per name, all over the same x; x that lacks a name is None there."""
    xs = sorted({row[x] for row in rows if row[x] is not None})
    found = {(row[x], row[name]): row[value] for row in rows}
    return xs, {n: [found.get((a, n)) for a in xs] for n in dict.fromkeys(row[name] for row in rows)}


def _bars(title: str, x: Sequence[float], series: Mapping[str, Values], *, note: str, total: bool = False) -> str:
    """Stacked bars over rounds, thinned to means where there are too many to see."""
    size = -(-len(x) // MAX_BARS) if x else 1
    if size > 1:
        series = {name: [fmean(v or 0.0 for v in values[i:i + size]) for i in range(0, len(values), size)]
                  for name, values in series.items()}
        x, note = x[::size], f"{note} Each bar is the mean of {size} rounds."
    return stacked(title, x, series, note=note, total=total)


def _sound(metric: Metric) -> str:
    limits = [f"{side} {limit:g}" for side, limit in (("at least", metric.low), ("at most", metric.high)) if limit is not None]
    return f" Sound: {' and '.join(limits)}." if limits else ""


def _metric_chart(metric: Metric, rows: Rows, x: str = "round_idx") -> str:
    """A number, or a map of numbers, over rounds."""
    xs = [row[x] for row in rows]
    values = [row[metric.name] for row in rows]
    series: dict[str, Values] = {metric.name: values}
    if metric.kind not in _NUMERIC:
        series = {key: [None if v is None else v.get(key) for v in values] for key in dict.fromkeys(k for v in values for k in v or ())}
    unit = f"({metric.unit}) " if metric.unit else ""
    return lines(metric.name, xs, series, note=f"{unit}{metric.meaning}{_sound(metric)}", x_label="round",
                 limits=[v for v in (metric.low, metric.high) if v is not None])


def _charts(view: str, names: Iterable[str], views: Views) -> list[str]:
    rows = views.rows(f"SELECT * FROM {view} WHERE round_idx IS NOT NULL ORDER BY round_idx")
    columns = {column.name: column for column in VIEWS[view].columns}
    return [_metric_chart(columns[name], rows) for name in names]


def _learning(views: Views) -> str:
    rounds = views.rows("""SELECT r.*, e.low, e.high FROM rounds r LEFT JOIN (SELECT round_idx, quantile_cont(objective, 0.1) AS low,
        quantile_cont(objective, 0.9) AS high FROM episodes GROUP BY round_idx) e USING (round_idx) ORDER BY round_idx""")
    if not rounds:
        return _none("No round was finished.")
    x = [row["round_idx"] for row in rounds]

    def series(*names: str) -> dict[str, Values]:
        return {name: [row[name] for row in rounds] for name in names}

    return _grid(
        lines("Objective J", x, series("avg_objective"), band=([row["low"] for row in rounds], [row["high"] for row in rounds]),
              note="Mean over the envs; shaded from the 10th to the 90th percentile of episodes."),
        lines("Accuracy", x, series("avg_accuracy", "avg_committed_accuracy", "avg_val_accuracy"), note="(points) At the last epoch with "
              "all blended seeds, with fossilized ones only, and the mean over all epochs."),
        lines("Reward", x, series("avg_reward"), note="Mean total of an episode."),
        lines("Added parameters", x, series("avg_added_params"), note="Mean over the envs, fossilized seeds."),
        _bars("Seeds", *_pivot(views.rows("""UNPIVOT (SELECT round_idx, avg(fossilized) AS fossilized, avg(pruned) AS pruned,
            avg(germinated - fossilized - pruned) AS unfinished FROM episodes GROUP BY ALL) ON COLUMNS(* EXCLUDE round_idx)"""),
            "round_idx", "name", "value"), note="What became of those germinated in an episode, mean over the envs."))


def _growth(views: Views, count: int) -> str:
    outcomes = views.rows("SELECT * FROM episodes ORDER BY round_idx, env_id")
    recorded = [row["round_idx"] for row in views.rows("SELECT DISTINCT round_idx FROM steps ORDER BY 1")]
    if not recorded:
        return _none("No steps were recorded (they are from telemetry level normal on, at the end of each round).")
    mean = {r: fmean(row["objective"] or 0.0 for row in rows) for r, rows in groupby(outcomes, key=lambda row: row["round_idx"])}
    best = max(mean, key=mean.__getitem__, default=recorded[-1])
    spaced = {recorded[round(i * (len(recorded) - 1) / max(count - 1, 1))] for i in range(count)}
    chosen = sorted({recorded[-1], *spaced, best} & set(recorded))
    start = views.rows("SELECT slots, episode_length FROM starts ORDER BY seq DESC LIMIT 1")
    lives = views.rows(f"SELECT * FROM slots WHERE round_idx IN ({', '.join(map(str, chosen))}) ORDER BY ALL")
    ends = {(row["round_idx"], row["env_id"]): row for row in outcomes}
    envs = views.rows("SELECT DISTINCT round_idx, env_id, max(epoch) OVER () AS epochs FROM steps ORDER BY ALL")
    names = (start[0]["slots"] if start else None) or sorted({row["slot"] for row in lives})
    seeds: dict[tuple[int, int, str], list[Life]] = {}
    for row in lives:
        seeds.setdefault((row["round_idx"], row["env_id"], row["slot"]), []).append(
            (row["epoch"], row["stage"], row["blueprint"], row["alpha"]))
    pages = {r: "".join(lanes(
        f"env {env['env_id']}", _outcome(ends.get((r, env["env_id"]))), env["epochs"],
        {slot: sorted(seeds.get((r, env["env_id"], slot), ())) for slot in names}) for env in envs if env["round_idx"] == r) for r in chosen}
    options = "".join(f'<option value="{r}"{" selected" if r == chosen[-1] else ""}>{r}{" (best J)" if r == best else ""}'
                      f'{" (last)" if r == recorded[-1] else ""}</option>' for r in chosen)
    legend = "".join(f'<span><i class="stage {s.name}"></i>{s.name.lower()}</span>' for s in SeedStage if s is not SeedStage.UNKNOWN)
    left_out = f" {len(chosen)} of {len(recorded)} rounds are in this page." if len(chosen) < len(recorded) else ""
    return (f'<p>Round <select id="round">{options}</select> Bands are stages, the line is alpha (0 at the lane\'s bottom, 1 at its top).'
            f'{left_out}</p><div class="legend">{legend}</div><div class="grid" id="growth">{pages[chosen[-1]]}</div>'
            + "".join(f'<template data-round="{r}">{page}</template>' for r, page in pages.items()))


def _outcome(end: Mapping[str, Any] | None) -> str:
    if end is None:
        return "not finished"
    rollbacks = f", {end['rollbacks']} rollbacks" if end["rollbacks"] else ""
    return (f"J {number(end['objective'])}, committed accuracy {number(end['committed_accuracy'])} of {number(end['final_accuracy'])}, "
            f"+{number(end['added_params'])} parameters{rollbacks}")


def _decisions(views: Views) -> str:
    x, mix = _pivot(views.rows("""SELECT round_idx, e.key AS op, e.value / nullif(total, 0) AS share FROM (SELECT *,
        unnest(map_entries(action_counts)) AS e, list_sum(map_values(action_counts)) AS total FROM actions)"""), "round_idx", "op", "share")
    when, steps = _pivot(views.rows("""SELECT epoch, op, count(*) AS n FROM steps WHERE op <> 'WAIT'
        AND round_idx = (SELECT max(round_idx) FROM steps) GROUP BY ALL ORDER BY op"""), "epoch", "op", "n")
    refused = views.rows("""SELECT op, count(*) AS n, coalesce(veto, list_aggregate(gate_failures, 'string_agg', ', ')) AS reason
        FROM steps WHERE NOT executed GROUP BY ALL ORDER BY n DESC LIMIT 12""")
    return _grid(_bars("Action mix", x, mix, note="Share of each operation among a round's decisions."),
                 stacked("When it acts", when, steps, note="Decisions of the last round by epoch, WAIT left out.", x_label="epoch"),
                 *_charts("masks", ["hit_rates"], views)) + (
        _table(["operation", "times", "why it was not carried out"], [(r["op"], r["n"], r["reason"] or "—") for r in refused])
        if refused else _none("Every decision on record was carried out."))


def _rewards(views: Views) -> str:
    x, paid = _pivot(views.rows("""SELECT round_idx, term, sum(amount) / count(DISTINCT env_id) AS amount FROM terms GROUP BY ALL"""),
                     "round_idx", "term", "amount")
    when, terms = _pivot(views.rows("""SELECT epoch, term, avg(amount) AS amount FROM terms
        WHERE round_idx = (SELECT max(round_idx) FROM terms) GROUP BY ALL"""), "epoch", "term", "amount")
    return _grid(_bars("Reward terms", x, paid, note="Mean of an episode, by term; the mark is their sum.", total=True),
                 stacked("Reward terms by epoch", when, terms, note="Mean step of the last round.", x_label="epoch", total=True))


def _attribution(views: Views) -> str:
    rows = views.rows("""SELECT round_idx, slot, avg(shapley) AS shapley, avg(leave_one_out) AS leave_one_out, count(*) AS n
        FROM shares GROUP BY ALL ORDER BY slot, round_idx""")
    if not rows:
        return _none("No episode ended with a blended seed.")
    pairs = views.rows("""SELECT e.key AS pair, count(*) AS n, avg(e.value) AS points FROM (SELECT unnest(map_entries(interactions)) AS e
        FROM attribution) GROUP BY ALL ORDER BY pair""")
    charts = [lines(title, *_pivot(rows, "round_idx", "slot", column), note=f"(points) {METRICS[f'attribution.{column}'].meaning} "
                    "Mean at the end of episodes, by slot.") for title, column in (("Shapley value", "shapley"),
                                                                                  ("Leave one out", "leave_one_out"))]
    counts = stacked("Blended seeds", *_pivot(rows, "round_idx", "slot", "n"), note="Episodes that ended with one, by slot.")
    made = views.rows("""SELECT slot, blueprint, count(*) AS n, avg(shapley) AS s, avg(leave_one_out) AS l FROM shares
        GROUP BY ALL ORDER BY s DESC NULLS LAST""")
    return (_grid(*charts, counts) + _table(["slot", "blueprint", "episodes", "mean Shapley", "mean leave-one-out"],
                                            [tuple(row.values()) for row in made])
            + (_table(["pair of slots", "episodes", "mean interaction"], [tuple(row.values()) for row in pairs]) if pairs else ""))


def _blueprints(views: Views) -> str:
    rows = views.rows("SELECT * FROM blueprints")
    return _table([c.name.replace("_", " ") for c in VIEWS["blueprints"].columns], [tuple(row.values()) for row in rows]) if rows else (
        _none("No seed was germinated, or lifecycles were not recorded."))


def _ppo(views: Views) -> str:
    if not views.rows("SELECT seq FROM updates LIMIT 1"):
        return _none("This run's policy does not learn.")
    return _grid(*_charts("updates", [f.name for f in EVENTS[TelemetryEventType.PPO_UPDATE].fields
                                      if f.kind in (*_NUMERIC, FieldKind.NUMBERS) and f.name != "update"], views))


def _health(views: Views) -> str:
    return _grid(*_charts("health", [f.name for f in ROUND], views), *_charts("rounds", ["accuracy_drop", "rollbacks"], views))


def _time(views: Views) -> str:
    rows = views.rows("SELECT * FROM rounds ORDER BY round_idx")
    speed = views.rows("SELECT round_idx, sum(s) AS samples_per_second FROM (SELECT round_idx, env_id, avg(samples_per_second) AS s "
                       "FROM throughput GROUP BY ALL) GROUP BY ALL ORDER BY round_idx")
    phases: dict[str, Values] = {phase: [row[f"{phase}_seconds"] for row in rows] for phase in PHASES}
    return _grid(_bars("Time of a round", [row["round_idx"] for row in rows], phases, note="(s) By phase."),
                 lines("Training speed", [row["round_idx"] for row in speed], {"samples": [r["samples_per_second"] for r in speed]},
                       note="(samples/s) All envs together."))


def _alerts(views: Views) -> str:
    alerts = views.rows("SELECT round_idx, severity, code, message, metric, value, \"limit\", streak FROM alerts ORDER BY seq")
    rollbacks = views.rows("SELECT round_idx, env_id, epoch, reason, loss, \"limit\", amount FROM rollbacks ORDER BY seq")
    shown = _table(list(alerts[0]), [(r["round_idx"], f'<b class="{escape(r["severity"] or "")}">{escape(r["severity"] or "—")}</b>',
                                      *list(r.values())[2:]) for r in alerts]) if alerts else _none("No alert was raised.")
    return shown + (f"<h3>Rollbacks</h3>{_table(list(rollbacks[0]), [tuple(r.values()) for r in rollbacks])}" if rollbacks else "")


def _glossary(views: Views) -> str:
    """Every metric: its last value, its course over rounds, and what it means."""
    parts = []
    for name, meaning, fields in (*((EVENT_VIEWS[k], spec.meaning, spec.fields) for k, spec in EVENTS.items()),
                                  ("health", VIEWS["health"].meaning, ROUND)):
        order = "round_idx" if name == "health" else "seq"
        last = views.rows("SELECT " + ", ".join(f'arg_max("{f.name}", {order}) AS "{f.name}"' for f in fields) + f" FROM {name}")[0]
        numeric = [f.name for f in fields if f.kind in _NUMERIC and f.name != "round_idx"]
        course = views.rows("SELECT round_idx AS at" + "".join(f', avg("{n}") AS "{n}"' for n in numeric) + f" FROM {name} GROUP BY 1 ORDER BY 1")
        rows = [(f"<code>{f.name}</code>", f.unit, f"{f.better} {_sound(f)}".strip(), _plain(last[f.name]),
                 spark([row[f.name] for row in course]) if f.name in numeric else "", f.meaning) for f in fields]
        parts.append(f"<details><summary><b>{name}</b> {escape(meaning)}</summary>"
                     f"{_table(['field', 'unit', 'better', 'last', 'over rounds', 'meaning'], rows)}</details>")
    unknown = f"<p>Recorded, but unknown to this version: {escape(', '.join(sorted(views.unknown)))}.</p>" if views.unknown else ""
    return unknown + "".join(parts)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number(item)}" for key, item in value.items()) or "—"
    return (", ".join(map(str, value)) or "—") if isinstance(value, list) else value


def _settings(views: Views) -> str:
    saved = views.rows("SELECT path, finished_rounds, finished_epochs, best FROM checkpoints ORDER BY seq")
    parts = "".join(f"<details><summary><b>{name}</b></summary><pre>{escape(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())}"
                    f"</pre></details>" for name, content in (("config.json", views.run.config), ("run.json", views.run.info)))
    return parts + (_table(["checkpoint", "finished rounds", "finished epochs", "best"], [tuple(r.values()) for r in saved]) if saved else "")
