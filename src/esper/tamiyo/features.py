"""What a policy sees: one table of features from which the layout, the docs and the arrays are made.

Each feature has a name, a description, a source and a normaliser. A feature that may be unmeasured is
followed by a validity bit; without a measurement both columns are 0. Everything is computed for all networks
and slots at once.

E envs, S slots, H epochs of history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import torch

from esper.leyline import (
    COOLDOWN_STAGES,
    OP_ADVANCE,
    OP_FOSSILIZE,
    STAGES,
    AlphaAlgorithm,
    AlphaMode,
    EsperError,
    LifecycleOp,
    PolicyObservation,
    ReportArray,
    SeedStage,
    TrainingSignals,
    allowed,
)

Array = npt.NDArray[Any]
SLOPE_WINDOWS = (1, 3, 8)
"""Numbers of epochs over which the slopes of accuracy and loss are computed."""
SENSORS = ("boundary_norm", "growth_score", "feature_rank", "tap_ratio")
"""Built-in growth sensors. Hosts without convolutions do not measure `tap_ratio`."""


@dataclass(frozen=True, slots=True)
class FeatureInputs:
    """One decision's raw numbers, stacked over envs."""

    signals: dict[str, Array]  # name → [E]
    accuracies: Array  # [E, H], NaN before the first epoch, newest last
    losses: Array  # [E, H]
    table: ReportArray  # [E, S]
    depths: Array  # [S], place of each slot in the order in which activations pass them: 0 first, 1 last
    sensors: dict[str, Array]  # name → [E, S], NaN where nothing was measured
    last_op: Array  # [E]
    last_success: Array  # [E]


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


# Floors keep logarithms finite; losses, norms and sizes are never below them unless a network has diverged.
_CURVES: dict[str, Callable[[Array], Array]] = {
    "linear": lambda raw: raw,
    "log": lambda raw: np.log(np.maximum(raw, 1e-12)),
    "log1p": lambda raw: np.log1p(np.maximum(raw, 0.0)),
}
PLAIN = Normaliser()
PERCENT = Normaliser(unit=100.0)
POINTS = Normaliser(unit=10.0, low=-3.0, high=3.0)
"""Differences of accuracy: ten percentage points become 1; differences beyond 30 points are clipped."""
MAGNITUDE = Normaliser("log", unit=4.0, low=-3.0, high=3.0)
"""Norms and ratios that span many orders of magnitude."""
LOSS = Normaliser("log1p", high=4.0)
LOSS_SLOPE = Normaliser(unit=0.2, low=-3.0, high=3.0)
GROWTH = Normaliser("log1p")
EPOCHS = Normaliser(unit=8.0)
UP_TO_TEN = Normaliser(unit=10.0, high=1.0)


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


def _signal(name: str) -> Source:
    return Source(f"signal {name}", lambda x: x.signals[name])


def _column(name: str) -> Source:
    return Source(f"report {name}", lambda x: x.table[name].astype(np.float64))


def _difference(name: str, other: str) -> Source:
    return Source(f"report {name} - {other}", lambda x: x.table[name] - x.table[other])


def _share_of_episode(name: str) -> Source:
    return Source(f"report {name} / max_epochs", lambda x: x.table[name] / x.signals["max_epochs"][:, None])


def _is(name: str, value: int) -> Source:
    return Source(
        f"report {name} is {value} and occupied",
        lambda x: ((x.table[name] == value) & x.table["occupied"]).astype(np.float64),
    )


def _stage(stage: SeedStage) -> Source:
    return Source(f"report stage is {int(stage)}", lambda x: (x.table["stage"] == stage).astype(np.float64))


def _can(name: str, op: int) -> Source:
    return Source(f"report can_{name}", lambda x: x.table["legal"][..., op].astype(np.float64))


def _slope(values: Literal["accuracies", "losses"], window: int) -> Source:
    """Mean change per epoch over the window; unmeasured before there are that many epochs."""

    def read(x: FeatureInputs) -> Array:
        history = x.accuracies if values == "accuracies" else x.losses
        if history.shape[1] <= window:
            return np.full(len(history), np.nan)
        return (history[:, -1] - history[:, -1 - window]) / window

    return Source(f"slope of {values} over {window}", read)


