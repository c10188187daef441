"""The HTML page: complete, self-contained, and drawn by a real browser without complaint."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from html import escape, unescape
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper._charts import HEIGHT, lanes, lines, number, stacked, ticks, trend
from esper.karn import Views, render_report
from esper.karn.summary import open_run
from esper.leyline import METRICS

from .conftest import Write


@pytest.fixture(scope="module")
def views(run_path: Path) -> Views:
    return open_run(run_path)


@pytest.fixture(scope="module")
def page(views: Views) -> str:
    return render_report(views)


def test_every_metric_is_on_the_page_with_its_meaning(page: str) -> None:
    for name, metric in METRICS.items():
        assert f"<code>{metric.name}</code>" in page, name
        assert escape(metric.meaning) in page, name


def test_the_page_needs_nothing_else(page: str) -> None:
    assert not re.findall(
        r"""(?:src|href)\s*=\s*["'](?!#)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page
    )


def policy_of(page: str) -> dict[str, list[str]]:
    """Directives of the page's Content-Security-Policy."""
    content = re.search(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)[1]  # type: ignore[index]
    return {name: sources for name, *sources in (part.split() for part in unescape(content).split(";"))}


def csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_allows_the_pages_own_style_and_script_and_nothing_else(page: str) -> None:
    policy = policy_of(page)
    assert policy.pop("default-src") == ["'none'"]
    for name, element in (("style-src", "style"), ("script-src", "script")):
        (content,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        assert policy.pop(name) == [csp_hash(content)]
    assert policy == {"img-src": ["data:"], "base-uri": ["'none'"], "form-action": ["'none'"]}
    assert page.index("Content-Security-Policy") < page.index("<title>")
    assert not re.search(r"<[^>]*\s(?:style|on\w+)=", page)  # these would be blocked


def test_values_are_those_of_the_run(page: str, views: Views) -> None:
    last = views.rows("SELECT avg_objective, avg_reward FROM rounds ORDER BY round_idx DESC LIMIT 1")[0]
    chart = json.loads(unescape(re.search(r'Objective J.*?data-chart="(.*?)"', page)[1]))  # type: ignore[index]
    assert chart["x"] == [1, 2]
    assert chart["series"]["avg_objective"][-1] == number(last["avg_objective"])


def test_growth_is_there_for_every_env_of_the_chosen_rounds(page: str, views: Views) -> None:
    growth = page[page.index('id="lanes"') : page.index('<section id="decisions"')]
    assert growth.count("<template") == 2
    assert all(
        growth.count(f"<b>env {env}</b>") == 3 for env in range(4)
    )  # the last round is shown, and both are at hand
    stages = {row["stage"] for row in views.rows("SELECT DISTINCT stage FROM slots")}
    assert stages
    assert all(f'class="{stage}"' in growth for stage in stages)
    one = render_report(views, growth_rounds=1)
    assert set(re.findall(r'<template data-round="(\d)"', one)) == {"2"} | {
        str(row["round_idx"] + 1)
        for row in views.rows("SELECT round_idx FROM rounds ORDER BY avg_objective DESC LIMIT 1")
    }


def test_names_from_a_run_cannot_become_markup(write_run: Write) -> None:
    evil = "<script>alert(1)</script>"
    page = render_report(
        open_run(
            write_run(
                [
                    ("run_started", {"task": evil, "slots": [evil]}),
                    ("run_ended", {"status": evil, "message": evil}),
                    ("alert", {"code": evil, "severity": '"><b>', "message": evil}),
                ],
                config=evil,
            )
        )
    )
    assert evil not in page
    assert '"><b>' not in page
    assert escape(evil) in page


def test_a_run_without_rounds_has_a_page(write_run: Write) -> None:
    page = render_report(open_run(write_run([])))
    assert "No round was finished" in page
    assert "cut off" in page


# -- charts --------------------------------------------------------------------------------------------------


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9), st.integers(2, 10))
def test_ticks_are_few_even_and_within(low: float, span: float, count: int) -> None:
    high = low + span
    if not high - low > 1e-6 * max(abs(low), abs(high)):
        return  # a chart widens such a range first
    found = ticks(low, high, count)
    assert 1 <= len(found) <= count + 1
    step = (high - low) / count
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in found)
    for a, b in pairwise(found):
        assert 1 - 1e-6 <= (b - a) / step <= 5.1
        mantissa = (b - a) / 10 ** math.floor(math.log10((b - a) * (1 + 1e-9)))
        assert min(abs(mantissa - m) for m in (1, 2, 5)) < 1e-3


def rects(svg: str) -> list[tuple[str, float, float, float, float]]:
    found = re.findall(
        r'<rect class="(\w+)" x="([\d.-]+)" y="([\d.-]+)" width="([\d.]+)" height="([\d.]+)"', svg
    )
    return [(css, *map(float, numbers)) for css, *numbers in found]


