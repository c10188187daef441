"""Observations are scale-free: worlds that differ only in units look the same.

Synthetic worlds are written down twice, once in other units, and must give equal features. Real worlds are
trained again with other inputs, widths and lengths of an epoch; each feature must move by less than half of
its spread between truly different worlds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from env_helpers import make_env
from esper.leyline import (
    REPORT_DTYPE,
    AlphaMode,
    ObjectiveConfig,
    PolicyObservation,
    SeedStage,
    TimeLeft,
    TrainingSignals,
    head_sizes,
)
from esper.leyline.facts import TRAITS, HostFacts
from esper.runtime.data import load_dataset
from esper.runtime.data.datasets import dataset_names, register_dataset
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.simic.training.batch_ops import batch_signals_to_features
from esper.tamiyo import FixedSchedule, Planting
from esper.tamiyo.columns import columns, first_columns
from esper.tamiyo.features import BASE, QUOTE, SLOT, batch_obs_to_features
from esper.tamiyo.inputs import Setting, stack_inputs

torch.set_num_threads(1)

BLUEPRINTS = head_sizes(1)[1]
SLOTS = 3
EPOCH, LENGTH = 24, 48
AT = 0.5
"""Place of the accuracy between chance and 1."""


@dataclass(frozen=True)
class Units:
    """The units of a world. Everything else is the same in all of them."""

    classes: int = 10
    val_samples: int = 1100
    epochs: int = 1
    """Epochs for each epoch of the first world; steps per epoch shrink, so that steps stay."""
    host: int = 1
    flops: float = 1.0
    gradient: float = 1.0
    curve: str = "linear"
    """Of the accuracy over time."""

    def points(self, relative: float) -> float:
        """A difference of accuracies as points."""
        return 100 * relative * (1 - 1 / self.classes)

    def accuracy(self, relative: float) -> float:
        return 100 / self.classes + self.points(relative)


def history(units: Units) -> list[float]:
    """Places of the accuracy between chance and 1, epoch by epoch."""
    now = EPOCH * units.epochs
    past = range(1, now + 1)
    if units.curve == "linear":
        return [AT - 0.02 * (now - epoch) / units.epochs for epoch in past]
    return [AT + 0.1 * math.log(epoch / now) for epoch in past]


def signals(units: Units) -> TrainingSignals:
    accuracies = [units.accuracy(r) for r in history(units)]
    guess = math.log(units.classes)
    losses = [guess * (0.8 - 0.3 * r) for r in history(units)]
    now, length = EPOCH * units.epochs, LENGTH * units.epochs
    return TrainingSignals(
        time=TimeLeft.of_epochs(now, length, 12 / units.epochs),
        train_loss=0.6 * guess,
        train_accuracy=units.accuracy(0.6),
        val_loss=losses[-1],
        val_accuracy=accuracies[-1],
        plateau_epochs=2 * units.epochs,
        host_stabilized=True,
        best_accuracy=units.accuracy(0.55),
        loss_history=tuple(losses),
        accuracy_history=tuple(accuracies),
    )


def reports(units: Units) -> np.ndarray:
    """A blending seed, a fossil and an empty slot."""
    table = np.zeros((1, SLOTS), REPORT_DTYPE)
    for name in REPORT_DTYPE.names or ():
        if REPORT_DTYPE[name] == np.float64:
            table[name] = np.nan
    table["alpha"] = table["alpha_target"] = table["alpha_velocity"] = 0.0
    table["stage"], table["blueprint_index"] = SeedStage.DORMANT, -1
    for slot, stage in ((0, SeedStage.BLENDING), (1, SeedStage.FOSSILIZED)):
        seed = table[0, slot : slot + 1]
        seed["occupied"], seed["stage"], seed["blueprint_index"] = True, stage, 1 + slot
        seed["params"] = (30 + 10 * slot) * units.host
        seed["epochs_in_stage"], seed["epochs_total"] = 2 * units.epochs, 5 * units.epochs
        seed["tempo_epochs"], seed["contribution_age"] = 3 * units.epochs, units.epochs
        for name, relative in (
            ("contribution", 0.08),
            ("first_contribution", 0.03),
            ("contribution_velocity", 0.01),
            ("interaction_sum", -0.02),
            ("boost_received", 0.04),
        ):
            seed[name] = units.points(relative)
        seed["contribution_velocity"] /= units.epochs
        seed["initial_accuracy"] = units.accuracy(0.3)
        seed["stage_start_accuracy"], seed["current_accuracy"] = units.accuracy(0.4), units.accuracy(AT)
        seed["gradient_norm"], seed["gradient_ratio"] = 0.2 * units.gradient, 0.7
        seed["gradient_health"] = 1.0
    table[0, 0]["alpha"], table[0, 0]["alpha_target"] = 0.4, 1.0
    table[0, 0]["alpha_mode"] = AlphaMode.UP
    table[0, 0]["alpha_steps_total"], table[0, 0]["alpha_steps_done"] = 3 * units.epochs, units.epochs
    return table


def facts(units: Units) -> HostFacts:
    rng = np.random.default_rng(0)
    sizes, flops = rng.integers(1, 300, (SLOTS, BLUEPRINTS)), rng.integers(1, 900, (SLOTS, BLUEPRINTS))
    grows = rng.random((SLOTS, BLUEPRINTS)) < 0.7
    grows[:, 1:3] = True
    traits = rng.random((SLOTS, BLUEPRINTS, len(TRAITS)))
    return HostFacts(
        classes=units.classes,
        val_samples=units.val_samples,
        params=400 * units.host,
        flops=5000 * units.flops,
        depth=np.array([0.0, 0.5, 1.0]),
        width=np.array([0.25, 0.5, 1.0]),
        resolution=np.array([1.0, 0.25, 0.0625]),
        params_before=np.array([0.1, 0.3, 0.9]),
        flops_before=np.array([0.4, 0.6, 0.9]),
        seed_params=np.where(grows, sizes * units.host, np.nan),
        seed_flops=np.where(grows, flops * units.flops, np.nan),
        traits=np.where(grows[..., None], traits, np.nan),
    )


def observe(units: Units, prices: ObjectiveConfig | None = None) -> PolicyObservation:
    span = 1 - 1 / units.classes
    if prices is None:
        prices = ObjectiveConfig(size_price=0.2 * span, waste_price=0.02 * span, rollback_price=0.1 * span)
    offered = np.arange(BLUEPRINTS) % 3 != 0
    sensors = {
        "boundary_norm": np.array([[0.3, 0.2, 0.6]]) * units.gradient,
        "growth_score": np.array([[1.3, 0.8, 2.0]]),
        "feature_rank": np.array([[0.4, 0.7, 0.2]]),
        "tap_ratio": np.array([[1.5, 0.6, 1.1]]),
    }
    return batch_obs_to_features(
        stack_inputs(
            [signals(units)],
            reports(units),
            sensors,
            setting=Setting(facts(units), offered, (9 * units.epochs, 4 * units.epochs)),
            prices=[prices],
            learning_rate=[0.03],
            last_op=[1],
            last_success=[True],
        )
    )


def compare(one: PolicyObservation, other: PolicyObservation, *, but: tuple[str, ...] = ()) -> None:
    for part, table in (("base", BASE), ("slots", SLOT), ("quotes", QUOTE)):
        a, b = getattr(one, part), getattr(other, part)
        kept = sorted({*range(a.shape[-1])} - {*columns(table, but)})
        torch.testing.assert_close(a[..., kept], b[..., kept], atol=1e-6, rtol=0, msg=lambda m, t=part: t + m)


FEWER_CLASSES = {"classes": 4, "val_samples": 1500}
"""At the same place between chance and 1, this many validation samples have the same standard error over
1 − chance: p(1 − p)/(1 − chance)² is 0.2475/0.81 with 10 classes and 0.234375/0.5625 with 4."""
PER_EPOCH = ("accuracy_change_last", "loss_slope_last", "contribution_velocity")
"""These look back one epoch: a shorter one has seen a smaller change."""
EXPECTED = ("expected_end", "expected_gain")
"""These are fitted to every epoch of the past, so a curve that they do not fit is seen a little differently
when it is measured more often."""


@pytest.mark.parametrize(
    "units",
    [
        {"host": 7},
        {"flops": 1e4},
        {"gradient": 1e-5},
        FEWER_CLASSES,
        {"host": 1000, "flops": 1e9, "gradient": 300.0, **FEWER_CLASSES},
    ],
    ids=["size of the host", "cost of the host", "gradients", "classes", "all at once"],
)
def test_worlds_that_differ_only_in_units_look_the_same(units) -> None:
    one, other = observe(Units()), observe(Units(**units))
    assert one.base.abs().sum() > 5
    assert one.slots.abs().sum() > 20
    assert one.quotes.abs().sum() > 50
    compare(one, other)


def test_a_shorter_epoch_looks_the_same_but_for_changes_per_epoch() -> None:
    compare(observe(Units()), observe(Units(epochs=5, host=3)), but=PER_EPOCH + EXPECTED)


def test_the_expected_end_does_not_depend_on_the_length_of_an_epoch() -> None:
    """On a curve that is linear in the logarithm of time, as the extrapolation assumes."""
    one, other = (observe(Units(curve="log", epochs=epochs)) for epochs in (1, 4))
    at = columns(BASE, ["expected_end", "expected_gain"])
    torch.testing.assert_close(one.base[:, at], other.base[:, at], atol=1e-6, rtol=0)
    wanted = AT + 0.1 * math.log(LENGTH / EPOCH)
    assert one.base[0, at].tolist() == pytest.approx([wanted, 1, (wanted - AT) / (1 - AT), 1], abs=1e-6)


@pytest.mark.parametrize("price", [0.0, 0.001, 0.01, 0.1, 1.0])
def test_prices_are_seen_and_told_apart(price: float) -> None:
    """Equal features would prove nothing if they were blind."""
    cheap, dear = observe(Units()), observe(Units(), ObjectiveConfig(size_price=0.9 * price))
    seen = dear.base[0, columns(BASE, ["size_price"])[0]].item()
    assert seen == pytest.approx(math.log1p(1000 * price) / 7, abs=1e-6)
    at = columns(QUOTE, ["price"])[0]
    offered = cheap.quotes[..., 0] > 0
    quoted, before = dear.quotes[offered][:, at], cheap.quotes[offered][:, at]
    torch.testing.assert_close(quoted, (before * price / 0.2).clamp(max=3), atol=1e-5, rtol=0)


# -- real worlds ---------------------------------------------------------------------------------------------

NETWORKS = 24
MOMENTS = (1 / 2, 3 / 4, 1.0)
"""Shares of the budget at which worlds are compared."""
FURTHER = ("digits_shift", "digits_impaired", "digits_scale", "digits_mlp")
"""With the first world, those whose differences make the spread of a feature."""


def loud_digits() -> str:
    """The digits with inputs four times as large."""
    digits = load_dataset("digits")
    arrays = {part: getattr(digits, part).squeeze(1).numpy() for part in ("train_x", "test_x")}
    arrays |= {part: getattr(digits, part).numpy() for part in ("train_y", "test_y")}
    unit = digits.scale / 255
    name = "digits_loud"
    if name not in dataset_names():
        mean, std = (tuple(unit * m for m in digits.mean), tuple(unit * s / 4 for s in digits.std))
        register_dataset(name, arrays, mean=mean, std=std)
    return name


def observed(task: TaskSpec) -> list[PolicyObservation]:
    """At the moments, in networks that get one seed after a quarter of the budget."""
    env, seen = make_env(task, NETWORKS, population=NETWORKS), []
    plan = [Planting(task.episode_length // 4, 0, task.blueprints[0])]
    policy = FixedSchedule([plan] * NETWORKS)
    env.begin_round(0)
    for epoch in range(1, task.episode_length + 1):
        env.train_epoch(epoch)
        env.validate(epoch)
        sensed = env.sense(epoch)
        obs = batch_signals_to_features(sensed.signals, sensed.table, env.envs, "cpu")
        if epoch / task.episode_length in MOMENTS:
            seen.append(obs)
        env.act(sensed, policy.act(obs, None, sensed.masks).actions.tolist())
    return seen


def named_columns(obs: PolicyObservation) -> dict[str, torch.Tensor]:
    """Each column's numbers, over networks, slots and offers; validity bits are marked by ?."""
    offered = obs.quotes[obs.quotes[..., 0] > 0]
    found = {}
    for table, rows in ((BASE, obs.base), (SLOT, obs.slots.flatten(0, 1)), (QUOTE, offered)):
        for name, first in first_columns(table).items():
            found[name] = rows[:, first]
        for feature in table:
            if feature.optional:
                found[f"{feature.name}?"] = rows[:, first_columns(table)[feature.name] + 1]
    return found


