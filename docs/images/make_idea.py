"""Draws `idea.svg`, the picture in the README: a network with slots, the seeds in them, the life of a seed.

`python docs/images/make_idea.py` writes the file beside this script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).with_name("idea.svg")
WIDTH, HEIGHT = 960, 520
INK, FAINT, PAPER = "#1f2933", "#6b7785", "#ffffff"
HOST, POLICY, EMPTY, FRAME = "#dbe7f5", "#efe6f7", "#ffffff", "#f6f8fa"
TRAINING, BLENDING, PERMANENT, PRUNED = "#fdf0d0", "#fbd9a6", "#cdebd0", "#f3d6d6"
LINE_Y, SEED_Y = 300, 190
"""Heights of the host's forward pass and of the seeds beside it."""


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


def add_sign(x: float) -> str:
    """Where the output of a seed joins the host."""
    circle = f'<circle cx="{x}" cy="{LINE_Y}" r="11" fill="{PAPER}" stroke="{INK}" stroke-width="1.4"/>'
    return circle + text(x, LINE_Y + 6, "+", size=18, bold=True)


def slot(x: float, name: str, fill: str, lines: tuple[str, ...], *, empty: bool = False) -> str:
    """A slot of 150 after a host block: the seed reads what passes and adds to it."""
    box = Box(x + 5, SEED_Y - 29, 140, 58, fill, lines, dashed=empty)
    colour = FAINT if empty else INK
    way_in = arrow((x + 20, LINE_Y), (x + 20, SEED_Y + 30), dashed=empty, colour=colour)
    way_out = arrow((x + 130, SEED_Y + 30), (x + 130, LINE_Y - 12), dashed=empty, colour=colour)
    label = text(x + 75, LINE_Y - 42, name, size=13, colour=FAINT)
    return "\n".join([box.svg(), way_in, way_out, label, "" if empty else add_sign(x + 130)])


def network() -> list[str]:
    parts = [
        f'<rect x="14" y="146" width="{WIDTH - 28}" height="216" rx="10" fill="{FRAME}"/>',
        arrow((70, LINE_Y), (932, LINE_Y)),
        text(46, LINE_Y + 5, "input"),
        text(908, LINE_Y - 12, "output"),
    ]
    for number, x in enumerate((85, 350, 615), start=1):
        parts.append(Box(x, LINE_Y - 26, 96, 52, HOST, (f"block {number}",)).svg())
    parts += [
        slot(188, "slot 1", PERMANENT, ("seed", "permanent")),
        slot(453, "slot 2", BLENDING, ("seed", "blending in, α = 0.6")),
        slot(718, "slot 3", EMPTY, ("empty",), empty=True),
    ]
    parts.append(text(480, LINE_Y + 47, "the host: an ordinary network that trains all the time", size=13))
    return parts


def policy() -> list[str]:
    choices = "after every epoch: wait, or plant, advance, keep or prune one seed"
    box = Box(150, 20, 660, 58, POLICY, ("policy", choices))
    sees = arrow((200, 146), (200, 82))
    does = arrow((560, 80), (560, SEED_Y - 33))
    return [
        box.svg(),
        sees,
        text(212, 118, "sees accuracy, gradients, what each seed contributes", size=13, anchor="start"),
        does,
        text(572, 118, "decides what grows, and where", size=13, anchor="start"),
    ]


def life() -> list[str]:
    """The stages of a seed, in the order in which it passes them."""
    y, width, height = 420, 132, 64
    stages = (
        ("germinated", ("planted; output", "does not change"), EMPTY),
        ("training", ("learns alone,", "host unaffected"), TRAINING),
        ("blending", ("its share α rises", "from 0 to 1"), BLENDING),
        ("holding", ("fully on; its worth", "is measured"), BLENDING),
        ("fossilized", ("permanent part", "of the network"), PERMANENT),
    )
    parts = [text(30, y - 18, "the life of a seed, within one training run", bold=True, anchor="start")]
    for i, (name, lines, fill) in enumerate(stages):
        x = 30 + i * 154
        parts.append(Box(x, y, width, height, fill, (name, *lines)).svg())
        if i:
            parts.append(arrow((x - 22, y + height / 2), (x - 4, y + height / 2)))
    last, below = 30 + len(stages) * 154, y + height + 18
    parts.append(
        Box(last, y, width - 2, height, PRUNED, ("pruned", "removed; the slot", "is free again")).svg()
    )
    for i in range(4):  # a seed can be pruned in every stage but the last
        x = 30 + i * 154 + width / 2
        parts.append(arrow((x, y + height + 2), (x, below), dashed=True, head=False, colour=FAINT))
    end = last + width / 2
    parts.append(
        arrow((30 + width / 2, below), (end, below), (end, y + height + 4), dashed=True, colour=FAINT)
    )
    return parts


def draw() -> str:
    markers = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
        for name, colour in (("head", INK), ("faint", FAINT))
    )
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" role="img">'
    )
    lines = [
        start,
        "<title>A host network with three slots, the seeds in them, and the policy that decides</title>",
        f"<defs>{markers}</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="{PAPER}"/>',
        *network(),
        *policy(),
        *life(),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
