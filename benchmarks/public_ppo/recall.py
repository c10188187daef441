"""The task of both sides, in plain numpy: a cue at step 0, no information after it, and at step 30 the action
that matches the cue.

Two actions are legal at every step and only the last one is rewarded, so credit assignment matters. E envs
run in lockstep."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

DELAY = 30
STEPS = DELAY + 1
FEATURES = 8
WINDOW = 256
"""Number of last episodes over which the share of solved ones is taken."""
SOLVED = 0.95
BUDGET = 150_000
"""Env steps after which a run gives up."""


class Recall:
    """Observations [E, 8]: whether the answer is due, and the cue (−1 or 1, seven times) at step 0."""

    def __init__(self, envs: int, seed: int) -> None:
        self.envs, self.rng = envs, np.random.default_rng(seed)
        self.t = 0
        self.cue = np.zeros(envs, np.int64)

    def reset(self) -> npt.NDArray[np.float32]:
        self.t = 0
        self.cue = self.rng.integers(2, size=self.envs)
        seen = self._blank()
        seen[:, 1:] = 2.0 * self.cue[:, None] - 1.0
        return seen

    def step(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], bool]:
        """Next observations, rewards, and whether the episodes are over (then call reset)."""
        done = self.t == DELAY
        earned = (actions == self.cue).astype(np.float32) if done else np.zeros(self.envs, np.float32)
        self.t += 1
        return self._blank(), earned, done

    def _blank(self) -> npt.NDArray[np.float32]:
        seen = np.zeros((self.envs, FEATURES), np.float32)
        seen[:, 0] = self.t == DELAY
        return seen


class Progress:
    """Counts env steps until the share of solved episodes among the last WINDOW reaches SOLVED."""

    def __init__(self) -> None:
        self.steps, self.solved_at = 0, 0
        self.results: list[float] = []

    def add(self, envs: int, earned: npt.NDArray[np.float32], done: bool) -> None:
        self.steps += envs
        if done:
            self.results = [*self.results, *earned.tolist()][-WINDOW:]
            if not self.solved_at and len(self.results) == WINDOW and self.share >= SOLVED:
                self.solved_at = self.steps

    @property
    def share(self) -> float:
        return float(np.mean(self.results)) if self.results else 0.0

    @property
    def over(self) -> bool:
        return self.solved_at > 0 or self.steps >= BUDGET

    def report(self, seconds: float) -> dict[str, float]:
        """`seconds`: of one processor core, including learning."""
        return {"solved_at": self.solved_at, "steps": self.steps, "share": self.share, "seconds": seconds}
