"""The update's record: every metric says what it is, and several updates reduce to one."""
from __future__ import annotations

from dataclasses import fields

import pytest

from esper.leyline import EsperError
from esper.simic.agent.ppo_metrics import REDUCERS, PPOUpdateMetrics, aggregate


def record(value: float) -> PPOUpdateMetrics:
    return PPOUpdateMetrics(**{f.name: (value,) * 8 if "tuple" in str(f.type) else value for f in fields(PPOUpdateMetrics)})


def test_each_metric_has_unit_reducer_and_a_sentence() -> None:
    for f in fields(PPOUpdateMetrics):
        assert f.metadata["unit"]
        assert f.metadata["reducer"] in REDUCERS
        assert f.metadata["meaning"].endswith(".")
        assert len(f.metadata["meaning"]) > 20
    assert 20 <= len(fields(PPOUpdateMetrics)) <= 30


def test_aggregation_follows_the_reducers() -> None:
    merged = aggregate([record(1.0), record(5.0), record(3.0)])
    assert (merged.policy_loss, merged.ratio_max, merged.ratio_min) == (3.0, 5.0, 1.0)
    assert (merged.steps, merged.update) == (9.0, 3.0)
    assert merged.head_kl == (3.0,) * 8


def test_aggregating_nothing_is_an_error() -> None:
    with pytest.raises(EsperError, match="no updates"):
        aggregate([])
