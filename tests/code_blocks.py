"""Blocks of code in Markdown pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^( *)```(?: { \.)?(\w*)(?: })?\s*$")
"""The form with braces is for blocks that the formatter must leave alone."""
INCLUDE = re.compile(r'^--8<-- "(.+)"$')
"""A line in whose place the site shows a file of the repository."""


def blocks(page: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Language, first line number and lines of every fenced block."""
    language, start, indent = None, 0, ""
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        fence = FENCE.match(line)
        if fence is None:
            continue
        if language is None:
            indent, language = fence.groups()
            start = number
        else:
            yield language, start + 1, [text.removeprefix(indent) for text in lines[start : number - 1]]
            language = None
    assert language is None, f"{page.name}: the block at line {start} does not end"


def python_of(page: Path) -> str:
    """The page's Python on the lines where it stands, so that a traceback names the line of the page.
    Files that the site includes are left out."""
    lines: list[str] = []
    for language, start, code in blocks(page):
        if language == "python" and not any(INCLUDE.match(line) for line in code):
            lines += [""] * (start - 1 - len(lines)) + code
    return "\n".join(lines)


def included(page: Path) -> list[str]:
    """The files that a page includes."""
    return [match[1] for _, _, code in blocks(page) for line in code if (match := INCLUDE.match(line))]
