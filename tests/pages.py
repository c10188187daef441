"""The parts of docs/telemetry.md that are generated from the code. `python tests/pages.py` writes them into
the page, between its markers."""

from __future__ import annotations

import re
from pathlib import Path

from esper.karn.views import EVENT_VIEWS, VIEWS
from esper.leyline import EVENTS, METRICS, STEP_TABLES
from esper.leyline.metrics import ROUND, Metric
from esper.nissa.alerts import RULES

DOCS = Path(__file__).parents[1] / "docs" / "telemetry.md"


def renewed(page: str) -> str:
    """The page with its generated parts as the code describes them now."""
    parts = {"alerts": describe_alerts(), "events": describe_metrics(), "views": describe_views()}
    for name, text in parts.items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->\n"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        page, count = pattern.subn(lambda _, new=f"{begin}{text}{end}": new, page)
        if count != 1:
            raise ValueError(f"{DOCS} has {count} parts named {name}, must have 1")
    return page


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
            "Not recorded. The alert rules compute these from the events of a round.",
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
    rows = []
    for rule in RULES:
        sign = "<" if METRICS[rule.metric].high is None else ">"
        fault = f"`{rule.metric}` {sign} {rule.limit:g}"
        rows.append(f"| `{rule.code}` | {fault} | {rule.streak} | {rule.severity.value} | {rule.sentence} |")
    return "\n".join(
        ["| code | fault | times in a row | severity | meaning |", "|---|---|---|---|---|", *rows, ""]
    )


def describe_views() -> str:
    """The part of docs/telemetry.md about SQL: every view, with the columns that no event has."""
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
    return "\n".join(["| view | meaning of a row | columns |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    DOCS.write_text(renewed(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
