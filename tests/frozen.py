"""What a frozen page holds: its data, and the rules of its Content-Security-Policy."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html import unescape
from typing import Any


def data_of(page: str) -> dict[str, Any]:
    """What the page shows."""
    (packed,) = re.findall(r'<script type="application/gzip" id="data">(.*?)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def assert_sealed(page: str) -> None:
    """The page loads nothing, and may run and apply only its own script and style sheet."""
    links = r"""(?:src|href)\s*=\s*["'](?!#|data:)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)"""
    assert not re.findall(links, page)
    (content,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    policy = {name: sources for name, *sources in (part.split() for part in unescape(content).split(";"))}
    assert policy.pop("default-src") == ["'none'"]
    for name, element in (("style-src", "style"), ("script-src", 'script type="module"')):
        (content,) = re.findall(rf"<{element}>(.*?)</{element.split()[0]}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(name) == [f"'sha256-{digest}'"]
    assert policy == {"img-src": ["data:"], "base-uri": ["'none'"], "form-action": ["'none'"]}
    assert page.index("Content-Security-Policy") < page.index("<style")
    assert not re.search(r"<[a-z][^>]*\s(?:style|on\w+)=", page)  # these would be blocked
