"""The page opens in a real browser: the one browser test of the fast suite."""

from __future__ import annotations

import pytest

from browser import CHROMIUM, Browser

from .conftest import Site


@pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium on this machine; Debian's package is chromium"
)
def test_a_run_opens_without_a_complaint(site: Site) -> None:
    with Browser() as browser:
        browser.open(f"{site.url}#/run/one")
        browser.wait("document.querySelector('[data-title=\"Objective J\"] path.line')")
        assert browser.run("document.querySelector('h1').textContent") == "one"
        assert browser.run("document.querySelector('#state').textContent") == "live"
        browser.press("3")
        browser.wait("document.querySelector('#drawing .seed')")
        browser.press("4")
        browser.wait("document.querySelectorAll('.panel').length === 7")
        assert browser.problems == []
