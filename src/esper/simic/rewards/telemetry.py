"""What one reward was made of."""

from __future__ import annotations


class RewardComponentsTelemetry(dict[str, float]):
    """Named amounts in the order in which their mode lists them. The reward is their sum, there is no
    other."""

    @property
    def total(self) -> float:
        return sum(self.values())
