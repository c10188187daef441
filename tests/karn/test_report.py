"""The report: complete, self-contained, and with the figures that SQL finds in the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import pytest

from esper._text import number, trend
from esper.karn import Views, render_report
from esper.karn.summary import open_run
from esper.leyline import METRICS, EsperError
from frozen import assert_sealed, data_of

from .conftest import Write


@pytest.fixture(scope="module")
def views(run_path: Path) -> Views:
    return open_run(run_path)


@pytest.fixture(scope="module")
def page(run_path: Path) -> str:
    return render_report(run_path)


@pytest.fixture(scope="module")
def data(page: str) -> dict[str, Any]:
    return data_of(page)


def same(one: Any, other: Any) -> bool:
    """Equal, numbers up to the rounding of another order of summation; NaN and null alike."""
    if isinstance(one, float) or isinstance(other, float):
        gaps = [v is None or v != v for v in (one, other)]
        return all(gaps) or (not any(gaps) and math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# -- the file ------------------------------------------------------------------------------------------------


def test_every_metric_is_on_the_page_with_its_meaning(data: dict[str, Any]) -> None:
    told = {
        f"{group['event']}.{field['name']}": field["meaning"]
        for group in data["layout"]["glossary"]
        for field in group["fields"]
    }
    for name, metric in METRICS.items():
        assert (
            told[name.replace("round.", "health.", 1) if name.startswith("round.") else name]
            == metric.meaning
        )


def test_the_page_needs_nothing_else_and_lets_nothing_else_in(page: str) -> None:
    assert_sealed(page)


def test_the_same_run_gives_the_same_file(run_path: Path, page: str) -> None:
    assert render_report(run_path) == page


def test_names_from_a_run_cannot_become_markup(write_run: Write) -> None:
    evil = "</script><script>alert(1)</script>"
    path = write_run(
        [
            ("run_started", {"task": evil, "slots": [evil]}),
            ("run_ended", {"status": evil, "message": evil}),
            ("alert", {"code": evil, "severity": '"><b>', "message": evil}),
        ],
        name="<script>alert(2)<",
        config=evil,
    )
    page = render_report(path)
    assert f"<title>{escape('<script>alert(2)<')}</title>" in page
    assert page.count("alert(") == 1  # the title, as text
    parts = data_of(page)["run"]["parts"]
    assert (parts["facts"]["task"], parts["alerts"][0]["code"]) == (evil, evil)


def test_a_run_without_rounds_has_a_page(write_run: Write) -> None:
    parts = data_of(render_report(write_run([])))["run"]["parts"]
    assert parts["facts"]["status"] == "cut off"
    assert any("not started" in problem for problem in parts["problems"])


def test_growth_rounds_must_be_one_or_more(run_path: Path) -> None:
    with pytest.raises(EsperError, match="growth_rounds is 0"):
        render_report(run_path, growth_rounds=0)


# -- figures, against SQL ------------------------------------------------------------------------------------


def curve(data: dict[str, Any], name: str) -> dict[int, Any]:
    return {int(x): y for x, y in zip(*data["run"]["curves"].get(name, ([], [])), strict=True)}


@pytest.mark.parametrize(
    ("group", "view"), [("rounds", "rounds"), ("updates", "updates"), ("health", "health")]
)
def test_curves_of_events_are_those_of_the_views(
    data: dict[str, Any], views: Views, group: str, view: str
) -> None:
    names = {
        n.split("/")[1] for n in data["run"]["curves"] if n.startswith(f"{group}/") and n.count("/") == 1
    }
    assert len(names) > 5
    rows = views.rows(f"SELECT * FROM {view} ORDER BY round_idx")
    for name in names:
        expected = {row["round_idx"] + 1: row[name] for row in rows}
        found = curve(data, f"{group}/{name}")
        assert all(same(found.get(x), y) for x, y in expected.items()), name


QUERIES = {
    "spread/low": "SELECT round_idx, quantile_cont(objective, 0.1) FROM episodes GROUP BY ALL",
    "spread/high": "SELECT round_idx, quantile_cont(objective, 0.9) FROM episodes GROUP BY ALL",
    "fates/pruned": "SELECT round_idx, avg(pruned) FROM episodes GROUP BY ALL",
    "fates/unfinished": "SELECT round_idx, avg(germinated - fossilized - pruned) FROM episodes GROUP BY ALL",
    "mix/WAIT": "SELECT round_idx, action_counts['WAIT'] / list_sum(map_values(action_counts)) FROM actions",
    "masked/ADVANCE": "SELECT round_idx, hit_rates['ADVANCE'] FROM masks",
    "updates/head_entropy/op": "SELECT round_idx, head_entropy['op'] FROM updates",
    "phases/train": "SELECT round_idx, train_seconds FROM rounds",
    "speed/samples": """
        SELECT round_idx, sum(speed) FROM (
            SELECT round_idx, env_id, avg(samples_per_second) AS speed FROM throughput GROUP BY ALL
        ) GROUP BY ALL""",
}


@pytest.mark.parametrize("name", QUERIES)
def test_derived_curves_are_what_sql_computes(data: dict[str, Any], views: Views, name: str) -> None:
    _, rows = views.query(QUERIES[name])
    assert rows
    assert same({index + 1: value for index, value in rows}, curve(data, name))


@pytest.mark.parametrize(
    ("prefix", "query"),
    [
        ("terms", "SELECT round_idx, term, sum(amount) / count(DISTINCT env_id) FROM terms GROUP BY ALL"),
        ("shapley", "SELECT round_idx, slot, avg(shapley) FROM shares GROUP BY ALL"),
        ("leave_one_out", "SELECT round_idx, slot, avg(leave_one_out) FROM shares GROUP BY ALL"),
        ("blended", "SELECT round_idx, slot, count(*)::DOUBLE FROM shares GROUP BY ALL"),
    ],
)
def test_curves_by_name_are_what_sql_computes(
    data: dict[str, Any], views: Views, prefix: str, query: str
) -> None:
    _, rows = views.query(query)
    expected = {(f"{prefix}/{name}", index + 1): value for index, name, value in rows}
    found = {
        (name, x): y
        for name in data["run"]["curves"]
        if name.startswith(f"{prefix}/")
        for x, y in curve(data, name).items()
    }
    assert expected
    assert same({str(k): v for k, v in expected.items()}, {str(k): v for k, v in found.items()})


def test_tables_are_what_sql_computes(data: dict[str, Any], views: Views) -> None:
    parts = data["run"]["parts"]
    blueprints = [
        {key.replace("_", " ").replace("blueprint id", "blueprint"): value for key, value in row.items()}
        for row in views.rows("SELECT * FROM blueprints")
    ]
    assert same(parts["blueprints"], blueprints)
    seeds = views.rows("""
        SELECT slot, blueprint, count(*) AS episodes, avg(shapley) AS "mean shapley",
            avg(leave_one_out) AS "mean leave one out"
        FROM shares GROUP BY ALL""")
    order = lambda row: (row["slot"], row["blueprint"])  # noqa: E731
    assert same(sorted(parts["seeds"], key=order), sorted(seeds, key=order))
    refused = views.rows("SELECT count(*) AS n FROM steps WHERE NOT executed AND op <> 'WAIT'")
    assert sum(row["times"] for row in parts["refused"]) == refused[0]["n"]
    acts = parts["last_round"]["acts"]
    counted = views.rows("""
        SELECT op, epoch, count(*) AS n FROM steps
        WHERE op <> 'WAIT' AND round_idx = (SELECT max(round_idx) FROM steps) GROUP BY ALL""")
    found = {
        (op, epoch): n
        for op, values in acts["series"].items()
        for epoch, n in zip(acts["x"], values, strict=True)
        if n
    }
    assert found == {(row["op"], row["epoch"]): row["n"] for row in counted}


def test_lives_are_those_of_the_view(data: dict[str, Any], views: Views) -> None:
    found = [
        {
            "round_idx": int(number) - 1,
            "env_id": network["env"],
            "epoch": band["from"] + i,
            "slot": slot,
            "stage": band["stage"],
            "blueprint": band["blueprint"],
            "alpha": alpha,
            "contribution": band["contribution"][i],
        }
        for number, content in data["rounds"].items()
        for network in content["envs"]
        for slot, bands in network["slots"].items()
        for band in bands
        for i, alpha in enumerate(band["alpha"])
    ]
    expected = views.rows("SELECT * FROM slots")
    order = lambda row: tuple(row[name] for name in ("round_idx", "env_id", "slot", "epoch"))  # noqa: E731
    assert expected
    assert same(sorted(found, key=order), sorted(expected, key=order))


def test_every_decision_of_the_chosen_rounds_is_what_was_recorded(data: dict[str, Any], views: Views) -> None:
    steps = {(r["round_idx"], r["env_id"], r["epoch"]): r for r in views.rows("SELECT * FROM steps")}
    terms = {
        (r["round_idx"], r["env_id"], r["epoch"]): r["components"]
        for r in views.rows("SELECT * FROM rewards")
    }
    best = views.rows("SELECT round_idx FROM rounds ORDER BY avg_objective DESC LIMIT 1")[0]["round_idx"]
    shown = {int(place.split("/")[0]) - 1 for place in data["episodes"]}
    assert shown == {best, 1}
    count = 0
    for episode in data["episodes"].values():
        for step in episode["steps"]:
            place = step["round_idx"], step["env_id"], step["epoch"]
            assert same(step.pop("terms"), terms[place])
            assert same(step, steps[place]), place
            count += 1
    assert count == len(shown) * 4 * 6


def test_growth_is_there_for_the_chosen_rounds(run_path: Path, views: Views) -> None:
    best = views.rows("SELECT round_idx FROM rounds ORDER BY avg_objective DESC LIMIT 1")[0]["round_idx"]
    one = data_of(render_report(run_path, growth_rounds=1))
    assert set(one["rounds"]) == {"2", str(best + 1)}
    assert [network["env"] for network in one["rounds"]["2"]["envs"]] == [0, 1, 2, 3]


# -- text ----------------------------------------------------------------------------------------------------


def test_trend() -> None:
    assert trend([9.0, 0.0, None, 4.0, 8.0], 4) == "▁ ▅█"
    assert trend([1.0, 1.0], 4) == "▁▁"
    assert (trend([], 4), trend([None, float("nan")], 4)) == ("", "  ")


def test_numbers_are_rounded_for_people() -> None:
    assert [number(v) for v in (None, 3, 12345.6, 0.123456, True, "\x1b")] == [
        "—",
        "3",
        "12,346",
        "0.123",
        "True",
        "\\x1b",
    ]
