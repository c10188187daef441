"""Signals of one network's training run: losses, accuracies, whether it has settled, whether it improves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from esper._files import decode
from esper.leyline import TimeLeft, TrainingSignals

PLATEAU_GAIN = 0.01
"""A gain counts if it removes this share of the error that was left after the last gain that counted; every
other epoch adds to the plateau. Small gains add up, so that short epochs do not look like a plateau."""
HISTORY = 10
"""Number of epochs of loss and accuracy in the signals."""
STABLE_GAIN = 0.03
"""A loss that improves by less than this share …"""
STABLE_LOSS = 0.05
"""… and worsens by less than this share is stable."""
STABLE_EPOCHS = 3
"""Number of stable epochs in a row after which the host counts as settled, permanently."""


@dataclass(slots=True)
class _State:
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    best_accuracy: float = -math.inf
    last_gain: float | None = None
    """Accuracy at the last gain that counted."""
    plateau: int = 0
    stable: int = 0
    settled: bool = False


class SignalTracker:
    """Turns one epoch's measurements into signals. `update` records them; `peek` returns the same signals
    without recording."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._state = _State()

    def update(
        self,
        time: TimeLeft,
        *,
        train_loss: float,
        train_accuracy: float,
        val_loss: float,
        val_accuracy: float,
    ) -> TrainingSignals:
        self._state = self._next(val_loss, val_accuracy)
        return self._signals(self._state, time, train_loss, train_accuracy)

    def peek(
        self,
        time: TimeLeft,
        *,
        train_loss: float,
        train_accuracy: float,
        val_loss: float,
        val_accuracy: float,
    ) -> TrainingSignals:
        return self._signals(self._next(val_loss, val_accuracy), time, train_loss, train_accuracy)

    def _next(self, loss: float, accuracy: float) -> _State:
        old = self._state
        last = old.last_gain
        gains = last is None or accuracy > last + PLATEAU_GAIN * (100.0 - last)
        stable = old.stable + 1 if self._is_stable(old.losses, loss) else 0
        return _State(
            losses=[*old.losses, loss][-HISTORY:],
            accuracies=[*old.accuracies, accuracy][-HISTORY:],
            best_accuracy=accuracy if accuracy > old.best_accuracy else old.best_accuracy,
            last_gain=accuracy if gains and math.isfinite(accuracy) else last,
            plateau=0 if gains else old.plateau + 1,
            stable=stable,
            settled=old.settled or stable >= STABLE_EPOCHS,
        )

    def _is_stable(self, losses: Sequence[float], loss: float) -> bool:
        if not losses or not losses[-1] > 0:
            return False
        change = (losses[-1] - loss) / losses[-1]
        return -STABLE_LOSS < change < STABLE_GAIN

    def _signals(
        self, state: _State, time: TimeLeft, train_loss: float, train_accuracy: float
    ) -> TrainingSignals:
        losses, accuracies = state.losses, state.accuracies
        return TrainingSignals(
            time=time,
            train_loss=train_loss,
            train_accuracy=train_accuracy,
            val_loss=losses[-1],
            val_accuracy=accuracies[-1],
            plateau_epochs=state.plateau,
            host_stabilized=state.settled,
            best_accuracy=state.best_accuracy,
            loss_history=tuple(losses),
            accuracy_history=tuple(accuracies),
        )

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._state)

    def load_state_dict(self, state: object) -> None:
        self._state = decode(_State, state, "tracker", complete=True)
