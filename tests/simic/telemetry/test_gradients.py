"""Gradient sensors against loops, and levels that agree with the hub's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from esper.kasmina import MorphogeneticModel, PopulationOptimizer
from esper.leyline import EsperError, SeedStage
from esper.nissa import hub
from esper.simic.telemetry import (
    TelemetryConfig,
    TelemetryLevel,
    check_numerical_stability,
    collect_host_gradients_async,
    collect_per_layer_gradients,
    collect_seed_gradients_async,
    collect_seed_gradients_only_async,
)
from helpers import bring, make, population_batch, train_step


def trained() -> tuple[MorphogeneticModel, PopulationOptimizer]:
    model = make("cnn", 8)
    bring(model, "r0c0", "conv_light", SeedStage.TRAINING, row=2)
    bring(model, "r0c0", "norm", SeedStage.BLENDING, row=5, stir=0.1)
    bring(model, "r0c1", "conv_light", SeedStage.BLENDING, row=2, stir=0.1)
    optimizer = PopulationOptimizer(model)
    train_step(model, optimizer, *population_batch(model, 1))
    return model, optimizer


def test_host_gradients_are_those_before_clipping() -> None:
    model, twin = make("cnn", 8), make("cnn", 8)
    x, y = population_batch(model, 1)
    model.losses(x, y).total().backward()
    wanted = torch.stack(
        [
            torch.stack([p.grad[row].norm() for p in model.host.parameters() if p.grad is not None]).norm()
            for row in range(8)
        ]
    )
    optimizer = PopulationOptimizer(twin)
    optimizer.clip.fill_(1e-3)
    train_step(twin, optimizer, x, y)
    assert torch.allclose(collect_host_gradients_async(optimizer), wanted, rtol=1e-5)


def test_seed_gradients_agree_with_what_each_seed_is_told() -> None:
    model, optimizer = trained()
    norms, ratios = collect_seed_gradients_only_async(optimizer), collect_seed_gradients_async(optimizer)
    assert list(norms) == list(ratios) == ["r0c0", "r0c1"]
    assert optimizer.stats is not None
    for slot_id, row in (("r0c0", 2), ("r0c0", 5), ("r0c1", 2)):
        seed = model.seed_in(slot_id, row)
        assert seed is not None
        seed.update_metrics(gradient_ratio=None)  # a first measurement is not smoothed
        model.record_gradients(optimizer.stats)
        assert seed.metrics.gradient_norm == float(norms[slot_id][row]) > 0
        assert seed.metrics.gradient_ratio == pytest.approx(float(ratios[slot_id][row]), rel=1e-5)
    assert all(float(ratio[[0, 1, 3, 4, 6, 7]].abs().max()) == 0.0 for ratio in ratios.values())


def test_a_seed_without_finite_gradient_has_no_ratio() -> None:
    model, optimizer = trained()
    with torch.no_grad():
        for parameter in model.slot("r0c1").banks["conv_light"].parameters():
            parameter[2] = math.nan
    train_step(model, optimizer, *population_batch(model, 2))
    assert float(collect_seed_gradients_async(optimizer)["r0c1"][2]) == 0.0


def test_no_seeds_no_rows() -> None:
    model = make("cnn", 8)
    optimizer = PopulationOptimizer(model)
    with pytest.raises(EsperError, match="take an optimizer step first"):
        collect_host_gradients_async(optimizer)
    train_step(model, optimizer, *population_batch(model, 1))
    assert collect_seed_gradients_async(optimizer) == {}


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.Linear(2, 1))
    model[:3](torch.randn(5, 4)).square().sum().backward()
    return model


def test_layers_against_a_loop() -> None:
    model = network()
    parameters = dict(model.named_parameters())
    assert parameters["2.bias"].grad is not None
    parameters["2.bias"].grad.copy_(torch.tensor([20.0, 0.0]))
    by_name = {stats.name: stats for stats in collect_per_layer_gradients(model)}
    assert list(by_name) == ["0.weight", "0.bias", "2.weight", "2.bias"]  # the last layer has no gradient
    for name, stats in by_name.items():
        grad = parameters[name].grad
        assert grad is not None
        assert stats.zero_fraction == pytest.approx(sum(float(v) == 0 for v in grad.flatten()) / grad.numel())
        assert stats.nonfinite_count == 0
    assert by_name["2.bias"].zero_fraction == 0.5


def test_layers_with_numbers_that_are_not_finite() -> None:
    model = nn.Linear(4, 1, bias=False)
    model.weight.grad = torch.tensor([[math.nan, math.inf, -math.inf, 0.0]])
    (stats,) = collect_per_layer_gradients(model)
    assert (stats.zero_fraction, stats.nonfinite_count) == (0.25, 3)


def test_layers_without_any_gradient() -> None:
    assert collect_per_layer_gradients(nn.Linear(2, 2)) == []


def test_one_transfer_whatever_the_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__"):
        original = getattr(torch.Tensor, name)

        def spy(
            self: torch.Tensor, *args: Any, name: str = name, original: Any = original, **options: Any
        ) -> Any:
            calls.append(name)
            return original(self, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, spy)
    model = network()
    calls.clear()
    collect_per_layer_gradients(model)
    assert calls == ["tolist"]
    calls.clear()
    check_numerical_stability(model)
    assert calls == ["tolist"]
    grown, optimizer = trained()
    calls.clear()
    collect_host_gradients_async(optimizer)
    collect_seed_gradients_async(optimizer)
    assert calls == []
    assert grown.population == 8


def test_stability() -> None:
    model = network()
    assert check_numerical_stability(model) == []
    with torch.no_grad():
        model.get_parameter("0.weight")[1, 1] = math.nan
        model.get_parameter("3.bias")[0] = math.inf
        for name, value in (("0.bias", math.nan), ("2.weight", -math.inf), ("0.weight", math.inf)):
            grad = model.get_parameter(name).grad
            assert grad is not None
            grad.flatten()[0] = value
    assert check_numerical_stability(model) == ["0.bias", "0.weight", "2.weight", "3.bias"]
    assert check_numerical_stability(nn.ReLU()) == []


# -- levels --------------------------------------------------------------------------------------------------


def test_levels_are_the_hubs() -> None:
    assert {level.name.lower(): int(level) for level in TelemetryLevel} == hub.LEVELS
    assert all(hub.TelemetryHub(level=level).level == level for level in TelemetryLevel)


def test_an_anomaly_raises_the_level_for_some_rounds() -> None:
    config = TelemetryConfig(escalation_rounds=2)
    assert [config.level_in(r, 5) for r in (5, 6, 7, 8)] == [2, 3, 3, 2]
    assert config.level_in(3, None) is TelemetryLevel.NORMAL
    assert TelemetryConfig(escalation_rounds=0).level_in(6, 5) is TelemetryLevel.NORMAL
    assert TelemetryConfig(level=TelemetryLevel.OFF).level_in(6, 5) is TelemetryLevel.OFF


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"level": 2}, "level is 2; allowed: TelemetryLevel.OFF"),
        ({"level": "normal"}, "level is 'normal'"),
        ({"escalation_rounds": -1}, "escalation_rounds is -1"),
        ({"escalation_rounds": 1.5}, "escalation_rounds is 1.5"),
    ],
)
def test_bad_configs(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EsperError, match=message):
        TelemetryConfig(**config)
