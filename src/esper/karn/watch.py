"""`esper watch` on a terminal: three screens over a run directory, read again whenever it has changed."""

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

from esper._text import printable
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
"""Seconds between checks for new events. A run that is slow to read is checked less often, so that reading
takes about a tenth of the time."""


class WatchApp(App[None]):
    """The screens of one run. `round_idx` counts from 0; None follows the last round."""

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
        self.title = printable(views.run.path)
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
        """Show the current screen, or below it why it cannot be shown, as for a round that a resumed run has
        undone."""
        name, width, note = str(self.query_one(ContentSwitcher).current), self.size.width - 4, ""
        place = (self.round_idx, self.env_id) if name == "env" else ()
        try:
            self.query_one(f"#{name}-text", Static).update(SCREENS[name](self.views, width, *place))
        except EsperError as error:
            note = str(error)
        self.query_one("#note", Static).update(printable(note, lines=True))

    def poll(self) -> None:
        state = _state(self.views.run.path)
        if time.monotonic() >= self._next and state != self._seen:
            self._seen, self._next = state, math.inf
            self.run_worker(self._read, thread=True)

    def _read(self) -> None:
        """Runs in a thread of its own. A run that cannot be read now, as while it is being resumed, is tried
        again."""
        began = time.monotonic()
        note = ""
        try:
            views = open_run(self.views.run.path)
            views.query("SELECT 1 FROM steps, rewards LIMIT 0")  # read these here, not while drawing
            self.views = views
        except (EsperError, OSError) as error:
            note = str(error)
            self._seen = None
        self._next = time.monotonic() + 10 * (time.monotonic() - began)
        if note:
            self.call_from_thread(self.query_one("#note", Static).update, printable(note, lines=True))
        else:
            self.call_from_thread(self.draw)

    def action_show(self, name: str) -> None:
        self.query_one(ContentSwitcher).current = name
        self.draw()

    def action_env(self, step: int) -> None:
        envs = self._recorded("env_id")
        if not envs:
            return
        if self.env_id in envs:
            self.env_id = envs[(envs.index(self.env_id) + step) % len(envs)]
        else:
            self.env_id = envs[0]
        self.draw()

    def action_round(self, step: int) -> None:
        rounds = self._recorded("round_idx")
        last = len(rounds) - 1
        position = rounds.index(self.round_idx) if self.round_idx in rounds else last
        position = max(position + step, 0)
        self.round_idx = rounds[position] if position < last else None
        self.draw()

    def _recorded(self, column: str) -> list[int]:
        return [row[column] for row in self.views.rows(f"SELECT DISTINCT {column} FROM steps ORDER BY 1")]


def _state(path: Path) -> tuple[object, ...] | None:
    """A value that changes when the run writes, ends or dies."""
    try:
        log, tables = (path / "events.jsonl").stat(), (path / "tables").stat()
        return log.st_size, log.st_mtime_ns, tables.st_mtime_ns, is_written(path / "events.jsonl")
    except OSError:
        return None
