"""The objective against hand-computed numbers, and what each config refuses, with the value in the
message."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from esper.leyline import (
    EsperError,
    GateConfig,
    GateFailure,
    GateLevel,
    GateReason,
    GateResult,
    LossRewardConfig,
    ObjectiveConfig,
    Pacing,
    RentConfig,
    RewardConfig,
    RewardMode,
    objective,
)

PRICED = [GateConfig, LossRewardConfig, ObjectiveConfig, RentConfig, RewardConfig]
CONFIGS = [*PRICED, Pacing]
BAD_PRICES = [-0.5, float("nan"), float("inf"), float("-inf")]


def prices(config: type) -> list[str]:
    return [f.name for f in fields(config) if isinstance(getattr(config(), f.name), float)]


def counts(config: type) -> list[str]:
    return [f.name for f in fields(config) if type(getattr(config(), f.name)) is int]


def rejected(config: type, **bad: Any) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(EsperError) as error:
        config(**bad)
    assert name in str(error.value)
    assert str(value) in str(error.value)


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_are_valid_and_frozen(config: type) -> None:
    default = config()
    assert default == config()
    with pytest.raises(FrozenInstanceError):
        setattr(default, fields(config)[0].name, 1)


@pytest.mark.parametrize("value", BAD_PRICES)
@pytest.mark.parametrize(("config", "name"), [(config, name) for config in PRICED for name in prices(config)])
def test_prices_must_be_finite_and_not_negative(config: type, name: str, value: float) -> None:
    rejected(config, **{name: value})


@pytest.mark.parametrize(
    ("config", "name"), [(config, name) for config in (*PRICED, Pacing) for name in counts(config)]
)
def test_counts_must_not_be_negative(config: type, name: str) -> None:
    rejected(config, **{name: -1})


def test_the_checks_above_saw_every_number() -> None:
    assert {config.__name__: (len(prices(config)), len(counts(config))) for config in (*PRICED, Pacing)} == {
        "GateConfig": (4, 0),
        "LossRewardConfig": (3, 1),
        "ObjectiveConfig": (3, 0),
        "RentConfig": (5, 1),
        "RewardConfig": (13, 2),
        "Pacing": (0, 4),
    }


def test_zero_prices_are_allowed() -> None:
    for config in (ObjectiveConfig, RentConfig, RewardConfig):
        config(**dict.fromkeys(prices(config), 0.0))


@pytest.mark.parametrize(
    ("config", "bad"),
    [
        (RentConfig, {"host_params_floor": 0}),
        (RewardConfig, {"drip_fraction": 1.01}),
        (RewardConfig, {"escrow_window": 0}),
        (RewardConfig, {"live_share": 1.01}),
        (RewardConfig, {"contribution_weight": 1.01}),
        (RewardConfig, {"prune_bonus": 0.02}),
    ],
)
def test_limits_of_single_fields(config: type, bad: dict[str, Any]) -> None:
    rejected(config, **bad)


def test_limits_are_inclusive_where_they_say_so() -> None:
    assert RewardConfig(drip_fraction=1.0, escrow_window=1).drip_fraction == 1.0
    assert RentConfig(host_params_floor=1).host_params_floor == 1
    assert RewardConfig(live_share=1.0, contribution_weight=1.0, prune_bonus=0.011).live_share == 1.0


def test_auto_forward_gates() -> None:
    every = frozenset({GateLevel.G1, GateLevel.G2, GateLevel.G3, GateLevel.G5})
    assert Pacing(auto_forward_gates=every).auto_forward_gates == every
    with pytest.raises(EsperError, match=r"auto_forward_gates is G0, G1.*allowed: G1, G2, G3, G5"):
        Pacing(auto_forward_gates=every | {GateLevel.G0})


def test_configs_are_keyword_only_and_strict() -> None:
    for config in CONFIGS:
        with pytest.raises(TypeError):
            config(0)
        with pytest.raises(TypeError):
            config(no_such_field=1)


def test_reward_modes() -> None:
    assert [mode.value for mode in RewardMode] == [
        "sparse",
        "shaped",
        "escrow",
        "simplified",
        "basic",
        "basic_plus",
        "minimal",
    ]
    assert RewardConfig().mode == RewardMode.MINIMAL


def test_a_gate_passes_without_failures() -> None:
    assert GateResult(GateLevel.G2).passed
    assert not GateResult(GateLevel.G2, (GateFailure(GateReason.TOO_YOUNG, 3, 10),)).passed


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0.8, 0, 1000, 0, 0), 0.8),
        ((0.0, 0, 1000, 0, 0), 0.0),
        # 0.8 − 0.05 · ln 2
        ((0.8, 1000, 1000, 0, 0), 0.76534264097),
        # 0.9 − 0.05 · ln 1.5 − 0.01 · 3
        ((0.9, 250, 500, 3, 0), 0.84972674459),
        # 0.9 − 0.05 · ln 1.5 − 0.01 · 3 − 0.1 · 2
        ((0.9, 250, 500, 3, 2), 0.64972674459),
        # 0.1 − 0.1 · 4: a disaster is worth less than nothing
        ((0.1, 0, 500, 0, 4), -0.3),
    ],
)
def test_objective(numbers: tuple[float, int, int, int, int], expected: float) -> None:
    accuracy, added, host, wasted, rollbacks = numbers
    found = objective(
        ObjectiveConfig(size_price=0.05, waste_price=0.01, rollback_price=0.1),
        committed_accuracy=accuracy,
        added_params=added,
        host_params=host,
        wasted_seeds=wasted,
        rollbacks=rollbacks,
    )
    assert found == pytest.approx(expected, abs=1e-10)


def test_objective_with_other_prices() -> None:
    found = objective(
        ObjectiveConfig(size_price=0.5, waste_price=0.25, rollback_price=0.125),
        committed_accuracy=1.0,
        added_params=300,
        host_params=100,
        wasted_seeds=1,
        rollbacks=1,
    )
    assert found == pytest.approx(1.0 - 0.69314718056 - 0.25 - 0.125, abs=1e-10)  # 0.5 · ln 4 = ln 2


def test_objective_defaults() -> None:
    config = ObjectiveConfig()
    assert (config.size_price, config.waste_price, config.rollback_price) == (0.05, 0.01, 0.1)
