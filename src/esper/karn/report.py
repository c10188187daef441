"""One run as one HTML page that loads nothing from elsewhere: every metric of the registry, as charts, tables
and text.

Rounds are recorded from 0 and shown from 1: queries select `round_idx + 1 AS round`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import orjson

from esper._charts import (
    Life,
    Series,
    document,
    duration,
    escape,
    lanes,
    lines,
    number,
    stacked,
    table,
    tag,
    trend,
)
from esper.karn.summary import summarize
from esper.karn.views import EVENT_VIEWS, VIEWS, Views
from esper.leyline import EVENTS, OP_NAMES, PHASES, EsperError, SeedStage, TelemetryEventType
from esper.leyline.metrics import ROUND, FieldKind, Metric

MAX_BARS = 120
"""Longer runs show means of several rounds per bar."""
_NUMERIC = (FieldKind.FLOAT, FieldKind.INT)
Rows = Sequence[Mapping[str, Any]]


def render_report(views: Views, growth_rounds: int = 24) -> str:
    """The page. Growth is drawn for `growth_rounds` evenly spaced rounds, the last among them, and for the
    best round."""
    if growth_rounds < 1:
        raise EsperError(f"report: growth_rounds is {growth_rounds}, must be 1 or more")
    sections: dict[str, Callable[[Views], str]] = {
        "Learning": _learning,
        "Growth": lambda views: _growth(views, growth_rounds),
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
        tag("section", f"<h2>{name}</h2>{render(views)}", id=name.lower())
        for name, render in sections.items()
    )
    links = "".join(tag("a", name, href=f"#{name.lower()}") for name in sections)
    name = views.run.path.resolve().name
    return document(name, f"<h1>{escape(name)}</h1>{_facts(views)}<nav>{links}</nav>", body)


# -- pieces --------------------------------------------------------------------------------------------------


def _rows_table(rows: Rows, absent: str) -> str:
    return table(rows[0], [row.values() for row in rows]) if rows else _note(absent)


def _note(text: str) -> str:
    return tag("p", escape(text), css="absent")


def _grid(*figures: str) -> str:
    return tag("div", "".join(figures), css="grid")


def _pivot(rows: Rows) -> tuple[list[float], Series]:
    """Rows of (x, name, value) as one series per name, all over the same x; None where a name has no
    value."""
    cells = {(x, name): value for x, name, value in (row.values() for row in rows) if x is not None}
    xs = sorted({x for x, _ in cells})
    names = dict.fromkeys(name for _, name in cells)
    return xs, {name: [cells.get((x, name)) for x in xs] for name in names}


def _bars(title: str, x: Sequence[float], series: Series, *, note: str, total: bool = False) -> str:
    """Stacked bars over rounds; long runs are thinned to means of several rounds."""
    size = math.ceil(len(x) / MAX_BARS)
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
    """Metrics that are numbers or maps of numbers, over rounds."""
    rows = views.rows(f"SELECT * FROM {view} WHERE round_idx IS NOT NULL ORDER BY round_idx")
    rounds = [row["round_idx"] + 1 for row in rows]
    figures = []
    for metric in metrics:
        values = [row[metric.name] for row in rows]
        series: Series = {metric.name: values}
        if metric.kind not in _NUMERIC:
            keys = dict.fromkeys(key for value in values for key in value or ())
            series = {key: [(value or {}).get(key) for value in values] for key in keys}
        unit = f"({metric.unit}) " if metric.unit else ""
        limits = [limit for limit in (metric.low, metric.high) if limit is not None]
        note = f"{unit}{metric.meaning}{_sound(metric)}"
        figures.append(lines(metric.name, rounds, series, note=note, limits=limits))
    return figures


# -- sections ------------------------------------------------------------------------------------------------


def _facts(views: Views) -> str:
    run = summarize(views)
    facts = {
        "status": run.status,
        "task": run.task,
        "policy": run.policy,
        "random seed": run.seed,
        "envs": run.envs,
        "rounds": f"{run.rounds_done} of {number(run.rounds)}",
        "last J": run.objective,
        "best J": run.best,
        "alerts": run.alerts,
        "time": duration(run.seconds),
        "started": run.started,
    }
    items = "".join(
        f"<div><dt>{name}</dt><dd>{escape(number(value))}</dd></div>" for name, value in facts.items()
    )
    return tag("dl", items, css="facts")


def _learning(views: Views) -> str:
    rounds = views.rows("""
        WITH spread AS (
            SELECT round_idx, quantile_cont(objective, 0.1) AS low, quantile_cont(objective, 0.9) AS high
            FROM episodes GROUP BY round_idx
        )
        SELECT rounds.*, low, high FROM rounds LEFT JOIN spread USING (round_idx)
        WHERE round_idx IS NOT NULL ORDER BY round_idx""")
    if not rounds:
        return _note("No round was finished.")
    x = [row["round_idx"] + 1 for row in rounds]

    def series(*names: str) -> Series:
        return {name: [row[name] for row in rounds] for name in names}

    fates = _pivot(
        views.rows("""
        UNPIVOT (
            SELECT round_idx + 1 AS round, avg(fossilized) AS fossilized, avg(pruned) AS pruned,
                avg(germinated - fossilized - pruned) AS unfinished
            FROM episodes GROUP BY ALL
        ) ON COLUMNS(* EXCLUDE round)""")
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
            note="(points) At the last epoch with all blended seeds and with fossilized seeds only, and the "
            "mean over all epochs.",
        ),
        lines("Reward", x, series("avg_reward"), note="Mean total reward of an episode."),
        lines(
            "Added parameters",
            x,
            series("avg_added_params"),
            note="Parameters of fossilized seeds, mean over the envs.",
        ),
        _bars("Seeds", *fates, note="Fate of the seeds germinated in an episode, mean over the envs."),
    ) + _by_task(views)


def _by_task(views: Views) -> str:
    """Figures of each task, if there are several: J over the rounds, and the last round as a table."""
    if len(views.tasks()) < 2:
        return ""

    def over_rounds(column: str) -> tuple[list[float], Series]:
        return _pivot(views.rows(f"SELECT round_idx + 1 AS round, task, {column} FROM tasks ORDER BY ALL"))

    last = views.rows("""
        SELECT task, episodes, objective AS J, low AS "10 % of J", high AS "90 % of J",
            final_accuracy AS accuracy, committed_accuracy AS committed, total_reward AS reward,
            added_params AS "added parameters", epochs, germinated, fossilized, rollbacks
        FROM tasks WHERE round_idx = (SELECT max(round_idx) FROM rounds)""")
    figures = _grid(
        lines("Objective J by task", *over_rounds("objective"), note="Mean over the envs of each task."),
        lines(
            "Committed accuracy by task",
            *over_rounds("committed_accuracy"),
            note="(points) Mean over the envs of each task, with fossilized seeds only.",
        ),
        lines(
            "Added parameters by task",
            *over_rounds("added_params"),
            note="Parameters of fossilized seeds, mean over the envs of each task.",
        ),
    )
    return f"<h3>By task</h3>{figures}<p>The last round:</p>{_rows_table(last, 'No round was finished.')}"


def _growth(views: Views, count: int) -> str:
    envs = views.rows("""
        SELECT round_idx, env_id, max(epoch) AS epochs FROM steps
        WHERE round_idx IS NOT NULL AND epoch IS NOT NULL GROUP BY ALL ORDER BY ALL""")
    if not envs:
        return _note("No steps were recorded: level normal or debug records them, at the end of each round.")
    rounds = list(dict.fromkeys(env["round_idx"] for env in envs))
    last = rounds[-1]
    best = _best_round(views, last)
    spaced = {rounds[-1 - round(i * (len(rounds) - 1) / max(count - 1, 1))] for i in range(count)}
    chosen = [index for index in rounds if index in spaced or index == best]
    networks = _lives(views, [env for env in envs if env["round_idx"] in chosen])
    outcomes = {(row["round_idx"], row["env_id"]): row for row in views.rows("SELECT * FROM episodes")}
    epochs = max(env["epochs"] for env in envs)
    pages = dict.fromkeys(chosen, "")
    tasks = views.tasks()
    names = {env_id: f", {task.name}" for task in tasks for env_id in task.envs if len(tasks) > 1}
    for (round_idx, env_id), slots in networks.items():
        outcome = _outcome(outcomes.get((round_idx, env_id)))
        pages[round_idx] += lanes(f"env {env_id}{names.get(env_id, '')}", outcome, epochs, slots)
    labels = {index: str(index + 1) for index in chosen}
    if best in labels:
        labels[best] += " (best J)"
    labels[last] += " (last)"
    options = "".join(tag("option", labels[index], value=index + 1) for index in reversed(chosen))
    legend = "".join(
        f"<span>{tag('i', css=stage.name)}{stage.name.lower()}</span>" for stage in SeedStage if stage
    )
    left_out = ""
    if len(chosen) < len(rounds):
        left_out = f" This page has {len(chosen)} of {len(rounds)} rounds."
    return (
        f"<p>Round {tag('select', options, id='round')} Bands are stages. The line is alpha, from 0 at the "
        f"bottom of a lane to 1 at its top.{left_out}</p>{tag('div', legend, css='legend')}"
        f"{tag('div', pages[last], css='grid', id='lanes')}"
        + "".join(tag("template", page, data_round=index + 1) for index, page in pages.items())
    )


def _best_round(views: Views, default: int) -> int:
    """The round with the highest mean J."""
    ranked = views.rows("""
        SELECT round_idx FROM rounds WHERE avg_objective IS NOT NULL ORDER BY avg_objective DESC LIMIT 1""")
    return ranked[0]["round_idx"] if ranked else default


def _lives(views: Views, envs: Rows) -> dict[tuple[int, int], dict[str, list[Life]]]:
    """The seeds of each slot, epoch by epoch, by (round, env). Slots that stayed empty are there as well."""
    start = next(iter(views.rows("SELECT slots FROM starts ORDER BY seq DESC LIMIT 1")), {})
    all_slots = start.get("slots") or ()
    slots_of = {env_id: task.slots for task in views.tasks() for env_id in task.envs}
    lives: dict[tuple[int, int], dict[str, list[Life]]] = {
        (env["round_idx"], env["env_id"]): {slot: [] for slot in slots_of.get(env["env_id"], all_slots)}
        for env in envs
    }
    rounds = ", ".join(sorted({str(env["round_idx"]) for env in envs}))
    for row in views.rows(f"""
        SELECT * FROM slots WHERE round_idx IN ({rounds}) AND epoch IS NOT NULL ORDER BY epoch"""):
        network = lives.get((row["round_idx"], row["env_id"]))
        if network is not None:
            life = row["epoch"], row["stage"], row["blueprint"], row["alpha"]
            network.setdefault(row["slot"], []).append(life)
    return lives


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
        """Every operation in order, so that each has the same colour in all charts."""
        x, series = _pivot(views.rows(sql))
        return x, {op: series.get(op, [None] * len(x)) for op in OP_NAMES}

    mix = by_op("""
        SELECT round_idx + 1 AS round, entry.key, entry.value / total
        FROM (
            SELECT round_idx, unnest(map_entries(action_counts)) AS entry,
                nullif(list_sum(map_values(action_counts)), 0) AS total
            FROM actions
        )""")
    when = by_op("""
        SELECT epoch, op, count(*) FROM steps
        WHERE op <> 'WAIT' AND round_idx = (SELECT max(round_idx) FROM steps) GROUP BY ALL""")
    masked = by_op("""
        SELECT round_idx + 1 AS round, entry.key, entry.value
        FROM (SELECT round_idx, unnest(map_entries(hit_rates)) AS entry FROM masks)""")
    refused = views.rows("""
        SELECT op AS operation, count(*) AS times,
            coalesce(veto, nullif(array_to_string(gate_failures, ', '), ''), '—') AS "reason for refusal"
        FROM steps WHERE NOT executed AND op <> 'WAIT' GROUP BY ALL ORDER BY times DESC, op LIMIT 12""")
    return _grid(
        _bars("Action mix", *mix, note="Share of each operation among a round's decisions."),
        stacked(
            "When it acts",
            *when,
            note="Decisions of the last round by epoch, without WAIT.",
            x_label="epoch",
        ),
        lines("Forbidden operations", *masked, note="Share of decisions at which each was masked."),
    ) + _rows_table(refused, "Every recorded operation was carried out.")


def _rewards(views: Views) -> str:
    paid = _pivot(
        views.rows("""
        SELECT round_idx + 1 AS round, term, sum(amount) / count(DISTINCT env_id) FROM terms GROUP BY ALL""")
    )
    when = _pivot(
        views.rows("""
        SELECT epoch, term, avg(amount) FROM terms
        WHERE round_idx = (SELECT max(round_idx) FROM terms) GROUP BY ALL""")
    )
    return _grid(
        _bars("Reward terms", *paid, note="Mean per episode, by term. The mark is their sum.", total=True),
        stacked(
            "Reward terms by epoch",
            *when,
            note="Mean per step of the last round.",
            x_label="epoch",
            total=True,
        ),
    )


def _attribution(views: Views) -> str:
    def by_slot(value: str) -> tuple[list[float], Series]:
        return _pivot(
            views.rows(f"""
            SELECT round_idx + 1 AS round, slot, {value} FROM shares GROUP BY ALL ORDER BY slot, round""")
        )

    seeds = views.rows("""
        SELECT slot, blueprint, count(*) AS episodes, avg(shapley) AS mean_shapley,
            avg(leave_one_out) AS mean_leave_one_out
        FROM shares GROUP BY ALL ORDER BY mean_shapley DESC NULLS LAST""")
    pairs = views.rows("""
        SELECT entry.key AS pair_of_slots, count(*) AS episodes, avg(entry.value) AS mean_interaction
        FROM (SELECT unnest(map_entries(interactions)) AS entry FROM attribution)
        GROUP BY ALL ORDER BY ALL""")
    return (
        _grid(
            lines(
                "Shapley value",
                *by_slot("avg(shapley)"),
                note="(points) Mean over episodes, of the seed in each slot at the episode's end.",
            ),
            lines(
                "Leave one out",
                *by_slot("avg(leave_one_out)"),
                note="(points) Mean accuracy that networks would lose without the seed.",
            ),
            stacked(
                "Blended seeds",
                *by_slot("count(*)"),
                note="Episodes that ended with a blended seed, by slot.",
            ),
        )
        + _rows_table(seeds, "No episode ended with a blended seed.")
        + (_rows_table(pairs, "") if pairs else "")
    )


def _blueprints(views: Views) -> str:
    return _rows_table(
        views.rows("SELECT * FROM blueprints"), "No seed was germinated, or lifecycles were not recorded."
    )


def _ppo(views: Views) -> str:
    if not views.rows("SELECT seq FROM updates LIMIT 1"):
        return _note("No update was recorded: the policy does not learn, or no round was finished.")
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
        views.rows(f"""
        UNPIVOT (SELECT round_idx + 1 AS round, {phases} FROM rounds) ON COLUMNS(* EXCLUDE round)""")
    )
    speed = _pivot(
        views.rows("""
        SELECT round_idx + 1 AS round, 'samples', sum(speed)
        FROM (
            SELECT round_idx, env_id, avg(samples_per_second) AS speed FROM throughput GROUP BY ALL
        ) GROUP BY round_idx""")
    )
    return _grid(
        _bars("Time of a round", *spent, note="(s) By phase."),
        lines("Training speed", *speed, note="(samples/s) All envs together."),
    )


def _alerts(views: Views) -> str:
    alerts = views.rows("""
        SELECT round_idx + 1 AS round, severity, code, message, metric, value, "limit",
            streak AS "times in a row"
        FROM alerts ORDER BY seq""")
    for alert in alerts:
        alert["severity"] = tag("b", escape(alert["severity"]), css=alert["severity"])
    rollbacks = views.rows("""
        SELECT round_idx + 1 AS round, env_id AS env, epoch, reason, loss, "limit", amount
        FROM rollbacks ORDER BY seq""")
    return _rows_table(alerts, "No alert was raised.") + _rows_table(rollbacks, "No network was rolled back.")


def _glossary(views: Views) -> str:
    """Every metric: its last value, its trend over rounds, and its meaning."""
    parts = []
    if views.unknown:
        parts.append(_note(f"Recorded, but unknown to this version: {', '.join(sorted(views.unknown))}."))
    for kind, spec in EVENTS.items():
        parts.append(_glossary_part(views, EVENT_VIEWS[kind], "seq", spec.fields))
    parts.append(_glossary_part(views, "health", "round_idx", ROUND))
    return "".join(parts)


def _glossary_part(views: Views, view: str, order: str, fields: Sequence[Metric]) -> str:
    """The metrics of one view; the column `order` tells which row is the last."""
    last_values = ", ".join(f"arg_max({_quote(field)}, {order}) AS {_quote(field)}" for field in fields)
    last = views.rows(f"SELECT {last_values} FROM {view}")[0]
    numeric = [field for field in fields if field.kind in _NUMERIC and field.name != "round_idx"]
    means = "".join(f", avg({_quote(field)}) AS {_quote(field)}" for field in numeric)
    course = views.rows(f"SELECT round_idx AS at{means} FROM {view} GROUP BY 1 ORDER BY 1")
    rows = [
        (
            tag("code", field.name),
            field.unit,
            f"{field.better}{_sound(field)}".strip(),
            _plain(last[field.name]),
            trend([row[field.name] for row in course], 24) if field in numeric else "",
            field.meaning,
        )
        for field in fields
    ]
    heads = ("field", "unit", "better", "last", "last rounds", "meaning")
    summary = f"<summary><b>{view}</b> {escape(VIEWS[view].meaning)}</summary>"
    return f"<details>{summary}{table(heads, rows)}</details>"


def _quote(field: Metric) -> str:
    return f'"{field.name}"'


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number(item)}" for key, item in value.items()) or "—"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "—"
    return value


def _settings(views: Views) -> str:
    saved = views.rows(
        "SELECT path AS checkpoint, finished_rounds, finished_epochs, best FROM checkpoints ORDER BY seq"
    )
    parts = []
    for name, content in (("config.json", views.run.config), ("run.json", views.run.info)):
        text = escape(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
        parts.append(f"<details><summary><b>{name}</b></summary><pre>{text}</pre></details>")
    return "".join(parts) + _rows_table(saved, "No checkpoint was saved.")
