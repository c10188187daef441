"""Draws `alpha.svg` and `stages.svg`, the pictures of the page about growth, from the code that they show.

`python docs/images/make_growth.py` writes the files beside this script."""

from __future__ import annotations

from drawing import (
    BLENDING,
    EMPTY,
    FAINT,
    FRAME,
    PERMANENT,
    PRUNED,
    TRAINING,
    Box,
    arrow,
    picture,
    text,
    write,
)

from esper.kasmina.alpha import AlphaController, curve_value
from esper.leyline import AlphaCurve, LifecycleOp, SeedStage
from esper.leyline.actions import TEMPO_EPOCHS, TempoAction
from esper.leyline.stages import GRAFT, TRANSITIONS, Transition

ISOLATION, SHOWN = 2, 12
"""Epochs in isolation, as in the `digits_*` tasks, and epochs on the axis."""
COLOURS = {
    TempoAction.INSTANT: "#0b6e4f",
    TempoAction.FAST: "#b4540a",
    TempoAction.STANDARD: "#7a3e9d",
    TempoAction.SLOW: "#1f5fa8",
}
CURVE_COLOURS = {AlphaCurve.LINEAR: "#b4540a", AlphaCurve.COSINE: "#7a3e9d", AlphaCurve.SIGMOID: "#1f5fa8"}


# -- alpha over time -----------------------------------------------------------------------------------------


def line(points: list[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.4"/>'


def axes(left: float, width: float, title: str, below: str) -> list[str]:
    return [
        f'<rect x="{left}" y="60" width="{width}" height="200" fill="{FRAME}"/>',
        text(left, 36, title, bold=True, anchor="start"),
        text(left - 10, 65, "1", size=13, colour=FAINT, anchor="end"),
        text(left - 10, 264, "0", size=13, colour=FAINT, anchor="end"),
        text(left - 10, 165, "α", size=15, anchor="end"),
        text(left + width / 2, 286, below, size=13, colour=FAINT),
    ]


def alphas(tempo: TempoAction) -> list[float]:
    """Alpha in each epoch after a seed was planted, as the controller gives it."""
    control = AlphaController()
    if tempo is TempoAction.INSTANT:
        control.pin(1.0)
        return [control.alpha] * (SHOWN + 1)
    values = [0.0] * (ISOLATION + 1)
    control.retarget(1.0, TEMPO_EPOCHS[tempo])
    while len(values) <= SHOWN:
        control.tick()
        values.append(control.alpha)
    return values


def draw_alpha() -> str:
    left, width = 50, 430
    parts = axes(left, width, "a graft, and lifecycles with three tempos", "epochs after planting")
    for epoch in range(0, SHOWN + 1, 2):
        x = left + epoch * width / SHOWN
        parts.append(text(x, 276, str(epoch), size=11, colour=FAINT))
    parts[5] = text(left + width / 2, 296, "epochs after planting", size=13, colour=FAINT)
    for row, (tempo, colour) in enumerate(COLOURS.items()):
        points = [(left + e * width / SHOWN, 260 - 200 * a) for e, a in enumerate(alphas(tempo))]
        parts.append(line(points, colour))
        label = "graft" if tempo is TempoAction.INSTANT else f"{TEMPO_EPOCHS[tempo]} epochs"
        parts += legend(left + 330, 176 + 20 * row, label, colour)
    left = 560
    parts += axes(left, 350, "curves of a ramp", "time of the ramp")
    for row, (curve, colour) in enumerate(CURVE_COLOURS.items()):
        points = [(left + 350 * t / 40, 260 - 200 * curve_value(curve, t / 40, 12.0)) for t in range(41)]
        parts.append(line(points, colour))
        parts += legend(left + 250, 196 + 20 * row, curve.name.lower(), colour)
    return picture("Share of a seed over time", 940, 310, parts)


def legend(x: float, y: float, label: str, colour: str) -> list[str]:
    return [line([(x, y), (x + 24, y)], colour), text(x + 32, y + 5, label, size=13, anchor="start")]


# -- stages --------------------------------------------------------------------------------------------------

FILLS = {
    SeedStage.DORMANT: EMPTY,
    SeedStage.GERMINATED: EMPTY,
    SeedStage.TRAINING: TRAINING,
    SeedStage.BLENDING: BLENDING,
    SeedStage.HOLDING: BLENDING,
    SeedStage.FOSSILIZED: PERMANENT,
}
STEP, WIDE, TOP, HIGH = 164, 110, 120, 50


def left_of(stage: SeedStage) -> float:
    return 15 + STEP * list(FILLS).index(stage)


def draw_stages() -> str:
    """The table of transitions. Those to the next stage are straight, a graft runs above, prunes below."""
    parts = [Box(left_of(s), TOP, WIDE, HIGH, fill, (s.name.lower(),)).svg() for s, fill in FILLS.items()]
    below = TOP + 120
    parts.append(Box(left_of(SeedStage.BLENDING), below, WIDE, HIGH, PRUNED, ("pruned",)).svg())
    middle, centre = TOP + HIGH / 2, left_of(SeedStage.BLENDING) + WIDE / 2
    for (stage, op), transition in TRANSITIONS.items():
        x = left_of(stage) + WIDE / 2
        if op is LifecycleOp.PRUNE:
            parts.append(arrow((x, TOP + HIGH), (x, below - 40), head=False, colour=FAINT))
        elif op is not LifecycleOp.SET_ALPHA_TARGET:
            parts.append(arrow((left_of(stage) + WIDE + 2, middle), (left_of(transition.to) - 2, middle)))
            parts.append(text(left_of(stage) + (WIDE + STEP) / 2, middle - 30, gate(transition), size=12))
            parts.append(text(left_of(stage) + (WIDE + STEP) / 2, middle + 44, op.name.lower(), size=12))
    ends = [left_of(s) + WIDE / 2 for s in (SeedStage.GERMINATED, SeedStage.HOLDING)]
    parts.append(arrow((ends[0], below - 40), (ends[1], below - 40), head=False, colour=FAINT))
    parts.append(arrow((centre, below - 40), (centre, below - 3), colour=FAINT))
    parts.append(text(centre + 10, below - 16, "prune", size=12, anchor="start"))
    start, end = left_of(SeedStage.DORMANT) + WIDE / 2, left_of(GRAFT.to) + WIDE / 2
    parts.append(arrow((start, TOP), (start, 62), (end, 62), (end, TOP - 3)))
    graft = f"germinate as a graft ({gate(GRAFT)}): fully on at once"
    parts.append(text((start + end) / 2, 50, graft, size=13))
    parts.append(
        arrow((left_of(SeedStage.BLENDING), below + 25), (start, below + 25), (start, TOP + HIGH + 3))
    )
    parts.append(text(start + 150, below + 18, "after a cooldown the slot is free", size=12, colour=FAINT))
    note = "set alpha target: a blending or holding seed gets another share"
    parts.append(text(935, below + 70, note, size=12, anchor="end"))
    return picture("The stages of a seed and the operations that lead from one to the next", 950, 325, parts)


def gate(transition: Transition) -> str:
    return "" if transition.gate is None else f"gate {transition.gate.name}"


PICTURES = {"alpha.svg": draw_alpha, "stages.svg": draw_stages}

if __name__ == "__main__":
    write(PICTURES)
