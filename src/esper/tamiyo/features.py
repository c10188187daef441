"""What a policy sees: one table of features that makes the layout, the docs and the arrays.

Each feature has a name, a sentence, a source and a normaliser. One that may be unmeasured is followed by a
bit that says whether it was; the value itself is then 0 and means nothing. Everything is computed for all
networks and slots at once.

E envs, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
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
)

Array = npt.NDArray[Any]
SLOPE_WINDOWS = (1, 3, 8)
"""Epochs over which accuracy and loss are followed."""


@dataclass(frozen=True, slots=True)
class FeatureInputs:
    """One decision's raw numbers, stacked over envs."""

    signals: dict[str, Array]  # name → [E]
    accuracies: Array  # [E, H], NaN before the first epoch, newest last
    losses: Array  # [E, H]
    table: ReportArray  # [E, S]
    sensors: (
        Array  # [E, 4, S]: boundary norm, growth score, feature rank, tap ratio (NaN where there is none)
    )
    last_op: Array  # [E]
    last_success: Array  # [E]


@dataclass(frozen=True, slots=True)
class Feature:
    name: str
    meaning: str
    source: Callable[[FeatureInputs], Array]
    scale: Callable[[Array], Array]
    optional: bool = False
    """May be unmeasured (NaN): a bit follows."""

    @property
    def width(self) -> int:
        return 2 if self.optional else 1


def columns(table: Sequence[Feature], names: Sequence[str]) -> list[int]:
    """Where these features of a table lie, bits included; names of another table have no place here."""
    first = first_columns(table)
    return [first[f.name] + i for f in table if f.name in names for i in range(f.width)]


def first_columns(table: Sequence[Feature]) -> dict[str, int]:
    """Where each feature of a table begins."""
    ends = accumulate(feature.width for feature in table)
    return {feature.name: end - feature.width for feature, end in zip(table, ends, strict=True)}


def plain(x: Array) -> Array:
    return x


def percent(x: Array) -> Array:
    return x / 100.0


def points(x: Array) -> Array:
    """Differences of accuracy: ten percentage points are 1, and beyond ±30 nothing is told apart."""
    return np.clip(x / 10.0, -3.0, 3.0)


def magnitude(x: Array) -> Array:
    """Norms and ratios over many orders: ln, centred on 1 and kept within ±3."""
    return np.clip(np.log(np.maximum(x, 1e-12)) / 4.0, -3.0, 3.0)


def log_loss(x: Array) -> Array:
    return np.clip(np.log1p(np.maximum(x, 0.0)), 0.0, 4.0)


def _signal(name: str) -> Callable[[FeatureInputs], Array]:
    return lambda x: x.signals[name]


def _column(name: str) -> Callable[[FeatureInputs], Array]:
    return lambda x: x.table[name].astype(np.float64)


def _legal(op: int) -> Callable[[FeatureInputs], Array]:
    return lambda x: x.table["legal"][..., op].astype(np.float64)


def _share_of_episode(name: str) -> Callable[[FeatureInputs], Array]:
    return lambda x: x.table[name] / x.signals["max_epochs"][:, None]


def _is(name: str, value: int) -> Callable[[FeatureInputs], Array]:
    return lambda x: ((x.table[name] == value) & x.table["occupied"]).astype(np.float64)


def _stage(stage: SeedStage) -> Callable[[FeatureInputs], Array]:
    return lambda x: (x.table["stage"] == stage).astype(np.float64)


def _slope(values: str, window: int) -> Callable[[FeatureInputs], Array]:
    """Mean change per epoch over the window; unmeasured before there are so many epochs."""

    def source(x: FeatureInputs) -> Array:
        history = getattr(x, values)
        if history.shape[1] <= window:
            return np.full(len(history), np.nan)
        return (history[:, -1] - history[:, -1 - window]) / window

    return source


def _count(*stages: SeedStage) -> Callable[[FeatureInputs], Array]:
    return lambda x: np.isin(x.table["stage"], stages).mean(1)


def _last_op(op: LifecycleOp) -> Callable[[FeatureInputs], Array]:
    return lambda x: (x.last_op == op).astype(np.float64)


def _growth(x: FeatureInputs) -> Array:
    """[E, S] each seed's parameters over the host's; 0 once it is gone."""
    there = ~np.isin(x.table["stage"], tuple(COOLDOWN_STAGES))
    return np.where(there, x.table["params"], 0) / np.maximum(x.table["host_params"].max(1, keepdims=True), 1)


def _sensor(index: int, *, relative: bool = False) -> Callable[[FeatureInputs], Array]:
    def source(x: FeatureInputs) -> Array:
        values = x.sensors[:, index]
        if not relative:
            return values
        logs = np.log(np.maximum(np.where(np.isfinite(values), values, np.nan), 1e-12))
        return np.exp(logs - logs.mean(1, keepdims=True))

    return source


