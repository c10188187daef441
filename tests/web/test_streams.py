"""What clients are sent: everything once, then only what is new; and that nobody waits for anybody."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.karn.web.feed import Feed
from esper.karn.web.streams import BACKLOG, POINTS, Curves, thin
from esper.leyline import TelemetryEvent, TelemetryEventType
from esper.nissa import RunDirectory, TelemetryHub
from esper.simic import train_ppo_vectorized

from .conftest import SMALL, TOKEN, Site, serving


def completed(index: int, **more: Any) -> TelemetryEvent:
    data = {"round_idx": index, "rounds": 9, "avg_objective": index / 10, **more}
    return TelemetryEvent(event_type=TelemetryEventType.BATCH_COMPLETED, data=data, round_idx=index)


START = TelemetryEvent(
    event_type=TelemetryEventType.RUN_STARTED, data={"task": "t", "envs": 1, "reward_mode": "minimal"}
)


@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(4, 60))
def test_thinning_keeps_extremes_and_order(values: list[float | None], points: int) -> None:
    ys = array("d", (float("nan") if v is None else v for v in values))
    xs = array("d", range(len(values)))
    kept_x, kept_y = thin(xs, ys, points)
    assert len(kept_x) <= max(points, 1)
    assert list(kept_x) == sorted(set(kept_x))
    assert all(ys[int(x)] == y or y != y for x, y in zip(kept_x, kept_y, strict=True))
    there = [v for v in values if v is not None]
    if there:
        kept = [y for y in kept_y if y == y]
        assert (min(kept), max(kept)) == (min(there), max(there))


def test_a_client_that_is_far_behind_gets_the_whole(tmp_path: Path) -> None:
    curves = Curves()
    for revision in range(1, BACKLOG + 10):
        curves.add("a", revision, float(revision))
        curves.commit(revision)
    assert curves.added(3) is None
    recent = curves.added(BACKLOG + 5)
    assert recent == {
        "a": ([BACKLOG + 6.0, *range(BACKLOG + 7, BACKLOG + 10)], list(range(BACKLOG + 6, BACKLOG + 10)))
    }


def merged(messages: list[dict[str, Any]]) -> dict[str, dict[float, float]]:
    """Curves as a client builds them up."""
    curves: dict[str, dict[float, float]] = {}
    for message in messages:
        if message["whole"]:
            curves.clear()
        for name, (xs, ys) in message["curves"].items():
            curves.setdefault(name, {}).update(zip(xs, ys, strict=True))
    return curves


def test_each_round_is_sent_once(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", config={})
    feed, cursor, heard = Feed(run.path), None, []

    def listen() -> dict[str, Any] | None:
        nonlocal cursor
        feed.look(now=True)
        news = feed.since(cursor)
        if news is None:
            return None
        message, cursor = json.loads(news[0]), news[1]
        heard.append(message)
        return message

    first = listen()
    assert first is not None
    assert first["whole"]
    assert first["parts"]["problems"]
    with TelemetryHub().attached(*run.outputs()) as hub:
        hub.emit(START)
        for index in range(5):
            hub.emit(completed(index))
            hub.flush()
            news = listen()
            assert news is not None
            assert not news["whole"]
            assert news["curves"]["rounds/avg_objective"] == [[index + 1.0], [index / 10]]
            assert "config" not in news["parts"]
            assert news["parts"]["facts"]["status"] == "running"
            assert listen() is None
    assert merged(heard)["rounds/avg_objective"] == {i + 1.0: i / 10 for i in range(5)}
    ended = listen()
    assert ended is not None
    assert ended["curves"] == {}
    assert ended["parts"]["facts"]["status"] == "cut off"


def test_a_line_that_is_not_complete_waits(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", config={})
    with TelemetryHub().attached(*run.outputs()) as hub:
        hub.emit(START)
        hub.emit(completed(0))
    lines = run.log.read_bytes().splitlines(keepends=True)
    run.log.write_bytes(lines[0] + lines[1][:30])
    feed = Feed(run.path)
    feed.look()
    assert feed.rounds == {}
    run.log.write_bytes(b"".join(lines))
    feed.look(now=True)
    assert feed.rounds == {0: (len(lines[0]), len(lines[0]) + len(lines[1]))}


def test_a_resumed_run_starts_the_curves_over(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train_ppo_vectorized(**SMALL | {"rounds": 2}, checkpoint_every=1, telemetry_dir=str(path))
    feed = Feed(path)
    news = feed.since(None)
    assert news is not None
    before = merged([json.loads(news[0])])
    train_ppo_vectorized(
        **SMALL | {"rounds": 3},
        checkpoint_every=1,
        telemetry_dir=str(path),
        resume=str(path / "checkpoints" / "round-000001-epoch-0000.safetensors"),
    )
    feed.look(now=True)
    again = feed.since(news[1])
    assert again is not None
    message = json.loads(again[0])
    assert message["whole"]
    after = merged([message])["rounds/avg_objective"]
    assert sorted(after) == [1, 2, 3]
    assert {x: after[x] for x in (1, 2)} == before["rounds/avg_objective"]


def test_a_damaged_log_is_shown_up_to_the_damage(tmp_path: Path, runs: Path) -> None:
    shutil.copytree(runs / "one", tmp_path / "run")
    log = tmp_path / "run" / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[-1] = b"{broken\n"
    log.write_bytes(b"".join(lines))
    (tmp_path / "run" / "config.json").unlink()
    (tmp_path / "run" / "tables" / "steps-00001.parquet").write_bytes(b"PAR1")
    with serving(tmp_path) as site, site.stream(run="run") as messages:
        _, message = next(messages)
        assert sorted(message["curves"]["rounds/avg_objective"][0]) == [1, 2]
        problems = " ".join(message["parts"]["problems"])
        assert f"line {len(lines)}" in problems
        assert "config.json" in problems
        assert "steps-00001.parquet" in problems
        assert site.get("round", run="run", round=1)["envs"]
        status, _, body = site.ask(f"/{TOKEN}/api/round?run=run&round=2")
        assert (status, b"steps-00001.parquet" in body) == (400, True)


def test_reconnecting_resumes(site: Site) -> None:
    with site.stream(run="one") as messages:
        cursor = next(cursor for cursor, message in messages if message["parts"].get("last_round"))
    with site.stream(cursor, timeout=2.5, run="one") as messages, pytest.raises(TimeoutError):
        next(messages)  # nothing is new
    with site.stream(run="one") as messages:
        assert next(messages)[1]["whole"]
    with site.stream("0123456789abcdef.7", run="one") as messages:  # of a server that is gone
        assert next(messages)[1]["whole"]


def test_a_new_run_appears_and_becomes_the_latest(tmp_path: Path, runs: Path) -> None:
    root = tmp_path / "runs"
    shutil.copytree(runs / "one", root / "old")
    with serving(root) as site, site.stream() as listed, site.stream(run="latest") as followed:
        assert [run["id"] for run in next(listed)[1]["runs"]] == ["old"]
        assert next(followed)[1]["parts"]["facts"]["name"] == "old"
        new = RunDirectory.create(root / "new", config={})
        with TelemetryHub().attached(*new.outputs()) as hub:
            hub.emit(START)
            hub.flush()
            for _, news in listed:
                assert not news["whole"]
                rows = {run["id"]: run for run in news["runs"]}
                assert "old" not in rows
                if rows.get("new", {}).get("task") == "t":
                    break
            assert rows["new"]["status"] == "running"
            assert news["latest"] == "new"
            for _, message in followed:
                if message["whole"]:
                    break
            assert message["parts"]["facts"]["name"] == "new"


def test_a_client_that_stops_reading_holds_nothing_up(tmp_path: Path, runs: Path) -> None:
    root = tmp_path / "runs"
    run = RunDirectory.create(root / "run", config={"text": "x" * 4_000_000})  # more than socket buffers hold
    with serving(root) as site, TelemetryHub().attached(*run.outputs()) as hub:
        hub.emit(START)
        hub.flush()
        stuck = []
        for _ in range(4):
            client = socket.create_connection(("127.0.0.1", site.port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(f"GET /{TOKEN}/api/stream?run=run HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            stuck.append(client)
        time.sleep(0.5)
        with site.stream(run="run") as messages:
            next(messages)
            for index in range(3):
                hub.emit(completed(index))
                hub.flush()
                start = time.monotonic()
                _, news = next(messages)
                assert news["curves"]["rounds/avg_objective"][0] == [index + 1.0]
                assert time.monotonic() - start < 10
        for client in stuck:
            client.close()


def test_curves_are_thinned_to_what_a_screen_shows(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", config={})
    with TelemetryHub().attached(*run.outputs()) as hub:
        hub.emit(START)
        for index in range(3000):
            hub.emit(completed(index, avg_reward=50.0 if index == 1234 else 1.0))
    message = json.loads(Feed(run.path).since(None)[0])  # type: ignore[index]
    for xs, ys in message["curves"].values():
        assert len(xs) == len(ys) <= POINTS
    assert 50.0 in message["curves"]["rounds/avg_reward"][1]


@pytest.mark.parametrize("clients", [20])
def test_many_clients_at_once(site: Site, clients: int) -> None:
    heard: list[Any] = []

    def listen() -> None:
        with site.stream(run="one") as messages:
            heard.append(next(messages)[1])

    threads = [threading.Thread(target=listen) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(heard) == clients
    assert all(message["whole"] and message["curves"]["rounds/avg_objective"] for message in heard)
