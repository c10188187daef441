"""The page of `esper ui`, and the same page with its data in one file that needs neither server nor network.

Scripts are ES modules. In a file they are one script: imports and exports are dropped, so no two modules may
use one name at their top level.
"""

from __future__ import annotations

import gzip
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import orjson

from esper._text import printable

STYLE = "page.css"
SCRIPTS = (
    "dom.js",
    "source.js",
    "charts.js",
    "blocks.js",
    "runs.js",
    "run.js",
    "network.js",
    "why.js",
    "page.js",
)
"""In the order of their imports; the last one starts the page."""


@cache
def assets() -> Mapping[str, str]:
    """The style sheet and the scripts by name."""
    folder = files("esper").joinpath("karn", "assets")
    return {name: folder.joinpath(name).read_text(encoding="utf-8") for name in (STYLE, *SCRIPTS)}


_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Ccircle cx='8' cy='8' r='7' fill='%23009e73'/%3E%3Cpath d='M8 3v10M3 8h10' stroke='white' "
    "stroke-width='2'/%3E%3C/svg%3E"
)


def shell() -> str:
    """The page as the server sends it. Its data comes later."""
    style = f'<link rel="stylesheet" href="assets/{STYLE}">'
    return _document("Esper", f'{style}<script type="module" src="assets/{SCRIPTS[-1]}"></script>')


def freeze(title: str, data: Mapping[str, Any]) -> str:
    """The page with its data. Its Content-Security-Policy allows its own style sheet and script, by their
    hashes, and nothing else: other markup could run and load nothing."""
    style, script = assets()[STYLE], _bundle()
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    packed = b64encode(gzip.compress(orjson.dumps(data, option=options), mtime=0)).decode()
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'
        f'<script type="application/gzip" id="data">{packed}</script>'
        f'<script type="module">{script}</script>'
    )
    return _document(title, head)


def _document(title: str, head: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(printable(title))}</title><link rel="icon" href="{_ICON}">{head}</head>'
        "<body><noscript>This page draws itself with JavaScript, which is switched off.</noscript></body>"
        "</html>\n"
    )


def _bundle() -> str:
    """All modules as one script."""
    text = "\n".join(assets()[name] for name in SCRIPTS)
    text = re.sub(r"^import [^;]*;\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^export ", "", text, flags=re.MULTILINE)


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
