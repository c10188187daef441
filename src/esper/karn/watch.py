"""`esper watch` on a terminal: three screens over a run directory, read again whenever the run has written."""
from __future__ import annotations

import time
from pathlib import Path

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import ContentSwitcher, Footer, Static

from esper.karn.screens import env_screen, overview, policy_screen
from esper.karn.summary import is_written, open_run
from esper.karn.views import Views
from esper.leyline import EsperError

SCREENS = ("overview", "env", "policy")
POLL = 1.0
"""Seconds between looks; a run that takes long to read is looked at less often, so that reading stays a tenth of the time."""


class WatchApp(App[None]):
    """A run; `round_idx` None follows the last one."""

    CSS = "VerticalScroll { padding: 0 1; } #note { dock: bottom; height: auto; color: $error; }"
    BINDINGS = [
        *(Binding(str(i + 1), f"show('{name}')", name) for i, name in enumerate(SCREENS)),
        Binding("n", "env(1)", "next env"), Binding("p", "env(-1)", "previous env"),
        Binding("right_square_bracket", "round(1)", "next round", key_display="]"),
        Binding("left_square_bracket", "round(-1)", "previous round", key_display="["),
        Binding("q", "quit", "quit")]

    def __init__(self, views: Views, *, round_idx: int | None = None, env_id: int = 0) -> None:
        super().__init__()
        self.title = str(views.run.path)
        self.views, self.round_idx, self.env_id = views, round_idx, env_id
        self._seen, self._next = _state(views.run.path), 0.0

    def compose(self) -> ComposeResult:
        with ContentSwitcher(initial="overview"):
            for name in SCREENS:
                with VerticalScroll(id=name):
                    yield Static(id=f"{name}-text")
        yield Static(id="note")
        yield Footer()

    def on_mount(self) -> None:
        self.draw()
        self.set_interval(POLL, self.poll)

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        width = self.size.width - 4
        texts = {"overview": overview(self.views, width), "env": env_screen(self.views, width, self.round_idx, self.env_id),
                 "policy": policy_screen(self.views, width)}
        for name, text in texts.items():
            self.query_one(f"#{name}-text", Static).update(text)

    def poll(self) -> None:
        """Read the run again if it has changed. What cannot be read now, as while a run is resumed, may be in a moment."""
        if time.monotonic() < self._next or self._seen == (state := _state(self.views.run.path)):
            return
        began, note = time.monotonic(), ""
        try:
            self.views, self._seen = open_run(self.views.run.path), state
            self.draw()
        except (EsperError, OSError) as error:
            note = str(error)
        self.query_one("#note", Static).update(note)
        self._next = time.monotonic() + 10 * (time.monotonic() - began)

    def action_show(self, name: str) -> None:
        self.query_one(ContentSwitcher).current = name

    def action_env(self, step: int) -> None:
        envs = [row["env_id"] for row in self.views.rows("SELECT DISTINCT env_id FROM steps ORDER BY 1")]
        if envs:
            self.env_id = envs[(envs.index(self.env_id) + step) % len(envs)]
            self.draw()

    def action_round(self, step: int) -> None:
        rounds = [row["round_idx"] for row in self.views.rows("SELECT DISTINCT round_idx FROM steps ORDER BY 1")]
        if rounds:
            at = len(rounds) - 1 if self.round_idx is None else rounds.index(self.round_idx)
            self.round_idx = rounds[max(0, at + step)] if at + step < len(rounds) - 1 else None
            self.draw()


def _state(path: Path) -> tuple[object, ...] | None:
    """What changes when the run writes, ends or dies."""
    try:
        log, tables = (path / "events.jsonl").stat(), (path / "tables").stat()
        return log.st_size, log.st_mtime_ns, tables.st_mtime_ns, is_written(path / "events.jsonl")
    except OSError:
        return None