BASE: tuple[Feature, ...] = (
    Feature(
        "progress",
        "share of the episode that has passed",
        lambda x: x.signals["epoch"] / x.signals["max_epochs"],
        plain,
    ),
    Feature("val_accuracy", "validation accuracy", _signal("val_accuracy"), percent),
    Feature("train_accuracy", "training accuracy", _signal("train_accuracy"), percent),
    Feature("best_accuracy", "best validation accuracy so far", _signal("best_accuracy"), percent),
    Feature("val_loss", "validation loss", _signal("val_loss"), log_loss),
    Feature("train_loss", "training loss", _signal("train_loss"), log_loss),
    Feature(
        "generalisation_gap",
        "training less validation accuracy",
        lambda x: x.signals["train_accuracy"] - x.signals["val_accuracy"],
        points,
    ),
    *(
        Feature(
            f"accuracy_slope_{w}",
            f"change of validation accuracy per epoch over {w}",
            _slope("accuracies", w),
            points,
            True,
        )
        for w in SLOPE_WINDOWS
    ),
    *(
        Feature(
            f"loss_slope_{w}",
            f"change of validation loss per epoch over {w}",
            _slope("losses", w),
            lambda v: np.clip(v * 5, -3, 3),
            True,
        )
        for w in SLOPE_WINDOWS
    ),
    Feature(
        "plateau",
        "epochs without a gain, of ten",
        _signal("plateau_epochs"),
        lambda v: np.minimum(v, 10) / 10,
    ),
    Feature("host_settled", "the loss has stood still once", _signal("host_stabilized"), plain),
    Feature(
        "incubating",
        "share of slots with a seed that is not yet blended",
        _count(SeedStage.GERMINATED, SeedStage.TRAINING),
        plain,
    ),
    Feature("blending", "share of slots with a blending seed", _count(SeedStage.BLENDING), plain),
    Feature("holding", "share of slots with a holding seed", _count(SeedStage.HOLDING), plain),
    Feature("fossilized", "share of slots with a fossil", _count(SeedStage.FOSSILIZED), plain),
    Feature("rent", "ln(1 + seeds' / host's parameters)", lambda x: _growth(x).sum(1), np.log1p),
    Feature("last_success", "the last action was executed", lambda x: x.last_success, plain),
    *(
        Feature(f"last_{op.name.lower()}", f"the last action was {op.name}", _last_op(op), plain)
        for op in LifecycleOp
    ),
)

