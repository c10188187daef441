"""What the pictures are drawn with: boxes, texts and arrows as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INK, FAINT, PAPER = "#1f2933", "#6b7785", "#ffffff"
HOST, POLICY, EMPTY, FRAME = "#dbe7f5", "#efe6f7", "#ffffff", "#f6f8fa"
TRAINING, BLENDING, PERMANENT, PRUNED = "#fdf0d0", "#fbd9a6", "#cdebd0", "#f3d6d6"


@dataclass(frozen=True, slots=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    fill: str
    lines: tuple[str, ...]
    dashed: bool = False

    def svg(self) -> str:
        dash = ' stroke-dasharray="5 4"' if self.dashed else ""
        shape = (
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="8" '
            f'fill="{self.fill}" stroke="{FAINT if self.dashed else INK}" stroke-width="1.4"{dash}/>'
        )
        middle = self.x + self.width / 2
        first = self.y + self.height / 2 + 5 - 9 * (len(self.lines) - 1)
        title, *rest = self.lines
        texts = [text(middle, first, title, bold=True, colour=FAINT if self.dashed else INK)]
        texts += [text(middle, first + 18 * (i + 1), line, size=13) for i, line in enumerate(rest)]
        return "\n".join([shape, *texts])


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 15,
    bold: bool = False,
    colour: str = INK,
    anchor: str = "middle",
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{words}</text>"
    )


def arrow(*points: tuple[float, float], dashed: bool = False, head: bool = True, colour: str = INK) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    marker = "faint" if colour == FAINT else "head"
    end = f' marker-end="url(#{marker})"' if head else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}{end}/>'


def picture(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    markers = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
        for name, colour in (("head", INK), ("faint", FAINT))
    )
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">'
    )
    lines = [
        start,
        f"<title>{title}</title>",
        f"<defs>{markers}</defs>",
        f'<rect width="{width}" height="{height}" rx="12" fill="{PAPER}"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def write(pictures: Mapping[str, Callable[[], str]]) -> None:
    """Write each picture beside this file."""
    for name, draw in pictures.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")
