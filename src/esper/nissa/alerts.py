"""Alert rules: one table, judged the same way while a run goes on and afterwards over its log.

A rule watches one metric of the registry; its limit is the registry's. It counts how often in a row the
metric was at fault and raises one alert when that reaches the rule's streak; the next one only after the
fault has gone. What is judged depends on the recorded events alone, so replaying a log gives the alerts of
the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from esper.leyline import EVENTS, METRICS, LifecycleOp, TelemetryEvent, TelemetryEventType, allowed
from esper.leyline.metrics import FieldKind
from esper.nissa.hub import TelemetryError

BASELINE_ROUNDS = 10
"""Rounds that a round's reward is compared with."""


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Rule:
    """`metric` is a name of METRICS; one that starts with `round.` is judged when a round is over, others
    with their event."""

    code: str
    metric: str
    streak: int
    severity: Severity
    sentence: str

    @property
    def limit(self) -> float:
        """The side that the registry gives a limit to."""
        metric = METRICS[self.metric]
        limit = metric.low if metric.high is None else metric.high
        assert limit is not None, f"{self.metric} has no limit for rule {self.code}"
        return limit


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule's finding, as the payload of an alert event; `value` is NaN where it was not finite."""

    code: str
    severity: Severity
    metric: str
    value: float
    limit: float
    streak: int
    message: str


_WARNING, _ERROR = Severity.WARNING, Severity.ERROR
RULES = (
    Rule("nonfinite_metric", "round.nonfinite_metrics", 1, _ERROR, "A number of the round is NaN or Inf."),
    Rule(
        "skipped_steps",
        "ppo_update.skipped_steps",
        1,
        _ERROR,
        "Loss or gradient was not finite; the step was not taken.",
    ),
    Rule(
        "nonfinite_layer",
        "ppo_update.nonfinite_layers",
        1,
        _ERROR,
        "A layer of the policy has NaN or Inf in its gradient.",
    ),
    Rule(
        "log_prob_drift",
        "ppo_update.log_prob_drift",
        1,
        _ERROR,
        "The update does not see what the policy saw while acting.",
    ),
    Rule("no_learning", "ppo_update.optimizer_steps", 2, _ERROR, "Updates end before their first step."),
    Rule("gradient_explosion", "ppo_update.grad_norm_max", 2, _WARNING, "The policy's gradient explodes."),
    Rule("gradient_vanishing", "ppo_update.grad_norm", 3, _WARNING, "The policy's gradient vanishes."),
    Rule("entropy_collapse", "ppo_update.entropy", 5, _WARNING, "The policy hardly explores any more."),
    Rule("kl_spike", "ppo_update.approx_kl_max", 2, _WARNING, "Updates move the policy too far at once."),
    Rule(
        "ratio_explosion",
        "ppo_update.ratio_max",
        3,
        _WARNING,
        "Probability ratios leave the trust region by far.",
    ),
    Rule("clipping", "ppo_update.clip_fraction", 3, _WARNING, "Most of the surrogate loss is clipped."),
    Rule("value_collapse", "ppo_update.value_loss", 3, _WARNING, "The value head is far off its targets."),
    Rule(
        "critic_useless",
        "ppo_update.explained_variance",
        10,
        _WARNING,
        "The value head explains less than a constant would.",
    ),
    Rule("no_choice", "ppo_update.choice_fraction", 3, _WARNING, "Almost nothing was left to decide."),
    Rule(
        "accuracy_drop",
        "batch_completed.accuracy_drop",
        2,
        _WARNING,
        "Accuracy has fallen below that of the rounds before.",
    ),
    Rule("rollback_storm", "round.rollbacks_per_episode", 1, _ERROR, "Many networks had to be rolled back."),
    Rule("reward_explosion", "round.reward_jump", 1, _ERROR, "Rewards are far larger than before."),
    Rule("all_wait", "round.wait_share", 5, Severity.INFO, "The policy only waits."),
    Rule("single_op", "round.top_op_share", 5, _WARNING, "The policy has only one operation left."),
    Rule(
        "failing_actions",
        "round.failure_rate",
        3,
        _WARNING,
        "Actions that the masks allow are not carried out.",
    ),
    Rule(
        "stuck_seeds", "round.unfinished_share", 3, _WARNING, "Seeds are planted and never brought to an end."
    ),
)
"""All rules, in the order in which alerts of one event are raised."""

_NUMBERS = {
    kind: frozenset(f.name for f in spec.fields if f.kind in (FieldKind.FLOAT, FieldKind.INT))
    for kind, spec in EVENTS.items()
}
_KINDS = tuple(TelemetryEventType)
_JUDGED = (TelemetryEventType.PPO_UPDATE, TelemetryEventType.BATCH_COMPLETED)


