"""The scoreboard of blueprints."""

from __future__ import annotations

from pathlib import Path

from esper.leyline import LifecycleKind, TelemetryEvent, TelemetryEventType
from esper.nissa import BlueprintAnalytics, JsonlOutput, TelemetryHub, read_events
from esper.nissa.analytics import BlueprintScore


def seed(
    kind: LifecycleKind, blueprint: str, *, contribution: float | None = None, params: int = 100, age: int = 5
) -> TelemetryEvent:
    return TelemetryEvent(
        event_type=TelemetryEventType.SEED_LIFECYCLE,
        env_id=2,
        epoch=9,
        data={
            "kind": kind,
            "blueprint_id": blueprint,
            "stage_from": "HOLDING",
            "stage_to": "FOSSILIZED",
            "alpha": 1.0,
            "params": params,
            "epochs_total": age,
            "contribution": contribution,
            "gate_failures": [],
            "cause": None,
        },
    )


HISTORY = [
    *[seed(LifecycleKind.GERMINATED, "norm")] * 3,
    *[seed(LifecycleKind.GERMINATED, "conv_light")] * 4,
    seed(LifecycleKind.STAGE_CHANGED, "conv_light"),
    seed(LifecycleKind.GATE_REFUSED, "conv_light"),
    seed(LifecycleKind.FOSSILIZED, "conv_light", contribution=4.0, params=156, age=8),
    seed(LifecycleKind.FOSSILIZED, "conv_light", contribution=2.0, params=144, age=10),
    seed(LifecycleKind.FOSSILIZED, "conv_light", contribution=None, params=156, age=12),
    seed(LifecycleKind.PRUNED, "conv_light", contribution=-1.5),
    seed(LifecycleKind.PRUNED, "norm"),
]
EXPECTED = [
    BlueprintScore(
        blueprint_id="conv_light",
        germinated=4,
        fossilized=3,
        pruned=1,
        survival=0.75,
        mean_contribution=3.0,
        mean_pruned_contribution=-1.5,
        mean_params=152.0,
        mean_age=10.0,
    ),
    BlueprintScore(
        blueprint_id="norm",
        germinated=3,
        fossilized=0,
        pruned=1,
        survival=0.0,
        mean_contribution=None,
        mean_pruned_contribution=None,
        mean_params=None,
        mean_age=None,
    ),
]


def test_scoreboard_live_and_from_the_log(tmp_path: Path) -> None:
    live, later = BlueprintAnalytics(), BlueprintAnalytics()
    assert live.scoreboard() == []
    hub = TelemetryHub()
    with hub.attached(live, JsonlOutput(tmp_path / "log")):
        for event in HISTORY:
            hub.emit(event)
        hub.emit(
            TelemetryEvent(
                event_type=TelemetryEventType.ALERT, data={"kind": "pruned", "blueprint_id": "norm"}
            )
        )
    assert live.scoreboard() == EXPECTED
    for line in read_events(tmp_path / "log"):
        if line["event_type"] == "seed_lifecycle":
            later.observe(line["data"])
    assert later.scoreboard() == EXPECTED


def test_a_blueprint_that_is_still_alive_has_no_survival() -> None:
    analytics = BlueprintAnalytics()
    analytics.observe(seed(LifecycleKind.GERMINATED, "norm").data)
    (score,) = analytics.scoreboard()
    assert (score.germinated, score.survival) == (1, None)
