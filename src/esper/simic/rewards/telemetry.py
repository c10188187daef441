"""What one reward was made of."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RewardComponentsTelemetry:
    """Named amounts in the order in which their mode lists them. The reward is their sum, there is no other."""

    components: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        return sum(amount for _, amount in self.components)

    def __getitem__(self, name: str) -> float:
        return dict(self.components)[name]

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return iter(self.components)

    def as_dict(self) -> dict[str, float]:
        return dict(self.components)
