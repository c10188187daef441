"""The result of a comparison as tables, and as one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from esper._page import freeze
from esper._statistics import Estimate
from esper._text import number
from esper.leyline import LifecycleOp
from esper.proof.compare import LEARNED

COLUMNS = (
    ("J", "iqm", 100, "points of J"),
    ("J", "mean", 100, "J, mean"),
    ("test_accuracy", "iqm", 1, "test accuracy, %"),
    ("accuracy_per_kparam", "iqm", 1, "accuracy per 1,000 parameters"),
    ("added_params", "mean", 1, "added parameters"),
    ("flops", "mean", 1e-6, "training MFLOPs"),
    ("germinated", "mean", 1, "germinated"),
    ("fossilized", "mean", 1, "fossilized"),
    ("pruned", "mean", 1, "pruned"),
    ("rollbacks", "mean", 1, "rollbacks"),
)
"""Measure, mean or interquartile mean, factor, and the head of the column."""
FIGURES = ("points of J", "test accuracy, %", "added parameters", "training MFLOPs")


# -- tables -------------------------------------------------------------------------------------------------


def with_interval(estimate: Estimate | None, scale: float = 1.0) -> str:
    """A cell of a table."""
    if estimate is None:
        return "—"
    low, high = estimate.low * scale, estimate.high * scale
    return f"{estimate.value * scale:.4g} [{low:.4g}, {high:.4g}]"


def tables(result: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, column heads and rows of each table."""
    policies = ", ".join(result["policies"]) or "none"
    first = result["settings"]["first_network"]
    last = first + result["settings"]["networks"] - 1
    title = f"{result['task']}: held-out networks {first} to {last}, policies: {policies}"
    yield (
        f"{title}; interquartile means of J and accuracies, means of the rest, 95 % intervals",
        ("cohort", *(column[-1] for column in COLUMNS)),
        [
            [name, *(with_interval(row[measure][kind], scale) for measure, kind, scale, _ in COLUMNS)]
            for name, row in result["cohorts"].items()
        ],
    )
    yield (
        f"{result['task']}: learned − other, paired, in points of J and of test accuracy",
        (
            "other",
            "J, mean",
            "J, interquartile mean",
            "J, mean of each policy",
            "accuracy, mean",
            "accuracy, interquartile mean",
        ),
        [
            [
                name,
                *(with_interval(row["J"][kind], 100) for kind in ("mean", "iqm")),
                "; ".join(with_interval(one["mean"], 100) for one in row["J"]["by_policy"]),
                *(with_interval(row["test_accuracy"][kind]) for kind in ("mean", "iqm")),
            ]
            for name, row in result["learned_minus"].items()
        ],
    )
    yield (
        f"{result['task']}: networks with a permanent seed in a slot, by the state of a block, in %",
        ("slot", "block", "crippled", "healthy", "difference"),
        [
            [
                row["slot"],
                str(row["block"]),
                *(with_interval(row[part], 100) for part in ("crippled", "healthy", "difference")),
            ]
            for row in result.get("growth_by_condition", ())
        ],
    )


# -- the page ------------------------------------------------------------------------------------------------


def intervals(title: str, note: str, rows: Mapping[str, Estimate], scale: float) -> dict[str, Any]:
    """A chart with a dot and its interval for each name."""
    scaled = {name: [e.value * scale, e.low * scale, e.high * scale] for name, e in rows.items()}
    return {"type": "intervals", "title": title, "note": note, "rows": scaled, "marked": LEARNED}


def _figures(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    figures = []
    for measure, kind, scale, head in COLUMNS:
        if head in FIGURES:
            average = "Mean" if kind == "mean" else "Interquartile mean"
            estimates = {name: row[measure][kind] for name, row in result["cohorts"].items()}
            note = f"{average} over the held-out networks, 95 % interval."
            figures.append(intervals(head, note, estimates, scale))
    for measure, _, scale, head in COLUMNS:
        if head in FIGURES[:2] and result["learned_minus"]:
            estimates = {name: row[measure]["mean"] for name, row in result["learned_minus"].items()}
            note = "Mean of the paired differences, 95 % interval."
            figures.append(intervals(f"learned − other, {head}", note, estimates, scale))
    germinations = Counter(
        (decision.slot, decision.epoch)
        for stratum in result["episodes"].get(LEARNED, ())
        for played in stratum
        for decision in played.decisions
        if decision.op == LifecycleOp.GERMINATE.name
    )
    if germinations:
        epochs = range(1, 1 + max(epoch for _, epoch in germinations))
        slots = sorted({slot for slot, _ in germinations})
        by_slot = {slot: [germinations[slot, epoch] for epoch in epochs] for slot in slots}
        note = "Germinations of the learned policies by epoch."
        data = {"x": list(epochs), "series": by_slot}
        figures.append({"type": "bars", "title": "Germinations", "note": note, "x": "epoch", "data": data})
    return figures


def _schedule(result: Mapping[str, Any]) -> str:
    if result["schedule"] is None:
        return "none"
    plantings = [
        f"{p['blueprint']} in {p['slot']} at epoch {p['epoch']}, {p['style'].lower()}"
        for p in result["schedule"]
    ]
    return " + ".join(plantings) or "not to grow"


def table_blocks(all_tables: Iterable[tuple[str, Sequence[str], list[list[str]]]]) -> list[dict[str, Any]]:
    """Tables of title, heads and rows as blocks of a page, without the empty ones."""
    return [
        {"type": "table", "title": title, "rows": [dict(zip(heads, row, strict=True)) for row in rows]}
        for title, heads, rows in all_tables
        if rows
    ]


def _section(result: Mapping[str, Any]) -> dict[str, Any]:
    """One task."""
    facts = f"host of {number(result['host_params'])} parameters; fixed schedule: {_schedule(result)}"
    blocks: list[dict[str, Any]] = [{"type": "note", "text": facts}, *_figures(result)]
    blocks += table_blocks(tables(result))
    blocks += [{"type": "note", "text": f"left out {name}: {why}"} for name, why in result["absent"].items()]
    return {"id": result["task"], "title": result["task"], "blocks": blocks}


def sections(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The comparison on each task as charts and tables, for the page and for `esper ui`."""
    return [_section(result) for result in results]


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """The comparison as one HTML page that loads nothing."""
    return freeze(f"Proof: {results[0]['task']}", {"proof": sections(results)})
