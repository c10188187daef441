"""The page in a real browser: every view draws, answers to keys, and shows the figures of the run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Context
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from browser import CHROMIUM, Browser
from esper.karn import Views, render_report
from esper.karn.summary import open_run
from esper.scripts.cli import main
from grower_helpers import SmallCNN, accuracy, attach, make, train_epoch
from proof.worlds import policy_file

from .conftest import EVIL, SMALL, Site, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no Chromium on this machine; Debian's package is chromium"
    ),
]
TALL = 30_000
"""A window so high that every chart of a page is in view, and therefore drawn."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(autouse=True)
def no_problems(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, the console stays silent."""
    if "browser" not in request.fixturenames:
        yield
        return
    browser: Browser = request.getfixturevalue("browser")
    browser.open("about:blank")  # the page of the last test may still ask for its server
    browser.problems.clear()
    yield
    assert browser.problems == []


def show(browser: Browser, site: Site, address: str, ready: str) -> None:
    """Open a view and wait until an expression is true."""
    browser.open("about:blank")
    browser.open(f"{site.url}#/{address}")
    browser.wait(ready)


DRAWN = """[...document.querySelectorAll("svg[role=img]")].map((svg) =>
    [...svg.querySelectorAll("path,rect,circle,line.total")].some((mark) => {
      const box = mark.getBBox();
      return box.width + box.height > 0;
    }))"""


# -- views ---------------------------------------------------------------------------------------------------


def count(selector: str) -> str:
    return f"document.querySelectorAll({json.dumps(selector)}).length"


PANELS = f"{count('.panel')} === 7"
VIEWS = {
    "runs": f"{count('tbody tr')} === 2",
    "run/one": f"{count('#lanes svg')} === 4 && {count('svg')} > 40",
    "network/one/1/2/3": f"{count('#drawing')} && {count('svg')} === 3",
    "why/one/2/0/2": PANELS,
    "compare/one/nested%2Ftwo": f"{count('.grid svg')} === 2 && {count('main li')}",
    "proof": "document.querySelector('.bar').textContent.includes('no proof.json')",
    "own": "document.querySelector('.absent').textContent.includes('esper.attach')",
}
"""Address of each view, and what is true once it is drawn."""


@pytest.mark.parametrize("address", VIEWS)
def test_a_view_draws_in_any_width_and_light(browser: Browser, site: Site, address: str) -> None:
    for width, dark in ((1280, False), (390, True)):
        browser.look(width, TALL, dark=dark)
        show(browser, site, address, VIEWS[address])
        assert all(browser.run(DRAWN))
        assert not browser.run("document.documentElement.scrollWidth > innerWidth"), "wider than the window"
        assert browser.run("document.querySelector('#state').textContent") == "live"
        small = browser.run("""[...document.querySelectorAll("body *")].filter((e) => e.childNodes.length
            && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.getClientRects().length
            && parseFloat(getComputedStyle(e).fontSize) < 11).length""")
        assert small == 0, "text too small to read"
        hidden = "[...document.querySelectorAll('[hidden]')].map((e) => e.getClientRects().length)"
        assert not any(browser.run(hidden)), "shown although it is hidden"
        ids = browser.run("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(ids) == len(set(ids))
        style = browser.run(
            "(({ color, backgroundColor }) => [color, backgroundColor])(getComputedStyle(document.body))"
        )
        ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in style)
        assert (ink > paper) == dark


def test_lists_sort_search_and_lead_to_runs(browser: Browser, site: Site) -> None:
    browser.look(1280)
    show(browser, site, "runs", VIEWS["runs"])
    names = "[...document.querySelectorAll('tbody tr')].map((row) => row.dataset.run)"
    assert browser.run(names) == ["nested/two", "one"]  # the newest first
    browser.click("th[data-column=run] button")
    browser.click("th[data-column=run] button")
    assert browser.run(names) == ["one", "nested/two"]
    assert browser.run("document.querySelector('th[data-column=run]').ariaSort") == "descending"
    browser.press("/")
    for letter in "ppo":
        browser.press(letter)
    assert browser.run(names) == ["one"]
    browser.click("tbody a")
    browser.wait("document.querySelector('h1').textContent === 'one'")
    assert browser.run("location.hash") == "#/run/one"


def test_two_runs_are_chosen_and_compared(browser: Browser, site: Site) -> None:
    show(browser, site, "runs", VIEWS["runs"])
    for name in ("one", "nested/two"):
        browser.click(f"tr[data-run='{name}'] input")
    browser.click("a.button[href^='#/compare']")
    browser.wait("document.querySelectorAll('tbody tr').length > 5")
    heads = browser.run("[...document.querySelectorAll('th')].map((e) => e.textContent)")
    assert heads == ["metric", "unit", "one", "nested/two", "nested/two − one"]


def test_keys_reach_every_view(browser: Browser, site: Site) -> None:
    browser.look(1280)
    show(browser, site, "runs", VIEWS["runs"])
    for number, view in enumerate(("runs", "run", "network", "why", "compare", "proof", "own"), 1):
        browser.press(str(number))
        browser.wait(f"document.querySelector('main').dataset.view === '{view}'")
    browser.press("?")
    assert browser.run("document.querySelector('#help').open")
    browser.run("document.querySelector('#help').close()")
    before = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.press("t")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != before


SEEDS = """[...document.querySelectorAll("#drawing .seed")].map((g) =>
    [g.dataset.slot, g.dataset.stage, g.querySelector(".body")?.getAttribute("fill-opacity") ?? null,
     g.querySelector(".body")?.getAttribute("width") ?? null])"""


def test_scrubbing_changes_the_drawing(browser: Browser, site: Site, runs: Path) -> None:
    """Stage, alpha and size of every seed at every epoch, against SQL."""
    browser.look(1280, 1600)
    views = open_run(runs / "one")
    (task,) = views.tasks()
    rows = views.rows("SELECT * FROM slots WHERE round_idx = 0 AND env_id = 1")
    epochs = SMALL["episode_length"]
    show(browser, site, "network/one/1/1/1", "document.querySelector('#drawing')")
    looks = []
    for epoch in range(1, epochs + 1):
        browser.wait(f"document.querySelector('#drawing').ariaLabel.startsWith('epoch {epoch}:')")
        seeds = {slot: (stage, opacity) for slot, stage, opacity, _ in browser.run(SEEDS)}
        assert sorted(seeds) == sorted(task.slots)  # empty ones too
        expected = {row["slot"]: row for row in rows if row["epoch"] == epoch}
        for slot, (stage, opacity) in seeds.items():
            row = expected.get(slot)
            assert stage == (row["stage"] if row else "DORMANT")
            if row:
                assert float(opacity) == pytest.approx(0.15 + 0.85 * row["alpha"])
        looks.append(json.dumps(browser.run(SEEDS)))
        assert browser.run("document.querySelector('#epoch').value") == str(epoch)
        browser.press("ArrowRight")
    assert len(set(looks)) > 1
    browser.press("ArrowLeft")
    browser.wait(f"document.querySelector('#epoch').value === '{epochs - 1}'")
    assert browser.run("location.hash") == f"#/network/one/1/1/{epochs - 1}"
    browser.press("]")
    browser.wait("location.hash === '#/network/one/2/1'")
    browser.press("e")
    browser.wait("location.hash === '#/network/one/2/2'")
    browser.click("#play")
    browser.wait("document.querySelector('#epoch').value === '3'")


def number(value: float | None) -> str:
    """As the page writes numbers; written here once more. JavaScript rounds ties away from zero."""
    if value is None or value != value:
        return "—"
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{round(value) + 0:,}"
    small = abs(value) < 1e-3
    digits = Context(prec=2 if small else 3, rounding=ROUND_HALF_UP)
    rounded = float(digits.create_decimal_from_float(value))
    if small:
        mantissa, exponent = f"{rounded:.1e}".split("e")
        return f"{mantissa}e{int(exponent):+d}"
    return f"{rounded:g}"


def test_the_why_panel_shows_what_was_recorded(browser: Browser, site: Site, runs: Path) -> None:
    browser.look(1280, 3000)
    views = open_run(runs / "one")
    rows = views.rows("SELECT * FROM steps ORDER BY round_idx, env_id, epoch")
    by_op: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_op.setdefault(row["op"], []).append(row)
    assert {"WAIT", "GERMINATE"} < by_op.keys()
    for same in by_op.values():
        for row in same[:2]:
            assert_explained(browser, site, views, row)


def assert_explained(
    browser: Browser, site: Site, views: Views, row: dict[str, Any], run: str = "one"
) -> None:
    """The why panel of a decision shows what SQL says of it."""
    round_idx, env, epoch = row["round_idx"], row["env_id"], row["epoch"]
    show(browser, site, f"why/{run}/{round_idx + 1}/{env}/{epoch}", PANELS)

    def texts(attribute: str, panel: str = "") -> dict[str, str]:
        """What the page marks with an attribute: the exact share if it is one, else the text."""
        inside = f"[data-panel='{panel}'] " if panel else ""
        return browser.run(f"""Object.fromEntries(
            [...document.querySelectorAll("{inside}[data-{attribute}]")].map((e) =>
                [e.dataset.{attribute}, e.querySelector("[data-share]")?.dataset.share ?? e.textContent]))""")

    figures = texts("figure")
    for name in ("value", "log_prob", "reward", "accuracy", "loss"):
        assert figures[name.replace("_", " ")] == number(row[name]), name
    assert {op: float(p) for op, p in texts("op").items()} == pytest.approx(row["op_probs"])
    pairs = texts("pair")
    for pair, p in row["slot_probs"].items():
        assert float(pairs[pair]) == pytest.approx(p)
    for pair, veto in row["vetoes"].items():
        if pair in pairs:
            assert pairs[pair] == veto.replace("_", " ")
    contributions = texts("contribution")
    assert contributions == {slot: number(row["contributions"].get(slot)) for slot in row["stages"]}
    where = f"round_idx = {round_idx} AND env_id = {env} AND epoch = {epoch}"
    terms = views.rows(f"SELECT term, amount FROM terms WHERE {where}")
    assert texts("term") == {term["term"]: number(term["amount"]) for term in terms}
    values = texts("value", "What the policy saw")
    for feature in views.rows(f"SELECT slot, feature, value FROM observations WHERE {where}"):
        name = " ".join(filter(None, (feature["slot"], feature["feature"])))
        assert values[name] == number(feature["value"]), name
    assert texts("value", "Sensors") == {name: number(value) for name, value in row["sensors"].items()}
    network = f"round_idx = {round_idx} AND env_id = {env}"
    later = views.rows(f"SELECT accuracy FROM steps WHERE {network} AND epoch > {epoch} ORDER BY epoch")
    after = browser.run("document.querySelector('[data-panel=\"What happened next\"] p').textContent")
    if later:
        gain = later[0]["accuracy"] - row["accuracy"]
        assert f"epochs: {'+' if gain > 0 else ''}{number(gain)}" in after
    end = views.rows(f"SELECT objective FROM episodes WHERE {network}")
    assert f"J {number(end[0]['objective'])}" in after


# -- charts --------------------------------------------------------------------------------------------------

STAND = """(async (type, series, options) => {
  const { Chart } = await import(new URL("assets/charts.js", document.baseURI));
  const chart = new Chart({ type, title: "t", ...options });
  document.querySelector("main").replaceChildren(chart.element);
  chart.set(series);
  await new Promise((done) => setTimeout(done, 150));
  const sides = ["x", "y", "width", "height"];
  const box = (e) => [e.getAttribute("class"), ...sides.map((side) => e.getBBox()[side])];
  return {
    rects: [...chart.holder.querySelectorAll("rect")].map(box),
    paths: [...chart.holder.querySelectorAll("path.line")].map((e) => e.getAttribute("d")),
    limits: chart.holder.querySelectorAll(".limit").length,
    sums: [...chart.holder.querySelectorAll(".total")].map((e) => Number(e.getAttribute("y1"))),
    words: [...chart.holder.querySelectorAll("text.blueprint")].map((e) => e.textContent),
    text: chart.element.textContent,
  };
})"""


@pytest.fixture
def draw(browser: Browser, site: Site) -> Any:
    browser.look(1280, 1200)
    show(browser, site, "own", VIEWS["own"])

    def draw(kind: str, series: Any, **options: Any) -> dict[str, Any]:
        given = ", ".join(json.dumps(value) for value in (kind, series, options))
        return browser.run(f"{STAND}({given})")

    return draw


def series(**values: list[float | None]) -> list[dict[str, Any]]:
    return [{"name": name, "x": list(range(len(ys))), "y": ys} for name, ys in values.items()]


def test_bars_stack_in_proportion(draw: Any) -> None:
    found = draw("bars", series(a=[1.0, 2.0], b=[3.0, -1.0], c=[None, None]), total=True, label="x")
    bars = {(css, round(x)): (y, height) for css, x, y, _, height in found["rects"]}
    first, second = sorted({x for _, x in bars})
    unit = bars["c0", first][1]
    assert bars["c1", first][1] == pytest.approx(3 * unit, abs=0.2)
    assert bars["c0", first][0] == pytest.approx(bars["c1", first][0] + 3 * unit, abs=0.2)  # b stands on a
    assert bars["c1", second][0] == pytest.approx(sum(bars["c0", second]), abs=0.2)  # what is negative hangs
    assert len(bars) == 4
    assert found["sums"][0] - found["sums"][1] == pytest.approx((1.0 - 4.0) * unit, abs=0.2)


def test_many_bars_become_means(draw: Any) -> None:
    found = draw("bars", series(a=[float(i % 2) for i in range(2000)]), label="x")
    assert len(found["rects"]) < 400
    assert "Each bar is the mean of" in found["text"]


def test_a_line_has_gaps_where_values_are_absent(draw: Any) -> None:
    found = draw("lines", series(a=[1.0, 2.0, None, 4.0, 1e301]), limits=[3.0, 1e6], label="x")
    assert [len(part.split("L")) for part in found["paths"][0].split("M")[1:]] == [2, 1]
    assert found["limits"] == 1  # the far one would squash the chart
    assert "not measured" in draw("lines", series(a=[None]), label="x")["text"]


def test_lanes_end_a_band_where_a_seed_ended(draw: Any) -> None:
    """Two seeds of one kind with a free epoch between are two seeds, even in the same stage."""
    seed = {"stage": "TRAINING", "blueprint": "norm", "params": 1}
    bands = [
        {**seed, "born": 1, "from": 1, "to": 2, "alpha": [0, 0]},
        {**seed, "born": 4, "from": 4, "to": 4, "alpha": [0]},
    ]
    found = draw("lanes", {"r0c0": bands}, epochs=10)
    drawn = [(x, width) for css, x, _, width, _ in found["rects"] if css == "TRAINING"]
    per = drawn[1][1]
    assert drawn[0][1] == pytest.approx(2 * per, abs=0.2)
    assert drawn[1][0] - drawn[0][0] == pytest.approx(3 * per, abs=0.2)
    assert found["words"] == ["norm", "norm"]


def test_ticks_are_few_even_and_within(browser: Browser, site: Site) -> None:
    show(browser, site, "own", VIEWS["own"])
    ranges = [(low * 10.0**p, (low + span) * 10.0**p, n) for low in (-7.3, 0, 1.1) for span in (0.1, 1, 37.7)
              for p in (-6, 0, 5) for n in (2, 5, 8)]  # fmt: skip
    found = browser.run(f"""import(new URL("assets/charts.js", document.baseURI)).then(({{ ticks }}) =>
        {json.dumps(ranges)}.map(([low, high, n]) => ticks(low, high, n)))""")
    for (low, high, count), marks in zip(ranges, found, strict=True):
        assert 1 <= len(marks) <= count + 1
        slack = 1e-6 * (high - low)
        assert all(low - slack <= mark <= high + slack for mark in marks)
        steps = {round((b - a) / (marks[1] - marks[0]), 6) for a, b in pairwise(marks)}
        assert steps <= {1.0}


def test_values_are_shown_under_the_pointer(browser: Browser, site: Site) -> None:
    browser.look(1280, 1200)
    show(browser, site, "run/one", "document.querySelector('[data-title=\"Objective J\"] svg')")
    x, y = browser.run("""(() => { const b = document.querySelector('[data-title="Objective J"] svg')
        .getBoundingClientRect(); return [b.right - 15, b.top + 50]; })()""")
    browser.hover(x, y)
    assert "avg_objective" in browser.wait("document.querySelector('.tip')?.textContent")


# -- reports -------------------------------------------------------------------------------------------------


def test_a_report_is_the_same_page(browser: Browser, site: Site, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(render_report(runs / "one"), encoding="utf-8")
    browser.look(1280, TALL)
    show(browser, site, "run/one", VIEWS["run/one"])
    live = browser.run("[...document.querySelectorAll('figure')].map((e) => e.textContent)")
    browser.open(file.as_uri())
    browser.wait(VIEWS["run/one"])
    assert browser.run("[...document.querySelectorAll('figure')].map((e) => e.textContent)") == live
    assert all(browser.run(DRAWN))
    views = browser.run("[...document.querySelectorAll('header nav a')].map((e) => e.textContent)")
    assert views == ["Run", "Network", "Why"]
    browser.press("3")
    browser.wait(PANELS)
    browser.press("2")
    browser.wait("document.querySelector('#drawing')")


def test_a_report_runs_no_script_but_its_own(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    planted = "<script>document.title = 'owned'</script></body>"
    file.write_text(render_report(runs / "one").replace("</body>", planted), encoding="utf-8")
    with Browser() as browser:
        browser.open(file.as_uri())
        browser.wait("document.querySelector('main h1')")
        assert browser.run("document.title") == "one"
        assert any("Content Security Policy" in problem for problem in browser.problems)


def test_markup_in_a_run_is_shown_as_text(browser: Browser, hostile: Path) -> None:
    with serving(hostile) as site:
        for view in ("runs", "run/latest", "network/latest", "why/latest"):
            shown = f"document.querySelector('main').textContent.includes({json.dumps(EVIL[-20:])})"
            show(browser, site, view, shown)
            time.sleep(0.3)
            assert browser.run("document.title") != "owned"
            assert browser.run("document.querySelectorAll('main script').length") == 0
        browser.open("about:blank")  # before the server ends, which the page would complain about


# -- a run that trains ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def others(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to compare with, a proof, and a network of one's own."""
    root = tmp_path_factory.mktemp("live") / "runs"
    shutil.copytree(runs / "one", root / "done")
    task = "digits_shift:episode_length=3,steps_per_epoch=1,val_size=24,batch_size=8"
    learned = policy_file(root.parent / "policy.safetensors")
    sizes = ["--networks", "2", "--probe-networks", "8"]
    assert main(["prove", "--task", task, "--policy", learned, *sizes, "--out", str(root / "proof")]) == 0
    model = make(lambda: SmallCNN(4))
    planted = [(1, "layer1", "conv_light")]
    grower = attach(model, policy=planted, epochs=4, record=root / "mine", evaluate=lambda: accuracy(model))
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    while grower.epoch < 4:
        train_epoch(model, optimizer)
        grower.step()
    return root


@pytest.fixture
def live(others: Path) -> Iterator[Site]:
    """A site with a run that is training for as long as the test looks at it."""
    code = (
        "import torch; torch.set_num_threads(1); from esper.simic import train_ppo_vectorized as train; "
        f"train(**{SMALL | {'rounds': 4000}!r}, telemetry_dir={str(others / 'live')!r})"
    )
    with serving(others) as site:
        training = subprocess.Popen([sys.executable, "-c", code])
        try:
            yield site
        finally:
            training.terminate()
            training.wait()


def test_every_view_of_a_run_that_is_training(browser: Browser, live: Site, others: Path) -> None:
    """Curves grow, the newest round is followed, nothing is loaded again, and figures are those of SQL."""
    browser.look(1280, TALL)
    show(browser, live, "runs", "document.querySelector('tr[data-run=done]')")
    browser.wait("document.querySelector('tr[data-run=live] .status.running')", 120)  # appears by itself
    browser.requests.clear()
    show(browser, live, "run/latest", "document.querySelector('[data-title=\"Objective J\"] circle')")
    browser.run("window.untouched = true")
    points = "document.querySelectorAll('[data-title=\"Objective J\"] circle').length"
    before = browser.wait(points)
    browser.wait(f"{points} >= {before + 3}", 240)
    newest = "Number(document.querySelector('#round').options[0].value)"
    assert browser.wait(f"{newest} >= {before + 2} && {newest}")
    assert browser.run("window.untouched")
    assert sum("api/stream" in url for url in browser.requests) == 1  # one stream, never asked for again
    for view, ready in (("network/live/newest/1", count("#drawing")), ("why/live/newest/1", PANELS)):
        show(browser, live, view, ready)
        first = "document.querySelector('select[aria-label=round]').options[0].textContent"
        label = browser.run(first)
        browser.wait(f"{first} !== {json.dumps(label)}", 240)  # the newest round is another one now
        browser.wait(ready)
    assert_grows_and_explains(browser, live, others / "live")
    show(browser, live, "compare/live/done", f"{count('.grid svg')} === 2 && {count('main li')}")
    show(browser, live, "proof", f"{count('section svg')} && {count('section table')}")
    show(browser, live, "own", "document.querySelector('tr[data-run=mine] .status')")
    show(browser, live, "run/mine", f"{count('#lanes svg')} === 1 && {count('svg')} > 1")
    show(browser, live, "network/mine", "document.querySelector('#drawing [data-slot=layer1] .body')")
    show(browser, live, "runs", "document.querySelector('tr[data-run=live] .status.running')")
    browser.open("about:blank")  # before the server ends, which the page would complain about


def assert_grows_and_explains(browser: Browser, site: Site, path: Path) -> None:
    """A network of the run is another one at its last epoch, and its decisions are explained."""
    views = open_run(path)
    planted = views.rows("SELECT * FROM steps WHERE op = 'GERMINATE' AND executed ORDER BY round_idx LIMIT 1")
    (row,) = planted
    place = f"network/live/{row['round_idx'] + 1}/{row['env_id']}"
    looks = []
    for epoch in (1, SMALL["episode_length"]):
        at = f"document.querySelector('#drawing')?.ariaLabel.startsWith('epoch {epoch}:')"
        show(browser, site, f"{place}/{epoch}", at)
        looks.append(browser.run(SEEDS))
    assert looks[0] != looks[1]
    assert_explained(browser, site, views, row, "live")
