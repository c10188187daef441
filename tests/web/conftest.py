"""A server over a directory of runs, and small runs to serve."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from esper.karn.web.server import make_server
from esper.leyline import TelemetryEvent, TelemetryEventType
from esper.nissa import RunDirectory, TelemetryHub
from esper.simic import train_ppo_vectorized

TOKEN = "the-token"
EVIL = "</script><script>document.title='owned'</script>"
SMALL: dict[str, Any] = {
    "task": "digits_impaired",
    "rounds": 2,
    "envs": 4,
    "episode_length": 6,
    "steps_per_epoch": 3,
    "val_size": 64,
    "permissive_gates": True,
    "population": 8,
    "seed": 5,
}


@dataclass(frozen=True)
class Site:
    port: int
    token: str = TOKEN

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def ask(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and body of an answer; `path` is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def get(self, name: str, **parameters: Any) -> Any:
        status, _, body = self.ask(f"/{self.token}/api/{name}?{urlencode(parameters, doseq=True)}")
        assert status == 200, body
        return json.loads(body)

    @contextmanager
    def stream(
        self, cursor: str | None = None, *, timeout: float = 30, **parameters: str
    ) -> Iterator[Iterator[tuple[str, Any]]]:
        """Cursor and content of each message of a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = {} if cursor is None else {"Last-Event-ID": cursor}
        try:
            connection.request("GET", f"/{self.token}/api/stream?{urlencode(parameters)}", headers=headers)
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            yield _messages(answer)
        finally:
            connection.close()


def _messages(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    cursor = ""
    while line := answer.readline():
        if line.startswith(b"id: "):
            cursor = line[4:].strip().decode()
        elif line.startswith(b"data: "):
            yield cursor, json.loads(line[6:])


@contextmanager
def serving(root: Path) -> Iterator[Site]:
    server, listening = make_server(root, TOKEN), socket.socket()
    listening.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield Site(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two finished runs of one random seed."""
    root = tmp_path_factory.mktemp("web") / "runs"
    train_ppo_vectorized(**SMALL, telemetry_dir=str(root / "one"))
    train_ppo_vectorized(**SMALL, policy="random", telemetry_dir=str(root / "nested" / "two"))
    return root


@pytest.fixture(scope="session")
def site(runs: Path) -> Iterator[Site]:
    with serving(runs) as site:
        yield site


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose names, tasks, slots and messages are markup."""
    root = tmp_path_factory.mktemp("hostile")
    name = EVIL.replace("/", "∕")  # a slash of another kind: files cannot have the real one
    run = RunDirectory.create(root / name, config={"task": EVIL})
    pair, first = f"{EVIL} {EVIL}", {"env_id": 0, "epoch": 1}
    start = {"task": EVIL, "policy": EVIL, "slots": [EVIL], "envs": 1, "rounds": 1, "reward_mode": EVIL}
    action = {"op": EVIL, "slot": EVIL, "stages": {EVIL: 2}, "alphas": {EVIL: 0.5}, "mask": {EVIL: True}}
    events: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("run_started", start, {}),
        ("seed_lifecycle", {"kind": "germinated", "blueprint_id": EVIL}, first | {"slot_id": EVIL}),
        ("last_action", action | {"vetoes": {pair: EVIL}, "sensors": {pair: 1.0}}, first),
        ("reward_summary", {"components": {EVIL: 1.0}}, first),
        ("alert", {"code": EVIL, "severity": EVIL, "message": EVIL}, {}),
        ("batch_completed", {"round_idx": 0, "rounds": 1, "avg_objective": 0.5}, {}),
        ("run_ended", {"status": EVIL, "message": EVIL}, {}),
    ]
    with TelemetryHub().attached(*run.outputs()) as hub:
        hub.round_idx = 0
        for kind, data, context in events:
            hub.emit(TelemetryEvent(event_type=TelemetryEventType(kind), data=data, **context))
    return root
