"""Gates: for each the table of what opens it, strict and permissive; nothing unmeasured ever passes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina import check_gate
from esper.kasmina.seed import Seed
from esper.leyline import (
    AlphaAlgorithm,
    AlphaCurve,
    AlphaMode,
    GateConfig,
    GateFailure,
    GateLevel,
    GateReason,
    Pacing,
    SeedMetrics,
    SeedStage,
)

R = GateReason
STRICT, PERMISSIVE = GateConfig(), GateConfig(permissive=True)
PACING = Pacing(min_training_epochs=10, min_blending_epochs=4)


def seed(
    stage: SeedStage = SeedStage.TRAINING,
    *,
    seed_id: str = "s",
    blueprint_id: str = "norm",
    alpha: float = 0.0,
    target: float = 0.0,
    mode: AlphaMode = AlphaMode.HOLD,
    **metrics: Any,
) -> Seed:
    planted = Seed(
        seed_id=seed_id,
        init_seed=0,
        blueprint_id=blueprint_id,
        algorithm=AlphaAlgorithm.ADD,
        tempo_epochs=3,
        ramp_curve=AlphaCurve.LINEAR,
        stage=stage,
        metrics=SeedMetrics(**metrics),
    )
    planted.alpha.alpha, planted.alpha.target, planted.alpha.mode = alpha, target, mode
    return planted


def failures(
    gate: GateLevel, of: Seed, config: GateConfig
) -> list[tuple[GateReason, float | None, float | None]]:
    result = check_gate(gate, of, config, PACING)
    assert result.gate is gate
    assert result.passed is (not result.failures)
    return [(f.reason, f.value, f.limit) for f in result.failures]


READY = {
    "epochs_in_stage": 10,
    "gradient_ratio": 0.1,
    "gradient_health": 0.7,
    "gradient_norm": 3.0,
    "stage_start_accuracy": 50.0,
    "current_accuracy": 50.5,
}


def but(**changes: Any) -> dict[str, Any]:
    return READY | changes


YOUNG, UNMEASURED = (R.TOO_YOUNG, 9, 10), (R.GRADIENT_UNMEASURED, None, None)

G2_TABLE = [
    # measured                       strict                                    permissive
    (READY, [], []),
    (but(epochs_in_stage=9), [YOUNG], [YOUNG]),
    (but(gradient_ratio=0.0999), [(R.GRADIENT_RATIO_LOW, 0.0999, 0.1)], []),
    (but(gradient_ratio=math.nan), [(R.GRADIENT_RATIO_LOW, None, 0.1)], []),
    (but(gradient_health=0.69), [], [(R.GRADIENT_UNHEALTHY, 0.69, 0.7)]),
    (but(gradient_health=math.nan), [], [(R.GRADIENT_UNHEALTHY, None, 0.7)]),
    (but(gradient_exploding=True), [], [(R.GRADIENT_EXPLODING, 3.0, None)]),
    (but(current_accuracy=50.4), [(R.IMPROVEMENT_LOW, 0.4, 0.5)], []),
    (but(current_accuracy=math.nan), [(R.IMPROVEMENT_LOW, None, 0.5)], []),
    (but(current_accuracy=None), [(R.IMPROVEMENT_LOW, None, 0.5)], []),
    (but(stage_start_accuracy=None), [(R.IMPROVEMENT_LOW, None, 0.5)], []),
    (but(gradient_health=None), [UNMEASURED], [UNMEASURED]),
    (but(gradient_ratio=None), [UNMEASURED], [UNMEASURED]),
    ({"epochs_in_stage": 9}, [YOUNG, UNMEASURED, (R.IMPROVEMENT_LOW, None, 0.5)], [YOUNG, UNMEASURED]),
]


def near(actual: list[Any], wanted: list[Any]) -> bool:
    """Reasons and limits equal, values up to rounding; a wanted None also stands for NaN."""
    return [(reason, limit) for reason, _, limit in actual] == [
        (reason, limit) for reason, _, limit in wanted
    ] and all(
        (w is None and (f is None or math.isnan(f))) or (w is not None and f == pytest.approx(w))
        for (_, f, _), (_, w, _) in zip(actual, wanted, strict=True)
    )


@pytest.mark.parametrize(("metrics", "strict", "permissive"), G2_TABLE)
def test_g2_start_blending(metrics, strict, permissive):
    assert near(failures(GateLevel.G2, seed(**metrics), STRICT), strict)
    assert near(failures(GateLevel.G2, seed(**metrics), PERMISSIVE), permissive)


@pytest.mark.parametrize(
    ("options", "strict", "permissive"),
    [
        ({}, [], []),
        ({"seed_id": ""}, [(R.MISSING_ID, None, None)], [(R.MISSING_ID, None, None)]),
        ({"blueprint_id": ""}, [(R.MISSING_ID, None, None)], [(R.MISSING_ID, None, None)]),
    ],
)
def test_g0_germinate(options, strict, permissive):
    assert failures(GateLevel.G0, seed(SeedStage.DORMANT, **options), STRICT) == strict
    assert failures(GateLevel.G0, seed(SeedStage.DORMANT, **options), PERMISSIVE) == permissive


def test_g1_start_training_is_open():
    assert failures(GateLevel.G1, seed(SeedStage.GERMINATED), STRICT) == []
    assert failures(GateLevel.G1, seed(SeedStage.GERMINATED), PERMISSIVE) == []


FULL = {"alpha": 1.0, "target": 1.0, "epochs_in_stage": 4}


@pytest.mark.parametrize(
    ("options", "strict", "permissive"),
    [
        (FULL, [], []),
        (FULL | {"epochs_in_stage": 3}, [(R.TOO_YOUNG, 3, 4)], []),
        (
            FULL | {"alpha": 0.7, "target": 0.7},
            [(R.TARGET_NOT_FULL, 0.7, 1.0)],
            [(R.TARGET_NOT_FULL, 0.7, 1.0)],
        ),
        (
            FULL | {"alpha": 0.6, "mode": AlphaMode.UP},
            [(R.ALPHA_NOT_AT_TARGET, 0.6, 1.0)],
            [(R.ALPHA_NOT_AT_TARGET, 0.6, 1.0)],
        ),
        (
            FULL | {"alpha": 0.6, "target": 0.0, "mode": AlphaMode.DOWN},
            [(R.TARGET_NOT_FULL, 0.0, 1.0), (R.ALPHA_NOT_AT_TARGET, 0.6, 0.0)],
            [(R.TARGET_NOT_FULL, 0.0, 1.0), (R.ALPHA_NOT_AT_TARGET, 0.6, 0.0)],
        ),
    ],
)
def test_g3_hold(options, strict, permissive):
    assert failures(GateLevel.G3, seed(SeedStage.BLENDING, **options), STRICT) == strict
    assert failures(GateLevel.G3, seed(SeedStage.BLENDING, **options), PERMISSIVE) == permissive


@pytest.mark.parametrize(
    ("options", "strict", "permissive"),
    [
        ({"contribution": 1.0}, [], []),
        ({"contribution": 0.99}, [(R.CONTRIBUTION_LOW, 0.99, 1.0)], []),
        ({"contribution": -4.0}, [(R.CONTRIBUTION_LOW, -4.0, 1.0)], []),
        ({}, [(R.CONTRIBUTION_UNMEASURED, None, 1.0)], [(R.CONTRIBUTION_UNMEASURED, None, 1.0)]),
        (
            {"contribution": math.nan},
            [(R.CONTRIBUTION_UNMEASURED, None, 1.0)],
            [(R.CONTRIBUTION_UNMEASURED, None, 1.0)],
        ),
    ],
)
def test_g5_fossilize(options, strict, permissive):
    assert failures(GateLevel.G5, seed(SeedStage.HOLDING, **options), STRICT) == strict
    assert failures(GateLevel.G5, seed(SeedStage.HOLDING, **options), PERMISSIVE) == permissive


@given(st.booleans(), st.sampled_from([GateLevel.G2, GateLevel.G5]), st.integers(0, 1000))
def test_the_unmeasured_never_pass(permissive, gate, age):
    unmeasured = seed(epochs_in_stage=age, epochs_total=age)
    assert not check_gate(gate, unmeasured, GateConfig(permissive=permissive), PACING).passed


def test_gates_read_and_change_nothing():
    of = seed(**READY)
    before = of.to_dict()
    for gate in GateLevel:
        check_gate(gate, of, STRICT, PACING)
    assert of.to_dict() == before


def test_thresholds_come_from_the_configuration():
    of = seed(**but(gradient_ratio=0.3, current_accuracy=52.0, epochs_in_stage=2))
    config = GateConfig(min_gradient_ratio=0.4, min_training_improvement=3.0)
    result = check_gate(GateLevel.G2, of, config, Pacing(min_training_epochs=2))
    assert result.failures == (
        GateFailure(R.GRADIENT_RATIO_LOW, 0.3, 0.4),
        GateFailure(R.IMPROVEMENT_LOW, 2.0, 3.0),
    )
