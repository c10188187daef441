"""Text for messages: safe to print on a terminal, and of bounded length."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from datetime import timedelta


def printable(value: object, *, lines: bool = False) -> str:
    """`str(value)` with every character that a terminal could act on made visible, as `\\x1b` for ESC.

    Names and messages in a run's files may come from anyone; printed raw they could clear the screen, set the
    window's title or reverse the direction of text. `lines=True` keeps line breaks.
    """
    text = str(value)
    if text.isprintable():
        return text
    kept = "\n" if lines else ""
    return "".join(
        character if character.isprintable() or character in kept else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def shorten(value: object) -> str:
    """A repr of bounded length and depth, for messages: values may be huge, or nested without end."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a whole number of {value.bit_length():,} bits"  # Python refuses to print the longest ones
    short = reprlib.Repr()
    short.maxstring, short.maxother, short.maxlong = 80, 80, 80
    short.maxlevel, short.maxlist, short.maxdict = 3, 4, 4
    text = short.repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def number(value: object) -> str:
    """A value as people read it: a number rounded, text with control characters made visible, None as a
    dash."""
    if value is None:
        return "—"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return printable(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"


def duration(seconds: float) -> str:
    """As 1:02:03; a number that is too large for that stays a number."""
    try:
        return str(timedelta(seconds=round(seconds)))
    except OverflowError:
        return f"{number(seconds)} s"


def trend(values: Sequence[float | None], count: int) -> str:
    """The last values as blocks of text; a blank where one is absent or not finite."""
    shown = [v if v is not None and math.isfinite(v) else None for v in values[-count:]]
    there = [v for v in shown if v is not None]
    low, high = min(there, default=0.0), max(there, default=0.0)
    scale = 8 / (high - low) if 0 < high - low < math.inf else 0.0
    return "".join(" " if v is None else "▁▂▃▄▅▆▇█"[min(7, int((v - low) * scale))] for v in shown)
