"""The watcher, driven key by key on a real run, and following one that goes on."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import Awaitable, Callable
from html import unescape
from pathlib import Path

import pytest

from esper.karn.summary import open_run
from esper.leyline import TelemetryEvent, TelemetryEventType
from esper.nissa import RunDirectory, TelemetryHub
from esper.scripts.cli import main

from .conftest import Write

SIZES = [(100, 30), (200, 60)]


def drive(path: Path, size: tuple[int, int], script: Callable[..., Awaitable[None]], **options: int) -> None:
    from esper.karn.watch import WatchApp

    async def run() -> None:
        app = WatchApp(open_run(path), **options)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await script(app, pilot)

    asyncio.run(run())


def screen(app: object) -> str:
    """What is on the terminal now, as text."""
    svg = app.export_screenshot()  # type: ignore[attr-defined]
    return unescape(re.sub(r"<[^>]+>", "", "\n".join(re.findall(r"<text[^>]*>.*?</text>", svg)))).replace(
        "\xa0", " "
    )


async def sees(app, pilot, *texts: str, without: str | None = None) -> None:
    """Wait until all of these are on the terminal."""
    for _ in range(300):
        shown = screen(app)
        if all(text in shown for text in texts) and (without is None or without not in shown):
            return
        await pilot.pause(0.1)
    raise AssertionError(f"waited for {texts}, there is {shown}")


@pytest.mark.parametrize("size", SIZES)
def test_three_screens_of_a_finished_run(size: tuple[int, int], run_path: Path) -> None:
    views = open_run(run_path)
    last = views.rows("SELECT * FROM rounds ORDER BY seq DESC LIMIT 1")[0]
    update = views.rows("SELECT * FROM updates ORDER BY seq DESC LIMIT 1")[0]

    async def script(app, pilot) -> None:
        await sees(app, pilot, "finished", "2 of 2 rounds", f"{last['avg_objective']:.3g}", "quit")
        await pilot.press("2")
        await sees(app, pilot, "round 2, env 0")
        await pilot.press("n", "left_square_bracket")
        await sees(app, pilot, "round 1, env 1")
        await pilot.press("p", "p", "right_square_bracket")
        await sees(app, pilot, "round 2, env 3")
        await pilot.press("3")
        await sees(app, pilot, f"{update['entropy']:.3g}", "explained_variance")
        await pilot.resize_terminal(80, 24)
        await sees(app, pilot, "explained_variance")

    drive(run_path, size, script)


def test_it_follows_a_run_that_goes_on(write_run: Write) -> None:
    at = {"round_idx": 0}
    path = write_run([("run_started", {"task": "t", "policy": "ppo", "rounds": 3, "slots": ["r0c0"]})])

    async def script(app, pilot) -> None:
        await sees(app, pilot, "cut off")
        with TelemetryHub().attached(*RunDirectory.open(path).outputs()) as hub:
            hub.emit(
                TelemetryEvent(
                    event_type=TelemetryEventType.LAST_ACTION,
                    data={"op": "WAIT", "stages": {"r0c0": 3}},
                    env_id=0,
                    epoch=1,
                    **at,
                )
            )
            hub.emit(
                TelemetryEvent(
                    event_type=TelemetryEventType.BATCH_COMPLETED,
                    data={"round_idx": 0, "avg_objective": 0.4321},
                    **at,
                )
            )
            hub.flush()
            await sees(app, pilot, "0.432", "running")
        await sees(app, pilot, "cut off")
        (path / "run.json").rename(path / "gone")
        (path / "events.jsonl").touch()
        await sees(app, pilot, "is not a run")
        (path / "gone").rename(path / "run.json")
        await sees(app, pilot, "0.432", without="is not a run")

    drive(path, (100, 30), script)


def test_text_of_a_run_cannot_act_on_the_screens(write_run: Write) -> None:
    """Neither control characters nor markup, which would be an error in the middle of drawing."""
    evil = "evil\x1b[2J[/]"
    at = {"round_idx": 0, "env_id": 0, "epoch": 1}
    path = write_run(
        [
            ("run_started", {"task": evil, "rounds": 1, "slots": [evil]}),
            ("seed_lifecycle", {"kind": "germinated", "blueprint_id": evil}, at | {"slot_id": evil}),
            ("last_action", {"op": "GERMINATE", "slot": evil, "veto": evil, "stages": {evil: 3}}, at),
            ("batch_completed", {"round_idx": 0}, {"round_idx": 0}),
            ("alert", {"code": evil, "severity": "error", "message": evil}, {"round_idx": 0}),
        ]
    )

    async def script(app, pilot) -> None:
        shown = r"evil\x1b[2J[/]"
        await sees(app, pilot, f"{shown}, policy", f"round 1 {shown}: {shown}", f"0.00 {shown}")
        await pilot.press("2")
        await sees(app, pilot, "round 1, env 0", f"✗ {shown}")
        await pilot.press("3")
        await sees(app, pilot, "no update recorded")

    drive(path, (160, 60), script)


@pytest.mark.parametrize("damage", ["no steps", "nothing"])
def test_runs_that_have_not_come_far(damage: str, run_path: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(run_path, tmp_path / "copy"))
    for table in (path / "tables").iterdir():
        table.unlink()
    if damage == "nothing":
        (path / "events.jsonl").write_bytes(b"")

    async def script(app, pilot) -> None:
        for key in "13np[]2":
            await pilot.press({"[": "left_square_bracket", "]": "right_square_bracket"}.get(key, key))
        await sees(app, pilot, "no steps recorded")
        await pilot.press("3")
        await sees(app, pilot, "no update recorded" if damage == "nothing" else "explained_variance")

    drive(path, (100, 30), script)


def test_plain_text_elsewhere(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    views = open_run(run_path)
    decided = views.rows("SELECT op FROM steps WHERE env_id = 2 AND round_idx = 0 AND op <> 'WAIT'")
    assert main(["watch", str(run_path), "--env", "2", "--round", "1"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "round 1, env 2" in shown
    assert all(row["op"] in shown for row in decided)
    assert "explained_variance" in shown


def test_without_textual_the_extra_is_named(
    run_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "esper.karn.watch", raising=False)
    monkeypatch.setitem(sys.modules, "textual.app", None)  # as if it were not installed
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert main(["watch", str(run_path)]) == 2
    assert "pip install textual" in capsys.readouterr().err
