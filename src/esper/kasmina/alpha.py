"""Alpha: the share of a seed in the output of its slot. Only the controller changes it, once per epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from esper.leyline import AlphaCurve, AlphaMode, EsperError

MIN_STEEPNESS, MAX_STEEPNESS = 1e-3, 100.0
"""Below this range a sigmoid is a straight line, and in the limit 0/0; above it is a step."""


def curve_value(curve: AlphaCurve, t: float, steepness: float) -> float:
    """Progress in [0, 1] at time t in [0, 1]; 0 and 1 map to themselves. Only SIGMOID uses the steepness."""
    if curve is AlphaCurve.LINEAR:
        return t
    if curve is AlphaCurve.COSINE:
        return 0.5 * (1.0 - math.cos(math.pi * t))
    # σ(k(t−½)) rescaled to pass through (0, 0) and (1, 1), written with tanh, which cannot overflow.
    return 0.5 * (1.0 + math.tanh(0.5 * steepness * (t - 0.5)) / math.tanh(0.25 * steepness))


@dataclass(slots=True)
class AlphaController:
    """A ramp from `start` to `target` over `steps_total` epochs, of which `steps_done` have passed."""

    alpha: float = 0.0
    start: float = 0.0
    target: float = 0.0
    mode: AlphaMode = AlphaMode.HOLD
    curve: AlphaCurve = AlphaCurve.LINEAR
    steepness: float = 12.0
    steps_total: int = 0
    steps_done: int = 0

    def retarget(
        self, target: float, steps: int, curve: AlphaCurve = AlphaCurve.LINEAR, steepness: float = 12.0
    ) -> None:
        """Begin a ramp to `target`. With 0 steps, or if alpha is there already, alpha is set at once."""
        if self.mode is not AlphaMode.HOLD:
            raise EsperError(
                f"alpha is moving ({self.mode.name} to {self.target}); a new target needs it to hold"
            )
        if not 0.0 <= target <= 1.0:
            raise EsperError(f"alpha target is {target}, must lie in [0, 1]")
        if steps < 0:
            raise EsperError(f"alpha ramp of {steps} epochs, must be 0 or more")
        if not MIN_STEEPNESS <= steepness <= MAX_STEEPNESS:
            raise EsperError(f"steepness is {steepness}, must lie in [{MIN_STEEPNESS:g}, {MAX_STEEPNESS:g}]")
        if steps == 0 or target == self.alpha:
            self.pin(target)
            return
        self.start, self.target = self.alpha, target
        self.curve, self.steepness = curve, steepness
        self.steps_total, self.steps_done = steps, 0
        self.mode = AlphaMode.UP if target > self.alpha else AlphaMode.DOWN

    def pin(self, alpha: float) -> None:
        """Hold at exactly this value."""
        self.alpha = self.start = self.target = alpha
        self.mode = AlphaMode.HOLD
        self.steps_total = self.steps_done = 0

    def tick(self) -> bool:
        """Move one epoch along the ramp; True when the target is reached by this tick."""
        if self.mode is AlphaMode.HOLD:
            return False
        self.steps_done += 1
        if self.steps_done >= self.steps_total:
            self.pin(self.target)
            return True
        progress = curve_value(self.curve, self.steps_done / self.steps_total, self.steepness)
        self.alpha = self.start + (self.target - self.start) * progress
        return False

    @property
    def velocity(self) -> float:
        """Mean change per epoch of the current ramp."""
        return 0.0 if self.mode is AlphaMode.HOLD else (self.target - self.start) / self.steps_total