class AlertEngine:
    """Takes events in order, hands out alerts. `active` holds every rule at fault for its streak or
    longer."""

    def __init__(self) -> None:
        self.active: dict[str, Alert] = {}
        self.evaluated: set[str] = set()
        """Codes of the rules whose metric has been seen."""
        self.round: Mapping[str, float] = {}
        """The figures of the last round that is over, without what could not be measured."""
        self._streaks = dict.fromkeys((rule.code for rule in RULES), 0)
        self._rewards: deque[float] = deque(maxlen=BASELINE_ROUNDS)
        self._begin_round()

    def _begin_round(self) -> None:
        self._actions: Mapping[str, int] = {}
        self._successes: Mapping[str, int] | None = None
        self._seeds: list[tuple[int, int, int]] = []
        self._episodes = self._rollbacks = self._nonfinite = 0

    def observe(
        self, kind: TelemetryEventType, data: Mapping[str, Any], nonfinite: Collection[str] = ()
    ) -> list[Alert]:
        """The alerts that this event raises. `nonfinite` names fields that a log holds as null because they
        were not finite."""
        if kind is TelemetryEventType.ROLLBACK:
            self._rollbacks += 1
        elif kind is TelemetryEventType.EPISODE_OUTCOME:
            self._episodes += 1
            germinated, fossilized, pruned = (
                data.get(name) for name in ("germinated", "fossilized", "pruned")
            )
            if (
                germinated is not None and fossilized is not None and pruned is not None
            ):  # a log may lack them
                self._seeds.append((germinated, fossilized, pruned))
        elif kind is TelemetryEventType.ACTION_DISTRIBUTION:
            self._actions, self._successes = data.get("action_counts") or {}, data.get("action_successes")
        if kind not in _JUDGED:
            return []
        numbers = _numbers(kind, data, nonfinite)
        self._nonfinite += sum(not math.isfinite(value) for value in numbers.values())
        found = {f"{kind.value}.{name}": value for name, value in numbers.items()}
        scopes = [kind.value]
        if kind is TelemetryEventType.BATCH_COMPLETED:
            self.round = self._round_metrics(numbers)
            found |= {f"round.{name}": value for name, value in self.round.items()}
            scopes.append("round")
            self._begin_round()
        return [
            alert
            for rule in RULES
            if rule.metric.split(".")[0] in scopes and (alert := self._judge(rule, found))
        ]

    def _judge(self, rule: Rule, found: Mapping[str, float]) -> Alert | None:
        """A metric that was not measured breaks a streak; one that is not finite is `nonfinite_metric`'s
        business."""
        value = found.get(rule.metric)
        if value is not None:
            self.evaluated.add(rule.code)
        if value is None or not METRICS[rule.metric].fault(value):
            self._streaks[rule.code] = 0
            self.active.pop(rule.code, None)
            return None
        streak = self._streaks[rule.code] = self._streaks[rule.code] + 1
        if streak < rule.streak:
            return None
        alert = Alert(rule.code, rule.severity, rule.metric, value, rule.limit, streak, rule.sentence)
        self.active[rule.code] = alert
        return alert if streak == rule.streak else None

    def _round_metrics(self, numbers: Mapping[str, float]) -> dict[str, float]:
        found = {"nonfinite_metrics": float(self._nonfinite)}
        total, waits = sum(self._actions.values()), self._actions.get(LifecycleOp.WAIT.name, 0)
        if total:
            found["wait_share"] = waits / total
        if acted := total - waits:
            others = {op: count for op, count in self._actions.items() if op != LifecycleOp.WAIT.name}
            found["top_op_share"] = max(others.values()) / acted
            if self._successes is not None:
                found["failure_rate"] = 1.0 - sum(self._successes.get(op, 0) for op in others) / acted
        if self._episodes:
            found["rollbacks_per_episode"] = self._rollbacks / self._episodes
        if planted := sum(germinated for germinated, _, _ in self._seeds):
            found["unfinished_share"] = (
                1.0 - sum(fossilized + pruned for _, fossilized, pruned in self._seeds) / planted
            )
        reward = abs(numbers.get("avg_reward", math.nan))
        if math.isfinite(reward):
            if self._rewards:
                found["reward_jump"] = reward / max(1.0, *self._rewards)
            self._rewards.append(reward)
        return found


def _numbers(
    kind: TelemetryEventType, data: Mapping[str, Any], nonfinite: Collection[str]
) -> dict[str, float]:
    """The registered numbers of a payload; whatever is not finite becomes NaN, because a log cannot tell NaN
    from Inf."""
    found = {
        name: float(value) for name, value in data.items() if name in _NUMBERS[kind] and value is not None
    }
    found = {name: value if math.isfinite(value) else math.nan for name, value in found.items()}
    return found | {name: math.nan for name in nonfinite if name in _NUMBERS[kind]}


def event_parts(
    event: TelemetryEvent | Mapping[str, Any],
) -> tuple[TelemetryEventType, Mapping[str, Any], list[str]]:
    """Kind, payload and non-finite fields of an event as it was emitted or as a log holds it."""
    if isinstance(event, TelemetryEvent):
        return event.event_type, event.data, []
    kind, data = event.get("event_type"), event.get("data")
    if kind not in _KINDS or not isinstance(data, Mapping):
        raise TelemetryError(
            f"event {event.get('seq')}: type {kind!r} with {type(data).__name__} as data; {allowed(_KINDS)}, "
            "with an object"
        )
    nonfinite = [path.removeprefix("data.") for path in event.get("nonfinite", ())]
    return TelemetryEventType(kind), data, nonfinite


def evaluate(events: Iterable[TelemetryEvent | Mapping[str, Any]]) -> list[Alert]:
    """All alerts of a log or of a list of events; recorded alert events are passed over."""
    engine = AlertEngine()
    return [alert for event in events for alert in engine.observe(*event_parts(event))]
