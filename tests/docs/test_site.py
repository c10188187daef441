"""The documentation site: it builds without a warning, loads nothing from elsewhere, and fits its screens."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[2]
WIDTHS = (1280, 390)
TOO_WIDE = """(() => {
    const root = document.documentElement, limit = root.clientWidth;
    const scrolls = element => element !== document.body && element.parentElement &&
        (getComputedStyle(element).overflowX !== "visible" || scrolls(element.parentElement));
    const parts = [...document.querySelectorAll(".md-content *, .md-header *, .md-footer *")];
    const names = parts.filter(element => {
        const box = element.getBoundingClientRect();
        return box.width > 0 && box.right > limit + 1 && !scrolls(element.parentElement);
    }).slice(0, 3).map(element => `${element.tagName} ${element.textContent.slice(0, 60)}`);
    return root.scrollWidth > limit ? [`the page is ${root.scrollWidth} wide`, ...names] : names;
})()"""
"""What lies beyond the right edge: the page itself, or elements that cannot be scrolled into view."""
OVERLAPS = """(() => {
    const blocks = [...document.querySelectorAll(".md-content__inner > *")]
        .map(element => [element, element.getBoundingClientRect()])
        .filter(([element, box]) => box.height > 0 && getComputedStyle(element).float === "none");
    return blocks.slice(1).flatMap(([element, box], i) =>
        box.top < blocks[i][1].bottom - 1 ? [element.textContent.slice(0, 60)] : []);
})()"""
"""Blocks of the text that begin above the end of the block before them."""
BROKEN = "[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
SPOILED = f"""(async () => {{
    const place = document.querySelector(".md-content__inner");
    place.insertAdjacentHTML("beforeend",
        "<p style='width: 3000px'>wide</p><p style='margin-top: -90px'>high</p><img src='none.png'>");
    await new Promise(done => setTimeout(done, 500));
    return [{TOO_WIDE}, {OVERLAPS}, {BROKEN}].map(found => Math.min(found.length, 1));
}})()"""
"""A page with all three faults, and how many of the checks see one."""

pytestmark = pytest.mark.slow


class Addresses(HTMLParser):
    """Addresses that a page loads by itself: scripts, styles, images, fonts."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in ("script", "img", "iframe", "source"):
            self.loaded.append(given.get("src") or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "preconnect", "icon", "preload"):
            self.loaded.append(given.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("needs the dependency group docs")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return target


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


def test_every_page_is_there_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {str(path.relative_to(site).with_suffix(".md")) for path in site.rglob("*.html")}
    sources = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sources <= pages
    for page in site.rglob("*.html"):
        addresses = Addresses()
        addresses.feed(page.read_text(encoding="utf-8"))
        assert addresses.loaded, page.name
        assert [a for a in addresses.loaded if a.startswith(("http:", "https:", "//"))] == [], page.name


def test_no_page_overflows_or_overlaps(site: Path, address: str) -> None:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    problems = []
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    with Browser() as browser:
        for width in WIDTHS:
            browser.look(width, 900)
            for page in pages:
                browser.open(f"{address}/{page}")
                browser.wait(f"location.pathname === '/{page}' && document.readyState === 'complete'")
                for script in (TOO_WIDE, OVERLAPS, BROKEN):
                    problems += [f"{page} at {width}: {what}" for what in browser.run(script)]
                if page == pages[-1]:
                    assert browser.run(SPOILED) == [1, 1, 1], "the checks see nothing"
        assert not [asked for asked in browser.requests if asked.startswith("http") and address not in asked]
    assert problems == []
