"""The scoreboard of blueprints, and lines for a person at a terminal."""
from __future__ import annotations

import io
from pathlib import Path

import pytest

from esper.leyline import LifecycleKind, TelemetryEvent, TelemetryEventType
from esper.nissa import BlueprintAnalytics, ConsoleOutput, JsonlOutput, TelemetryHub, read_events
from esper.nissa.analytics import BlueprintScore


def seed(kind: LifecycleKind, blueprint: str, *, contribution: float | None = None, params: int = 100,
         age: int = 5) -> TelemetryEvent:
    return TelemetryEvent(event_type=TelemetryEventType.SEED_LIFECYCLE, env_id=2, epoch=9, data={
        "kind": kind, "blueprint_id": blueprint, "stage_from": "HOLDING", "stage_to": "FOSSILIZED", "alpha": 1.0,
        "params": params, "epochs_total": age, "contribution": contribution, "gate_failures": [], "cause": None})


HISTORY = [
    *[seed(LifecycleKind.GERMINATED, "norm")] * 3, *[seed(LifecycleKind.GERMINATED, "conv_light")] * 4,
    seed(LifecycleKind.STAGE_CHANGED, "conv_light"), seed(LifecycleKind.GATE_REFUSED, "conv_light"),
    seed(LifecycleKind.FOSSILIZED, "conv_light", contribution=4.0, params=156, age=8),
    seed(LifecycleKind.FOSSILIZED, "conv_light", contribution=2.0, params=144, age=10),
    seed(LifecycleKind.FOSSILIZED, "conv_light", contribution=None, params=156, age=12),
    seed(LifecycleKind.PRUNED, "conv_light", contribution=-1.5), seed(LifecycleKind.PRUNED, "norm"),
]
EXPECTED = [
    BlueprintScore(blueprint_id="conv_light", germinated=4, fossilized=3, pruned=1, survival=0.75, mean_contribution=3.0,
                   mean_pruned_contribution=-1.5, mean_params=152.0, mean_age=10.0),
    BlueprintScore(blueprint_id="norm", germinated=3, fossilized=0, pruned=1, survival=0.0, mean_contribution=None,
                   mean_pruned_contribution=None, mean_params=None, mean_age=None),
]


def test_scoreboard_live_and_from_the_log(tmp_path: Path) -> None:
    live, later = BlueprintAnalytics(), BlueprintAnalytics()
    assert live.scoreboard() == []
    with TelemetryHub([live, JsonlOutput(tmp_path / "log")]) as hub:
        for event in HISTORY:
            hub.emit(event)
        hub.emit(TelemetryEvent(event_type=TelemetryEventType.ALERT, data={"kind": "pruned", "blueprint_id": "norm"}))
    assert live.scoreboard() == EXPECTED
    for line in read_events(tmp_path / "log"):
        if line["event_type"] == "seed_lifecycle":
            later.observe(line["data"])
    assert later.scoreboard() == EXPECTED


def test_a_blueprint_that_is_still_alive_has_no_survival() -> None:
    analytics = BlueprintAnalytics()
    analytics.observe(seed(LifecycleKind.GERMINATED, "norm").data)
    score, = analytics.scoreboard()
    assert (score.germinated, score.survival) == (1, None)


@pytest.mark.parametrize("verbose", [False, True])
def test_console(verbose: bool) -> None:
    stream = io.StringIO()
    with TelemetryHub([ConsoleOutput(stream, verbose=verbose)]) as hub:
        hub.emit(TelemetryEvent(event_type=TelemetryEventType.BATCH_COMPLETED, data={
            "round_idx": 3, "avg_accuracy": 71.25, "avg_objective": None, "avg_reward": 0.123456, "seconds": 4.0}))
        hub.emit(seed(LifecycleKind.FOSSILIZED, "norm"))
        hub.emit(TelemetryEvent(event_type=TelemetryEventType.PPO_UPDATE, data={"entropy": 1.0}))
        hub.emit(TelemetryEvent(event_type=TelemetryEventType.ROLLBACK, env_id=1, epoch=4, data={
            "reason": "collapse", "loss": 2.31, "limit": float("inf"), "amount": -0.1}))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "round 3: accuracy 71.25, J –, reward 0.1235, 4 s"
    assert lines[-1] == "env 1, epoch 4: rollback: collapse, loss 2.31, limit inf"
    assert lines[1:-1] == (["env 2, epoch 9: seed fossilized: norm, HOLDING to FOSSILIZED"] if verbose else [])
