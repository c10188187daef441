"""What clients follow: a state with a revision number, of which each client asks for what it has not seen."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping
from secrets import token_hex
from typing import Any

import orjson

POLL = 1.0
"""Seconds between two looks at the files, however many clients ask."""
POINTS = 400
"""Points of a curve that are sent: about what a chart has pixels for."""
KEPT = 20_000
"""Points of a curve that are held; longer ones are thinned."""
BACKLOG = 64
"""Changes that a client may be behind and still get only these; beyond, it gets everything, thinned."""


class Stream:
    """One state that changes. A cursor names its life and revision: a cursor from another life (of another
    server, or before a run's log was cut back) gets the whole state."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due = 0.0
        self.busy = False
        """Whether there is more to read at once."""
        self._sent: dict[str, bytes] = {}
        self.begin()

    def begin(self) -> None:
        """Start a new life, in which nothing was read yet."""
        self.life, self.revision = token_hex(8), 0

    @property
    def cursor(self) -> str:
        return f"{self.life}.{self.revision}"

    def since(self, cursor: str | None) -> tuple[bytes, str] | None:
        """What changed since a cursor, as JSON, and the new cursor; None if nothing did. Clients that ask for
        the same share one answer. Safe to call from any thread."""
        with self._lock:
            self.read()
            if cursor == self.cursor:
                return None
            place = str(cursor)
            if place not in self._sent:
                life, _, seen = place.partition(".")
                more = self.changes(int(seen)) if life == self.life and seen.isdigit() else None
                message = {"whole": more is None, **(self.everything() if more is None else more)}
                self._sent[place] = encode(message)
            return self._sent[place], self.cursor

    def look(self, *, now: bool = False) -> None:
        """As `read`, from any thread; with `now` whenever the last look was."""
        with self._lock:
            self._due = 0.0 if now else self._due
            self.read()

    def read(self) -> None:
        """Look at the files, if the last look is long enough ago."""
        if time.monotonic() >= self._due:
            before = self.cursor
            self.busy = self.refresh()
            self._due = time.monotonic() + (0.0 if self.busy else POLL)
            if self.cursor != before:
                self._sent.clear()

    def refresh(self) -> bool:
        """Read what is new, and count the revision up if there was anything. True: there is more to read."""
        raise NotImplementedError

    def everything(self) -> dict[str, Any]:
        raise NotImplementedError

    def changes(self, revision: int) -> dict[str, Any] | None:
        """What came after a revision; None if that is not known any more."""
        raise NotImplementedError


def encode(value: Any) -> bytes:
    """JSON. NaN and infinity become null; keys of any kind become text."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


class Curves:
    """Named curves that grow at their right end, and the points added since each of the last revisions."""

    def __init__(self) -> None:
        self._curves: dict[str, tuple[array[float], array[float]]] = {}
        self._backlog: deque[tuple[int, dict[str, tuple[list[float], list[float]]]]] = deque(maxlen=BACKLOG)
        self._new: dict[str, tuple[list[float], list[float]]] = {}

    def add(self, name: str, x: float, y: float | None) -> None:
        """Add a point, or replace the one at the same x if it is the last. None leaves a gap."""
        xs, ys = self._curves.setdefault(name, (array("d"), array("d")))
        value = math.nan if y is None else float(y)
        if xs and xs[-1] == x:
            ys[-1] = value
        else:
            xs.append(x)
            ys.append(value)
        new_x, new_y = self._new.setdefault(name, ([], []))
        new_x.append(x)
        new_y.append(value)
        if len(xs) > KEPT:
            self._curves[name] = thin(xs, ys, KEPT // 2)

    def add_all(self, group: str, x: float, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            self.add(f"{group}/{name}", x, value)

    def commit(self, revision: int) -> bool:
        """File the points added since the last call under a revision; False if there are none."""
        if self._new:
            self._backlog.append((revision, self._new))
            self._new = {}
            return True
        return False

    def latest(self, name: str) -> tuple[array[float], array[float]]:
        return self._curves.get(name, (array("d"), array("d")))

    def thinned(self, points: int = POINTS) -> dict[str, tuple[list[float], list[float]]]:
        made = {name: thin(xs, ys, points) for name, (xs, ys) in self._curves.items()}
        return {name: (xs.tolist(), ys.tolist()) for name, (xs, ys) in made.items()}

    def added(self, revision: int) -> dict[str, tuple[list[float], list[float]]] | None:
        """Points after a revision; None if the backlog does not reach back to it, or is longer than the whole
        would be."""
        if self._backlog and self._backlog[0][0] > revision + 1 and len(self._backlog) == BACKLOG:
            return None
        joined: dict[str, tuple[list[float], list[float]]] = {}
        for number, points in self._backlog:
            if number > revision:
                for name, (xs, ys) in points.items():
                    into_x, into_y = joined.setdefault(name, ([], []))
                    into_x += xs
                    into_y += ys
        return None if any(len(xs) > POINTS for xs, _ in joined.values()) else joined


def thin(xs: array[float], ys: array[float], points: int) -> tuple[array[float], array[float]]:
    """At most `points` points: the lowest and the highest of each of equal parts, so that no spike is lost.
    A part without values keeps one gap."""
    if len(xs) <= points:
        return xs, ys
    parts = points // 2
    kept: list[int] = []
    for part in range(parts):
        low, high = part * len(xs) // parts, (part + 1) * len(xs) // parts
        there = [i for i in range(low, high) if ys[i] == ys[i]]
        ends = {min(there, key=ys.__getitem__), max(there, key=ys.__getitem__)} if there else {low}
        kept += sorted(ends)
    return array("d", (xs[i] for i in kept)), array("d", (ys[i] for i in kept))
