"""A seed's measurements by hand computation."""

from __future__ import annotations

import pytest

from esper.kasmina.seed import Seed
from esper.leyline import AlphaAlgorithm, AlphaCurve, SeedMetrics


def make_seed(**metrics: float) -> Seed:
    return Seed(
        seed_id="s",
        blueprint_id="norm",
        algorithm=AlphaAlgorithm.ADD,
        ramp_curve=AlphaCurve.LINEAR,
        tempo_epochs=3,
        init_seed=0,
        metrics=SeedMetrics(**metrics),
    )


def test_record_accuracy() -> None:
    seed = make_seed()
    assert seed.metrics.improvement_since_stage_start() is None
    for accuracy in (40.0, 55.0, 50.0):
        seed.record_accuracy(accuracy)
    assert (seed.metrics.initial_accuracy, seed.metrics.current_accuracy) == (40.0, 50.0)
    assert seed.metrics.improvement_since_stage_start() == 10.0
    seed.update_metrics(stage_start_accuracy=55.0)
    assert seed.metrics.improvement_since_stage_start() == -5.0


def test_record_accuracy_counts_no_epochs() -> None:
    seed = make_seed(epochs_total=7, epochs_in_stage=3)
    seed.record_accuracy(50.0)
    seed.record_accuracy(60.0)
    assert (seed.metrics.epochs_total, seed.metrics.epochs_in_stage) == (7, 3)


def measured(seed: Seed) -> tuple[float | None, float | None, int | None]:
    metrics = seed.metrics
    return metrics.contribution, metrics.contribution_velocity, metrics.contribution_age


def test_record_contribution() -> None:
    seed = make_seed(contribution_age=9)
    seed.record_contribution(1.0)
    assert measured(seed) == (1.0, None, 0)
    seed.update_metrics(contribution_age=4)
    seed.record_contribution(3.0)  # the first change is taken as it is
    assert measured(seed) == (3.0, 2.0, 0)
    seed.record_contribution(2.0)  # 0.7 · 2 + 0.3 · (−1)
    assert seed.metrics.contribution_velocity == pytest.approx(1.1, abs=1e-12)
    seed.record_contribution(2.0)  # 0.7 · 1.1 + 0.3 · 0
    assert seed.metrics.contribution_velocity == pytest.approx(0.77, abs=1e-12)
    assert seed.metrics.first_contribution == 1.0
    assert (seed.metrics.epochs_total, seed.metrics.epochs_in_stage) == (0, 0)
