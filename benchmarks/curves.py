"""Learning curves as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

COLOURS = (
    "#b0b0b0",
    "#56b4e9",
    "#999933",
    "#0072b2",
    "#009e73",
    "#004d38",
    "#d55e00",
    "#cc79a7",
    "#e69f00",
    "#8c510a",
    "#6a3d9a",
    "#b15928",
    "#000000",
)


@dataclass(frozen=True, slots=True)
class Line:
    """One learner: values [random seeds, steps]."""

    steps: Sequence[int]
    values: npt.NDArray[np.float64]

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        return self.values.mean(0)

    @property
    def error(self) -> npt.NDArray[np.float64]:
        """Standard error over random seeds; 0 of a single one."""
        if len(self.values) == 1:
            return np.zeros(self.values.shape[1])
        return self.values.std(0, ddof=1) / len(self.values) ** 0.5


def draw(title: str, lines: Mapping[str, Line], colours: Sequence[str] = COLOURS) -> str:
    """A mean line for each learner over env-steps, with a band of one standard error."""
    width, height, left, top, right, bottom = 860, 440, 60, 40, 250, 50
    most = max(line.steps[-1] for line in lines.values())
    means = np.concatenate([line.mean for line in lines.values()])
    low, high = np.floor(min(means.min(), 0)) - 1, np.ceil(means.max()) + 1

    def x(step: float) -> float:
        return left + step / most * (width - left - right)

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * (height - top - bottom)

    def points(steps: Sequence[int], values: npt.NDArray[np.float64]) -> list[str]:
        return [f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, values, strict=True)]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12">',
        "<style>text { font-family: sans-serif }</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for value in range(int(np.ceil(low)), int(high) + 1, max(1, round((high - low) / 8))):
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="{"#444" if value == 0 else "#ddd"}"/>'
            f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>'
        )
    for step in np.linspace(0, most, 5):
        place = f'x="{x(step):.1f}" y="{height - bottom + 18}"'
        parts.append(f'<text {place} text-anchor="middle">{step / 1000:.0f}k</text>')
    parts.append(
        f'<text x="{(left + width - right) / 2:.0f}" y="{height - 12}" text-anchor="middle">env-steps</text>'
    )
    for row, (name, line) in enumerate(lines.items()):
        colour = colours[row % len(colours)]
        upper = points(line.steps, line.mean + line.error)
        lower = points(line.steps, line.mean - line.error)
        parts.append(
            f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{colour}" opacity="0.15"/>'
            f'<polyline points="{" ".join(points(line.steps, line.mean))}" fill="none" stroke="{colour}" '
            f'stroke-width="2"/>'
            f'<rect x="{width - right + 14}" y="{top + 22 * row}" width="14" height="4" fill="{colour}"/>'
            f'<text x="{width - right + 34}" y="{top + 6 + 22 * row}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
