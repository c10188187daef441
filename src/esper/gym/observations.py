"""One network's observation as one vector: its base features, those of each slot, and the quotes of each slot
for the blueprints that the task offers.

E envs, S slots, B offered blueprints.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from esper.leyline import PolicyObservation, blueprint_index
from esper.runtime.tasks import TaskSpec
from esper.tamiyo.columns import Feature
from esper.tamiyo.features import BASE, QUOTE, SLOT

WIDE = 10.0
"""Bound of columns whose normaliser has none. They are shares and flags, far inside of it."""

Floats = npt.NDArray[np.float32]


class ObservationLayout:
    """Names, bounds and order of the columns of a task's observation."""

    def __init__(self, task: TaskSpec) -> None:
        self.blueprints = [blueprint_index(name) for name in task.blueprints]
        parts = [("", BASE)]
        parts += [(f"{slot}.", SLOT) for slot in task.slots]
        parts += [(f"{slot}.{name}.", QUOTE) for slot in task.slots for name in task.blueprints]
        self.names = tuple(prefix + name for prefix, table in parts for name in _names(table))
        limits = np.array([limit for _, table in parts for limit in _limits(table)], np.float32)
        self.space = Box(limits[:, 0], limits[:, 1], dtype=np.float32)

    def flatten(self, obs: PolicyObservation) -> Floats:
        """[E, len(names)]."""
        envs = len(obs.base)
        quotes = obs.quotes[:, :, self.blueprints]
        parts = (obs.base, obs.slots.reshape(envs, -1), quotes.reshape(envs, -1))
        return np.concatenate([part.numpy() for part in parts], axis=1)


def _names(table: Sequence[Feature]) -> list[str]:
    """Column names of a table. A validity bit is named `feature.known`."""
    return [name for f in table for name in ((f.name, f"{f.name}.known") if f.optional else (f.name,))]


def _limits(table: Sequence[Feature]) -> list[tuple[float, float]]:
    """Bounds of each column. 0 is always inside: it stands for what was not measured."""
    limits = []
    for feature in table:
        normaliser = feature.normaliser
        lowest = 0.0 if normaliser.curve == "log1p" else -WIDE
        low, high = max(normaliser.low, lowest), min(normaliser.high, WIDE)
        limits.append((min(low, 0.0), max(high, 0.0)))
        if feature.optional:
            limits.append((0.0, 1.0))
    return limits
