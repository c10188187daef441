"""HTML pages that need no network, and their charts as inline SVG. Colours come from the style sheet; a value
that is None or not finite leaves a gap."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from html import escape as escape_markup
from importlib.resources import files
from itertools import groupby, pairwise

from esper._text import printable

Values = Sequence[float | None]
Series = Mapping[str, Values]
WIDTH, HEIGHT = 460, 200
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 10, 32
COLOURS = 10
"""Classes c0 to c9 of the style sheet; series beyond them start over."""
LARGEST = 1e300
"""Values beyond this are not drawn."""
ABSENT = '<p class="absent">not measured</p>'


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


def escape(value: object) -> str:
    """Text as markup that shows it, control characters made visible."""
    return escape_markup(printable(value, lines=True))


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within a range, at steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class Html(str):
    """Text that is markup already."""


def tag(name: str, text: str = "", **attributes: object) -> Html:
    """An element around markup. `css` is its class; floats are rounded to a tenth of a pixel."""
    parts = [name]
    for key, value in attributes.items():
        shown = f"{value:.1f}" if isinstance(value, float) else escape(value)
        attribute = "class" if key == "css" else key.replace("_", "-")
        parts.append(f'{attribute}="{shown}"')
    return Html(f"<{' '.join(parts)}>{text}</{name}>")


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Html:
    """Numbers are aligned right; cells that are markup stay as they are."""
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return tag("div", f"<table><tr>{head}</tr>{body}</table>", css="wide")


def _cell(value: object) -> str:
    if isinstance(value, Html):
        return f"<td>{value}</td>"
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    return tag("td", escape(number(value)), css="n")


def document(title: str, header: str, main: str) -> str:
    """A whole page; `header` and `main` are markup. Its Content-Security-Policy allows this style sheet and
    this script, by their hashes, and nothing else: other markup could run and load nothing."""
    style, script = (_asset(name) for name in ("report.css", "report.js"))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<header>{header}</header><main>{main}</main>"
        f"<script>{script}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return files("esper").joinpath("karn", "assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def figure(title: str, note: str, body: str, legend: Mapping[str, str] | None = None) -> str:
    keys = "".join(f"<span>{tag('i', css=css)}{escape(name)}</span>" for name, css in (legend or {}).items())
    caption = f"<figcaption><b>{escape(title)}</b> {escape(note)}</figcaption>"
    return f"<figure>{caption}{body}{tag('div', keys, css='legend') if keys else ''}</figure>"


class Frame:
    """The axes of one chart, and the scale from values to pixels."""

    def __init__(
        self, x: Sequence[float], low: float, high: float, x_label: str, *, pad: float = 0.0
    ) -> None:
        self.x0, self.x1 = min(x) - pad, max(x) + pad
        if self.x0 == self.x1:
            self.x0, self.x1 = self.x0 - 0.5, self.x1 + 0.5
        if high - low <= 1e-6 * max(abs(low), abs(high)):
            low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
        margin = (high - low) * 0.05
        self.y0, self.y1 = (low - margin if low else low), (high + margin if high else high)
        self.parts: list[str] = [
            tag("text", escape(x_label), x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 3, text_anchor="middle")
        ]
        marks = ticks(self.y0, self.y1)
        digits = max(0, math.ceil(-math.log10(_step(marks)) - 1e-9))
        for value in marks:
            text = f"{value:,.{digits}f}" if digits < 5 else f"{value:.1e}"
            self.parts += [
                self.level(value, "grid"),
                tag("text", text, x=LEFT - 5, y=self.y(value) + 3.5, text_anchor="end"),
            ]
        self.parts += [
            tag("text", f"{value:.0f}", x=self.x(value), y=HEIGHT - BOTTOM + 14, text_anchor="middle")
            for value in ticks(self.x0, self.x1, 8)
            if round(value, 9).is_integer()
        ]

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def level(self, value: float, css: str) -> Html:
        return tag("line", css=css, x1=LEFT, x2=WIDTH - RIGHT, y1=self.y(value), y2=self.y(value))

    def path(self, points: Sequence[tuple[float, float | None]]) -> str:
        """Line segments through the values that are there."""
        return "".join(
            "M" + "L".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in group if b is not None)
            for absent, group in groupby(points, key=lambda point: point[1] is None)
            if not absent
        )

    def svg(self, x: Sequence[float], series: Series) -> str:
        """The chart, with the numbers that the page shows under the pointer."""
        shown = {printable(name): [number(value) for value in values] for name, values in series.items()}
        data = json.dumps({"x": list(x), "px": [round(self.x(v), 1) for v in x], "series": shown})
        return tag("svg", "".join(self.parts), viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", data_chart=data)


def lines(
    title: str,
    x: Sequence[float],
    series: Series,
    *,
    note: str = "",
    x_label: str = "round",
    limits: Sequence[float] = (),
    band: tuple[Values, Values] | None = None,
) -> str:
    """One line per series; `band` shades between two more; `limits` are drawn where they are near."""
    series = _finite(series)
    every = [v for values in (*series.values(), *(band or ())) for v in values if v is not None]
    if not every:
        return figure(title, note, ABSENT)
    span = max(every) - min(every) or abs(every[0])
    near = [v for v in limits if min(every) - span <= v <= max(every) + span]
    frame = Frame(x, min(*every, *near, every[0]), max(*every, *near, every[0]), x_label)
    if band is not None:
        low, high = ([(a, b) for a, b in zip(x, edge, strict=True) if b is not None] for edge in band)
        frame.parts.append(tag("path", css="band", d=frame.path([*high, *reversed(low)]) + "Z"))
    frame.parts += [frame.level(value, "limit") for value in near]
    for i, values in enumerate(series.values()):
        points = list(zip(x, values, strict=True))
        frame.parts.append(tag("path", css=f"line c{i % COLOURS}", d=frame.path(points)))
        if len(x) <= 40:
            frame.parts += [
                tag("circle", css=f"c{i % COLOURS}", cx=frame.x(a), cy=frame.y(b), r=2.2)
                for a, b in points
                if b is not None
            ]
    return figure(title, note, frame.svg(x, series), _legend(series) if len(series) > 1 else None)


def stacked(
    title: str,
    x: Sequence[float],
    series: Series,
    *,
    note: str = "",
    x_label: str = "round",
    total: bool = False,
) -> str:
    """One bar per x, its parts stacked, negative ones downwards; `total` marks their sum."""
    series = _finite(series)
    columns = list(zip(*([v or 0.0 for v in values] for values in series.values()), strict=True))
    if not any(map(any, columns)):
        return figure(title, note, ABSENT)
    tops, bottoms = ([sum(v for v in column if v * sign > 0) for column in columns] for sign in (1, -1))
    frame = Frame(x, min(bottoms), max(tops), x_label, pad=0.5 * _step(x))
    width = max(frame.x(x[0] + _step(x)) - frame.x(x[0]) - 1.0, 0.5)
    for a, column in zip(x, columns, strict=True):
        left, up, down = frame.x(a) - width / 2, 0.0, 0.0
        for i, value in enumerate(column):
            start, up, down = (up, up + value, down) if value > 0 else (down, up, down + value)
            if value:
                high, low = sorted((frame.y(start), frame.y(start + value)))
                frame.parts.append(
                    tag("rect", css=f"c{i % COLOURS}", x=left, y=high, width=width, height=low - high)
                )
        if total:
            level = frame.y(sum(column))
            frame.parts.append(tag("line", css="total", x1=left, x2=left + width, y1=level, y2=level))
    sums = {"sum": [sum(column) for column in columns]} if total else {}
    return figure(title, note, frame.svg(x, {**series, **sums}), _legend(series) | dict.fromkeys(sums, "sum"))


def _legend(series: Series) -> dict[str, str]:
    """Series that show nothing keep their colour and are not listed."""
    return {
        name: f"c{i % COLOURS}"
        for i, (name, values) in enumerate(series.items())
        if any(v is not None for v in values)
    }


def _finite(series: Series) -> dict[str, list[float | None]]:
    """Values that can be drawn. Differences of larger ones would overflow."""
    return {
        name: [v if v is not None and abs(v) < LARGEST else None for v in values]
        for name, values in series.items()
    }


def _step(x: Sequence[float]) -> float:
    return min((b - a for a, b in pairwise(x)), default=1.0)


def trend(values: Values, count: int) -> str:
    """The last values as blocks of text; a blank where one is absent."""
    shown = _finite({"": values[-count:]})[""]
    there = [v for v in shown if v is not None]
    low, high = min(there, default=0.0), max(there, default=0.0)
    span = high - low if high > low else 1.0
    return "".join(" " if v is None else "▁▂▃▄▅▆▇█"[min(7, int((v - low) / span * 8))] for v in shown)


Life = tuple[int, str, str | None, float | None]
"""Epoch, stage, blueprint, alpha."""


def lanes(title: str, note: str, epochs: int, slots: Mapping[str, Sequence[Life]]) -> str:
    """One network: a lane per slot, stages as bands, blueprints written where they begin, alpha as a line
    from 0 to 1."""
    lane, left, end = 38, 44, WIDTH - RIGHT
    height, per = lane * len(slots) + 16, (end - left) / epochs
    parts = [tag("text", "epoch", x=left - 5, y=height - 4, text_anchor="end")]
    parts += [
        tag("text", f"{e:.0f}", x=left + e * per, y=height - 4, text_anchor="middle")
        for e in ticks(0, epochs, 8)[1:]
        if e.is_integer()
    ]
    for row, (slot, lives) in enumerate(slots.items()):
        top, base = row * lane + 4, row * lane + lane
        parts += [
            tag("rect", css="DORMANT", x=left, y=top, width=per * epochs, height=lane - 4),
            tag("text", escape(slot), x=left - 5, y=top + 19, text_anchor="end"),
        ]
        # A gap in the epochs ends a group: the next seed may have the same blueprint.
        numbered = list(enumerate(lives))
        for (stage, blueprint, _), group in groupby(
            numbered, key=lambda n: (n[1][1], n[1][2], n[1][0] - n[0])
        ):
            at = [life[0] for _, life in group]
            label = f"{slot}: {blueprint or 'unknown'} {stage}, epochs {at[0]} to {at[-1]}"
            parts.append(
                tag(
                    "rect",
                    tag("title", escape(label)),
                    css=stage,
                    x=left + (at[0] - 1) * per,
                    y=top,
                    width=per * len(at),
                    height=lane - 4,
                )
            )
        for (blueprint, _), group in groupby(numbered, key=lambda n: (n[1][2], n[1][0] - n[0])):
            seed = [life for _, life in group]
            begin = left + (seed[0][0] - 1) * per + 2
            place = {"x": begin} if begin < end - 62 else {"x": end, "text_anchor": "end"}
            points = "L".join(
                f"{left + e * per:.1f},{base - (alpha or 0.0) * (lane - 6):.1f}" for e, _, _, alpha in seed
            )
            parts += [
                tag("text", escape(blueprint or "unknown"), css="blueprint", y=top + 10, **place),
                tag("path", css="alpha", d=f"M{points}"),
            ]
    return figure(title, note, tag("svg", "".join(parts), viewBox=f"0 0 {WIDTH} {height}", role="img"))
