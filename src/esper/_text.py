"""Text that is safe to print on a terminal."""

from __future__ import annotations


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
