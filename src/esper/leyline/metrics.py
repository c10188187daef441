"""The metric registry: every field of events and tables, with its unit, its better direction and its limits.

Table schemas, alert rules, colours, tracker names and docs/telemetry.md are generated from it, so no field is
described twice. A field that was not measured is null, never 0. Accuracies are in percentage points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.telemetry import TelemetryEventType

PHASES = ("train", "validate", "sense", "decide", "act", "record", "update")
"""Phases of a round whose time is measured."""


class FieldKind(StrEnum):
    """Type of a field's values. `numbers`, `counts`, `flags` and `labels` map names to values, `lists` maps
    them to lists of text; `texts` is a list, `vector` a list of numbers in single precision."""

    FLOAT = "float"
    INT = "int"
    FLAG = "flag"
    TEXT = "text"
    TEXTS = "texts"
    NUMBERS = "numbers"
    COUNTS = "counts"
    FLAGS = "flags"
    LISTS = "lists"
    LABELS = "labels"
    VECTOR = "vector"


@dataclass(frozen=True, slots=True)
class Metric:
    """One field. A value below `low` or above `high` is a fault. The alert rules and all displays use these
    limits."""

    name: str
    unit: str
    meaning: str
    kind: FieldKind = FieldKind.FLOAT
    better: str = ""
    """"higher", "lower", or "" if neither is better by itself."""
    low: float | None = None
    high: float | None = None

    def fault(self, value: float) -> bool:
        """Whether a value is outside its limits. NaN never is; the alert rules handle it separately."""
        return (self.low is not None and value < self.low) or (self.high is not None and value > self.high)


@dataclass(frozen=True, slots=True)
class EventSpec:
    """Meaning of an event type, and the fields of its payload."""

    meaning: str
    fields: tuple[Metric, ...]


def _up(name: str, unit: str, meaning: str, *, low: float | None = None) -> Metric:
    return Metric(name, unit, meaning, better="higher", low=low)


def _down(name: str, unit: str, meaning: str, *, high: float | None = None) -> Metric:
    return Metric(name, unit, meaning, better="lower", high=high)


def integer(
    name: str,
    unit: str,
    meaning: str,
    *,
    better: str = "",
    low: float | None = None,
    high: float | None = None,
) -> Metric:
    return Metric(name, unit, meaning, FieldKind.INT, better, low, high)


def text(name: str, meaning: str) -> Metric:
    return Metric(name, "", meaning, FieldKind.TEXT)


def _texts(name: str, meaning: str) -> Metric:
    return Metric(name, "", meaning, FieldKind.TEXTS)


def _flag(name: str, meaning: str) -> Metric:
    return Metric(name, "", meaning, FieldKind.FLAG)


def _map(name: str, unit: str, meaning: str, kind: FieldKind = FieldKind.NUMBERS) -> Metric:
    return Metric(name, unit, meaning, kind)


CONTEXT = (
    integer("seq", "", "Position in the log."),
    Metric("t_wall", "s", "Time of recording, in seconds since 1970."),
    integer("round_idx", "", "Number of the round, from 0."),
    integer("env_id", "", "Number of the env, from 0."),
    text("device", "Device on which the env runs."),
    integer("epoch", "", "Epoch of the episode, from 1."),
    text("slot_id", "Slot that the event is about."),
    text("seed_id", "Seed that the event is about."),
)
"""Context columns: what events and table rows have besides their payload."""
_HEADS = ", ".join(HEAD_NAMES)
_PPO_UPDATE = (
    integer("update", "updates", "Number of this update, counted from 1."),
    integer("steps", "steps", "Valid steps in the rollout."),
    Metric(
        "choice_fraction", "share", "Share of valid steps at which more than one action was legal.", low=0.02
    ),
    _up("reward_mean", "reward", "Mean stored reward of a valid step."),
    _up("return_mean", "reward", "Mean target of the value head."),
    Metric("return_std", "reward", "Standard deviation of the value head's targets."),
    Metric("value_mean", "reward", "Mean value that the policy predicted while acting."),
    _up(
        "explained_variance",
        "share",
        "1 − Var(return − value) / Var(return); 1 is perfect, 0 is a constant.",
        low=0.0,
    ),
    Metric(
        "advantage_std",
        "reward",
        "Standard deviation of advantages before normalisation, over steps with a choice.",
    ),
    Metric("policy_loss", "advantage", "Clipped surrogate loss."),
    _down("value_loss", "return variance", "Half the squared error of the normalised value.", high=5.0),
    Metric("entropy", "nats", "Chain-rule entropy of the joint action.", low=0.05),
    Metric("approx_kl", "nats", "KL divergence from the acting policy, estimated as ratio − 1 − log ratio."),
    _down("approx_kl_max", "nats", "Largest KL estimate of a minibatch.", high=0.2),
    _down("clip_fraction", "share", "Share of steps whose ratio left the clip range.", high=0.5),
    _down("ratio_max", "ratio", "Largest probability ratio to the acting policy.", high=20.0),
    Metric("ratio_min", "ratio", "Smallest probability ratio to the acting policy."),
    _down(
        "log_prob_drift",
        "nats",
        "Largest difference between acting and update log-probs before any step. 0 for lessons.",
        high=0.05,
    ),
    Metric("grad_norm", "norm", "Gradient norm before clipping.", low=1e-6),
    _down("grad_norm_max", "norm", "Largest gradient norm before clipping.", high=100.0),
    integer("optimizer_steps", "steps", "Optimizer steps taken.", low=1),
    integer(
        "skipped_steps",
        "steps",
        "Optimizer steps skipped because loss or gradient was not finite.",
        better="lower",
        high=0,
    ),
    integer(
        "kl_stops",
        "updates",
        "Updates that ended early because the KL estimate passed its limit.",
        better="lower",
    ),
    Metric("learning_rate", "rate", "Learning rate of this update."),
    Metric("entropy_coef", "coefficient", "Weight of the entropy bonus, as annealed."),
    Metric("epsilon", "share", "Share of uniform exploration in the acting policy."),
    Metric("value_scale", "reward", "PopArt's scale of returns."),
    _map("head_entropy", "nats", f"Each head's share of the entropy: {_HEADS}."),
    _map("head_kl", "nats", f"Each head's KL estimate: {_HEADS}."),
    _up(
        "layer_health",
        "share",
        "Share of the policy's layers with a finite, non-zero gradient; measured at level debug.",
    ),
    integer("dead_layers", "layers", "Layers whose gradient is zero almost everywhere.", better="lower"),
    integer(
        "nonfinite_layers", "layers", "Layers with NaN or Inf in their gradient.", better="lower", high=0
    ),
    Metric(
        "clipped_grad_norm",
        "norm",
        "Gradient norm of the last step after clipping; measured at level debug.",
    ),
    _texts("nonfinite", "Parameters and gradients that were not finite, if a step was skipped."),
)
_BATCH_COMPLETED = (
    integer("round_idx", "rounds", "Number of the round, from 0."),
    integer("rounds", "rounds", "Number of rounds planned."),
    integer("episodes_completed", "episodes", "Number of episodes finished so far, over all envs."),
    _up("avg_reward", "reward", "Mean total reward of an episode."),
    _up("avg_accuracy", "points", "Mean validation accuracy at the last epoch, with all blended seeds."),
    _up("avg_val_accuracy", "points", "Mean validation accuracy over all epochs of the round."),
    _up(
        "avg_committed_accuracy",
        "points",
        "Mean validation accuracy at the last epoch, with fossilized seeds only.",
    ),
    _up("avg_objective", "J", "Mean objective J."),
    Metric("avg_added_params", "parameters", "Mean parameters of the fossilized seeds."),
    integer("rollbacks", "rollbacks", "Rollbacks by the governors in this round.", better="lower"),
    Metric("baseline_accuracy", "points", "Mean of avg_accuracy over the earlier rounds."),
    _down(
        "accuracy_drop",
        "share",
        "Drop of a task's accuracy below its mean over the earlier rounds, as a share of the latter; the "
        "largest of all tasks.",
        high=0.1,
    ),
    _flag("degraded", "Whether accuracy_drop exceeds its limit."),
    _map("objective_by_task", "J", "Mean objective J of each task."),
    _map("accuracy_by_task", "points", "avg_accuracy of each task."),
    _map("drop_by_task", "share", "accuracy_drop of each task."),
    _up(
        "plan_gain",
        "J",
        "Mean J of the plans that action values hold for the best, minus that of twins that grow nothing; "
        "null in a round without action values.",
    ),
    _up("explored_gain", "J", "The same for the plans that explore: favourites of single members."),
    _down("value_error", "share", "Mean squared error of the action values, over the variance of the gains."),
    Metric("learning_rate", "rate", "The policy's learning rate after the round."),
    Metric("entropy_coef", "coefficient", "The policy's entropy weight after the round."),
    integer("env_steps", "steps", "Number of env steps taken so far, over all envs."),
    _down("seconds", "s", "Duration of the round."),
    *(_down(f"{phase}_seconds", "s", f"Time spent in phase {phase}.") for phase in PHASES),
    text("seed_stage", "Stage of the seed in active_slot; null if there is none."),
    text(
        "active_slot", "First slot with a live seed, in the first env that has one, at the end of the round."
    ),
    text("telemetry_level", "Level at which the round was recorded."),
)
_LAST_ACTION = (
    text("op", "Sampled operation."),
    text(
        "slot",
        "Target slot; this and the fields up to alpha_curve are null if the operation does not use them.",
    ),
    text("blueprint", "Blueprint to germinate."),
    text("style", "Ramp curve and blend operator."),
    integer("tempo", "epochs", "Duration of the first alpha ramp; 0: a graft."),
    Metric("alpha_target", "alpha", "Target of the alpha ramp."),
    integer("alpha_speed", "epochs", "Duration of a later alpha ramp."),
    text("alpha_curve", "Shape of a later alpha ramp."),
    _flag("executed", "Whether the operation was carried out."),
    text("veto", "Reason why the governor refused it."),
    _texts("gate_failures", "Reasons why a gate refused it."),
    Metric("log_prob", "nats", "Joint log-probability of the relevant heads."),
    Metric("value", "reward", "Value that the policy predicted."),
    _map("op_probs", "share", "Probability of each operation."),
    _map("confidences", "share", "Probability of the chosen value, for each relevant head."),
    _up("accuracy", "points", "Validation accuracy before the step, with all blended seeds."),
    _down("loss", "nats", "Validation loss before the step."),
    _up("reward", "reward", "Reward of this step."),
    _up("cumulative_reward", "reward", "Reward of the episode so far."),
    _map("mask", "", "Whether each operation was legal.", FieldKind.FLAGS),
    _map("stages", "", "Number of each seed's stage after the step, by slot.", FieldKind.COUNTS),
    _map("alphas", "alpha", "Blending weight of each seed after the step, by slot."),
    _map("contributions", "points", "Accuracy lost without each blended seed, by slot."),
    _map(
        "gradient_ratios",
        "ratio",
        "Gradient norm of each training seed relative to its host, by slot; measured at level debug.",
    ),
    _map("slot_probs", "share", "Probability of each legal operation on a slot (`OP slot`)."),
    _map(
        "vetoes",
        "",
        "Reasons why operations on a slot were not legal (`OP slot`). A pair without one was legal, or its "
        "slot was empty.",
        FieldKind.LABELS,
    ),
    _map("sensors", "", "Growth sensors as measured (`slot sensor`)."),
    Metric(
        "observation",
        "",
        "Numbers that the policy saw; run_started.observed_by_task has their names.",
        FieldKind.VECTOR,
    ),
)
_T = TelemetryEventType
EVENTS: Mapping[TelemetryEventType, EventSpec] = MappingProxyType(
    {
        _T.RUN_STARTED: EventSpec(
            "A run starts.",
            (
                text("task", "Name of the task; several are separated by spaces."),
                text("policy", "Policy: ppo, heuristic, random or wait."),
                text("reward_mode", "Name of the reward mode."),
                integer("seed", "", "Root random seed of the run."),
                integer("rounds", "rounds", "Number of rounds planned."),
                integer("envs", "envs", "Number of envs: networks trained side by side."),
                integer("episode_length", "epochs", "Number of epochs of the longest episode."),
                _texts("slots", "Names of the slots of all tasks, each once."),
                integer("host_params", "parameters", "Number of parameters of the first task's host."),
                _map(
                    "depths",
                    "share",
                    "Place of each slot among those that activations pass, in the first task that has it: 0 "
                    "first, 1 last.",
                ),
                _map(
                    "slots_by_task",
                    "",
                    "Names of each task's slots, in the order of the policy's indices.",
                    FieldKind.LISTS,
                ),
                _map(
                    "envs_by_task",
                    "envs",
                    "Number of envs of each task. They are numbered in the order of the tasks.",
                    FieldKind.COUNTS,
                ),
                _map("epochs_by_task", "epochs", "Longest episode of each task.", FieldKind.COUNTS),
                _map(
                    "params_by_task",
                    "parameters",
                    "Number of parameters of each task's host.",
                    FieldKind.COUNTS,
                ),
                _map(
                    "observed_by_task",
                    "",
                    "Names of the numbers in last_action.observation: features of the network, then of each "
                    "slot (`slot feature`), then quotes (`slot blueprint feature`). `… known` is 0 where a "
                    "feature was not measured.",
                    FieldKind.LISTS,
                ),
            ),
        ),
        _T.RUN_ENDED: EventSpec(
            "A run ends. A log without this event was cut off.",
            (
                text("status", "finished, stopped or failed."),
                text("message", "Error message, if the run failed."),
                integer(
                    "rounds_completed", "rounds", "Number of rounds finished, before and after resuming."
                ),
                integer("episodes_completed", "episodes", "Number of episodes finished."),
                integer("env_steps", "steps", "Number of env steps taken."),
                _down("seconds", "s", "Duration since the run was started or resumed."),
            ),
        ),
        _T.BATCH_COMPLETED: EventSpec(
            "A round is finished. Its other events come before this one, its alerts after it.",
            _BATCH_COMPLETED,
        ),
        _T.PPO_UPDATE: EventSpec("PPO has updated the policy on a rollout.", _PPO_UPDATE),
        _T.ACTION_DISTRIBUTION: EventSpec(
            "Counts of the decisions of a round.",
            (
                _map(
                    "action_counts", "steps", "Number of times each operation was sampled.", FieldKind.COUNTS
                ),
                _map(
                    "action_successes",
                    "steps",
                    "Number of times each operation was carried out.",
                    FieldKind.COUNTS,
                ),
            ),
        ),
        _T.MASK_HIT_RATES: EventSpec(
            "Counts of the operations that were masked in a round.",
            (
                _map(
                    "hits",
                    "steps",
                    "Number of decisions at which each operation was masked.",
                    FieldKind.COUNTS,
                ),
                _map(
                    "totals", "steps", "Number of decisions at which the mask was computed.", FieldKind.COUNTS
                ),
                _map("hit_rates", "share", "hits divided by totals."),
            ),
        ),
        _T.SEED_LIFECYCLE: EventSpec(
            "The state of a seed changed, or a change was refused.",
            (
                text(
                    "kind",
                    "germinated, gate_refused, stage_changed, retargeted, prune_scheduled, fossilized or "
                    "pruned.",
                ),
                text("blueprint_id", "Blueprint of the seed."),
                text("stage_from", "Stage before."),
                text("stage_to", "Stage after."),
                Metric("alpha", "alpha", "Blending weight of the seed."),
                integer("params", "parameters", "Number of parameters of the seed."),
                integer("epochs_total", "epochs", "Age of the seed."),
                _up(
                    "contribution",
                    "points",
                    "Accuracy that the network would lose without the seed, as last measured.",
                ),
                _texts("gate_failures", "Reasons why a gate refused."),
                text("cause", "Cause of pruning: POLICY or ROLLBACK."),
                integer("global_epoch", "epochs", "Number of epochs over all rounds so far."),
            ),
        ),
        _T.ATTRIBUTION: EventSpec(
            "Contribution of each seed, at one epoch of one env.",
            (
                _texts("slots", "Slots with a blended seed."),
                _up("accuracy", "points", "Accuracy with all blended seeds."),
                _up("host_accuracy", "points", "Accuracy of the host alone."),
                _up("committed_accuracy", "points", "Accuracy with fossilized seeds only."),
                _map("leave_one_out", "points", "Accuracy that the network would lose without each seed."),
                _map("shapley", "points", "Each seed's Shapley value."),
                _map("shapley_error", "points", "Standard error of the Shapley value; 0 if it is exact."),
                _map(
                    "interactions",
                    "points",
                    "Contribution of two seeds (`a+b`) beyond the sum of each alone.",
                ),
            ),
        ),
        _T.CF_UNAVAILABLE: EventSpec(
            "No contribution could be measured.", (text("reason", "Reason why it was not measured."),)
        ),
        _T.LAST_ACTION: EventSpec("One decision and its result.", _LAST_ACTION),
        _T.REWARD_SUMMARY: EventSpec(
            "Terms of one step's reward.",
            (
                _map("components", "reward", "Value of each named term."),
                _up("total_reward", "reward", "Sum of the terms."),
            ),
        ),
        _T.THROUGHPUT: EventSpec(
            "Training speed of an env.",
            (
                _up("batches_per_second", "1/s", "Training batches per second."),
                _up("samples_per_second", "1/s", "Training samples per second."),
                Metric("gpu_utilization", "share", "Share of time during which the device was busy."),
            ),
        ),
        _T.EPISODE_OUTCOME: EventSpec(
            "Outcome of an episode, recorded once, after all penalties.",
            (
                text("task", "Name of the env's task."),
                integer("episode_idx", "episodes", "Number of the episode, from 0."),
                integer("epochs", "epochs", "Length of the episode."),
                _up("final_accuracy", "points", "Accuracy with all blended seeds."),
                _up("committed_accuracy", "points", "Accuracy with fossilized seeds only."),
                _up("objective", "J", "Objective J."),
                _up("total_reward", "reward", "Sum of all rewards, including penalties."),
                integer("host_params", "parameters", "Number of parameters of the host."),
                integer("added_params", "parameters", "Number of parameters of the fossilized seeds."),
                integer("germinated", "seeds", "Number of seeds germinated."),
                integer("fossilized", "seeds", "Number of seeds made permanent.", better="higher"),
                integer("pruned", "seeds", "Number of seeds removed."),
                integer("rollbacks", "rollbacks", "Number of rollbacks by the governor.", better="lower"),
            ),
        ),
        _T.ROLLBACK: EventSpec(
            "The governor restored a network's last good state.",
            (
                text("reason", "non_finite, divergence or collapse."),
                Metric("loss", "nats", "Validation loss that caused the rollback."),
                Metric("limit", "nats", "Limit that the loss exceeded."),
                Metric("amount", "reward", "Penalty added to the reward of the last decision."),
            ),
        ),
        _T.ALERT: EventSpec(
            "An alert rule was at fault as many times in a row as it requires.",
            (
                text("code", "Name of the rule."),
                text("severity", "info, warning or error."),
                text("metric", "Metric that the rule judges."),
                Metric("value", "the metric's", "Value of the metric; null if it was not finite."),
                Metric("limit", "the metric's", "Limit that the value passed."),
                integer("streak", "times", "Number of times in a row that the metric was at fault."),
                text("message", "Meaning of the alert."),
            ),
        ),
        _T.CHECKPOINT: EventSpec(
            "The state of the run was saved. A resumed run continues after this event.",
            (
                text("path", "Name of the file."),
                integer("finished_rounds", "rounds", "Number of rounds finished when it was saved."),
                integer("finished_epochs", "epochs", "Number of finished epochs of the current round."),
                _flag("best", "Whether the last round was the best so far."),
            ),
        ),
    }
)
"""Every event type and its payload."""

ROUND = (
    Metric("wait_share", "share", "Share of decisions that were WAIT.", high=0.99),
    _down(
        "top_op_share",
        "share",
        "Share of the most frequent operation that plants nothing, among decisions other than WAIT.",
        high=0.95,
    ),
    _down("failure_rate", "share", "Share of decisions other than WAIT that were not carried out.", high=0.2),
    _down(
        "rollbacks_per_episode",
        "rollbacks",
        "Rollbacks per episode of the round, in the task with most.",
        high=0.5,
    ),
    _down(
        "unfinished_share",
        "share",
        "Share of germinated seeds that were neither fossilized nor pruned, in the task with most.",
        high=0.9,
    ),
    _down(
        "reward_jump",
        "ratio",
        "Magnitude of avg_reward relative to the largest of the ten earlier rounds (at least 1).",
        high=10.0,
    ),
    integer(
        "nonfinite_metrics", "fields", "Numbers of the round that were NaN or Inf.", better="lower", high=0
    ),
)
"""Figures of a round that the alert rules compute from several of its events."""

METRICS: Mapping[str, Metric] = MappingProxyType(
    {f"{kind.value}.{field.name}": field for kind, spec in EVENTS.items() for field in spec.fields}
    | {f"round.{field.name}": field for field in ROUND}
)
"""By full name: event type, a dot, field."""
