"""Who may ask the server, and what a hostile run can do to the page: nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from esper.karn import render_report
from frozen import assert_sealed, data_of

from .conftest import EVIL, TOKEN, Site, serving


def refused(site: Site, path: str, status: int = 403, **options: Any) -> None:
    code, headers, body = site.ask(path, **options)
    assert code == status, body
    assert b"<" not in body
    assert_guarded(headers)


def assert_guarded(headers: Any) -> None:
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Access-Control-Allow-Origin" not in headers
    assert "Set-Cookie" not in headers


def test_the_page_and_its_answers_are_guarded(site: Site) -> None:
    for path in ("", "assets/page.js", "assets/page.css", "api/layout", "api/round?run=one&round=1"):
        status, headers, _ = site.ask(f"/{TOKEN}/{path}")
        assert status == 200
        assert_guarded(headers)


@pytest.mark.parametrize("path", ["/", "/assets/page.js", "/api/layout", "/api/stream", "//", "/?token=x"])
def test_no_token(site: Site, path: str) -> None:
    refused(site, path)


@pytest.mark.parametrize("token", [TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "", "%00", "%F0%9F%8C%B1"])
def test_a_wrong_token(site: Site, token: str) -> None:
    refused(site, f"/{token}/api/layout")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "[::2]", "[", "localhost:x", ""],
)
def test_a_foreign_host(site: Site, host: str) -> None:
    refused(site, f"/{TOKEN}/", headers={"Host": host})


@pytest.mark.parametrize("host", ["localhost:{port}", "127.0.0.1:1", "[::1]:{port}"])
def test_names_of_this_machine_may_come_through_a_tunnel(site: Site, host: str) -> None:
    status, _, _ = site.ask(f"/{TOKEN}/", headers={"Host": host.format(port=site.port)})
    assert status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"]
)
def test_a_foreign_origin(site: Site, origin: str) -> None:
    refused(site, f"/{TOKEN}/api/layout", headers={"Origin": origin.format(port=site.port)})


def test_the_pages_own_origin(site: Site) -> None:
    headers = {"Origin": f"http://127.0.0.1:{site.port}"}
    status, answer, _ = site.ask(f"/{TOKEN}/api/layout", headers=headers)
    assert status == 200
    assert "Access-Control-Allow-Origin" not in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_reading(site: Site, runs: Path, method: str) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))
    refused(site, f"/{TOKEN}/api/layout", 405, method=method)
    refused(site, f"/{TOKEN}/", 405, method=method)
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before


@pytest.mark.parametrize(
    "path",
    [
        "assets/../../../../pyproject.toml",
        "assets/..%2f..%2fpyproject.toml",
        "assets/%2e%2e/report.py",
        "assets//etc/passwd",
        "api/round?run=../outside&round=1",
        "api/round?run=/etc&round=1",
        "api/round?run=one/../../outside&round=1",
        "api/episode?run=one%00&round=1&env=0",
        "api/stream?run=../outside",
        "api/proof?proof=../outside",
        "api/compare?run=one&run=../outside",
    ],
)
def test_paths_lead_nowhere_else(site: Site, runs: Path, path: str) -> None:
    outside = runs.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "proof.json").write_text('{"page": []}')
    (outside / "run.json").write_text("{}")
    refused(site, f"/{TOKEN}/{path}", 404)


@pytest.mark.parametrize(
    "query", ["run=one&round=x", "run=one&round=1e9", "run=one", "round=1", "run=one&round=-5"]
)
def test_bad_questions_get_reasons(site: Site, query: str) -> None:
    status, _, body = site.ask(f"/{TOKEN}/api/round?{query}")
    assert status in (400, 404)
    assert b"Traceback" not in body


def test_a_stranger_cannot_probe_the_token_by_its_answers(site: Site) -> None:
    """Any path without the token has the same answer, whether something is there or not."""
    answers = {site.ask(path)[2] for path in ("/x/", "/x/api/layout", "/x/nothing", "/")}
    assert len(answers) == 1


def test_a_run_and_a_task_named_as_markup_are_text(hostile: Path) -> None:
    """Nothing a run says is in the page itself: it arrives as JSON, which is never markup."""
    with serving(hostile) as site, site.stream() as messages:
        _, headers, page = site.ask(f"/{TOKEN}/")
        assert headers["Content-Type"].startswith("text/html")
        assert b"owned" not in page
        _, listed = next(messages)
        (row,) = listed["runs"]
        assert row["task"] == EVIL
        assert "<script>" in row["id"]
        _, headers, body = site.ask(f"/{TOKEN}/api/round?{urlencode({'run': row['id'], 'round': 99})}")
        assert headers["Content-Type"].startswith("text/plain")
        assert b"owned" not in body


def test_an_event_that_closes_a_script_is_text(hostile: Path) -> None:
    """In answers it is JSON; in a report it is packed, so that its page has the scripts of any other."""
    (run,) = hostile.iterdir()
    with serving(hostile) as site:
        for name, parameters in (("round", {"round": 1}), ("episode", {"round": 1, "env": 0})):
            assert EVIL in json.dumps(site.get(name, run=run.name, **parameters))
            _, headers, _ = site.ask(f"/{TOKEN}/api/{name}?{urlencode({'run': run.name, **parameters})}")
            assert headers["Content-Type"] == "application/json"
    page = render_report(run)
    assert EVIL in json.dumps(data_of(page))
    assert page.count("<script") == page.count("</script>") == 2
    assert_sealed(page)
