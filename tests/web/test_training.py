"""A page that is open changes nothing of the training that it shows, and its command ends quietly."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

from run_helpers import assert_same_run, train

from .conftest import Site, serving


def follow(site: Site, run: str, heard: list[int]) -> None:
    """Follow a run as the page does: fetch each round that it records, and note it."""
    with site.stream(run=run) as messages:
        for _, message in messages:
            for shown in message["parts"].get("recorded", {}).get("rounds", [])[-1:]:
                site.get("round", run=run, round=shown)
                site.get("episode", run=run, round=shown, env=0)
                heard.append(shown)
            if message["parts"].get("facts", {}).get("status") == "finished":
                return


def test_training_is_bit_identical_with_the_page_open(tmp_path: Path) -> None:
    train(tmp_path / "alone")
    root, heard = tmp_path / "runs", list[int]()
    root.mkdir()
    with serving(root) as site, site.stream() as listed:

        def client() -> None:
            next(message for _, message in listed if message["runs"])
            follow(site, "latest", heard)

        thread = threading.Thread(target=client)
        thread.start()
        train(root / "shown")
        thread.join(60)
        assert not thread.is_alive()
    assert heard[-1] == 2
    assert_same_run(tmp_path / "alone", root / "shown")


def test_the_command_serves_and_ends_quietly_while_a_page_is_open(runs: Path) -> None:
    command = [sys.executable, "-m", "esper.scripts.ui", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = urlsplit(process.stdout.readline().strip())
        assert url.hostname == "127.0.0.1"
        assert url.port is not None
        site = Site(url.port, token=url.path.strip("/"))
        assert len(site.token) >= 20
        with site.stream(run="one") as messages:
            next(messages)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