def _count(*stages: SeedStage) -> Source:
    numbers = ", ".join(str(int(stage)) for stage in stages)
    return Source(
        f"share of slots with report stage in {numbers}", lambda x: np.isin(x.table["stage"], stages).mean(1)
    )


def _last_op(op: LifecycleOp) -> Source:
    return Source(f"last op is {int(op)}", lambda x: (x.last_op == op).astype(np.float64))


def _growth(x: FeatureInputs) -> Array:
    """[E, S] each seed's parameters over the host's; 0 once it is gone."""
    there = ~np.isin(x.table["stage"], tuple(COOLDOWN_STAGES))
    return np.where(there, x.table["params"], 0) / np.maximum(x.table["host_params"].max(1, keepdims=True), 1)


def _sensor(name: str) -> Source:
    return Source(f"sensor {name}", lambda x: x.sensors[name])


def _relative_sensor(name: str) -> Source:
    def read(x: FeatureInputs) -> Array:
        values = x.sensors[name]
        logs = np.log(np.maximum(np.where(np.isfinite(values), values, np.nan), 1e-12))
        return np.exp(logs - logs.mean(1, keepdims=True))

    return Source(f"sensor {name} / geometric mean over slots", read)


def sensor_feature(name: str, meaning: str, normaliser: Normaliser) -> Feature:
    """The slot feature that shows a sensor."""
    return Feature(name, meaning, _sensor(name), normaliser, True)


BASE: tuple[Feature, ...] = (
    Feature(
        "progress",
        "share of the episode that is over",
        Source("signal epoch / max_epochs", lambda x: x.signals["epoch"] / x.signals["max_epochs"]),
    ),
    Feature("val_accuracy", "validation accuracy", _signal("val_accuracy"), PERCENT),
    Feature("train_accuracy", "training accuracy", _signal("train_accuracy"), PERCENT),
    Feature("best_accuracy", "best validation accuracy so far", _signal("best_accuracy"), PERCENT),
    Feature("val_loss", "validation loss", _signal("val_loss"), LOSS),
    Feature("train_loss", "training loss", _signal("train_loss"), LOSS),
    Feature(
        "generalisation_gap",
        "training accuracy minus validation accuracy",
        Source(
            "signal train_accuracy - val_accuracy",
            lambda x: x.signals["train_accuracy"] - x.signals["val_accuracy"],
        ),
        POINTS,
    ),
    *(
        Feature(
            f"accuracy_slope_{w}",
            f"mean change of validation accuracy per epoch, last {w} epochs",
            _slope("accuracies", w),
            POINTS,
            True,
        )
        for w in SLOPE_WINDOWS
    ),
    *(
        Feature(
            f"loss_slope_{w}",
            f"mean change of validation loss per epoch, last {w} epochs",
            _slope("losses", w),
            LOSS_SLOPE,
            True,
        )
        for w in SLOPE_WINDOWS
    ),
    Feature(
        "plateau",
        "epochs since the last gain of accuracy",
        _signal("plateau_epochs"),
        UP_TO_TEN,
    ),
    Feature("host_settled", "1 once the loss has stabilised", _signal("host_stabilized")),
    Feature(
        "incubating",
        "share of slots with a seed that is not yet blended",
        _count(SeedStage.GERMINATED, SeedStage.TRAINING),
    ),
    Feature("blending", "share of slots with a blending seed", _count(SeedStage.BLENDING)),
    Feature("holding", "share of slots with a holding seed", _count(SeedStage.HOLDING)),
    Feature("fossilized", "share of slots with a fossil", _count(SeedStage.FOSSILIZED)),
    Feature(
        "rent",
        "parameters of all seeds over those of the host",
        Source("sum of seeds' params / host params", lambda x: _growth(x).sum(1)),
        GROWTH,
    ),
    Feature(
        "last_success", "1 if the last action was executed", Source("last success", lambda x: x.last_success)
    ),
    *(
        Feature(f"last_{op.name.lower()}", f"1 if the last action was {op.name}", _last_op(op))
        for op in LifecycleOp
    ),
)

