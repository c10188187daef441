"""The metric registry: every field that events and tables carry, with its unit, its good direction and its
limits.

Table schemas, alert rules, colours, tracker names and docs/telemetry.md are made from it, so no number is
described twice. A field that was not measured is null, never 0. Accuracies are percentage points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.telemetry import TelemetryEventType

PHASES = ("train", "validate", "sense", "decide", "act", "record", "update")
"""Parts of a round whose time is measured."""


class FieldKind(StrEnum):
    """What a field holds. `numbers`, `counts` and `flags` map names to values; `texts` is a list."""

    FLOAT = "float"
    INT = "int"
    FLAG = "flag"
    TEXT = "text"
    TEXTS = "texts"
    NUMBERS = "numbers"
    COUNTS = "counts"
    FLAGS = "flags"


@dataclass(frozen=True, slots=True)
class Metric:
    """One field. A value below `low` or above `high` is a fault; the alert rules and every display use these
    two."""

    name: str
    unit: str
    meaning: str
    kind: FieldKind = FieldKind.FLOAT
    better: str = ""
    """"higher", "lower", or "" where neither is better by itself."""
    low: float | None = None
    high: float | None = None

    def fault(self, value: float) -> bool:
        """Whether a value is out of its limits; one that is not finite has no side."""
        return (self.low is not None and value < self.low) or (self.high is not None and value > self.high)


@dataclass(frozen=True, slots=True)
class EventSpec:
    """What an event type is for, and its payload."""

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
    Metric("t_wall", "s", "When it was recorded, in seconds since 1970."),
    integer("round_idx", "", "Number of the round, from 0."),
    integer("env_id", "", "Number of the env, from 0."),
    text("device", "Where the env runs."),
    integer("epoch", "", "Epoch of the episode, from 1."),
    text("slot_id", "The slot it is about."),
    text("seed_id", "The seed it is about."),
)
"""What events and rows of tables have beside their payload."""
_HEADS = ", ".join(HEAD_NAMES)
_PPO_UPDATE = (
    integer("update", "updates", "Number of this update, counted from 1."),
    integer("steps", "steps", "Valid steps in the rollout."),
    Metric(
        "choice_fraction", "share", "Share of valid steps at which more than one action was legal.", low=0.02
    ),
    _up("reward_mean", "reward", "Mean stored reward of a valid step."),
    _up("return_mean", "reward", "Mean target of the value head."),
    Metric("return_std", "reward", "Spread of the value head's targets."),
    Metric("value_mean", "reward", "Mean value that the policy predicted while acting."),
    _up(
        "explained_variance",
        "share",
        "1 − Var(return − value) / Var(return); 1 is perfect, 0 is a constant.",
        low=0.0,
    ),
    Metric("advantage_std", "reward", "Spread of advantages before normalisation, where there was a choice."),
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
        "Largest difference between acting and update log-probs before any step.",
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
        "Share of the policy's layers with a sound gradient; measured at level debug.",
    ),
    integer("dead_layers", "layers", "Layers whose gradient is zero almost everywhere.", better="lower"),
    integer(
        "nonfinite_layers", "layers", "Layers with NaN or Inf in their gradient.", better="lower", high=0
    ),
    Metric(
        "clipped_grad_norm",
        "norm",
        "Gradient norm of the last step, as it was taken; measured at level debug.",
    ),
    _texts("nonfinite", "Parameters and gradients that were not finite, where a step was skipped."),
)
_BATCH_COMPLETED = (
    integer("round_idx", "rounds", "Number of the round, from 0."),
    integer("rounds", "rounds", "Rounds that the run will have."),
    integer("episodes_completed", "episodes", "Episodes finished so far, over all envs."),
    _up("avg_reward", "reward", "Mean total reward of an episode."),
    _up("avg_accuracy", "points", "Mean validation accuracy at the last epoch, all blended seeds on."),
    _up("avg_val_accuracy", "points", "Mean validation accuracy over all epochs of the round."),
    _up(
        "avg_committed_accuracy",
        "points",
        "Mean validation accuracy at the last epoch, fossilized seeds only.",
    ),
    _up("avg_objective", "J", "Mean objective J."),
    Metric("avg_added_params", "parameters", "Mean parameters of the fossilized seeds."),
    integer("rollbacks", "rollbacks", "Rollbacks by the governors in this round.", better="lower"),
    Metric("baseline_accuracy", "points", "Mean of avg_accuracy over the rounds before, to compare with."),
    _down(
        "accuracy_drop", "share", "How far avg_accuracy lies below the baseline, as a share of it.", high=0.1
    ),
    _flag("degraded", "The drop exceeds its limit."),
    Metric("learning_rate", "rate", "The policy's learning rate after the round."),
    Metric("entropy_coef", "coefficient", "The policy's entropy weight after the round."),
    integer("env_steps", "steps", "Env steps taken so far, over all envs."),
    _down("seconds", "s", "Time that the round took."),
    *(_down(f"{phase}_seconds", "s", f"Time of the round's phase {phase}.") for phase in PHASES),
    text("seed_stage", "Stage of the seed in active_slot; null where there is none."),
    text("active_slot", "First slot with a live seed, in the first env that has one, at the round's end."),
    text("telemetry_level", "Level at which the round was recorded."),
)
_LAST_ACTION = (
    text("op", "The operation that was sampled."),
    text(
        "slot",
        "Its slot; this and the fields to alpha_curve are null where the operation has no use for them.",
    ),
    text("blueprint", "What to germinate."),
    text("style", "Ramp curve and blend operator."),
    integer("tempo", "epochs", "Length of the first alpha ramp."),
    Metric("alpha_target", "alpha", "Where alpha shall go."),
    integer("alpha_speed", "epochs", "Length of a later alpha ramp."),
    text("alpha_curve", "Shape of a later alpha ramp."),
    _flag("executed", "The operation was carried out."),
    text("veto", "Why the governor refused it."),
    _texts("gate_failures", "Why a gate refused it."),
    Metric("log_prob", "nats", "Joint log-probability of the relevant heads."),
    Metric("value", "reward", "Value that the policy predicted."),
    _map("op_probs", "share", "Probability of each operation."),
    _map("confidences", "share", "Probability of what was chosen, for each relevant head."),
    _up("accuracy", "points", "Validation accuracy before the step, all blended seeds on."),
    _down("loss", "nats", "Validation loss before the step."),
    _up("reward", "reward", "Reward of this step."),
    _up("cumulative_reward", "reward", "Reward of the episode so far."),
    _map("mask", "", "Which operations were legal.", FieldKind.FLAGS),
    _map("stages", "", "Number of each seed's stage after the step, by slot.", FieldKind.COUNTS),
    _map("alphas", "alpha", "How much of each seed is mixed in after the step, by slot."),
    _map("contributions", "points", "Accuracy lost without each blended seed, by slot."),
    _map(
        "gradient_ratios",
        "ratio",
        "Gradient of each learning seed over its host's, by slot; measured at level debug.",
    ),
)
_T = TelemetryEventType
EVENTS: Mapping[TelemetryEventType, EventSpec] = MappingProxyType(
    {
        _T.RUN_STARTED: EventSpec(
            "A run begins.",
            (
                text("task", "Name of the task."),
                text("policy", "Who decides: ppo, heuristic, random or wait."),
                text("reward_mode", "What is rewarded."),
                integer("seed", "", "Root of all random streams."),
                integer("rounds", "rounds", "Rounds that the run will have."),
                integer("envs", "envs", "Networks side by side."),
                integer("episode_length", "epochs", "Epochs of one episode."),
                _texts("slots", "Slots in the order of the policy's indices."),
                integer("host_params", "parameters", "Parameters of a host without seeds."),
            ),
        ),
        _T.RUN_ENDED: EventSpec(
            "A run ends; a log without it was cut off.",
            (
                text("status", "finished, stopped or failed."),
                text("message", "What went wrong, where something did."),
                integer("rounds_completed", "rounds", "Rounds finished, over all parts of the run."),
                integer("episodes_completed", "episodes", "Episodes finished."),
                integer("env_steps", "steps", "Env steps taken."),
                _down("seconds", "s", "Time of this part of the run."),
            ),
        ),
        _T.BATCH_COMPLETED: EventSpec(
            "A round is over; everything else about it came before, its alerts come after.", _BATCH_COMPLETED
        ),
        _T.PPO_UPDATE: EventSpec("The policy has learned from a rollout.", _PPO_UPDATE),
        _T.ACTION_DISTRIBUTION: EventSpec(
            "What was decided in a round.",
            (
                _map("action_counts", "steps", "How often each operation was sampled.", FieldKind.COUNTS),
                _map("action_successes", "steps", "How often each was carried out.", FieldKind.COUNTS),
            ),
        ),
        _T.MASK_HIT_RATES: EventSpec(
            "What was forbidden in a round.",
            (
                _map("hits", "steps", "How often each operation was forbidden.", FieldKind.COUNTS),
                _map("totals", "steps", "How often it was asked for.", FieldKind.COUNTS),
                _map("hit_rates", "share", "The one as a share of the other."),
            ),
        ),
        _T.SEED_LIFECYCLE: EventSpec(
            "Something happened to a seed.",
            (
                text(
                    "kind",
                    "germinated, gate_refused, stage_changed, retargeted, prune_scheduled, fossilized or pruned.",
                ),
                text("blueprint_id", "What the seed is made from."),
                text("stage_from", "Stage before."),
                text("stage_to", "Stage after."),
                Metric("alpha", "alpha", "How much of the seed is mixed in."),
                integer("params", "parameters", "Parameters of the seed."),
                integer("epochs_total", "epochs", "Age of the seed."),
                _up(
                    "contribution",
                    "points",
                    "What the network would lose without the seed, as last measured.",
                ),
                _texts("gate_failures", "Why a gate refused."),
                text("cause", "Who pruned: POLICY or ROLLBACK."),
                integer("global_epoch", "epochs", "Epochs over all rounds so far."),
            ),
        ),
        _T.ATTRIBUTION: EventSpec(
            "Which seed contributes what, at one epoch of one env.",
            (
                _texts("slots", "Slots with a blended seed."),
                _up("accuracy", "points", "The network as it is."),
                _up("host_accuracy", "points", "The host alone."),
                _up("committed_accuracy", "points", "Fossilized seeds only."),
                _map("leave_one_out", "points", "What the network would lose without each seed."),
                _map("shapley", "points", "Each seed's Shapley value."),
                _map("shapley_error", "points", "Its standard error; 0 where it is exact."),
                _map("interactions", "points", "What two seeds (`a+b`) give beyond what each gives alone."),
            ),
        ),
        _T.CF_UNAVAILABLE: EventSpec("No contribution could be measured.", (text("reason", "Why not."),)),
        _T.LAST_ACTION: EventSpec("One decision and what came of it.", _LAST_ACTION),
        _T.REWARD_SUMMARY: EventSpec(
            "What a step's reward is made of.",
            (
                _map("components", "reward", "The named terms, in order."),
                _up("total_reward", "reward", "Their sum."),
            ),
        ),
        _T.THROUGHPUT: EventSpec(
            "How fast an env trains.",
            (
                _up("batches_per_second", "1/s", "Training batches per second."),
                _up("samples_per_second", "1/s", "Training samples per second."),
                Metric("gpu_utilization", "share", "Share of time that the device computed."),
            ),
        ),
        _T.EPISODE_OUTCOME: EventSpec(
            "What an episode came to; written once, after all penalties.",
            (
                integer("episode_idx", "episodes", "Number of the episode."),
                integer("epochs", "epochs", "Its length."),
                _up("final_accuracy", "points", "All blended seeds on."),
                _up("committed_accuracy", "points", "Fossilized seeds only."),
                _up("objective", "J", "The objective J."),
                _up("total_reward", "reward", "Everything that was paid, penalties included."),
                integer("host_params", "parameters", "Parameters of the host."),
                integer("added_params", "parameters", "Parameters of the fossilized seeds."),
                integer("germinated", "seeds", "Seeds germinated."),
                integer("fossilized", "seeds", "Seeds made permanent.", better="higher"),
                integer("pruned", "seeds", "Seeds removed."),
                integer("rollbacks", "rollbacks", "Rollbacks by the governor.", better="lower"),
            ),
        ),
        _T.ROLLBACK: EventSpec(
            "The governor put a network back to its last good state.",
            (
                text("reason", "non_finite, divergence or collapse."),
                Metric("loss", "nats", "Validation loss at the panic."),
                Metric("limit", "nats", "What it exceeded."),
                Metric("amount", "reward", "What the rollback paid into the last decision."),
            ),
        ),
        _T.ALERT: EventSpec(
            "A rule found a fault for long enough.",
            (
                text("code", "Name of the rule."),
                text("severity", "info, warning or error."),
                text("metric", "What the rule watches."),
                Metric("value", "the metric's", "The value found; null where it was not finite."),
                Metric("limit", "the metric's", "The limit it passed."),
                integer("streak", "times", "How often in a row it was found."),
                text("message", "What it means."),
            ),
        ),
        _T.CHECKPOINT: EventSpec(
            "The run's state was saved; a resumed run goes on behind this event.",
            (
                text("path", "File name."),
                integer("finished_rounds", "rounds", "Rounds finished when it was saved."),
                integer("finished_epochs", "epochs", "Finished epochs of the round that was under way."),
                _flag("best", "The best round so far was the last one."),
            ),
        ),
    }
)
"""Every event type and its payload."""

ROUND = (
    Metric("wait_share", "share", "Share of decisions that were WAIT.", high=0.99),
    _down(
        "top_op_share", "share", "Share of the commonest operation among those that were not WAIT.", high=0.95
    ),
    _down("failure_rate", "share", "Share of decisions, WAIT aside, that were not carried out.", high=0.2),
    _down("rollbacks_per_episode", "rollbacks", "Rollbacks per episode of the round.", high=0.5),
    _down(
        "unfinished_share",
        "share",
        "Share of germinated seeds that were neither fossilized nor pruned.",
        high=0.9,
    ),
    _down(
        "reward_jump",
        "ratio",
        "Size of avg_reward relative to the largest of the ten rounds before (at least 1).",
        high=10.0,
    ),
    integer(
        "nonfinite_metrics", "fields", "Numbers of the round that were NaN or Inf.", better="lower", high=0
    ),
)
"""Read from several events of a round, for the alert rules."""

METRICS: Mapping[str, Metric] = MappingProxyType(
    {f"{kind.value}.{field.name}": field for kind, spec in EVENTS.items() for field in spec.fields}
    | {f"round.{field.name}": field for field in ROUND}
)
"""By full name: the event type, a point, the field."""
