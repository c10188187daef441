"""The raw numbers of one decision, stacked over the networks of one task, and what follows from them: chance,
standard errors, sizes and prices relative to the host.

Accuracies arrive in points and leave as shares of 1. Unknown numbers are NaN.

E envs, S slots, B registered blueprints, H epochs of history.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from esper.leyline import (
    PRESENT_STAGES,
    EsperError,
    ObjectiveConfig,
    ReportArray,
    TrainingSignals,
)
from esper.leyline.facts import HostFacts

Array = npt.NDArray[Any]
SENSORS = ("boundary_norm", "growth_score", "feature_rank", "tap_ratio")
"""Built-in growth sensors. Hosts without convolutions do not measure `tap_ratio`."""
SIGNALS = ("train_loss", "val_loss", "plateau_epochs", "host_stabilized")
ACCURACIES = ("train_accuracy", "val_accuracy", "best_accuracy")
TIMES = ("epoch", "progress", "epochs_left", "steps_left")
PRICES = ("size_price", "waste_price", "rollback_price")


@dataclass(frozen=True, slots=True)
class Setting:
    """What the networks of one task have in common, as far as a policy sees it."""

    facts: HostFacts
    offered: npt.NDArray[np.bool_]  # [B], blueprints that may be germinated
    epochs_needed: tuple[int, ...]
    """By tempo: epochs from a germination to the decision that makes the seed permanent."""
    flops_budget: bool = False
    """The budget counts training FLOPs, so that a larger network trains for fewer steps."""


@dataclass(frozen=True)
class FeatureInputs:
    """One decision's raw numbers, stacked over the envs of one task."""

    setting: Setting
    signals: dict[str, Array]  # names of SIGNALS, ACCURACIES (shares of 1), TIMES and PRICES → [E]
    accuracies: Array  # [E, H], shares of 1, NaN before the first epoch, newest last
    losses: Array  # [E, H]
    table: ReportArray  # [E, S]
    sensors: dict[str, Array]  # name → [E, S], NaN where nothing was measured
    learning_rate: Array  # [E]
    last_op: Array  # [E]
    last_success: Array  # [E]

    # -- accuracies ------------------------------------------------------------------------------------------

    @cached_property
    def classes(self) -> float:
        """NaN: unknown, or no classification."""
        classes = self.setting.facts.classes
        return math.nan if classes is None or classes < 2 else float(classes)

    @cached_property
    def span(self) -> float:
        """From chance to 1: the unit of differences of accuracy and of prices. Where the number of classes is
        unknown, chance counts as 0 here."""
        return 1.0 if math.isnan(self.classes) else 1.0 - 1.0 / self.classes

    @cached_property
    def headroom(self) -> Array:
        """[E] share of wrong answers; at least a tenth of a point."""
        return np.maximum(1.0 - self.signals["val_accuracy"], 1e-3)

    @cached_property
    def standard_error(self) -> Array:
        """[E] of the validation accuracy."""
        samples = self.setting.facts.val_samples
        if samples is None:
            return np.full(len(self.table), np.nan)
        half = 0.5 / samples
        share = np.clip(self.signals["val_accuracy"], half, 1.0 - half)
        return np.sqrt(share * (1.0 - share) / samples)

    @cached_property
    def difference_error(self) -> Array:
        """[E] standard error of a difference of two validation accuracies."""
        return math.sqrt(2.0) * self.standard_error

    @cached_property
    def expected_end(self) -> Array:
        """[E] accuracy at the end of the budget if it stays linear in the logarithm of time, as it was in the
        known history (least squares)."""
        steps = self.accuracies.shape[1]
        epochs = self.signals["epoch"][:, None] - np.arange(steps)[::-1]  # [E, H]
        known = np.isfinite(self.accuracies) & (epochs >= 1)
        count = known.sum(1)
        if not (count >= 2).any():
            return np.full(len(self.table), np.nan)
        x, y = np.log(np.where(known, epochs, 1)), np.where(known, self.accuracies, 0.0)
        few = np.maximum(count, 1)
        x_centred = np.where(known, x - (x.sum(1) / few)[:, None], 0.0)
        y_centred = np.where(known, y - (y.sum(1) / few)[:, None], 0.0)
        spread = (x_centred**2).sum(1)
        slope = (x_centred * y_centred).sum(1) / np.where(count >= 2, spread, np.nan)
        return self.signals["val_accuracy"] - slope * np.log(self.signals["progress"])

    # -- time ------------------------------------------------------------------------------------------------

    @cached_property
    def length(self) -> Array:
        """[E] epochs of the whole episode."""
        return self.signals["epoch"] + self.signals["epochs_left"]

    # -- sizes and prices ------------------------------------------------------------------------------------

    @cached_property
    def present(self) -> Array:
        """[E, S] where a seed has weights."""
        return np.isin(self.table["stage"], tuple(PRESENT_STAGES))

    @cached_property
    def sizes(self) -> Array:
        """[E, S] each seed's parameters over the host's; 0 where there is none."""
        return np.where(self.present, self.table["params"], 0) / max(self.setting.facts.params, 1)

    @cached_property
    def added(self) -> Array:
        """[E] parameters of all seeds over the host's."""
        return self.sizes.sum(1)

    @cached_property
    def seed_prices(self) -> Array:
        """[E, S] what each seed costs in J: the price of all seeds minus that of the others, per span."""
        others = self.added[:, None] - self.sizes
        rise = np.log1p(self.added)[:, None] - np.log1p(np.maximum(others, 0.0))
        return self.signals["size_price"][:, None] * rise / self.span

    @cached_property
    def quoted_prices(self) -> Array:
        """[E, S, B] what one more seed would cost in J, beside those that are there, per span."""
        added = self.added[:, None, None]
        sizes = self.setting.facts.seed_params / max(self.setting.facts.params, 1)
        rise = np.log1p(added + sizes) - np.log1p(added)
        return self.signals["size_price"][:, None, None] * rise / self.span

    @cached_property
    def flops_added(self) -> Array:
        """[E] training FLOPs of all seeds over the host's."""
        flops = self.of_resident(self.setting.facts.seed_flops) / self.setting.facts.flops
        return np.where(self.present, flops, 0.0).sum(1)

    def of_resident(self, facts: Array) -> Array:
        """[E, S] the entry of a fact [S, B] for the blueprint in each slot, also while the slot cools down;
        NaN where there is none."""
        index = self.table["blueprint_index"]
        found = facts[np.arange(facts.shape[0]), np.maximum(index, 0)]
        return np.where(index >= 0, found, np.nan)


