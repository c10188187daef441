"""Charts as inline SVG. Colours come from the page's style sheet; a value that is None leaves a gap."""
from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

Values = Sequence[float | None]
WIDTH, HEIGHT = 460, 200
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 10, 32
COLOURS = 10
"""Classes c0 to c9 of the style sheet; series beyond them start over."""


def number(value: object) -> str:
    """A value for people: a dash where it is absent."""
    if value is None:
        return "—"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within a range, at steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


class Frame:
    """The axes of one chart, and the way from values to pixels."""

    def __init__(self, x: Sequence[float], y: tuple[float, float], x_label: str, *, pad: float = 0.0) -> None:
        self.x0, self.x1 = min(x) - pad, max(x) + pad
        if self.x0 == self.x1:
            self.x0, self.x1 = self.x0 - 0.5, self.x1 + 0.5
        low, high = y
        if not high - low > 1e-12 * max(abs(low), abs(high)):
            low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
        margin = (high - low) * 0.05
        self.y0, self.y1 = (low - margin if low else low), (high + margin if high else high)
        self.parts = [f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_label)}</text>']
        for value in ticks(self.y0, self.y1):
            self.parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self.y(value):.1f}" y2="{self.y(value):.1f}"/>'
                              f'<text x="{LEFT - 5}" y="{self.y(value) + 3.5:.1f}" text-anchor="end">{number(value)}</text>')
        for value in ticks(self.x0, self.x1, 8):
            if value.is_integer():
                self.parts.append(f'<text x="{self.x(value):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{value:.0f}</text>')

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def path(self, x: Sequence[float], values: Values) -> str:
        """Line segments through the values that are there."""
        runs = groupby(zip(x, values, strict=True), key=lambda point: point[1] is None)
        return "".join("M" + "L".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in points if b is not None)
                       for absent, points in runs if not absent)

    def svg(self, x: Sequence[float], series: Mapping[str, Values]) -> str:
        """All of it, with the numbers that the page shows under the pointer."""
        shown = {name: [number(value) for value in values] for name, values in series.items()}
        data = {"x": list(x), "px": [round(self.x(v), 1) for v in x], "series": shown}
        return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-chart="{escape(json.dumps(data))}">'
                f'{"".join(self.parts)}</svg>')


def figure(title: str, note: str, body: str, legend: Mapping[str, str] | None = None) -> str:
    keys = "".join(f'<span><i class="{css}"></i>{escape(name)}</span>' for name, css in (legend or {}).items())
    return (f'<figure><figcaption><b>{escape(title)}</b> {escape(note)}</figcaption>{body}'
            f'{f"""<div class="legend">{keys}</div>""" if keys else ""}</figure>')


def lines(title: str, x: Sequence[float], series: Mapping[str, Values], *, note: str = "", x_label: str = "round",
          limits: Sequence[float] = (), band: tuple[Values, Values] | None = None) -> str:
    """One line per series; `band` shades between two more; `limits` are drawn where they are near."""
    every = [v for values in (*series.values(), *(band or ())) for v in values if v is not None]
    if not every:
        return figure(title, note, '<p class="absent">not measured</p>')
    low, high = min(every), max(every)
    near = [v for v in limits if low - (high - low or abs(high)) <= v <= high + (high - low or abs(high))]
    frame = Frame(x, (min(low, *near, low), max(high, *near, high)), x_label)
    if band is not None:
        there = [(a, b, c) for a, b, c in zip(x, *band, strict=True) if b is not None and c is not None]
        edge = [*((a, c) for a, _, c in there), *((a, b) for a, b, _ in reversed(there))]
        frame.parts.append(f'<path class="band" d="M{"L".join(f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in edge)}Z"/>')
    for value in near:
        frame.parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{frame.y(value):.1f}" y2="{frame.y(value):.1f}"/>')
    for i, values in enumerate(series.values()):
        frame.parts.append(f'<path class="line c{i % COLOURS}" d="{frame.path(x, values)}"/>')
        if len(x) <= 40:
            frame.parts += [f'<circle class="c{i % COLOURS}" cx="{frame.x(a):.1f}" cy="{frame.y(b):.1f}" r="2.2"/>'
                            for a, b in zip(x, values, strict=True) if b is not None]
    legend = {name: f"c{i % COLOURS}" for i, name in enumerate(series)} if len(series) > 1 else {}
    return figure(title, note, frame.svg(x, series), legend)


