"""Alpha: the curves against formulas written here, and what a ramp may and may not do."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina import AlphaController, curve_value
from esper.leyline import ALPHA_CURVE_STEEPNESS, ALPHA_CURVE_VALUES, AlphaCurve, AlphaMode, EsperError
from helpers import examples

times = st.floats(0.0, 1.0)
steepnesses = st.floats(0.01, 100.0)
curves = st.sampled_from(AlphaCurve)


def sigmoid(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-z))


def rescaled_sigmoid(t: float, k: float) -> float:
    low, high = sigmoid(-k / 2), sigmoid(k / 2)
    return (sigmoid(k * (t - 0.5)) - low) / (high - low)


FIVE_TICKS = {
    (AlphaCurve.LINEAR, 12.0): (0.2, 0.4, 0.6, 0.8, 1.0),
    (AlphaCurve.COSINE, 12.0): (0.096, 0.345, 0.655, 0.905, 1.0),
    (AlphaCurve.SIGMOID, 6.0): (0.104, 0.339, 0.661, 0.896, 1.0),
    (AlphaCurve.SIGMOID, 12.0): (0.024, 0.230, 0.770, 0.976, 1.0),
    (AlphaCurve.SIGMOID, 24.0): (0.001, 0.083, 0.917, 0.999, 1.0),
}


def ramp(controller: AlphaController) -> list[float]:
    """The values of alpha until it holds."""
    values = []
    while controller.mode is not AlphaMode.HOLD:
        arrived = controller.tick()
        values.append(controller.alpha)
        assert arrived is (controller.mode is AlphaMode.HOLD)
    return values


@given(times)
def test_linear_is_the_identity(t):
    assert curve_value(AlphaCurve.LINEAR, t, 12.0) == t


@given(times)
def test_cosine_is_the_squared_sine_of_the_half_angle(t):
    assert curve_value(AlphaCurve.COSINE, t, 12.0) == pytest.approx(math.sin(math.pi * t / 2) ** 2, abs=1e-12)


@given(times, steepnesses)
def test_sigmoid_is_the_logistic_function_through_both_corners(t, k):
    # The formula with exp cancels badly for flat curves, hence the tolerance.
    assert curve_value(AlphaCurve.SIGMOID, t, k) == pytest.approx(rescaled_sigmoid(t, k), abs=1e-9)


@given(curves, steepnesses)
def test_curves_pass_through_both_corners(curve, k):
    assert curve_value(curve, 0.0, k) == pytest.approx(0.0, abs=1e-15)
    assert curve_value(curve, 1.0, k) == pytest.approx(1.0, abs=1e-15)


@given(curves, times, times, steepnesses)
def test_curves_rise_and_stay_in_range(curve, s, t, k):
    low, high = (curve_value(curve, v, k) for v in sorted((s, t)))
    assert -1e-12 <= low <= high + 1e-12 <= 1.0 + 2e-12


@given(st.sampled_from([AlphaCurve.LINEAR, AlphaCurve.COSINE]), times, steepnesses, steepnesses)
def test_only_the_sigmoid_knows_steepness(curve, t, k1, k2):
    assert curve_value(curve, t, k1) == curve_value(curve, t, k2)


@pytest.mark.parametrize(("curve", "steepness"), FIVE_TICKS)
def test_five_ticks(curve, steepness):
    controller = AlphaController()
    controller.retarget(1.0, 5, curve, steepness)
    assert ramp(controller) == pytest.approx(FIVE_TICKS[curve, steepness], abs=6e-4)


def test_the_policy_can_choose_exactly_these_curves():
    assert set(zip(ALPHA_CURVE_VALUES, ALPHA_CURVE_STEEPNESS, strict=True)) == set(FIVE_TICKS)


@pytest.mark.fuzz
@examples(200)
@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(1, 30), curves, steepnesses)
def test_a_ramp_is_monotone_and_snaps_exactly(start, target, steps, curve, steepness):
    controller = AlphaController()
    controller.pin(start)
    controller.retarget(target, steps, curve, steepness)
    if start == target:
        assert controller.mode is AlphaMode.HOLD
        assert controller.alpha == target
        return
    rising = target > start
    assert controller.mode is (AlphaMode.UP if rising else AlphaMode.DOWN)
    assert controller.alpha == start, "a new target moves nothing before the next tick"
    assert controller.velocity == (target - start) / steps
    values = [start, *ramp(controller)]
    assert len(values) == steps + 1
    assert values[-1] == target, "no rounding is left over at the end"
    ordered = values if rising else values[::-1]
    for low, high in pairwise(ordered):
        assert low <= high + 1e-12
    assert min(start, target) - 1e-12 <= min(values)
    assert max(values) <= max(start, target) + 1e-12
    assert controller.velocity == 0.0
    assert controller.steps_total == controller.steps_done == 0


@pytest.mark.fuzz
@examples(100)
@given(st.floats(0.0, 1.0), st.integers(2, 20), curves, st.data())
def test_a_ramp_follows_its_curve_from_where_it_stands(start, steps, curve, data):
    target = data.draw(st.floats(0.0, 1.0).filter(lambda v: v != start))
    controller = AlphaController()
    controller.pin(start)
    controller.retarget(target, steps, curve, 12.0)
    done = data.draw(st.integers(1, steps - 1))
    for _ in range(done):
        controller.tick()
    t = done / steps
    progress = {
        AlphaCurve.LINEAR: t,
        AlphaCurve.COSINE: (1 - math.cos(math.pi * t)) / 2,
        AlphaCurve.SIGMOID: rescaled_sigmoid(t, 12.0),
    }[curve]
    assert controller.alpha == pytest.approx(start + (target - start) * progress, abs=1e-9)
    assert (controller.steps_done, controller.steps_total) == (done, steps)


def test_holding_does_not_tick():
    controller = AlphaController()
    controller.pin(0.7)
    assert controller.tick() is False
    assert (controller.alpha, controller.mode) == (0.7, AlphaMode.HOLD)


def test_no_steps_means_at_once():
    controller = AlphaController()
    controller.retarget(0.7, 0)
    assert (controller.alpha, controller.target, controller.mode) == (0.7, 0.7, AlphaMode.HOLD)


def test_a_moving_alpha_takes_no_new_target():
    controller = AlphaController()
    controller.retarget(1.0, 5)
    controller.tick()
    before = (controller.alpha, controller.target, controller.steps_done)
    with pytest.raises(EsperError, match=r"moving \(UP to 1\.0\)"):
        controller.retarget(0.5, 3)
    assert (controller.alpha, controller.target, controller.steps_done) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": 1.5, "steps": 3}, r"alpha target is 1\.5, must lie in \[0, 1\]"),
        ({"target": -0.1, "steps": 3}, r"alpha target is -0\.1"),
        ({"target": math.nan, "steps": 3}, "alpha target is nan"),
        ({"target": 1.0, "steps": -1}, "ramp of -1 epochs, must be 0 or more"),
        ({"target": 1.0, "steps": 3, "steepness": 0.0}, r"steepness is 0\.0, must lie in"),
        ({"target": 1.0, "steps": 3, "steepness": math.nan}, "steepness is nan"),
        ({"target": 1.0, "steps": 3, "steepness": 1e3}, "steepness is 1000"),
    ],
)
def test_bad_ramps_are_refused_and_change_nothing(arguments, message):
    controller = AlphaController()
    with pytest.raises(EsperError, match=message):
        controller.retarget(**arguments)
    assert controller == AlphaController()


def test_every_steepness_that_is_accepted_can_be_walked():
    controller = AlphaController()
    with pytest.raises(EsperError, match="steepness is 5e-324"):
        controller.retarget(1.0, 3, AlphaCurve.SIGMOID, 5e-324)
    for steepness in (1e-3, 100.0):
        controller = AlphaController()
        controller.retarget(1.0, 3, AlphaCurve.SIGMOID, steepness)
        assert ramp(controller)[-1] == 1.0
