"""The screens of `esper watch` as text for a terminal or a file: a run, one of its envs, and its policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from esper._text import duration, number, printable, trend
from esper.karn.summary import RunSummary, summarize
from esper.karn.views import EVENT_VIEWS, Views
from esper.leyline import EVENTS, OP_NAMES, EsperError, TelemetryEventType, allowed
from esper.leyline.metrics import ROUND, FieldKind, Metric

_STATUS = {
    "running": ("●", "green"),
    "finished": ("✓", "green"),
    "stopped": ("■", "yellow"),
    "failed": ("✗", "red"),
    "cut off": ("✗", "red"),
}
_STAGE = {
    "GERMINATED": ("g", "GERM", "black on bright_yellow"),
    "TRAINING": ("t", "TRAIN", "black on yellow"),
    "BLENDING": ("b", "BLEND", "black on bright_blue"),
    "HOLDING": ("h", "HOLD", "black on magenta"),
    "FOSSILIZED": ("F", "FOSSIL", "black on green"),
    "PRUNED": ("x", "PRUNED", "black on red"),
    "EMBARGOED": ("e", "EMBARGO", "white on bright_black"),
    "RESETTING": ("r", "RESET", "white on bright_black"),
}
"""A letter, a word and a style per stage, so that no stage is told by its colour alone."""
_OP = dict(zip(OP_NAMES, ("·", "G", "A", "P", "F", "V"), strict=True))
_OP_STYLES = ("dim", "yellow", "cyan", "red", "green", "blue")
_OVERVIEW = (
    "avg_objective",
    "avg_accuracy",
    "avg_committed_accuracy",
    "avg_reward",
    "avg_added_params",
    "accuracy_drop",
    "rollbacks",
    "seconds",
)
_OUTCOME = (
    "objective",
    "final_accuracy",
    "committed_accuracy",
    "added_params",
    "germinated",
    "fossilized",
    "pruned",
    "rollbacks",
)
_CHOICES = ("blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
_WIDTHS = {"J": 7, "last op": 9}
"""Columns that keep their width when there is little room."""
TREND = 24
"""Values in a trend."""


def text_table(*heads: str, title: str = "", wrap: bool = True) -> Table:
    """A table without lines, to be filled with `add_row`. `wrap=False` cuts long cells short."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    if title:
        table.title = Text(printable(title))
    for head in heads:
        table.add_column(
            Text(printable(head)),
            no_wrap=not wrap,
            overflow="fold" if wrap else "ellipsis",
            width=None if wrap else _WIDTHS.get(head),
            min_width=None if wrap else len(head),
        )
    return table