def stack_inputs(
    signals: Sequence[TrainingSignals],
    table: ReportArray,
    sensors: Mapping[str, Array],
    *,
    setting: Setting,
    prices: Sequence[ObjectiveConfig],
    learning_rate: Sequence[float],
    last_op: Sequence[int],
    last_success: Sequence[bool],
) -> FeatureInputs:
    """The numbers of all envs of one task as arrays; histories are aligned at their newest epoch. `sensors`
    are [E, S] by name; only `tap_ratio` may be missing. A learning rate that is unknown is NaN."""
    columns = {name: np.array([getattr(s, name) for s in signals], np.float64) for name in SIGNALS}
    columns |= {name: np.array([getattr(s, name) for s in signals], np.float64) / 100 for name in ACCURACIES}
    columns |= {name: np.array([getattr(s.time, name) for s in signals], np.float64) for name in TIMES}
    columns |= {name: np.array([getattr(p, name) for p in prices], np.float64) for name in PRICES}
    measured = {"tap_ratio": np.full(table.shape, np.nan), **sensors}
    for name in SENSORS:
        if name not in measured:
            raise EsperError(f"sensors: {name} is missing; measured were {', '.join(sensors) or 'none'}")
    for name, values in measured.items():
        if values.shape != table.shape:
            raise EsperError(f"sensors: {name} has shape {values.shape}, must have {table.shape}")
    _check_setting(setting, table)
    return FeatureInputs(
        setting=setting,
        signals=columns,
        accuracies=_aligned([s.accuracy_history for s in signals]) / 100,
        losses=_aligned([s.loss_history for s in signals]),
        table=table,
        sensors=measured,
        learning_rate=np.array(learning_rate, np.float64),
        last_op=np.array(last_op),
        last_success=np.array(last_success, np.float64),
    )


def _check_setting(setting: Setting, table: ReportArray) -> None:
    slots, blueprints = setting.facts.seed_params.shape
    if slots != table.shape[1]:
        raise EsperError(f"facts: of {slots} slots, the reports have {table.shape[1]}")
    if len(setting.offered) != blueprints:
        raise EsperError(f"facts: of {blueprints} blueprints, {len(setting.offered)} are registered")
    if table["blueprint_index"].max() >= blueprints:
        raise EsperError(
            f"facts: of {blueprints} blueprints, but a seed has index {table['blueprint_index'].max()}; "
            "measure the facts again after registering a blueprint"
        )


def _aligned(histories: Sequence[Sequence[float]]) -> Array:
    """[E, longest]: shorter histories begin with NaN."""
    longest = max(len(history) for history in histories)
    return np.array([[np.nan] * (longest - len(h)) + list(h) for h in histories], np.float64)
