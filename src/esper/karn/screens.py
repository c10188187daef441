"""What `esper watch` shows: a run, one of its envs, and its policy, as text for a terminal or a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from esper._charts import number, trend
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
"""A letter, a word and a style per stage: what is shown never depends on colour alone."""
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
_WIDTHS = {"J": 7, "last op": 9}
"""Columns that keep their width when there is little room."""
TREND = 24
"""Values in a trend."""


def _plain_table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(
            head, no_wrap=True, overflow="ellipsis", width=_WIDTHS.get(head), min_width=len(head)
        )
    return table


def metric_table(fields: Iterable[Metric], rows: Sequence[Mapping[str, Any]], *, meanings: bool) -> Table:
    """Each number's last value, whether it is within its limits, and its course."""
    table = _plain_table("metric", "last", "", "sound", "trend", *["meaning"] * meanings)
    for field in fields:
        values = [row[field.name] for row in rows]
        last = next((v for v in reversed(values) if v is not None), None)
        limits = " ".join(
            f"{sign} {v:g}" for sign, v in (("≥", field.low), ("≤", field.high)) if v is not None
        )
        state = (
            Text()
            if last is None or not limits
            else Text("✗", "red")
            if field.fault(last)
            else Text("✓", "green")
        )
        meaning = [f"{field.meaning} ({field.unit})"] * meanings
        table.add_row(field.name, number(last), state, limits, trend(values, TREND), *meaning)
    return table


def headline(run: RunSummary) -> Text:
    """Is it alive, how far is it, how long will it take."""
    symbol, style = _STATUS.get(run.status, ("?", "red"))
    text = Text.assemble(
        (f"{symbol} {run.status}", f"bold {style}"),
        f"  {number(run.task)}, policy {number(run.policy)}, seed "
        f"{number(run.seed)}, {number(run.envs)} envs, started {run.started}\n",
    )
    done = run.rounds_done / run.rounds if run.rounds else 0.0
    text.append("█" * round(done * 30) + "░" * (30 - round(done * 30)), style)
    text.append(
        f" round {run.rounds_done} of {number(run.rounds)}, J {number(run.objective)} (best {number(run.best)}), "
        f"{timedelta(seconds=round(run.seconds))} so far"
    )
    if run.status == "running":
        left = "" if run.seconds_left is None else f", {timedelta(seconds=round(run.seconds_left))} left"
        text.append(f"{left}, written {run.idle:.0f} s ago")
    return text


def overview(views: Views, width: int) -> RenderableType:
    """The run as a whole: progress, alerts, numbers by round, and the envs of its last round."""
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
        _action_mix(views),
        "",
        env_table(views),
    )


def _alert_lines(views: Views, count: int = 3) -> list[Text]:
    alerts = views.rows("SELECT * FROM alerts ORDER BY seq DESC")
    lines = [
        Text.assemble(
            (f"! {row['severity']}", "red" if row["severity"] == "error" else "yellow"),
            f" round {number(row['round_idx'])} {row['code']}: {row['message']} "
            f"{number(row['value'])}, limit {number(row['limit'])}",
        )
        for row in alerts[:count]
    ]
    more = [Text(f"  and {len(alerts) - count} earlier alerts", "dim")] if len(alerts) > count else []
    return [*lines, *more] or [Text("✓ no alerts", "green")]


def _action_mix(views: Views) -> Text:
    found = views.rows("SELECT action_counts FROM actions ORDER BY seq DESC LIMIT 1")
    counts = found[0]["action_counts"] if found else {}
    text, total = Text("actions of the last round: ", "bold"), sum(counts.values())
    for op, style in zip(OP_NAMES, _OP_STYLES, strict=True):
        if counts.get(op):
            text.append(
                f"{'█' * max(1, round(20 * counts[op] / total))} {op} {counts[op] / total:.0%}  ", style
            )
    return text if total else text.append("—", "none")


def env_table(views: Views) -> RenderableType:
    """The envs of the last recorded round: what each came to and what is in its slots."""
    at = "(SELECT max(round_idx) FROM steps)"
    ends = views.rows(f"""SELECT steps.env_id, objective, final_accuracy, added_params, stages, alphas, op, steps.round_idx
        FROM steps LEFT JOIN episodes USING (round_idx, env_id) WHERE steps.round_idx = {at}
        QUALIFY row_number() OVER (PARTITION BY steps.env_id ORDER BY steps.epoch DESC) = 1 ORDER BY steps.env_id""")
    if not ends:
        return Text("envs: no round on record yet", "dim")
    lives = {
        (row["env_id"], row["slot"]): row
        for row in views.rows(f"SELECT * FROM slots WHERE round_idx = {at} ORDER BY epoch")
        if row["slot"]
    }
    names = sorted({slot for _, slot in lives})
    table = _plain_table("env", "J", "accuracy", "+params", "last op", *names)
    for end in ends:
        cells = [
            _cell(lives[end["env_id"], slot]) if slot in (end["stages"] or {}) else Text("·")
            for slot in names
        ]
        table.add_row(
            str(end["env_id"]),
            number(end["objective"]),
            number(end["final_accuracy"]),
            number(end["added_params"]),
            end["op"],
            *cells,
        )
    return Group(Text(f"envs at the end of round {ends[0]['round_idx']}", "bold"), table)


def _cell(life: Mapping[str, Any]) -> Text:
    _, word, style = _STAGE.get(life["stage"], ("?", "?", ""))
    return Text.assemble((word, style), f" {life['alpha'] or 0:.2f} {life['blueprint'] or ''}")


