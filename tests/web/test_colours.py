"""Colours that people with any colour vision can tell apart, and text that stands out from its ground."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from esper._page import STYLE, assets

VISION = {
    "normal": np.eye(3),
    "no red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no blue": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
"""How people without one kind of cone see linear RGB (Machado, Oliveira and Fernandes, 2009)."""
SERIES = [f"c{i}" for i in range(6)]
STAGES = ["dormant", "germinated", "training", "blending", "holding", "fossilized", "pruned"]


def colours(scheme: str) -> dict[str, np.ndarray]:
    """Variables of the style sheet as linear RGB."""
    pairs = re.findall(r"--(\w+): light-dark\((#\w+), (#\w+)\)", assets()[STYLE])
    assert len(pairs) > 20
    return {name: linear(light if scheme == "light" else dark) for name, light, dark in pairs}


def linear(code: str) -> np.ndarray:
    digits = code[1:] if len(code) == 7 else "".join(2 * c for c in code[1:])
    values = np.array([int(digits[i : i + 2], 16) for i in (0, 2, 4)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB, for a white of D65."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("names", [SERIES, STAGES], ids=["series", "stages"])
def test_colours_can_be_told_apart(names: list[str], vision: str, scheme: str) -> None:
    seen = {name: lab(np.array(VISION[vision]) @ colours(scheme)[name]) for name in names}
    for one, other in combinations(names, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 10, f"{one} and {other}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("text", ["ink", "faint", "link", "fault", "warn", "good"])
def test_text_stands_out(text: str, scheme: str) -> None:
    found = colours(scheme)
    light = {name: float(np.array([0.2126, 0.7152, 0.0722]) @ rgb) + 0.05 for name, rgb in found.items()}
    for ground in ("paper", "panel"):
        ratio = max(light[text], light[ground]) / min(light[text], light[ground])
        assert ratio >= 4.5, f"{text} on {ground}: {ratio:.1f}"
