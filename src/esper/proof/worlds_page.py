"""The comparison over worlds as tables, and as sections of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from esper._page import freeze
from esper.proof.compare import LEARNED
from esper.proof.page import intervals, table_blocks, with_interval
from esper.proof.worlds import BEST_SINGLE, HINDSIGHT, NEVER, RUNG

COLUMNS = (
    ("J", 100, "points of J"),
    ("test_accuracy", 1, "test accuracy, %"),
    ("added_params", 1, "added parameters"),
    ("flops", 1e-6, "training MFLOPs"),
    ("germinated", 1, "germinated"),
    ("fossilized", 1, "fossilized"),
)
"""Measure, factor, and the head of the column."""
PROFILED = (
    LEARNED,
    NEVER,
    BEST_SINGLE,
    HINDSIGHT,
    "periodic",
    "plateau",
    "heuristic",
    "random_placement",
    "fixed_schedule",
    "halving",
)
"""Cohorts whose performance profiles are drawn. The profiles of all are in proof.json."""


def _title(result: Mapping[str, Any]) -> str:
    settings = result["settings"]
    first, count = settings["first_world"], settings["num_worlds"]
    return (
        f"{result['task']}: {settings['use']} worlds {first} to {first + count - 1}, "
        f"{settings['networks']} networks each"
    )


def summary(result: Mapping[str, Any]) -> Iterator[str]:
    """What a reader must know beside the tables, a sentence each."""
    yield f"Policies: {', '.join(result['policies']) or 'none'}."
    single = result["best_single_rung"].removeprefix(RUNG).replace(NEVER, "nothing")
    yield (
        f"{BEST_SINGLE} is {single!r}, the rung with the highest mean J over these same worlds: chosen in "
        "hindsight, in its favour."
    )
    if result["regret"] is None:
        return
    yield (
        f"Regret of the learned policy to the best rung of each world in hindsight: "
        f"{with_interval(result['regret'], 100)} points of J."
    )
    halving = result["halving_multiple"]
    if halving["multiple"] is None:
        yield f"FLOPs that halving needs to draw level: not between its budgets, because {halving['why']}."
    else:
        yield (
            f"FLOPs that halving needs to draw level: {halving['multiple']:.2f} times those of the learned "
            f"policy, from {halving['worlds']} worlds."
        )


def tables(result: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, column heads and rows of each table."""
    title = _title(result)
    yield (
        f"{title}; means, 95 % intervals that resample worlds, then networks",
        ("cohort", "worlds", *(column[-1] for column in COLUMNS)),
        [
            [name, str(row["worlds"]), *(with_interval(row[m], scale) for m, scale, _ in COLUMNS)]
            for name, row in result["cohorts"].items()
        ],
    )
    yield (
        f"{title}; learned − other, and the share of worlds in which learned is better, ties half",
        ("other", "worlds", "J", "J of each policy", "accuracy", "better in, % of worlds"),
        [
            [
                name,
                str(row["worlds"]),
                with_interval(row["J"], 100),
                "; ".join(with_interval(one, 100) for one in row["by_policy"]),
                with_interval(row["test_accuracy"]),
                with_interval(row["improvement"], 100),
            ]
            for name, row in result["learned_minus"].items()
        ],
    )
    for grown, what in (
        (result["growth_by_price"], "permanent seeds"),
        (result["size_by_price"], "ln(1 + added/host parameters)"),
    ):
        cohorts = [name for name in grown[0] if name not in ("size_price", "worlds")]
        yield (
            f"{title}; {what} by λ of the world",
            ("λ", "worlds", *cohorts),
            [
                [row["size_price"], str(row["worlds"]), *(with_interval(row[name]) for name in cohorts)]
                for row in grown
                if cohorts
            ],
        )
    yield (
        f"{title}; points of J by world",
        ("world", "data", "λ", "κ", "never", "best rung in hindsight", "its J", "learned", "regret"),
        [_world_row(row) for row in result["by_world"]],
    )


def _world_row(row: Mapping[str, Any]) -> list[str]:
    points = {name: f"{100 * value:.2f}" for name, value in row["J"].items()}
    return [
        str(row["world"]),
        row["dataset"],
        f"{row['size_price']:.4f}",
        f"{row['waste_price']:.4f}",
        points[NEVER],
        ", ".join(dict.fromkeys(row["best_rungs"])),
        points[HINDSIGHT],
        points.get(LEARNED, "—"),
        "—" if row["regret"] is None else f"{100 * row['regret']:.2f}",
    ]


def sections(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The comparison as charts and tables, for the page and for `esper ui`."""
    blocks: list[dict[str, Any]] = [{"type": "note", "text": text} for text in summary(result)]
    for measure, scale, head in COLUMNS[:4]:
        estimates = {name: row[measure] for name, row in result["cohorts"].items()}
        blocks.append(intervals(head, "Mean over worlds, 95 % interval.", estimates, scale))
    differences = result["learned_minus"]
    if differences:
        note = "Mean of the paired differences, 95 % interval."
        estimates = {name: row["J"] for name, row in differences.items()}
        blocks.append(intervals("learned − other, points of J", note, estimates, 100))
        note = "Share of worlds in which learned is better, ties half, 95 % interval."
        estimates = {name: row["improvement"] for name, row in differences.items()}
        blocks.append(intervals("probability of improvement, %", note, estimates, 100))
    shares = {name: result["profiles"][name] for name in PROFILED if name in result["profiles"]}
    blocks.append(
        {
            "type": "lines",
            "title": "Performance profiles",
            "note": "Share of worlds with at least this score: 0 is the worst rung of the world, 1 its best.",
            "x": "normalised score",
            "data": {"x": list(result["profile_scores"]), "series": shares},
        }
    )
    blocks += table_blocks(tables(result))
    blocks += [{"type": "note", "text": f"left out {name}: {why}"} for name, why in result["absent"].items()]
    return [{"id": result["task"], "title": _title(result), "blocks": blocks}]


def page(result: Mapping[str, Any]) -> str:
    """The comparison as one HTML page that loads nothing."""
    return freeze(f"Proof: {result['task']}", {"proof": sections(result)})