def stacked(title: str, x: Sequence[float], series: Mapping[str, Values], *, note: str = "", x_label: str = "round",
            total: bool = False) -> str:
    """One bar per x, its parts stacked, negative ones downwards; `total` marks their sum."""
    if not any(v for values in series.values() for v in values):
        return figure(title, note, '<p class="absent">not measured</p>')
    columns = list(zip(*([v or 0.0 for v in values] for values in series.values()), strict=True))
    tops, bottoms = ([sum(v for v in column if v * sign > 0) for column in columns] for sign in (1, -1))
    frame = Frame(x, (min(0.0, *bottoms, 0.0), max(0.0, *tops, 0.0)), x_label, pad=0.5 * _step(x))
    width = max(frame.x(x[0] + _step(x)) - frame.x(x[0]) - 1.0, 0.5)
    for a, column in zip(x, columns, strict=True):
        up = down = 0.0
        for i, value in enumerate(column):
            start, up, down = (up, up + value, down) if value > 0 else (down, up, down + value)
            if value:
                y, height = frame.y(max(start, start + value)), abs(frame.y(start + value) - frame.y(start))
                frame.parts.append(f'<rect class="c{i % COLOURS}" x="{frame.x(a) - width / 2:.1f}" y="{y:.1f}" '
                                   f'width="{width:.1f}" height="{height:.1f}"/>')
        if total:
            frame.parts.append(f'<line class="total" x1="{frame.x(a) - width / 2:.1f}" x2="{frame.x(a) + width / 2:.1f}" '
                               f'y1="{frame.y(sum(column)):.1f}" y2="{frame.y(sum(column)):.1f}"/>')
    legend = {name: f"c{i % COLOURS}" for i, name in enumerate(series)} | ({"sum": "sum"} if total else {})
    return figure(title, note, frame.svg(x, {**series, "sum": [sum(c) for c in columns]} if total else series), legend)


def _step(x: Sequence[float]) -> float:
    return min((b - a for a, b in zip(x, x[1:], strict=False)), default=1.0)


def spark(values: Values) -> str:
    """A line of the size of a word."""
    there = [v for v in values if v is not None]
    if len(there) < 2:
        return ""
    low, span = min(there), (max(there) - min(there)) or 1.0
    points = " ".join(f"{i * 88 / (len(there) - 1) + 1:.1f},{15 - (v - low) / span * 13:.1f}" for i, v in enumerate(there))
    return f'<svg class="spark" viewBox="0 0 90 17"><polyline points="{points}"/></svg>'


Life = tuple[int, str, str | None, float | None]
"""Epoch, stage, blueprint, alpha."""


def lanes(title: str, note: str, epochs: int, slots: Mapping[str, Sequence[Life]]) -> str:
    """One network: a lane per slot, stages as bands, blueprints written where they begin, alpha as a line from 0 to 1."""
    lane, left = 38, 44
    height = lane * len(slots) + 16
    per = (WIDTH - left - RIGHT) / epochs
    parts = []
    for row, (slot, lives) in enumerate(slots.items()):
        base = row * lane + lane
        parts.append(f'<rect class="stage DORMANT" x="{left}" y="{base - lane + 4}" width="{per * epochs:.1f}" height="{lane - 4}"/>'
                     f'<text x="{left - 5}" y="{base - lane / 2 + 5}" text-anchor="end">{escape(slot)}</text>')
        numbered = list(enumerate(lives))
        for (stage, blueprint, _), group in groupby(numbered, key=lambda n: (n[1][1], n[1][2], n[1][0] - n[0])):  # also at gaps
            found = [life for _, life in group]
            x, width = left + (found[0][0] - 1) * per, per * len(found)
            parts.append(f'<rect class="stage {escape(stage)}" x="{x:.1f}" y="{base - lane + 4}" width="{width:.1f}" height="{lane - 4}">'
                         f'<title>{escape(slot)}: {escape(blueprint or "?")} {stage}, epochs {found[0][0]} to {found[-1][0]}</title></rect>')
        for (blueprint, _), group in groupby(numbered, key=lambda n: (n[1][2], n[1][0] - n[0])):
            found = [life for _, life in group if life[3] is not None]
            if found:
                begin, end = left + (found[0][0] - 1) * per + 2, WIDTH - RIGHT
                place = f'x="{begin:.1f}"' if begin < end - 62 else f'x="{end}" text-anchor="end"'
                parts.append(f'<text class="blueprint" {place} y="{base - lane + 14}">{escape(blueprint or "?")}</text>')
            points = "L".join(f"{left + e * per:.1f},{base - (a or 0.0) * (lane - 6):.1f}" for e, _, _, a in found)
            parts.append(f'<path class="alpha" d="M{points}"/>' if len(found) > 1 else "")
    parts += [f'<text x="{left + e * per:.1f}" y="{height - 4}" text-anchor="middle">{e:.0f}</text>' for e in ticks(1, epochs, 8)]
    parts.append(f'<text x="{left - 5}" y="{height - 4}" text-anchor="end">epoch</text>')
    return figure(title, note, f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>')