def test_bars_stack_in_proportion() -> None:
    svg = stacked("s", [0, 1], {"a": [1.0, 2.0], "b": [3.0, -1.0], "c": [None, float("nan")]}, total=True)
    bars = {(css, x): (y, height) for css, x, y, _, height in rects(svg)}
    (first, second) = sorted({x for _, x in bars})
    unit = bars["c0", first][1]
    assert bars["c1", first][1] == pytest.approx(3 * unit, abs=0.2)
    assert bars["c0", first][0] == pytest.approx(bars["c1", first][0] + 3 * unit, abs=0.2)  # b stands on a
    assert bars["c1", second][0] == pytest.approx(
        sum(bars["c0", second]), abs=0.2
    )  # what is negative hangs from 0
    assert len(bars) == 4
    marks = [float(y) for y in re.findall(r'<line class="total" x1="[\d.]+" x2="[\d.]+" y1="([\d.]+)"', svg)]
    assert marks[0] - marks[1] == pytest.approx((1.0 - 4.0) * unit, abs=0.2)
    assert "not measured" in stacked("s", [0], {"a": [None]})


def test_a_line_has_gaps_where_values_are_absent() -> None:
    svg = lines("l", [0, 1, 2, 3, 4], {"a": [1.0, 2.0, None, 4.0, float("inf")]}, limits=[3.0, 1e6])
    path = re.search(r'class="line c0" d="(.*?)"', svg)[1]  # type: ignore[index]
    assert [len(part.split("L")) for part in path.split("M")[1:]] == [2, 1]
    assert svg.count('class="limit"') == 1  # the far one would squash the chart
    assert all(0 <= float(y) <= HEIGHT for y in re.findall(r",([\d.-]+)", path))
    assert "not measured" in lines("l", [0], {"a": [None]})


def test_lanes_end_a_band_where_a_seed_ended() -> None:
    """Two seeds of one kind with a free epoch between are two bands, even in the same stage."""
    svg = lanes(
        "n",
        "",
        10,
        {"r0c0": [(1, "TRAINING", "norm", 0.0), (2, "TRAINING", "norm", 0.0), (4, "TRAINING", "norm", 0.0)]},
    )
    bands = [(x, width) for css, x, _, width, _ in rects(svg) if css == "TRAINING"]
    per = bands[1][1]
    assert bands[0][1] == pytest.approx(2 * per, abs=0.2)
    assert bands[1][0] - bands[0][0] == pytest.approx(3 * per, abs=0.2)
    assert svg.count(">norm<") == 2


def test_trend() -> None:
    assert trend([9.0, 0.0, None, 4.0, 8.0], 4) == "▁ ▅█"
    assert trend([1.0, 1.0], 4) == "▁▁"
    assert (trend([], 4), trend([None, float("nan")], 4)) == ("", "  ")


# -- browser -------------------------------------------------------------------------------------------------

PROBE = """
addEventListener("load", () => {
  const choose = document.getElementById("round");
  choose.value = "1";
  choose.dispatchEvent(new Event("change"));
  const svgs = [...document.querySelectorAll("svg[role=img]")];
  const drawn = (svg) => [...svg.querySelectorAll("path,rect,circle,line.total")].some((mark) => {
    const box = mark.getBBox();
    return box.width + box.height > 0;
  });
  svgs[0].dispatchEvent(new PointerEvent("pointermove", { clientX: 300, clientY: 300 }));
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  const text = (selector) => document.querySelector(selector)?.textContent ?? "";
  const found = {
    charts: svgs.length,
    empty: svgs.filter((svg) => !drawn(svg)).length,
    wide: document.documentElement.scrollWidth > innerWidth,
    tip: text(".tip"),
    first: text("#lanes figure svg title"),
    round: choose.value,
    twice: ids.length - new Set(ids).size,
    ink: getComputedStyle(document.body).color,
    paper: getComputedStyle(document.body).backgroundColor,
  };
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
});
"""


def browse(page: str, directory: Path, scheme: str = "light") -> subprocess.CompletedProcess[str]:
    """Load a page that was given the probe; its document comes back on stdout, its console on stderr."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium on this machine; Debian's package is chromium")
    file = directory / "page.html"
    file.write_text(page.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8")
    return subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={directory}/profile",
            f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
            "--window-size=1400,900",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def test_a_browser_runs_no_script_but_the_pages_own(page: str, tmp_path: Path) -> None:
    done = browse(page, tmp_path)
    assert "Content Security Policy" in done.stderr
    assert '<pre id="probe">' not in done.stdout


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_every_chart(page: str, views: Views, scheme: str, tmp_path: Path) -> None:
    allowed = page.replace("script-src ", f"script-src {csp_hash(PROBE)} ", 1)
    done = browse(allowed, tmp_path, scheme)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(unescape(re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)[1]))  # type: ignore[index]
    assert found["charts"] >= 40
    assert found["empty"] == 0
    assert not found["wide"]
    assert found["twice"] == 0
    assert found["round"] == "1"
    assert found["tip"].startswith("at ")
    assert "avg_objective" in found["tip"]
    birth = views.rows("SELECT slot FROM slots WHERE round_idx = 0 AND env_id = 0 ORDER BY slot LIMIT 1")
    assert not birth or found["first"].startswith(birth[0]["slot"])
    light = [sum(map(int, re.findall(r"\d+", found[name]))) for name in ("ink", "paper")]
    assert (light[0] < light[1]) == (scheme == "light")