def add_row(table: Table, *cells: object) -> None:
    """Cells that are not Text become it, so that neither control characters nor rich's markup in the names of
    a run take effect."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(number(cell)) for cell in cells))


def metric_table(fields: Iterable[Metric], rows: Sequence[Mapping[str, Any]], *, meanings: bool) -> Table:
    """Last value of each metric, whether it is within its limits, and its trend."""
    heads = ["metric", "last", "", "sound", "trend"]
    if meanings:
        heads.append("meaning")
    table = text_table(*heads, wrap=False)
    for field in fields:
        values = [row[field.name] for row in rows]
        last = next((value for value in reversed(values) if value is not None), None)
        cells = [field.name, last, _soundness(field, last), _limits(field), trend(values, TREND)]
        if meanings:
            cells.append(f"{field.meaning} ({field.unit})")
        add_row(table, *cells)
    return table


def _limits(field: Metric) -> str:
    sides = (("≥", field.low), ("≤", field.high))
    return " ".join(f"{sign} {limit:g}" for sign, limit in sides if limit is not None)


def _soundness(field: Metric, value: float | None) -> Text:
    if value is None or not _limits(field):
        return Text()
    return Text("✗", "red") if field.fault(value) else Text("✓", "green")


def round_number(round_idx: int | None) -> str:
    """Rounds are recorded from 0 and shown from 1."""
    return number(None if round_idx is None else round_idx + 1)


def headline(run: RunSummary) -> Text:
    """Status, progress and remaining time."""
    symbol, style = _STATUS.get(run.status, ("?", "red"))
    text = Text.assemble(
        (f"{symbol} {printable(run.status)}", f"bold {style}"),
        f"  {number(run.task)}, policy {number(run.policy)}, random seed {number(run.seed)}, "
        f"{number(run.envs)} envs, started {printable(run.started)}\n",
    )
    share = min(max(run.rounds_done / run.rounds, 0.0), 1.0) if run.rounds else 0.0
    filled = round(share * 30)
    text.append("█" * filled + "░" * (30 - filled), style)
    text.append(
        f" {run.rounds_done} of {number(run.rounds)} rounds, J {number(run.objective)} "
        f"(best {number(run.best)}), time {duration(run.seconds)}"
    )
    if run.status == "running":
        if run.seconds_left is not None:
            text.append(f", {duration(run.seconds_left)} left")
        text.append(f", written {run.idle:.0f} s ago")
    return text


def overview(views: Views, width: int) -> RenderableType:
    """The run as a whole: progress, alerts, metrics by round, and the envs of its last round."""
    rounds = views.rows("SELECT * FROM rounds ORDER BY round_idx")
    fields = {field.name: field for field in EVENTS[TelemetryEventType.BATCH_COMPLETED].fields}
    numbers = metric_table([fields[name] for name in _OVERVIEW], rounds, meanings=width >= 180)
    return Group(
        headline(summarize(views)),
        "",
        *_alert_lines(views),
        "",
        numbers,
        "",
        *_task_lines(views),
        _action_mix(views),
        "",
        env_table(views),
    )


def _alert_lines(views: Views, count: int = 3) -> list[Text]:
    alerts = views.rows("SELECT * FROM alerts ORDER BY seq DESC")
    if not alerts:
        return [Text("✓ no alerts", "green")]
    lines = [
        Text.assemble(
            (f"! {number(row['severity'])}", "red" if row["severity"] == "error" else "yellow"),
            f" round {round_number(row['round_idx'])} {number(row['code'])}: {number(row['message'])} "
            f"{number(row['value'])}, limit {number(row['limit'])}",
        )
        for row in alerts[:count]
    ]
    if len(alerts) > count:
        lines.append(Text(f"  and {len(alerts) - count} earlier alerts", "dim"))
    return lines


def _task_lines(views: Views) -> list[RenderableType]:
    """Figures of each task in the last round, if there are several."""
    tasks = views.tasks()
    if len(tasks) < 2:
        return []
    rows = views.rows("SELECT * FROM tasks ORDER BY round_idx")
    table = text_table("task", "J", "trend", "accuracy", "committed", "+params", "rollbacks", wrap=False)
    for task in tasks:
        own = [row for row in rows if row["task"] == task.name]
        last = own[-1] if own else {}
        figures = [last.get(name) for name in ("final_accuracy", "committed_accuracy", "added_params")]
        course = trend([row["objective"] for row in own], TREND)
        add_row(table, task.name, last.get("objective"), course, *figures, last.get("rollbacks"))
    return [table, ""]


def _action_mix(views: Views) -> Text:
    last = views.rows("SELECT action_counts FROM actions ORDER BY seq DESC LIMIT 1")
    counts = (last[0]["action_counts"] or {}) if last else {}
    total = sum(counts.values())
    text = Text("actions of the last round: ", "bold")
    if total <= 0:
        return text.append("—", "none")
    for op, style in zip(OP_NAMES, _OP_STYLES, strict=True):
        if counts.get(op):
            share = counts[op] / total
            text.append(f"{'█' * max(1, round(20 * share))} {op} {share:.0%}  ", style)
    return text


def env_table(views: Views) -> RenderableType:
    """The envs of the last recorded round: outcome of each, and its slots."""
    last_round = "(SELECT max(round_idx) FROM steps)"
    ends = views.rows(f"""
        SELECT steps.env_id, objective, final_accuracy, added_params, stages, alphas, op, steps.round_idx
        FROM steps LEFT JOIN episodes USING (round_idx, env_id) WHERE steps.round_idx = {last_round}
        QUALIFY row_number() OVER (PARTITION BY steps.env_id ORDER BY steps.epoch DESC) = 1
        ORDER BY steps.env_id""")
    if not ends:
        return Text("envs: no finished round recorded yet", "dim")
    lives = {
        (row["env_id"], row["slot"]): row
        for row in views.rows(f"SELECT * FROM slots WHERE round_idx = {last_round} ORDER BY epoch")
    }
    slots = sorted({slot for _, slot in lives})
    tasks = views.tasks()
    names = {env_id: task.name for task in tasks for env_id in task.envs if len(tasks) > 1}
    heads = ["task"] if names else []
    table = text_table("env", *heads, "J", "accuracy", "+params", "last op", *slots, wrap=False)
    for end in ends:
        occupied = end["stages"] or {}
        cells = [_cell(lives[end["env_id"], slot]) if slot in occupied else Text("·") for slot in slots]
        figures = (end["objective"], end["final_accuracy"], end["added_params"])
        name = [names.get(end["env_id"], "")] if names else []
        add_row(table, str(end["env_id"]), *name, *figures, end["op"], *cells)
    return Group(Text(f"envs at the end of round {round_number(ends[0]['round_idx'])}", "bold"), table)


def _cell(life: Mapping[str, Any]) -> Text:
    _, word, style = _STAGE.get(life["stage"], ("?", "?", ""))
    return Text.assemble((word, style), f" {life['alpha'] or 0:.2f} {printable(life['blueprint'] or '')}")


def env_screen(views: Views, width: int, round_idx: int | None, env_id: int) -> RenderableType:
    """One env in one round: its slots epoch by epoch, its decisions, its reward. `round_idx` counts from 0;
    None is the last round recorded."""
    rounds = [row["round_idx"] for row in views.rows("SELECT DISTINCT round_idx FROM steps ORDER BY 1")]
    if not rounds:
        return Text("no steps recorded: level normal or debug records them, at the end of each round")
    at = rounds[-1] if round_idx is None else round_idx
    rows = views.rows(f"SELECT DISTINCT env_id FROM steps WHERE round_idx = {at} ORDER BY 1")
    envs = [row["env_id"] for row in rows]
    if not envs:
        raise EsperError(f"round {round_number(at)} is not recorded; {allowed(map(round_number, rounds))}")
    if env_id not in envs:
        raise EsperError(f"env {env_id} is not recorded in round {round_number(at)}; {allowed(envs)}")
    where = f"WHERE round_idx = {at} AND env_id = {env_id}"
    steps = views.rows(f"SELECT * FROM steps {where} ORDER BY epoch")
    outcome = views.rows(f"SELECT {', '.join(_OUTCOME)} FROM episodes {where}")
    if outcome:
        facts = ", ".join(f"{name} {number(value)}" for name, value in outcome[0].items())
    else:
        facts = "episode not finished"
    return Group(
        Text.assemble((f"round {round_number(at)}, env {env_id}: ", "bold"), facts),
        "",
        _lanes(views, where, steps, width),
        "",
        _decision_table(steps),
        "",
        _reward_table(views, where),
        "",
        _share_table(views, where),
    )


def _lanes(views: Views, where: str, steps: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    every = math.ceil(len(steps) / max(width - 12, 1))
    shown = steps[::every]
    lives = {(row["slot"], row["epoch"]): row for row in views.rows(f"SELECT * FROM slots {where}")}
    grid = Table.grid(padding=(0, 1))
    for slot in sorted({slot for slot, _ in lives}):
        states = [lives.get((slot, step["epoch"]), {}) for step in shown]
        stages = Text()
        for state in states:
            letter, _, style = _STAGE.get(state.get("stage", ""), ("·", "", "dim"))
            stages.append(letter, style)
        add_row(grid, slot, stages)
        add_row(grid, "alpha", Text("".join(_alpha_block(state.get("alpha")) for state in states), "dim"))
    add_row(grid, "action", Text("".join(_OP.get(step["op"], "?") for step in shown)))
    add_row(grid, "reward", Text(trend([step["reward"] for step in shown], len(shown))))
    stage_letters = ", ".join(f"{letter} {stage.lower()}" for stage, (letter, _, _) in _STAGE.items())
    op_letters = ", ".join(f"{letter} {op}" for op, letter in _OP.items())
    thinned = f"; every {every}th epoch" if every > 1 else ""
    return Group(grid, Text(f"{stage_letters}; {op_letters}{thinned}", "dim"))


def _alpha_block(alpha: float | None) -> str:
    if alpha is None or not math.isfinite(alpha):
        return " "
    return " ▁▂▃▄▅▆▇█"[round(min(max(alpha, 0.0), 1.0) * 8)]


def _decision_table(steps: Sequence[Mapping[str, Any]]) -> Table:
    table = text_table("epoch", "decision", "slot", "how", "P(op)", "value", "reward", "outcome", wrap=False)
    for step in steps:
        if step["op"] == "WAIT":
            continue
        chosen = [step[name] for name in _CHOICES if step[name] is not None]
        failure = step["veto"] or ", ".join(step["gate_failures"] or ()) or "not carried out"
        add_row(
            table,
            str(step["epoch"]),
            step["op"],
            step["slot"] or "",
            " ".join(number(choice) for choice in chosen),
            (step["op_probs"] or {}).get(step["op"]),
            step["value"],
            step["reward"],
            "✓" if step["executed"] else f"✗ {failure}",
        )
    return table


def _reward_table(views: Views, where: str) -> Table:
    table = text_table("reward term", "sum", wrap=False)
    for row in views.rows(
        f"SELECT term, sum(amount) AS amount FROM terms {where} GROUP BY term ORDER BY term"
    ):
        add_row(table, row["term"], row["amount"])
    return table


def _share_table(views: Views, where: str) -> Table:
    table = text_table("slot", "blueprint", "leave one out", "Shapley", "± error", wrap=False)
    for row in views.rows(f"SELECT * EXCLUDE (round_idx, env_id) FROM shares {where}"):
        add_row(table, *row.values())
    return table


def policy_screen(views: Views, width: int) -> RenderableType:
    """The policy's updates and heads, and the figures that the alert rules judge."""
    wide = width >= 130
    parts: list[RenderableType] = []
    updates = views.rows(f"SELECT * FROM {EVENT_VIEWS[TelemetryEventType.PPO_UPDATE]} ORDER BY seq")
    if updates:
        fields = EVENTS[TelemetryEventType.PPO_UPDATE].fields
        numeric = [field for field in fields if field.kind in (FieldKind.FLOAT, FieldKind.INT)]
        parts += [metric_table(numeric, updates, meanings=wide), "", _head_table(updates), ""]
    else:
        parts += [Text("no update recorded: the policy does not learn, or no round is finished", "dim"), ""]
    return Group(*parts, metric_table(ROUND, views.rows("SELECT * FROM health"), meanings=wide))


def _head_table(updates: Sequence[Mapping[str, Any]]) -> Table:
    table = text_table("head", "entropy", "trend", "KL", wrap=False)
    last = updates[-1]
    for head in last["head_entropy"] or {}:
        entropies = [(row["head_entropy"] or {}).get(head) for row in updates]
        add_row(table, head, entropies[-1], trend(entropies, TREND), (last["head_kl"] or {}).get(head))
    return table