def env_screen(views: Views, width: int, round_idx: int | None, env_id: int) -> RenderableType:
    """One env in one round (the last where none is named): its slots epoch by epoch, its decisions, its
    reward."""
    rounds = [row["round_idx"] for row in views.rows("SELECT DISTINCT round_idx FROM steps ORDER BY 1")]
    if not rounds:
        return Text("no steps on record: they are from telemetry level normal on, at the end of each round")
    at = rounds[-1] if round_idx is None else round_idx
    envs = [
        row["env_id"]
        for row in views.rows(f"SELECT DISTINCT env_id FROM steps WHERE round_idx = {at} ORDER BY 1")
    ]
    if env_id not in envs:
        raise EsperError(
            f"round {at}, env {env_id} is not on record; {allowed(envs) if envs else f'rounds {allowed(rounds)}'}"
        )
    where = f"WHERE round_idx = {at} AND env_id = {env_id}"
    steps = views.rows(f"SELECT * FROM steps {where} ORDER BY epoch")
    outcome = views.rows(f"SELECT * FROM episodes {where}")
    facts = (
        ", ".join(
            f"{name} {number(value)}"
            for name, value in outcome[0].items()
            if name
            in (
                "objective",
                "final_accuracy",
                "committed_accuracy",
                "added_params",
                "germinated",
                "fossilized",
                "pruned",
                "rollbacks",
            )
        )
        if outcome
        else "episode not finished"
    )
    return Group(
        Text.assemble((f"round {at}, env {env_id}: ", "bold"), facts),
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
    every = -(-len(steps) // max(width - 12, 1))
    shown = steps[::every]
    lives = {(row["slot"], row["epoch"]): row for row in views.rows(f"SELECT * FROM slots {where}")}
    grid = Table.grid(padding=(0, 1))
    for slot in sorted({slot for slot, _ in lives}):
        line = Text()
        for step in shown:
            letter, _, style = _STAGE.get(
                lives.get((slot, step["epoch"]), {}).get("stage", ""), ("·", "", "dim")
            )
            line.append(letter, style)
        alphas = [lives.get((slot, step["epoch"]), {}).get("alpha") for step in shown]
        grid.add_row(slot, line)
        grid.add_row(
            "alpha", Text("".join(" " if a is None else " ▁▂▃▄▅▆▇█"[round(a * 8)] for a in alphas), "dim")
        )
    grid.add_row("action", Text("".join(_OP.get(step["op"], "?") for step in shown)))
    grid.add_row("reward", Text(trend([step["reward"] for step in shown], len(shown))))
    words = ", ".join(f"{letter} {stage.lower()}" for stage, (letter, _, _) in _STAGE.items())
    letters = ", ".join(f"{letter} {op}" for op, letter in _OP.items())
    return Group(grid, Text(f"{words}; {letters}{f'; every {every}th epoch' if every > 1 else ''}", "dim"))


def _decision_table(steps: Sequence[Mapping[str, Any]]) -> Table:
    table = _plain_table("epoch", "decision", "slot", "how", "P(op)", "value", "reward", "outcome")
    for step in steps:
        if step["op"] != "WAIT":
            how = [
                step[name]
                for name in ("blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
            ]
            failed = step["veto"] or ", ".join(step["gate_failures"] or ()) or "not carried out"
            table.add_row(
                str(step["epoch"]),
                step["op"],
                step["slot"] or "",
                " ".join(number(h) for h in how if h is not None),
                number((step["op_probs"] or {}).get(step["op"])),
                number(step["value"]),
                number(step["reward"]),
                "✓" if step["executed"] else f"✗ {failed}",
            )
    return table


def _reward_table(views: Views, where: str) -> Table:
    table = _plain_table("reward term", "sum")
    for row in views.rows(
        f"SELECT term, sum(amount) AS amount FROM terms {where} GROUP BY term ORDER BY term"
    ):
        table.add_row(row["term"], number(row["amount"]))
    return table


def _share_table(views: Views, where: str) -> Table:
    table = _plain_table("slot", "blueprint", "leave one out", "Shapley", "± error")
    for row in views.rows(f"SELECT * EXCLUDE (round_idx, env_id) FROM shares {where}"):
        table.add_row(*(number(value) for value in row.values()))
    return table


def policy_screen(views: Views, width: int) -> RenderableType:
    """The policy's updates and heads, and what the alert rules read from the rounds."""
    wide = width >= 130
    parts: list[RenderableType] = []
    updates = views.rows(f"SELECT * FROM {EVENT_VIEWS[TelemetryEventType.PPO_UPDATE]} ORDER BY seq")
    if updates:
        fields = EVENTS[TelemetryEventType.PPO_UPDATE].fields
        parts.append(
            metric_table(
                [f for f in fields if f.kind in (FieldKind.FLOAT, FieldKind.INT)], updates, meanings=wide
            )
        )
        heads = _plain_table("head", "entropy", "trend", "KL")
        for head in updates[-1]["head_entropy"] or {}:
            course = [(row["head_entropy"] or {}).get(head) for row in updates]
            heads.add_row(
                head,
                number(course[-1]),
                trend(course, TREND),
                number((updates[-1]["head_kl"] or {}).get(head)),
            )
        parts += ["", heads, ""]
    else:
        parts += [
            Text("no update on record: the policy does not learn, or its first round is not over", "dim"),
            "",
        ]
    return Group(*parts, metric_table(ROUND, views.rows("SELECT * FROM health"), meanings=wide))
