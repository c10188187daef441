"""Running statistics: of observations, of rewards (a scale only) and of returns (PopArt).

Statistics are float64 and their state is plain JSON, so a stored and restored normaliser continues exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from esper._files import decode
from esper.leyline import EsperError, StructureError

Array = npt.NDArray[np.float64]


def _as_array(values: npt.ArrayLike | Tensor) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise EsperError(
            f"statistics of a batch with {np.count_nonzero(~np.isfinite(array))} non-finite values "
            f"of {array.size}"
        )
    return array


NonNegative = Annotated[float, msgspec.Meta(ge=0.0)]


@dataclass(frozen=True, slots=True)
class MeanStdState:
    """The state of a RunningMeanStd."""

    mean: float | list[float]
    var: float | list[float]
    count: NonNegative
    decay: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]


@dataclass(frozen=True, slots=True)
class RewardScaleState:
    """The state of a RewardNormalizer."""

    mean_square: NonNegative
    count: Annotated[int, msgspec.Meta(ge=0)]


class RunningMeanStd:
    """Mean and population variance of a stream of batches, merged exactly (Chan et al.).

    `decay` is the factor on the weight of earlier batches at each new batch; 1 keeps them all.
    """

    def __init__(self, shape: tuple[int, ...] = (), *, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise EsperError(f"RunningMeanStd: decay is {decay}, must lie in (0, 1]")
        self.decay = decay
        self.mean: Array = np.zeros(shape)
        self.var: Array = np.ones(shape)
        self.count = 0.0

    def update(self, values: npt.ArrayLike | Tensor) -> None:
        """Add a batch [N, *shape]; an empty batch changes nothing."""
        batch = _as_array(values)
        if batch.shape[1:] != self.mean.shape:
            needed = ", ".join(["N", *map(str, self.mean.shape)])
            raise EsperError(f"RunningMeanStd: batch of shape {batch.shape}, needs ({needed})")
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

    def load_state_dict(self, state: object) -> None:
        stored = decode(MeanStdState, state, "RunningMeanStd")
        mean, var = np.asarray(stored.mean, dtype=np.float64), np.asarray(stored.var, dtype=np.float64)
        for name, array in (("mean", mean), ("var", var)):
            if array.shape != self.mean.shape or not np.isfinite(array).all():
                raise StructureError(
                    f"RunningMeanStd: {name} has shape {array.shape} in the state, must be finite numbers of "
                    f"shape {self.mean.shape}"
                )
        self.mean, self.var, self.count, self.decay = mean, var, stored.count, stored.decay


class RewardNormalizer:
    """A positive scale for rewards: their root mean square over all rounds so far.

    No mean is subtracted and nothing is clipped, so the best policy stays the best. The scale changes only in
    `update`, between rounds, so all envs and steps of a round have the same scale."""

    def __init__(self) -> None:
        self.mean_square = 0.0
        self.count = 0

    @property
    def scale(self) -> float:
        return math.sqrt(self.mean_square) if self.mean_square > 0 else 1.0

    def normalize(self, reward: float) -> float:
        return reward / self.scale

    def update(self, rewards: npt.ArrayLike | Tensor) -> None:
        """Add the raw rewards of a finished round."""
        batch = _as_array(rewards)
        if batch.size:
            self.count += batch.size
            self.mean_square += (float((batch**2).mean()) - self.mean_square) * batch.size / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"mean_square": self.mean_square, "count": self.count}

    def load_state_dict(self, state: object) -> None:
        stored = decode(RewardScaleState, state, "RewardNormalizer")
        if not math.isfinite(stored.mean_square):
            raise StructureError(f"RewardNormalizer: mean_square is {stored.mean_square}, must be finite")
        self.mean_square, self.count = stored.mean_square, stored.count


class PopArt:
    """Keeps a value head's targets near zero mean and unit scale without changing its outputs (van Hasselt et
    al.). Every family of tasks has a row of the head and statistics of its own.

    `out` is the head's last layer; V = mean + scale·out(x), with `mean` and `scale` [F] the network's own
    buffers."""

    MIN_SCALE = 1e-3
    """Least scale; the scale of constant returns would be 0."""

    def __init__(self, out: nn.Linear, mean: Tensor, scale: Tensor, *, decay: float = 0.9) -> None:
        self.out, self.mean, self.scale = out, mean, scale
        self.statistics = [RunningMeanStd(decay=decay) for _ in mean]

    def normalize(self, returns: Tensor, family: Tensor) -> Tensor:
        return (returns - self.mean[family]) / self.scale[family]

    @torch.no_grad()
    def update(self, returns: Tensor, family: Tensor) -> None:
        """Add returns [N] of these families [N], then rescale the last layer so that every value stays the
        same. A family without a return stays as it is."""
        for row, statistics in enumerate(self.statistics):
            own = returns[family == row]
            if len(own):
                statistics.update(own)
                self._rescale(row, statistics)

    @torch.no_grad()
    def change_unit(self, factor: float) -> None:
        """All values and statistics times `factor`: rewards are counted in another unit from now on."""
        self.mean *= factor
        self.scale *= factor
        for statistics in self.statistics:
            statistics.mean, statistics.var = statistics.mean * factor, statistics.var * factor**2

    def _rescale(self, row: int, statistics: RunningMeanStd) -> None:
        old_mean, old_scale = self.mean[row].item(), self.scale[row].item()
        self.mean[row] = float(statistics.mean)
        self.scale[row] = max(float(statistics.var) ** 0.5, self.MIN_SCALE)
        # Read back: the float32 statistics that the network uses are the ones to compensate.
        mean, scale = self.mean[row].item(), self.scale[row].item()
        weight, bias = self.out.weight[row], self.out.bias[row]
        weight.copy_(weight.double() * (old_scale / scale))
        bias.copy_((bias.double() * old_scale + old_mean - mean) / scale)
