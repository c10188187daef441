"""The columns of an observation: features with their sources and normalisers, and where each begins.

A feature that may be unmeasured is followed by a validity bit; without a measurement both columns are 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np

from esper.leyline import EsperError, allowed
from esper.tamiyo.inputs import Array, FeatureInputs


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Maps a raw number to the range that a network reads well: clip(curve(raw) / unit, low, high)."""

    curve: Literal["linear", "log", "log1p"] = "linear"
    unit: float = 1.0
    """Value of `curve(raw)` that becomes 1."""
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        if self.curve not in _CURVES:
            raise EsperError(f"normaliser: curve is {self.curve!r}; {allowed(_CURVES)}")
        if not 0 < self.unit < math.inf or not self.low < self.high:
            raise EsperError(
                f"normaliser: unit {self.unit}, low {self.low}, high {self.high}; "
                "allowed: a finite unit above 0, and low below high"
            )

    def __call__(self, raw: Array) -> Array:
        scaled = _CURVES[self.curve](raw) / self.unit
        bounded = self.low > -math.inf or self.high < math.inf
        return np.clip(scaled, self.low, self.high) if bounded else scaled

    def curved(self, value: Any) -> Any:
        """`curve(raw)` of a normalised number or tensor: for a log curve, the logarithm of the raw number."""
        return value * self.unit


# Floors keep logarithms finite; ratios are never below them unless a network has diverged.
_CURVES: dict[str, Callable[[Array], Array]] = {
    "linear": lambda raw: raw,
    "log": lambda raw: np.log(np.maximum(raw, 1e-12)),
    "log1p": lambda raw: np.log1p(np.maximum(raw, 0.0)),
}
PLAIN = Normaliser()


class Source(NamedTuple):
    """Where a feature's raw number comes from. `key` states it for the schema hash: change it whenever `read`
    begins to mean something else."""

    key: str
    read: Callable[[FeatureInputs], Array]


@dataclass(frozen=True, slots=True)
class Feature:
    name: str
    meaning: str
    source: Source
    normaliser: Normaliser = PLAIN
    optional: bool = False
    """May be unmeasured (NaN): a validity bit follows."""

    @property
    def width(self) -> int:
        return 2 if self.optional else 1


def columns(table: Sequence[Feature], names: Sequence[str]) -> list[int]:
    """Columns of the named features of a table, validity bits included. Other names are ignored."""
    first = first_columns(table)
    return [first[f.name] + i for f in table if f.name in names for i in range(f.width)]


def first_columns(table: Sequence[Feature]) -> dict[str, int]:
    """First column of each feature of a table."""
    ends = accumulate(feature.width for feature in table)
    return {feature.name: end - feature.width for feature, end in zip(table, ends, strict=True)}


def width(table: Sequence[Feature]) -> int:
    """Number of columns of a table."""
    return sum(feature.width for feature in table)


def encode(features: Sequence[Feature], inputs: FeatureInputs) -> Array:
    """[..., width(features)] of a table whose sources have one shape."""
    columns = []
    for feature in features:
        raw = np.asarray(feature.source.read(inputs), np.float64)
        measured = np.isfinite(raw)
        # In a network that has just diverged anything may be infinite: that counts as unmeasured too.
        columns.append(np.where(measured, feature.normaliser(np.where(measured, raw, 1.0)), 0.0))
        if feature.optional:
            columns.append(measured.astype(np.float64))
    return np.stack(columns, -1).astype(np.float32)
