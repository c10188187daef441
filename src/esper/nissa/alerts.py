"""Alert rules: one table, judged the same way during a run and afterwards from its log.

A rule judges one metric of the registry by the registry's limit. It counts how many times in a row the metric
was at fault, and raises one alert when that count reaches the rule's streak; the next one only after the
fault has gone. Rules depend on recorded events alone, so replaying a log gives the alerts of the run."""

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
"""Number of earlier rounds that a round's reward is compared with."""


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Rule:
    """`metric` is a name of METRICS. Metrics that start with `round.` are judged when a round is finished,
    others with their event."""

    code: str
    metric: str
    streak: int
    severity: Severity
    sentence: str

    @property
    def limit(self) -> float:
        """The limit in the registry: its upper one, or else its lower one."""
        metric = METRICS[self.metric]
        limit = metric.low if metric.high is None else metric.high
        assert limit is not None, f"{self.metric} has no limit for rule {self.code}"
        return limit


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert, as the payload of an alert event. `value` is NaN if it was not finite."""

    code: str
    severity: Severity
    metric: str
    value: float
    limit: float
    streak: int
    message: str


_WARNING, _ERROR = Severity.WARNING, Severity.ERROR
RULES = (
    Rule("nonfinite_metric", "round.nonfinite_metrics", 1, _ERROR, "A metric of the round is NaN or Inf."),
    Rule(
        "skipped_steps",
        "ppo_update.skipped_steps",
        1,
        _ERROR,
        "Loss or gradient was not finite; the step was skipped.",
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
        "The update computes other log-probs than acting did, for the same weights.",
    ),
    Rule(
        "no_learning",
        "ppo_update.optimizer_steps",
        2,
        _ERROR,
        "Updates end before their first optimizer step.",
    ),
    Rule(
        "gradient_explosion",
        "ppo_update.grad_norm_max",
        2,
        _WARNING,
        "The policy's gradient norm is very large.",
    ),
    Rule(
        "gradient_vanishing",
        "ppo_update.grad_norm",
        3,
        _WARNING,
        "The policy's gradient norm is close to zero.",
    ),
    Rule("entropy_collapse", "ppo_update.entropy", 5, _WARNING, "The policy hardly explores."),
    Rule("kl_spike", "ppo_update.approx_kl_max", 2, _WARNING, "An update moved the policy too far."),
    Rule(
        "ratio_explosion",
        "ppo_update.ratio_max",
        3,
        _WARNING,
        "Probability ratios are far outside the trust region.",
    ),
    Rule("clipping", "ppo_update.clip_fraction", 3, _WARNING, "Most of the surrogate loss is clipped."),
    Rule("value_collapse", "ppo_update.value_loss", 3, _WARNING, "The value head is far from its targets."),
    Rule(
        "critic_useless",
        "ppo_update.explained_variance",
        10,
        _WARNING,
        "The value head predicts worse than a constant.",
    ),
    Rule(
        "no_choice", "ppo_update.choice_fraction", 3, _WARNING, "Almost all steps had a single legal action."
    ),
    Rule(
        "accuracy_drop",
        "batch_completed.accuracy_drop",
        2,
        _WARNING,
        "Accuracy is lower than in earlier rounds.",
    ),
    Rule("rollback_storm", "round.rollbacks_per_episode", 1, _ERROR, "Many networks were rolled back."),
    Rule(
        "reward_explosion", "round.reward_jump", 1, _ERROR, "Rewards are much larger than in earlier rounds."
    ),
    Rule("all_wait", "round.wait_share", 5, Severity.INFO, "The policy chooses almost only WAIT."),
    Rule(
        "single_op",
        "round.top_op_share",
        5,
        _WARNING,
        "The policy uses only one operation, which plants nothing.",
    ),
    Rule(
        "failing_actions",
        "round.failure_rate",
        3,
        _WARNING,
        "Actions that the masks allow are not carried out.",
    ),
    Rule(
        "stuck_seeds",
        "round.unfinished_share",
        3,
        _WARNING,
        "Seeds are germinated but neither fossilized nor pruned.",
    ),
)
"""All rules, in the order in which one event raises alerts."""

_NUMBERS = {
    kind: frozenset(f.name for f in spec.fields if f.kind in (FieldKind.FLOAT, FieldKind.INT))
    for kind, spec in EVENTS.items()
}
_KINDS = tuple(TelemetryEventType)
_JUDGED = (TelemetryEventType.PPO_UPDATE, TelemetryEventType.BATCH_COMPLETED)


class AlertEngine:
    """Takes events in order and returns alerts. `active` holds the rules that have been at fault for their
    streak or longer."""

    def __init__(self) -> None:
        self.active: dict[str, Alert] = {}
        self.evaluated: set[str] = set()
        """Codes of the rules whose metric was measured at least once."""
        self.round: Mapping[str, float] = {}
        """Figures of the last finished round; those that could not be measured are absent."""
        self._streaks = dict.fromkeys((rule.code for rule in RULES), 0)
        self._rewards: deque[float] = deque(maxlen=BASELINE_ROUNDS)
        self._begin_round()

    def _begin_round(self) -> None:
        self._actions: Mapping[str, int] = {}
        self._successes: Mapping[str, int] | None = None
        self._tasks: dict[str | None, _Tally] = {}
        self._worst: dict[str, str] = {}
        """With several tasks: the task that a metric's value is from."""
        self._rollbacks = self._nonfinite = 0

    def observe(
        self, kind: TelemetryEventType, data: Mapping[str, Any], nonfinite: Collection[str] = ()
    ) -> list[Alert]:
        """The alerts that this event raises. `nonfinite` names the fields that are null in a log because they
        were not finite."""
        if kind is TelemetryEventType.ROLLBACK:
            self._rollbacks += 1
        elif kind is TelemetryEventType.EPISODE_OUTCOME:
            self._tasks.setdefault(data.get("task"), _Tally()).add(data)
        elif kind is TelemetryEventType.ACTION_DISTRIBUTION:
            self._actions, self._successes = data.get("action_counts") or {}, data.get("action_successes")
        if kind not in _JUDGED:
            return []
        numbers = _numbers(kind, data, nonfinite)
        self._nonfinite += sum(not math.isfinite(value) for value in numbers.values())
        measured = {f"{kind.value}.{name}": value for name, value in numbers.items()}
        scopes = [kind.value]
        if kind is TelemetryEventType.BATCH_COMPLETED:
            self.round = self._round_metrics(numbers)
            measured |= {f"round.{name}": value for name, value in self.round.items()}
            scopes.append("round")
            drops = {
                task: drop for task, drop in (data.get("drop_by_task") or {}).items() if drop is not None
            }
            if len(drops) > 1:
                self._worst["batch_completed.accuracy_drop"] = max(drops, key=drops.__getitem__)
        judged = [self._judge(rule, measured) for rule in RULES if rule.metric.split(".")[0] in scopes]
        if kind is TelemetryEventType.BATCH_COMPLETED:
            self._begin_round()
        return [alert for alert in judged if alert is not None]

    def _judge(self, rule: Rule, measured: Mapping[str, float]) -> Alert | None:
        """A metric that was not measured ends a streak. So does one that is not finite, which the rule
        `nonfinite_metric` reports."""
        value = measured.get(rule.metric)
        if value is not None:
            self.evaluated.add(rule.code)
        if value is None or not METRICS[rule.metric].fault(value):
            self._streaks[rule.code] = 0
            self.active.pop(rule.code, None)
            return None
        streak = self._streaks[rule.code] = self._streaks[rule.code] + 1
        if streak < rule.streak:
            return None
        task = self._worst.get(rule.metric)
        message = rule.sentence if task is None else f"{rule.sentence} The worst task is {task}."
        alert = Alert(rule.code, rule.severity, rule.metric, value, rule.limit, streak, message)
        self.active[rule.code] = alert
        return alert if streak == rule.streak else None

    def _largest(self, name: str, by_task: Mapping[str | None, float]) -> dict[str, float]:
        """The figure of the task in which it is largest: a mean would hide one task behind the others."""
        if not by_task:
            return {}
        task = max(by_task, key=by_task.__getitem__)
        if len(self._tasks) > 1:
            self._worst[f"round.{name}"] = str(task)
        return {name: by_task[task]}

    def _round_metrics(self, numbers: Mapping[str, float]) -> dict[str, float]:
        figures = {"nonfinite_metrics": float(self._nonfinite)}
        others = {op: count for op, count in self._actions.items() if op != LifecycleOp.WAIT.name}
        total, acted = sum(self._actions.values()), sum(others.values())
        if total:
            figures["wait_share"] = (total - acted) / total
        if acted:
            # A graft becomes permanent by itself, so a policy that only germinates may be in good health.
            repeated = {op: count for op, count in others.items() if op != LifecycleOp.GERMINATE.name}
            figures["top_op_share"] = max(repeated.values(), default=0) / acted
            if self._successes is not None:
                figures["failure_rate"] = 1.0 - sum(self._successes.get(op, 0) for op in others) / acted
        rollbacks = {task: tally.rollbacks / tally.episodes for task, tally in self._tasks.items()}
        if len(rollbacks) == 1:  # an older log has rollbacks as events only
            rollbacks = {task: self._rollbacks / tally.episodes for task, tally in self._tasks.items()}
        figures |= self._largest("rollbacks_per_episode", rollbacks)
        unfinished = {
            task: 1.0 - tally.ended / tally.germinated
            for task, tally in self._tasks.items()
            if tally.germinated
        }
        figures |= self._largest("unfinished_share", unfinished)
        reward = abs(numbers.get("avg_reward", math.nan))
        if math.isfinite(reward):
            if self._rewards:
                figures["reward_jump"] = reward / max(1.0, *self._rewards)
            self._rewards.append(reward)
        return figures


