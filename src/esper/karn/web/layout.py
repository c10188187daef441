"""What the page of a run shows and in which order, as data that the page draws. A chart names the curves or
the part of the feed that it shows; a key that ends in a slash stands for all curves below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from esper.karn.views import EVENT_VIEWS
from esper.leyline import EVENTS, TelemetryEventType
from esper.leyline.metrics import ROUND, FieldKind, Metric

Block = dict[str, Any]
_NUMERIC = (FieldKind.FLOAT, FieldKind.INT)


def lines(title: str, note: str, *keys: str, **more: Any) -> Block:
    return {"type": "lines", "title": title, "note": note, "keys": keys, "x": "round", **more}


def bars(title: str, note: str, *keys: str, **more: Any) -> Block:
    return {"type": "bars", "title": title, "note": note, "keys": keys, "x": "round", **more}


def table(part: str, absent: str = "") -> Block:
    return {"type": "table", "part": part, "absent": absent}


def section(title: str, *blocks: Block) -> dict[str, Any]:
    return {"id": title.lower().replace(" ", "-"), "title": title, "blocks": blocks}


def _sound(metric: Metric) -> str:
    limits = [
        f"{side} {limit:g}"
        for side, limit in (("at least", metric.low), ("at most", metric.high))
        if limit is not None
    ]
    return f" Sound: {' and '.join(limits)}." if limits else ""


def _charts(group: str, metrics: Iterable[Metric]) -> list[Block]:
    """Metrics that are numbers or maps of numbers, over rounds."""
    return [
        lines(
            metric.name,
            f"{f'({metric.unit}) ' if metric.unit else ''}{metric.meaning}{_sound(metric)}",
            f"{group}/{metric.name}" if metric.kind in _NUMERIC else f"{group}/{metric.name}/",
            limits=[limit for limit in (metric.low, metric.high) if limit is not None],
        )
        for metric in metrics
    ]


def _fields(kind: TelemetryEventType, *names: str) -> list[Metric]:
    return [field for field in EVENTS[kind].fields if field.name in names]


_COURSE = "(points) Validation accuracy with all blended seeds."
RUN: Sequence[dict[str, Any]] = (
    section(
        "Learning",
        lines(
            "What plans are worth",
            "(J above twins that grow nothing) Plans that action values hold for the best, and plans that "
            "explore.",
            "rounds/plan_gain",
            "rounds/explored_gain",
            optional=True,
        ),
        lines(
            "Objective J",
            "Mean over the envs; shaded from the 10th to the 90th percentile of episodes.",
            "rounds/avg_objective",
            band=("spread/low", "spread/high"),
        ),
        lines(
            "Accuracy",
            "(points) At the last epoch with all blended seeds and with fossilized seeds only, and the mean "
            "over all epochs.",
            "rounds/avg_accuracy",
            "rounds/avg_committed_accuracy",
            "rounds/avg_val_accuracy",
        ),
        lines("Reward", "Mean total reward of an episode.", "rounds/avg_reward"),
        lines(
            "Added parameters",
            "Parameters of fossilized seeds, mean over the envs.",
            "rounds/avg_added_params",
        ),
        lines("Last round", f"{_COURSE} Mean over the envs.", part="last_round.course", only="accuracy"),
        lines("Objective J by task", "Mean over the envs of each task.", "objective_by_task/", optional=True),
        {**table("tasks"), "title": "By task, in the last round"},
    ),
    section(
        "Growth",
        bars("Seeds", "Fate of the seeds germinated in an episode, mean over the envs.", "fates/"),
        {"type": "growth"},
    ),
    section(
        "Decisions",
        bars("Action mix", "Share of each operation among a round's decisions.", "mix/"),
        bars("When it acts", "Decisions of the last round by epoch, without WAIT.", part="last_round.acts"),
        lines("Forbidden operations", "Share of decisions at which each was masked.", "masked/"),
        table("refused", "Every recorded operation was carried out."),
    ),
    section(
        "Rewards",
        bars("Reward terms", "Mean per episode, by term. The mark is their sum.", "terms/", total=True),
        bars(
            "Reward terms by epoch", "Mean per step of the last round.", part="last_round.terms", total=True
        ),
    ),
    section(
        "Attribution",
        lines(
            "Shapley value",
            "(points) Mean over episodes, of the seed in each slot at the episode's end.",
            "shapley/",
        ),
        lines(
            "Leave one out",
            "(points) Mean accuracy that networks would lose without the seed.",
            "leave_one_out/",
        ),
        bars("Blended seeds", "Episodes that ended with a blended seed, by slot.", "blended/"),
        table("seeds", "No episode ended with a blended seed."),
        table("pairs"),
    ),
    section("Blueprints", table("blueprints", "No seed was germinated, or lifecycles were not recorded.")),
    section(
        "PPO",
        *_charts(
            "updates",
            [
                f
                for f in EVENTS[TelemetryEventType.PPO_UPDATE].fields
                if f.kind in (*_NUMERIC, FieldKind.NUMBERS) and f.name != "update"
            ],
        ),
    ),
    section(
        "Health",
        *_charts("health", ROUND),
        *_charts("rounds", _fields(TelemetryEventType.BATCH_COMPLETED, "accuracy_drop", "rollbacks")),
    ),
    section(
        "Time",
        bars("Time of a round", "(s) By phase.", "phases/"),
        lines("Training speed", "(samples/s) All envs together.", "speed/samples"),
    ),
    section(
        "Alerts",
        table("alerts", "No alert was raised."),
        table("rollbacks", "No network was rolled back."),
    ),
    section("Metrics", {"type": "glossary"}),
    section("Settings", {"type": "settings"}, table("checkpoints", "No checkpoint was saved.")),
)
"""The page of a training run."""

OWN: Sequence[dict[str, Any]] = (
    section(
        "Learning",
        lines("Accuracy", _COURSE, "course/accuracy", x="epoch"),
        lines("Loss", "(nats) Validation loss, if it was told.", "course/loss", x="epoch"),
    ),
    section("Growth", {"type": "growth"}),
    *(part for part in RUN if part["title"] in ("Blueprints", "Metrics", "Settings")),
)
"""The page of a user's own network."""


def glossary() -> list[dict[str, Any]]:
    """Every metric with its meaning, by view."""
    groups = [(EVENT_VIEWS[kind], kind.value, spec.meaning, spec.fields) for kind, spec in EVENTS.items()]
    groups.append(("health", "health", "Figures of a round that the alert rules judge.", ROUND))
    return [
        {
            "view": view,
            "event": event,
            "meaning": meaning,
            "fields": [
                {
                    "name": field.name,
                    "unit": field.unit,
                    "better": f"{field.better}{_sound(field)}".strip(),
                    "meaning": field.meaning,
                }
                for field in fields
            ],
        }
        for view, event, meaning, fields in groups
    ]


def describe() -> dict[str, Any]:
    """All that the page needs besides the runs."""
    return {"run": RUN, "own": OWN, "glossary": glossary()}
