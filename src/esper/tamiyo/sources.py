"""Where the raw numbers of features come from: one function for each kind of source.

The key of a source states what it reads, for the schema of policy files."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from esper.leyline import LifecycleOp, SeedStage
from esper.leyline.facts import TRAITS
from esper.tamiyo.columns import Source
from esper.tamiyo.inputs import Array, FeatureInputs


def signal(name: str) -> Source:
    return Source(f"signal {name}", lambda x: x.signals[name])


def report(name: str) -> Source:
    return Source(f"report {name}", lambda x: x.table[name].astype(np.float64))


def over_time_left(key: str, read: Callable[[FeatureInputs], Array]) -> Source:
    """[E] or [E, S] epochs over epochs left. Without any left the ratio is finite and clipped later."""

    def share(x: FeatureInputs) -> Array:
        epochs = read(x)
        left = x.signals["epochs_left"].reshape(-1, *[1] * (epochs.ndim - 1))
        return epochs / np.maximum(left, 1e-6)

    return Source(f"{key} / epochs left", share)


def over_span(key: str, read: Callable[[FeatureInputs], Array]) -> Source:
    """A difference of accuracies over 1 − chance."""
    return Source(f"({key}) / (1 - chance)", lambda x: read(x) / x.span)


def over_error(key: str, read: Callable[[FeatureInputs], Array]) -> Source:
    """[E] share of the remaining error."""
    return Source(f"({key}) / (1 - accuracy)", lambda x: read(x) / x.headroom)


def share_of_episode(name: str) -> Source:
    return Source(f"report {name} / epochs of the episode", lambda x: x.table[name] / x.length[:, None])


def above_chance(key: str, read: Callable[[FeatureInputs], Array]) -> Source:
    """[E] an accuracy: 0 is chance, 1 is perfect. Unknown where the number of classes is."""
    return Source(f"({key} - chance) / (1 - chance)", lambda x: (read(x) - 1 / x.classes) / x.span)


def points(name: str, minus: str | None = None) -> Source:
    """[E, S] a measurement in points, or the difference of two, over 1 − chance."""
    if minus is None:
        return over_span(f"report {name}", lambda x: x.table[name] / 100)
    return over_span(f"report {name} - {minus}", lambda x: (x.table[name] - x.table[minus]) / 100)


def in_errors(name: str) -> Source:
    return Source(
        f"report {name} / standard error of a difference",
        lambda x: x.table[name] / 100 / x.difference_error[:, None],
    )


def net(name: str) -> Source:
    return Source(
        f"report {name} / 100 / (1 - chance) - price of the seed",
        lambda x: x.table[name] / 100 / x.span - x.seed_prices,
    )


def guesses(name: str) -> Source:
    return Source(f"{name} / ln classes", lambda x: x.signals[name] / np.log(x.classes))


def _looking_back(history: Array, x: FeatureInputs, share: float) -> tuple[Array, Array]:
    """[E] the value before the last `share` of the epochs so far, at least one, and how many epochs that is;
    NaN where there is none."""
    epochs = np.maximum(np.rint(share * x.signals["epoch"]), 1).astype(np.int64)
    epochs = np.minimum(epochs, max(history.shape[1] - 1, 1))
    if history.shape[1] < 2:
        return np.full(len(history), np.nan), epochs
    return history[np.arange(len(history)), -1 - epochs], epochs


def accuracy_change(share: float) -> Source:
    def read(x: FeatureInputs) -> Array:
        then, _ = _looking_back(x.accuracies, x, share)
        return (x.accuracies[:, -1] - then) / x.difference_error

    return Source(f"change of accuracy over {share:.3f} of the past / standard error of a difference", read)


def accuracy_slope(share: float) -> Source:
    def read(x: FeatureInputs) -> Array:
        then, epochs = _looking_back(x.accuracies, x, share)
        return (x.accuracies[:, -1] - then) / epochs * x.signals["epochs_left"]

    return over_error(f"slope of accuracy over {share:.3f} of the past * epochs left", read)


def loss_slope(share: float) -> Source:
    """The exponent of a power law: change of ln(loss) over that of ln(time)."""

    def read(x: FeatureInputs) -> Array:
        then, epochs = _looking_back(x.losses, x, share)
        now = np.log(np.maximum(x.losses[:, -1], 1e-12))
        time = np.log(x.signals["epoch"] / np.maximum(x.signals["epoch"] - epochs, 0.5))
        return (now - np.log(np.maximum(then, 1e-12))) / time

    return Source(f"slope of ln(loss) in ln(time) over {share:.3f} of the past", read)


def price(name: str) -> Source:
    return Source(f"1000 {name} / (1 - chance)", lambda x: 1000 * x.signals[name] / x.span)


def is_value(name: str, value: int) -> Source:
    return Source(
        f"report {name} is {value} and occupied",
        lambda x: ((x.table[name] == value) & x.table["occupied"]).astype(np.float64),
    )


def in_stage(stage: SeedStage) -> Source:
    return Source(f"report stage is {int(stage)}", lambda x: (x.table["stage"] == stage).astype(np.float64))


def can(name: str, op: int) -> Source:
    return Source(f"report can_{name}", lambda x: x.table["legal"][..., op].astype(np.float64))


def share_in(*stages: SeedStage) -> Source:
    numbers = ", ".join(str(int(stage)) for stage in stages)
    return Source(
        f"share of slots with report stage in {numbers}", lambda x: np.isin(x.table["stage"], stages).mean(1)
    )


def last_op(op: LifecycleOp) -> Source:
    return Source(f"last op is {int(op)}", lambda x: (x.last_op == op).astype(np.float64))


def place(name: str) -> Source:
    return Source(f"fact {name}", lambda x: np.broadcast_to(getattr(x.setting.facts, name), x.table.shape))


def resident_trait(index: int) -> Source:
    def read(x: FeatureInputs) -> Array:
        return np.nan_to_num(x.of_resident(x.setting.facts.traits[..., index]))

    return Source(f"trait {TRAITS[index]} of the resident", read)


def sensor(name: str) -> Source:
    return Source(f"sensor {name}", lambda x: x.sensors[name])


def relative_sensor(name: str) -> Source:
    def read(x: FeatureInputs) -> Array:
        values = x.sensors[name]
        logs = np.log(np.maximum(np.where(np.isfinite(values), values, np.nan), 1e-12))
        return np.exp(logs - logs.mean(1, keepdims=True))

    return Source(f"sensor {name} / geometric mean over slots", read)


def quoted(x: FeatureInputs, facts: Array) -> Array:
    """[E, S, B] of a fact [S, B]."""
    return np.broadcast_to(facts, (len(x.table), *facts.shape))


def flops_share(x: FeatureInputs) -> Array:
    """[E, S, B] of the network as it would be with one more seed."""
    facts = x.setting.facts
    seeds = facts.seed_flops / facts.flops
    return seeds / (1 + x.flops_added[:, None, None] + seeds)


def quoted_trait(index: int) -> Source:
    return Source(f"trait {TRAITS[index]}", lambda x: quoted(x, x.setting.facts.traits[..., index]))
