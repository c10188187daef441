"""`esper watch` on a terminal: three screens over a run directory, read again whenever the run has
written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from rich.console import RenderableType
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import ContentSwitcher, Footer, Static

from esper.karn.screens import env_screen, overview, policy_screen
from esper.karn.summary import is_written, open_run
from esper.karn.views import Views
from esper.leyline import EsperError

SCREENS: Mapping[str, Callable[..., RenderableType]] = {
    "overview": overview,
    "env": env_screen,
    "policy": policy_screen,
}
POLL = 1.0
"""Seconds between looks; a run that takes long to read is looked at less often, so that reading stays a tenth
of the time."""


class WatchApp(App[None]):
    """A run; `round_idx` None follows the last one."""

    CSS = "VerticalScroll { padding: 0 1; } #note { dock: bottom; height: auto; color: $error; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        *(Binding(str(i + 1), f"show('{name}')", name) for i, name in enumerate(SCREENS)),
        Binding("n", "env(1)", "env +"),
        Binding("p", "env(-1)", "env −"),
        Binding("right_square_bracket", "round(1)", "round +", key_display="]"),
        Binding("left_square_bracket", "round(-1)", "round −", key_display="["),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, views: Views, *, round_idx: int | None = None, env_id: int = 0) -> None:
        super().__init__()
        self.title = str(views.run.path)
        self.views, self.round_idx, self.env_id = views, round_idx, env_id
        self._seen: tuple[object, ...] | None = _state(views.run.path)
        self._next = 0.0

    def compose(self) -> ComposeResult:
        with ContentSwitcher(initial="overview"):
            for name in SCREENS:
                with VerticalScroll(id=name):
                    yield Static(id=f"{name}-text")
        yield Static(id="note", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.draw()
        self.set_interval(POLL, self.poll)

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)  # only then does the app know its new size

    def draw(self) -> None:
        """Show the current screen; what cannot be shown, as a round that a resumed run has undone, is said
        below it."""
        name, width, note = str(self.query_one(ContentSwitcher).current), self.size.width - 4, ""
        try:
            text = SCREENS[name](self.views, width, *((self.round_idx, self.env_id) if name == "env" else ()))
            self.query_one(f"#{name}-text", Static).update(text)
        except EsperError as error:
            note = str(error)
        self.query_one("#note", Static).update(note)

    def poll(self) -> None:
        state = _state(self.views.run.path)
        if time.monotonic() >= self._next and state != self._seen:
            self._seen, self._next = state, math.inf
            self.run_worker(self._read, thread=True)

    def _read(self) -> None:
        """Beside the screens. What cannot be read now, as while a run is being resumed, may be in a
        moment."""
        began, note = time.monotonic(), ""
        try:
            views = open_run(self.views.run.path)
            views.query("SELECT 1 FROM steps, rewards LIMIT 0")  # read these here, not while drawing
            self.views = views
        except (EsperError, OSError) as error:
            note, self._seen = str(error), None
        self._next = time.monotonic() + 10 * (time.monotonic() - began)
        self.call_from_thread(
            self.query_one("#note", Static).update, note
        ) if note else self.call_from_thread(self.draw)

    def action_show(self, name: str) -> None:
        self.query_one(ContentSwitcher).current = name
        self.draw()

    def action_env(self, step: int) -> None:
        envs = self._recorded("env_id")
        if envs:
            self.env_id = (
                envs[(envs.index(self.env_id) + step) % len(envs)] if self.env_id in envs else envs[0]
            )
            self.draw()

    def action_round(self, step: int) -> None:
        rounds = self._recorded("round_idx")
        at = (rounds.index(self.round_idx) if self.round_idx in rounds else len(rounds) - 1) + step
        self.round_idx = rounds[max(at, 0)] if at < len(rounds) - 1 and rounds else None
        self.draw()

    def _recorded(self, column: str) -> list[int]:
        return [row[column] for row in self.views.rows(f"SELECT DISTINCT {column} FROM steps ORDER BY 1")]


def _state(path: Path) -> tuple[object, ...] | None:
    """What changes when the run writes, ends or dies."""
    try:
        log, tables = (path / "events.jsonl").stat(), (path / "tables").stat()
        return log.st_size, log.st_mtime_ns, tables.st_mtime_ns, is_written(path / "events.jsonl")
    except OSError:
        return None