@pytest.mark.slow
def test_rescaled_worlds_look_alike_beside_other_worlds() -> None:
    """The mean of each feature moves by less than half of its spread, on average over the moments. A host
    that is twice as wide learns more of the digits, so its last gains come at other times."""
    plain = get_task_spec("digits_baseline:base=8,final_val_size=0")
    wide = get_task_spec("digits_baseline:base=16,final_val_size=0")
    rescaled = {
        "inputs × 4": (replace(plain, dataset=loud_digits()), ()),
        "epochs / 2": (replace(plain, episode_length=48, steps_per_epoch=6), ()),
        "host × 2": (wide, ("plateau", "plateau_so_far")),
    }
    first = [named_columns(obs) for obs in observed(plain)]
    others = [named_columns(obs) for name in FURTHER for obs in observed(get_task_spec(name))]
    spread = {name: torch.cat([seen[name] for seen in (*first, *others)]).std().item() for name in first[0]}
    for world, (task, but) in rescaled.items():
        again, moved = [named_columns(obs) for obs in observed(task)], {}
        for name in first[0]:
            pairs = zip(first, again, strict=True)
            shift = np.mean([abs(a[name].mean() - b[name].mean()).item() for a, b in pairs])
            moved[name] = shift / spread[name] if spread[name] > 1e-6 else (0.0 if shift < 1e-6 else math.inf)
        worst = sorted(moved, key=moved.__getitem__, reverse=True)[:8]
        print(  # noqa: T201  the figures are the point
            f"{world}: mean {np.mean(list(moved.values())):.3f} of the spread; most: "
            + ", ".join(f"{name} {moved[name]:.2f}" for name in worst)
        )
        assert {name: share for name, share in moved.items() if share > 0.5 and name not in but} == {}