SLOT: tuple[Feature, ...] = (
    Feature(
        "depth",
        "place of the slot in the order in which activations pass them: 0 first, 1 last",
        Source(
            "place of the slot in execution order from 0 to 1",
            lambda x: np.broadcast_to(x.depths, x.table.shape),
        ),
    ),
    *(
        Feature(f"stage_{stage.name.lower()}", f"1 if the stage is {stage.name}", _stage(stage))
        for stage in STAGES
        if stage is not SeedStage.UNKNOWN
    ),
    Feature("alpha", "weight with which the seed is blended in", _column("alpha")),
    Feature("alpha_distance", "target of alpha minus alpha", _difference("alpha_target", "alpha")),
    Feature(
        "time_to_target",
        "epochs until the alpha ramp ends",
        Source(
            "report alpha_steps_total - alpha_steps_done, 0 or more",
            lambda x: np.maximum(x.table["alpha_steps_total"] - x.table["alpha_steps_done"], 0),
        ),
        EPOCHS,
    ),
    Feature("alpha_velocity", "change of alpha per epoch", _column("alpha_velocity")),
    *(
        Feature(f"alpha_{mode.name.lower()}", f"1 if the alpha mode is {mode.name}", _is("alpha_mode", mode))
        for mode in AlphaMode
    ),
    *(
        Feature(
            f"mixes_by_{a.name.lower()}", f"1 if the blend operator is {a.name}", _is("alpha_algorithm", a)
        )
        for a in AlphaAlgorithm
    ),
    Feature("tempo", "length of the first alpha ramp in epochs", _column("tempo_epochs"), EPOCHS),
    Feature(
        "stage_age",
        "epochs in this stage, as a share of the episode",
        _share_of_episode("epochs_in_stage"),
    ),
    Feature("age", "epochs since germination, as a share of the episode", _share_of_episode("epochs_total")),
    Feature(
        "contribution",
        "accuracy lost without the seed, in points (leave-one-out)",
        _column("contribution"),
        POINTS,
        True,
    ),
    Feature(
        "contribution_velocity",
        "smoothed change of the contribution per epoch",
        _column("contribution_velocity"),
        POINTS,
        True,
    ),
    Feature(
        "contribution_age",
        "epochs since the contribution was measured, as a share of the episode",
        _share_of_episode("contribution_age"),
        optional=True,
    ),
    Feature(
        "interaction",
        "sum of the seed's pairwise interactions with other seeds, in points",
        _column("interaction_sum"),
        POINTS,
        True,
    ),
    Feature(
        "boost",
        "largest positive interaction with another seed, in points",
        _column("boost_received"),
        POINTS,
        True,
    ),
    Feature(
        "improvement",
        "accuracy gained since the stage began",
        _difference("current_accuracy", "stage_start_accuracy"),
        POINTS,
        True,
    ),
    Feature(
        "improvement_total",
        "accuracy gained since germination",
        _difference("current_accuracy", "initial_accuracy"),
        POINTS,
        True,
    ),
    Feature("gradient_norm", "norm of the seed's gradient", _column("gradient_norm"), MAGNITUDE, True),
    Feature(
        "gradient_ratio",
        "the seed's gradient over the host's, per parameter",
        _column("gradient_ratio"),
        MAGNITUDE,
        True,
    ),
    Feature(
        "gradient_health",
        "1 if every tensor of the seed has a gradient that neither vanishes nor explodes",
        _column("gradient_health"),
        optional=True,
    ),
    Feature(
        "size",
        "parameters of the seed over those of the host",
        Source("seed's params / host params", _growth),
        GROWTH,
    ),
    Feature("can_advance", "1 if the gate of the next stage is open", _can("advance", OP_ADVANCE)),
    Feature("can_fossilize", "1 if the gate to FOSSILIZED is open", _can("fossilize", OP_FOSSILIZE)),
    Feature(
        "boundary_norm", "norm of the loss gradient at the slot", _sensor("boundary_norm"), MAGNITUDE, True
    ),
    Feature(
        "boundary_norm_relative",
        "the same over its geometric mean across slots",
        _relative_sensor("boundary_norm"),
        MAGNITUDE,
        True,
    ),
    Feature(
        "growth_score",
        "gradient that a zero-initialised layer in this slot would receive, relative to the host's",
        _sensor("growth_score"),
        MAGNITUDE,
        True,
    ),
    Feature(
        "growth_score_relative",
        "the same over its geometric mean across slots",
        _relative_sensor("growth_score"),
        MAGNITUDE,
        True,
    ),
    Feature(
        "feature_rank",
        "effective number of independent channels that reach the slot, as a share of all",
        _sensor("feature_rank"),
        optional=True,
    ),
    Feature(
        "tap_ratio",
        "off-centre over centre taps of that gradient: above 1, spatial reach is missing",
        _sensor("tap_ratio"),
        MAGNITUDE,
        True,
    ),
)

