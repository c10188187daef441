"""Running statistics: of observations, of rewards (a scale only) and of returns (PopArt).

Statistics are float64 and their state is plain JSON, so a stored and restored normaliser continues exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from esper.leyline import EsperError, StructureError

Array = npt.NDArray[np.float64]


def _as_array(values: npt.ArrayLike | Tensor) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise EsperError(
            f"statistics of a batch with {np.count_nonzero(~np.isfinite(array))} non-finite values of {array.size}"
        )
    return array


def _read(state: Mapping[str, Any], owner: object, *names: str) -> list[Any]:
    if set(state) != set(names):
        raise StructureError(
            f"{type(owner).__name__}: state has fields {sorted(state)}, needs {sorted(names)}"
        )
    return [state[name] for name in names]


class RunningMeanStd:
    """Mean and population variance of a stream of batches, merged exactly (Chan et al.).

    `decay` < 1 shrinks the weight of everything seen before each batch; 1 forgets nothing.
    """

    def __init__(self, shape: tuple[int, ...] = (), *, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise EsperError(f"RunningMeanStd: decay is {decay}, must lie in (0, 1]")
        self.decay = decay
        self.mean: Array = np.zeros(shape)
        self.var: Array = np.ones(shape)
        self.count = 0.0

    def update(self, values: npt.ArrayLike | Tensor) -> None:
        """Take in a batch [N, *shape]; an empty batch changes nothing."""
        batch = _as_array(values)
        if batch.shape[1:] != self.mean.shape:
            raise EsperError(
                f"RunningMeanStd: batch of shape {batch.shape}, needs (N, {', '.join(map(str, self.mean.shape))})"
            )
        if not len(batch):
            return
        mean, var, old = batch.mean(axis=0), batch.var(axis=0), self.count * self.decay
        self.count = old + len(batch)
        share = len(batch) / self.count
        self.var = (
            (1 - share) * (self.var if old else 0.0)
            + share * var
            + share * (1 - share) * (mean - self.mean) ** 2
        )
        self.mean = self.mean + share * (mean - self.mean)

    def state_dict(self) -> dict[str, Any]:
        return {
            "mean": self.mean.tolist(),
            "var": self.var.tolist(),
            "count": self.count,
            "decay": self.decay,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mean, var, count, decay = _read(state, self, "mean", "var", "count", "decay")
        if np.shape(mean) != self.mean.shape:
            raise StructureError(
                f"RunningMeanStd: mean has shape {np.shape(mean)} in the state and {self.mean.shape} here"
            )
        self.mean, self.var = np.asarray(mean, dtype=np.float64), np.asarray(var, dtype=np.float64)
        self.count, self.decay = float(count), float(decay)


class RewardNormalizer:
    """A positive scale for rewards: their root mean square over all rounds so far.

    No mean is taken away and nothing is clipped, so the best policy stays the best. The scale moves only in
    `update`, between rounds: within one, every env and step is scaled alike, in whatever order they come."""

    def __init__(self) -> None:
        self.mean_square = 0.0
        self.count = 0

    @property
    def scale(self) -> float:
        return math.sqrt(self.mean_square) if self.mean_square > 0 else 1.0

    def normalize(self, reward: float) -> float:
        return reward / self.scale

    def update(self, rewards: npt.ArrayLike | Tensor) -> None:
        """Take in the raw rewards of a finished round."""
        batch = _as_array(rewards)
        if batch.size:
            self.count += batch.size
            self.mean_square += (float((batch**2).mean()) - self.mean_square) * batch.size / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"mean_square": self.mean_square, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mean_square, count = _read(state, self, "mean_square", "count")
        if not (math.isfinite(mean_square) and mean_square >= 0 and count >= 0):
            raise StructureError(
                f"RewardNormalizer: mean_square {mean_square} and count {count} must be finite and 0 or more"
            )
        self.mean_square, self.count = float(mean_square), int(count)


class PopArt:
    """Keeps a value head's targets near zero mean and unit scale while its outputs stay what they were (van
    Hasselt et al.).

    `out` is the head's last layer; V = mean + scale·out(x), with `mean` and `scale` the network's own
    buffers."""

    MIN_SCALE = 1e-3
    """Constant returns would otherwise divide the value error by nothing."""

    def __init__(self, out: nn.Linear, mean: Tensor, scale: Tensor, *, decay: float = 0.9) -> None:
        self.out, self.mean, self.scale = out, mean, scale
        self.statistics = RunningMeanStd(decay=decay)

    def normalize(self, returns: Tensor) -> Tensor:
        return (returns - self.mean) / self.scale

    @torch.no_grad()
    def update(self, returns: Tensor) -> None:
        """Take in returns [N], then rescale the last layer so that every value comes out as before."""
        self.statistics.update(returns)
        if not self.statistics.count:
            return
        old_mean, old_scale = self.mean.item(), self.scale.item()
        self.mean.fill_(float(self.statistics.mean))
        self.scale.fill_(max(float(self.statistics.var) ** 0.5, self.MIN_SCALE))
        # Read back: the float32 statistics that the network uses are the ones to compensate.
        mean, scale = self.mean.item(), self.scale.item()
        self.out.weight.copy_(self.out.weight.double() * (old_scale / scale))
        self.out.bias.copy_((self.out.bias.double() * old_scale + old_mean - mean) / scale)