SLOT: tuple[Feature, ...] = (
    Feature(
        "depth",
        "place of the slot, 0 first to 1 last",
        lambda x: np.broadcast_to(np.linspace(0, 1, x.table.shape[1]), x.table.shape),
        plain,
    ),
    *(
        Feature(f"stage_{stage.name.lower()}", f"stage {stage.name}", _stage(stage), plain)
        for stage in STAGES
        if stage is not SeedStage.UNKNOWN
    ),
    Feature("alpha", "how much of the seed is mixed in", _column("alpha"), plain),
    Feature(
        "alpha_distance", "target less alpha", lambda x: x.table["alpha_target"] - x.table["alpha"], plain
    ),
    Feature(
        "time_to_target",
        "epochs until the ramp ends",
        lambda x: np.maximum(x.table["alpha_steps_total"] - x.table["alpha_steps_done"], 0),
        lambda v: v / 8.0,
    ),
    Feature("alpha_velocity", "change of alpha per epoch", _column("alpha_velocity"), plain),
    *(
        Feature(f"alpha_{mode.name.lower()}", f"alpha mode {mode.name}", _is("alpha_mode", mode), plain)
        for mode in AlphaMode
    ),
    *(
        Feature(f"mixes_by_{a.name.lower()}", f"operator {a.name}", _is("alpha_algorithm", a), plain)
        for a in AlphaAlgorithm
    ),
    Feature("tempo", "length of the first ramp", _column("tempo_epochs"), lambda v: v / 8.0),
    Feature(
        "stage_age",
        "epochs in this stage, as a share of the episode",
        _share_of_episode("epochs_in_stage"),
        plain,
    ),
    Feature(
        "age", "epochs since germination, as a share of the episode", _share_of_episode("epochs_total"), plain
    ),
    Feature("contribution", "accuracy lost without the seed", _column("contribution"), points, True),
    Feature(
        "contribution_velocity",
        "smoothed change of the contribution",
        _column("contribution_velocity"),
        points,
        True,
    ),
    Feature(
        "contribution_age",
        "epochs since it was measured, as a share of the episode",
        _share_of_episode("contribution_age"),
        plain,
        True,
    ),
    Feature(
        "interaction",
        "what the seed gives beyond itself with the others",
        _column("interaction_sum"),
        points,
        True,
    ),
    Feature("boost", "the strongest help from another seed", _column("boost_received"), points, True),
    Feature(
        "improvement",
        "accuracy gained since the stage began",
        lambda x: x.table["current_accuracy"] - x.table["stage_start_accuracy"],
        points,
        True,
    ),
    Feature(
        "improvement_total",
        "accuracy gained since germination",
        lambda x: x.table["current_accuracy"] - x.table["initial_accuracy"],
        points,
        True,
    ),
    Feature("gradient_norm", "norm of the seed's gradient", _column("gradient_norm"), magnitude, True),
    Feature(
        "gradient_ratio",
        "newborn to incumbent: the seed's gradient over the host's, per parameter",
        _column("gradient_ratio"),
        magnitude,
        True,
    ),
    Feature(
        "gradient_health",
        "1 where all tensors have a sound gradient",
        _column("gradient_health"),
        plain,
        True,
    ),
    Feature("size", "ln(1 + seed's / host's parameters)", _growth, np.log1p),
    Feature("can_advance", "the gate of the next stage is open", _legal(OP_ADVANCE), plain),
    Feature("can_fossilize", "the gate to permanence is open", _legal(OP_FOSSILIZE), plain),
    Feature("boundary_norm", "norm of the gradient at the slot", _sensor(0), magnitude, True),
    Feature(
        "boundary_norm_relative",
        "the same over its geometric mean of all slots",
        _sensor(0, relative=True),
        magnitude,
        True,
    ),
    Feature("growth_score", "gradient that a silent layer here would receive", _sensor(1), magnitude, True),
    Feature(
        "growth_score_relative",
        "the same over its geometric mean of all slots",
        _sensor(1, relative=True),
        magnitude,
        True,
    ),
    Feature(
        "feature_rank",
        "independent channels that reach the slot, as a share of all: what can be expressed so far",
        _sensor(2),
        plain,
        True,
    ),
    Feature(
        "tap_ratio",
        "off-centre to centre taps of that gradient: is spatial reach missing",
        _sensor(3),
        magnitude,
        True,
    ),
)

BASE_DIM, SLOT_DIM = (sum(f.width for f in table) for table in (BASE, SLOT))


def schema() -> str:
    """A hash of the layout: a policy trained on one layout must not be fed another."""
    text = "/".join(f"{f.name}:{f.width}" for f in (*BASE, *SLOT))
    return blake2b(text.encode(), digest_size=8).hexdigest()


def stack_inputs(
    signals: Sequence[TrainingSignals],
    table: ReportArray,
    sensors: Array,
    *,
    last_op: Sequence[int],
    last_success: Sequence[bool],
) -> FeatureInputs:
    """Signals of all envs as arrays; histories are aligned at their newest epoch."""
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
    longest = max(len(s.accuracy_history) for s in signals)
    padded = [
        np.array([[np.nan] * (longest - len(h)) + list(h) for h in histories], np.float64)
        for histories in ([s.accuracy_history for s in signals], [s.loss_history for s in signals])
    ]
    if sensors.shape[1] == 3:
        sensors = np.concatenate([sensors, np.full_like(sensors[:, :1], np.nan)], 1)
    if sensors.shape != (len(signals), 4, table.shape[1]):
        raise EsperError(f"sensors have shape {sensors.shape}, wanted {(len(signals), 4, table.shape[1])}")
    return FeatureInputs(
        columns, padded[0], padded[1], table, sensors, np.array(last_op), np.array(last_success, np.float64)
    )


def _encode(features: Sequence[Feature], inputs: FeatureInputs) -> Array:
    columns = []
    for feature in features:
        raw = np.asarray(feature.source(inputs), np.float64)
        measured = np.isfinite(raw)
        # Under a network that has just diverged anything may be infinite: that is unmeasured too.
        columns.append(np.where(measured, feature.scale(np.where(measured, raw, 1.0)), 0.0))
        if feature.optional:
            columns.append(measured.astype(np.float64))
    return np.stack(columns, -1).astype(np.float32)


def batch_obs_to_features(inputs: FeatureInputs, device: torch.device | str = "cpu") -> PolicyObservation:
    """base [E, BASE_DIM], slots [E, S, SLOT_DIM], blueprint indices [E, S] (−1 where empty)."""
    return PolicyObservation(
        base=torch.from_numpy(_encode(BASE, inputs)).to(device),
        slots=torch.from_numpy(_encode(SLOT, inputs)).to(device),
        blueprints=torch.from_numpy(inputs.table["blueprint_index"].astype(np.int64)).to(device),
    )
