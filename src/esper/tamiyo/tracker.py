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
HISTORY = 128
"""Number of epochs of loss and accuracy in the signals."""
STABLE_GAIN = 0.09
"""A loss that has improved by less than this share …"""
STABLE_LOSS = 0.05
"""… and worsened by less than this share …"""
STABLE_TIME = 0.25
"""… over this share of the epochs so far …"""
STABLE_EPOCHS = 3
"""… but at least this many epochs, is stable: the host counts as settled from then on."""


@dataclass(slots=True)
class _State:
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    best_accuracy: float = -math.inf
    last_gain: float | None = None
    """Accuracy at the last gain that counted."""
    plateau: int = 0
    epochs: int = 0
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
        losses, epochs = [*old.losses, loss][-HISTORY:], old.epochs + 1
        return _State(
            losses=losses,
            accuracies=[*old.accuracies, accuracy][-HISTORY:],
            best_accuracy=accuracy if accuracy > old.best_accuracy else old.best_accuracy,
            last_gain=accuracy if gains and math.isfinite(accuracy) else last,
            plateau=0 if gains else old.plateau + 1,
            epochs=epochs,
            settled=old.settled or _is_stable(losses, epochs),
        )

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


def _is_stable(losses: Sequence[float], epochs: int) -> bool:
    """Whether the newest loss is close to each of the window's."""
    window = max(STABLE_EPOCHS, math.ceil(STABLE_TIME * epochs))
    *earlier, now = losses[-1 - window :]
    if len(earlier) < min(window, HISTORY - 1):
        return False
    return all(loss > 0 and -STABLE_LOSS < (loss - now) / loss < STABLE_GAIN for loss in earlier)
