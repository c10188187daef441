"""Draws `idea.svg`, the picture of the README and of the first page: a network with slots, the seeds in them,
the life of a seed.

`python docs/images/make_idea.py` writes the file beside this script."""

from __future__ import annotations

from drawing import (
    BLENDING,
    EMPTY,
    FAINT,
    FRAME,
    HOST,
    INK,
    PAPER,
    PERMANENT,
    POLICY,
    PRUNED,
    TRAINING,
    Box,
    arrow,
    picture,
    text,
    write,
)

WIDTH, HEIGHT = 960, 520
LINE_Y, SEED_Y = 300, 190
"""Heights of the host's forward pass and of the seeds beside it."""


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
    does = arrow((584, 80), (584, SEED_Y - 33))
    return [
        box.svg(),
        sees,
        text(212, 118, "sees accuracy, gradients, what each seed contributes", size=13, anchor="start"),
        does,
        text(596, 118, "decides what grows, and where", size=13, anchor="start"),
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
    title = "A host network with three slots, the seeds in them, and the policy that decides"
    return picture(title, WIDTH, HEIGHT, [*network(), *policy(), *life()])


PICTURES = {"idea.svg": draw}

if __name__ == "__main__":
    write(PICTURES)
