"""The metric registry: complete, consistent with what the code records, and the source of
docs/telemetry.md."""

from __future__ import annotations

from dataclasses import fields

import pytest

from esper.leyline import EVENTS, METRICS, EpisodeOutcome, TelemetryEventType
from esper.leyline.metrics import FieldKind, Metric
from esper.nissa.alerts import RULES
from esper.simic.agent.ppo_metrics import PPOUpdateMetrics
from pages import DOCS, renewed


def test_every_event_type_has_a_payload_of_distinct_fields() -> None:
    assert list(EVENTS) == list(TelemetryEventType)
    assert 14 <= len(EVENTS) <= 16
    for spec in EVENTS.values():
        names = [f.name for f in spec.fields]
        assert names
        assert len(set(names)) == len(names)


def test_every_field_says_what_it_is() -> None:
    for name, metric in METRICS.items():
        assert metric.meaning.endswith("."), name
        assert len(metric.meaning) >= 8, name
        assert metric.better in ("", "higher", "lower"), name
        if metric.kind in (FieldKind.FLOAT, FieldKind.INT):
            assert metric.unit or name.endswith(".seed"), name
        else:
            assert metric.low is metric.high is None, name


def test_limits() -> None:
    metric = Metric("x", "m", "An x.", low=-1.0, high=2.0)
    assert [metric.fault(v) for v in (-1.1, -1.0, 0.0, 2.0, 2.1, float("nan"))] == [
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    assert not Metric("x", "m", "An x.").fault(1e300)


def test_every_limit_has_a_rule() -> None:
    limited = {name for name, metric in METRICS.items() if metric.low is not None or metric.high is not None}
    assert limited == {rule.metric for rule in RULES}


@pytest.mark.parametrize("field", fields(PPOUpdateMetrics), ids=lambda f: f.name)
def test_update_metrics_are_registered(field) -> None:
    metric = METRICS[f"ppo_update.{field.name}"]
    assert metric.kind is {"int": FieldKind.INT, "float": FieldKind.FLOAT}.get(field.type, FieldKind.NUMBERS)


def test_outcomes_are_registered() -> None:
    kinds = {"int": FieldKind.INT, "float": FieldKind.FLOAT, "str": FieldKind.TEXT}
    expected = {f.name: kinds[f.type] for f in fields(EpisodeOutcome) if f.name != "env_id"}
    assert {f.name: f.kind for f in EVENTS[TelemetryEventType.EPISODE_OUTCOME].fields} == expected


def test_the_page_is_current() -> None:
    page = DOCS.read_text(encoding="utf-8")
    assert renewed(page) == page, "to renew the page: python tests/pages.py"
