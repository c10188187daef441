"""The update's record: several updates reduce to one."""

from __future__ import annotations

from dataclasses import fields

import pytest

from esper.leyline import EsperError
from esper.simic.agent.ppo_metrics import PPOUpdateMetrics, aggregate


def record(value: float) -> PPOUpdateMetrics:
    return PPOUpdateMetrics(
        **{f.name: (value,) * 8 if "tuple" in str(f.type) else value for f in fields(PPOUpdateMetrics)}
    )


def test_aggregation_follows_the_reducers() -> None:
    merged = aggregate([record(1.0), record(5.0), record(3.0)])
    assert (merged.policy_loss, merged.ratio_max, merged.ratio_min) == (3.0, 5.0, 1.0)
    assert (merged.steps, merged.update, merged.log_prob_drift) == (9.0, 3.0, 1.0)
    assert merged.head_kl == (3.0,) * 8


def test_aggregating_nothing_is_an_error() -> None:
    with pytest.raises(EsperError, match="no updates"):
        aggregate([])