BASE_DIM, SLOT_DIM = width(BASE), width(SLOT)


def schema(extra: Sequence[Feature] = ()) -> str:
    """A hash of what each column means: name, source, normaliser and validity of each feature. A policy that
    was trained on one observation must not be given another. The names of extra sensors follow the hash, so
    that a mismatch shows them."""
    rows = [
        [f.name, f.source.key, *(str(value) for value in astuple(f.normaliser)), f.optional]
        for table in (BASE, (*SLOT, *extra))
        for f in table
    ]
    digest = blake2b(orjson.dumps(rows), digest_size=8).hexdigest()
    return "+".join([digest, *(feature.name for feature in extra)])


def stack_inputs(
    signals: Sequence[TrainingSignals],
    table: ReportArray,
    sensors: Mapping[str, Array],
    *,
    depths: Sequence[float],
    last_op: Sequence[int],
    last_success: Sequence[bool],
) -> FeatureInputs:
    """Signals of all envs as arrays; histories are aligned at their newest epoch. `sensors` are [E, S] by
    name; only `tap_ratio` may be missing. `depths` has one number for each slot."""
    names = (
        "epoch",
        "max_epochs",
        "train_loss",
        "train_accuracy",
        "val_loss",
        "val_accuracy",
        "plateau_epochs",
        "host_stabilized",
        "best_accuracy",
    )
    columns = {name: np.array([getattr(s, name) for s in signals], np.float64) for name in names}
    accuracies = _aligned([s.accuracy_history for s in signals])
    losses = _aligned([s.loss_history for s in signals])
    measured = {"tap_ratio": np.full(table.shape, np.nan), **sensors}
    for name in SENSORS:
        if name not in measured:
            raise EsperError(f"sensors: {name} is missing; measured were {', '.join(sensors) or 'none'}")
    for name, values in measured.items():
        if values.shape != table.shape:
            raise EsperError(f"sensors: {name} has shape {values.shape}, must have {table.shape}")
    if len(depths) != table.shape[1]:
        raise EsperError(f"depths: {len(depths)} numbers, must be {table.shape[1]}, one for each slot")
    return FeatureInputs(
        columns,
        accuracies,
        losses,
        table,
        np.array(depths, np.float64),
        measured,
        np.array(last_op),
        np.array(last_success, np.float64),
    )


def _aligned(histories: Sequence[Sequence[float]]) -> Array:
    """[E, longest]: shorter histories begin with NaN."""
    longest = max(len(history) for history in histories)
    return np.array([[np.nan] * (longest - len(h)) + list(h) for h in histories], np.float64)


def _encode(features: Sequence[Feature], inputs: FeatureInputs) -> Array:
    columns = []
    for feature in features:
        raw = np.asarray(feature.source.read(inputs), np.float64)
        measured = np.isfinite(raw)
        # In a network that has just diverged anything may be infinite: that counts as unmeasured too.
        columns.append(np.where(measured, feature.normaliser(np.where(measured, raw, 1.0)), 0.0))
        if feature.optional:
            columns.append(measured.astype(np.float64))
    return np.stack(columns, -1).astype(np.float32)


def batch_obs_to_features(
    inputs: FeatureInputs, device: torch.device | str = "cpu", *, extra: Sequence[Feature] = ()
) -> PolicyObservation:
    """base [E, BASE_DIM], slots [E, S, SLOT_DIM + width(extra)], blueprint indices [E, S] (−1 where empty).
    `extra` are the features of registered sensors."""
    return PolicyObservation(
        base=torch.from_numpy(_encode(BASE, inputs)).to(device),
        slots=torch.from_numpy(_encode((*SLOT, *extra), inputs)).to(device),
        blueprints=torch.from_numpy(inputs.table["blueprint_index"].astype(np.int64)).to(device),
    )
