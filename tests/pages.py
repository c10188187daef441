"""The parts of docs/telemetry.md that are made from the code. To renew the page, paste what these return
under their headings."""

from __future__ import annotations

from esper.karn.views import EVENT_VIEWS, VIEWS
from esper.leyline import EVENTS, METRICS, STEP_TABLES
from esper.leyline.metrics import ROUND, Metric
from esper.nissa.alerts import RULES


def describe_metrics() -> str:
    """The part of docs/telemetry.md about events."""
    lines: list[str] = []
    for kind, spec in EVENTS.items():
        table = f" Table `{STEP_TABLES[kind]}`." if kind in STEP_TABLES else ""
        lines += [f"### `{kind.value}`", "", spec.meaning + table, "", *_table(spec.fields)]
    return "\n".join(
        [
            *lines,
            "### Derived per round",
            "",
            "Not recorded; read from the events of a round by the alert rules.",
            "",
            *_table(ROUND),
        ]
    )


def _table(fields: tuple[Metric, ...]) -> list[str]:
    rows = [
        f"| `{f.name}` | {f.kind.value} | {f.unit} | {f.better} | {_range(f)} | {f.meaning} |" for f in fields
    ]
    return ["| field | kind | unit | better | sound | meaning |", "|---|---|---|---|---|---|", *rows, ""]


def _range(field: Metric) -> str:
    low = "" if field.low is None else f"≥ {field.low:g}"
    return low if field.high is None else f"{low} ≤ {field.high:g}".strip()


def describe_alerts() -> str:
    """The part of docs/telemetry.md about alerts."""
    rows = [
        f"| `{r.code}` | `{r.metric}` {'>' if METRICS[r.metric].high is not None else '<'} {r.limit:g} | {r.streak} "
        f"| {r.severity.value} | {r.sentence} |"
        for r in RULES
    ]
    return "\n".join(
        ["| code | fault | times in a row | severity | meaning |", "|---|---|---|---|---|", *rows, ""]
    )


def describe_views() -> str:
    """The part of docs/telemetry.md about SQL: every view, and the columns that no event has."""
    events = {name: kind.value for kind, name in EVENT_VIEWS.items()}
    rows = [
        f"| `{view.name}` | {view.meaning} | "
        + (
            f"those of `{events[view.name]}`"
            if view.name in events
            else ", ".join(f"`{column.name}`" for column in view.columns)
        )
        + " |"
        for view in VIEWS.values()
    ]
    return "\n".join(["| view | what a row is about | columns |", "|---|---|---|", *rows, ""])
