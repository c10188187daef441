"""Text for messages: safe to print on a terminal, and of bounded length."""

from __future__ import annotations

import reprlib


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
