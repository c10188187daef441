"""The live detector: reports per round, levels that follow, and a resumed run that knows what the run
knew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from esper.leyline import TelemetryEvent, TelemetryEventType
from esper.nissa import JsonlOutput, TelemetryHub, evaluate, read_events
from esper.simic.seed_management import emit_anomaly_diagnostics, handle_telemetry_escalation
from esper.simic.telemetry import AnomalyDetector, AnomalyReport, TelemetryConfig, TelemetryLevel
from memory_output import MemoryOutput


def play(
    hub: TelemetryHub, detector: AnomalyDetector, first: int, ratios: list[float]
) -> list[AnomalyReport]:
    """Rounds with one update each; alerts are announced as the trainer does."""
    reports = []
    for round_idx, ratio in enumerate(ratios, first):
        hub.round_idx = round_idx
        hub.emit(
            TelemetryEvent(
                event_type=TelemetryEventType.PPO_UPDATE, data={"ratio_max": ratio, "clip_fraction": 0.1}
            )
        )
        hub.emit(
            TelemetryEvent(
                event_type=TelemetryEventType.BATCH_COMPLETED,
                data={"round_idx": round_idx, "avg_reward": 0.5},
            )
        )
        reports.append(detector.report)
        emit_anomaly_diagnostics(hub, detector.report, round_idx, 24)
    return reports


RATIOS = [2.0, 99.0, 99.0, 99.0, 99.0, 2.0, 2.0, 2.0, 2.0, 99.0, 99.0, 99.0]


def test_reports() -> None:
    detector, memory = AnomalyDetector(), MemoryOutput()
    reports = play(TelemetryHub([detector, memory]), detector, 0, RATIOS)
    assert [[a.code for a in r.raised] for r in reports] == [
        ["ratio_explosion"] if i in (3, 11) else [] for i in range(12)
    ]
    assert [r.last_anomaly for r in reports] == [None] * 3 + [3] + [4] * 7 + [11]
    alerts = [e for _, e in memory.events if e.event_type is TelemetryEventType.ALERT]
    assert [(e.round_idx, e.epoch, e.data["code"], e.data["value"]) for e in alerts] == [
        (3, 24, "ratio_explosion", 99.0),
        (11, 24, "ratio_explosion", 99.0),
    ]


def test_the_level_rises_for_some_rounds_and_falls_again() -> None:
    detector = AnomalyDetector()
    reports = play(TelemetryHub([detector]), detector, 0, RATIOS)
    config = TelemetryConfig(level=TelemetryLevel.NORMAL, escalation_rounds=3)
    assert [handle_telemetry_escalation(r, config) == TelemetryLevel.DEBUG for r in reports] == [
        False
    ] * 3 + [True] * 4 + [False] * 4 + [True]
    for quiet in (TelemetryConfig(level=TelemetryLevel.OFF), TelemetryConfig(escalation_rounds=0)):
        assert {handle_telemetry_escalation(r, quiet) for r in reports} == {quiet.level}


@pytest.mark.parametrize("stop", range(1, len(RATIOS)))
def test_a_resumed_run_reports_like_one_that_was_never_stopped(tmp_path: Path, stop: int) -> None:
    whole = AnomalyDetector()
    expected = play(TelemetryHub([whole, MemoryOutput()]), whole, 0, RATIOS)
    first = AnomalyDetector()
    with TelemetryHub().attached(first, JsonlOutput(tmp_path / "log")) as hub:
        reports = play(hub, first, 0, RATIOS[:stop])
    second = AnomalyDetector()
    second.replay(read_events(tmp_path / "log"))
    assert second.report == reports[-1]
    with TelemetryHub().attached(second, JsonlOutput(tmp_path / "log")) as hub:
        reports += play(hub, second, stop, RATIOS[stop:])
    assert reports == expected
    recorded = [e["data"]["code"] for e in read_events(tmp_path / "log") if e["event_type"] == "alert"]
    assert (
        recorded
        == [alert.code for alert in evaluate(read_events(tmp_path / "log"))]
        == ["ratio_explosion"] * 2
    )


def test_an_alert_that_is_over_before_the_round_is_still_reported() -> None:
    detector = AnomalyDetector()
    hub = TelemetryHub([detector])
    for data in ({"skipped_steps": 1}, {"skipped_steps": 0}):
        hub.emit(TelemetryEvent(event_type=TelemetryEventType.PPO_UPDATE, data=data))
    hub.emit(TelemetryEvent(event_type=TelemetryEventType.BATCH_COMPLETED, data={"round_idx": 0}))
    assert [a.code for a in detector.report.raised] == ["skipped_steps"]
    assert (detector.engine.active, detector.report.last_anomaly) == ({}, 0)


def test_before_the_first_round() -> None:
    report: Any = AnomalyDetector().report
    assert (report.round_idx, report.raised, report.last_anomaly) == (-1, (), None)
    assert handle_telemetry_escalation(report, TelemetryConfig()) is TelemetryLevel.NORMAL