@dataclass(slots=True)
class _Tally:
    """Counts of a round over the episodes of one task. An older log may lack some of them."""

    episodes: int = 0
    rollbacks: int = 0
    germinated: int = 0
    ended: int = 0

    def add(self, outcome: Mapping[str, Any]) -> None:
        self.episodes += 1
        self.rollbacks += outcome.get("rollbacks") or 0
        counts = [outcome.get(name) for name in ("germinated", "fossilized", "pruned")]
        given = [count for count in counts if count is not None]
        if len(given) == len(counts):
            self.germinated += given[0]
            self.ended += sum(given[1:])


def _numbers(
    kind: TelemetryEventType, data: Mapping[str, Any], nonfinite: Collection[str]
) -> dict[str, float]:
    """The registered numbers of a payload. Inf becomes NaN, because a log cannot tell one from the other."""
    numbers = {}
    for name, value in data.items():
        if name in _NUMBERS[kind] and value is not None:
            number = float(value)
            numbers[name] = number if math.isfinite(number) else math.nan
    return numbers | {name: math.nan for name in nonfinite if name in _NUMBERS[kind]}


def event_parts(
    event: TelemetryEvent | Mapping[str, Any],
) -> tuple[TelemetryEventType, Mapping[str, Any], list[str]]:
    """Type, payload and non-finite fields of an event, as emitted or as a line of a log."""
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
    """All alerts that a log or a list of events gives. Alert events among them are ignored."""
    engine = AlertEngine()
    return [alert for event in events for alert in engine.observe(*event_parts(event))]
