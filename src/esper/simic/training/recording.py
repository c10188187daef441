"""Telemetry of a run. The recorder reads the trainer's state and emits events; training never depends on it.

It also watches the events, so that an anomaly raises the telemetry level of the rounds after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline import OP_NAMES, LifecycleOp, PolicyObservation, PolicyStep, SeedStage, TelemetryEventType
from esper.simic.ranks import ALONE, Ranks
from esper.simic.seed_management import emit_anomaly_diagnostics, handle_telemetry_escalation
from esper.simic.telemetry.anomaly_detector import AnomalyDetector
from esper.simic.telemetry.debug_telemetry import LayerGradientStats
from esper.simic.telemetry.decision import Considered, observed_names
from esper.simic.telemetry.emitters import (
    compute_grad_norm_surrogate,
    emit_action_distribution,
    emit_attribution,
    emit_batch_completed,
    emit_cf_unavailable,
    emit_episode_outcome,
    emit_event,
    emit_last_action,
    emit_mask_hit_rates,
    emit_ppo_update_event,
    emit_reward_summary,
    emit_throughput,
)
from esper.simic.telemetry.gradient_collector import collect_seed_gradients_async
from esper.simic.telemetry.telemetry_config import TelemetryLevel
from esper.simic.training.batch_ops import to_host
from esper.simic.training.env_factory import configure_slot_telemetry
from esper.simic.training.stacking import part_of
from esper.tamiyo.policy import map_tensors

if TYPE_CHECKING:
    from esper.nissa import TelemetryHub
    from esper.simic.agent.ppo import PPOAgent
    from esper.simic.agent.ppo_metrics import PPOUpdateMetrics
    from esper.simic.contracts import BatchSummary
    from esper.simic.training.action_execution import ActionResult
    from esper.simic.training.config import TrainingConfig
    from esper.simic.training.sharded_envs import RelayHub
    from esper.simic.training.task_envs import Moment, StepRecord, TaskEnvs
    from esper.simic.training.vectorized_trainer import Progress

BASELINE_ROUNDS = 10
"""Number of earlier rounds with whose mean accuracy a task's accuracy in a round is compared."""


class RunRecorder:
    """Emits the events of one run."""

    def __init__(
        self,
        hub: TelemetryHub,
        config: TrainingConfig,
        *,
        collect_per_layer_gradients: Callable[[nn.Module], list[LayerGradientStats]],
        check_numerical_stability: Callable[[nn.Module], list[str]],
        relay: RelayHub | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`relay`: collects the events of envs, if other ranks have some of them."""
        self.hub, self.config = hub, config
        self.ranks, self._relay = ranks, relay
        self._env_hub = hub if relay is None else relay
        self.detector = AnomalyDetector()
        self._collect_gradients = collect_per_layer_gradients
        self._check_stability = check_numerical_stability
        self._accuracies: list[float] = []  # of the epochs of this round, mean over envs
        self._trained = 0.0  # seconds of this round, as of the last epoch
        self._round_accuracies: dict[str, list[float]] = {}  # of the last rounds, by task
        self._began = time.perf_counter()
        self.hub.level = config.telemetry.level

    @property
    def next_seq(self) -> int:
        return self.hub.next_seq

    @property
    def level(self) -> TelemetryLevel:
        return TelemetryLevel(self.hub.level)

    # -- the run ---------------------------------------------------------------------------------------------

    def begin_run(self, env: TaskEnvs) -> None:
        config, roster = self.config, env.roster
        tasks = {task.name: task for task in roster.tasks}
        rules = dict(zip(tasks, roster.rules, strict=True))
        slots = {name: list(own.slot_config.slot_ids) for name, own in rules.items()}
        family = config.reward_family.value
        extra = [sensor.feature for sensor in env.groups[0].extra_sensors]
        depths: dict[str, float] = {}
        for task in reversed(roster.tasks):
            depths |= zip(slots[task.name], task.build_model(1, [0]).slot_depths, strict=True)
        emit_event(
            self.hub,
            TelemetryEventType.RUN_STARTED,
            {
                "task": " ".join(env.tasks),
                "policy": config.policy,
                "reward_mode": config.reward.mode if family == "contribution" else family,
                "seed": config.seed,
                "rounds": config.rounds,
                "envs": env.num_envs,
                "episode_length": env.max_epochs,
                "slots": list(dict.fromkeys(chain.from_iterable(slots.values()))),
                "host_params": roster.tasks[0].host_params,
                "depths": depths,
                "slots_by_task": slots,
                "envs_by_task": dict(zip(tasks, roster.counts, strict=True)),
                "epochs_by_task": {name: own.max_epochs for name, own in rules.items()},
                "params_by_task": {name: task.host_params for name, task in tasks.items()},
                "observed_by_task": {
                    name: observed_names(slots[name], task.blueprints, extra) for name, task in tasks.items()
                },
            },
        )

    def end_run(self, status: str, progress: Progress, *, message: str | None = None) -> None:
        history = progress.history
        emit_event(
            self.hub,
            TelemetryEventType.RUN_ENDED,
            {
                "status": status,
                "message": message,
                "rounds_completed": len(history),
                "episodes_completed": history[-1].episodes_completed if history else 0,
                "env_steps": history[-1].env_steps if history else 0,
                "seconds": time.perf_counter() - self._began,
            },
        )
        self.hub.flush()

    def begin_round(self, round_idx: int) -> None:
        self.hub.round_idx = round_idx
        level = handle_telemetry_escalation(self.detector.report, self.config.telemetry)
        self.hub.level = self.ranks.from_first(level, "telemetry level")  # it alone sees all events
        self._accuracies, self._trained = [], 0.0

    def begin_epoch(self, env: TaskEnvs, epoch: int) -> None:
        """Set what is recorded of the slots. It does not change what is measured."""
        telemetry = replace(self.config.telemetry, level=self.level)
        for part in env.running:
            for member in part.envs:
                before = member.episode_idx * part.rules.max_epochs
                configure_slot_telemetry(member, telemetry, epoch, before + epoch)

    def end_round(
        self,
        env: TaskEnvs,
        summary: BatchSummary,
        agent: PPOAgent | None,
        offered: Tensor,
        seconds: Mapping[str, float],
    ) -> None:
        """Emit outcomes and attributions of the envs, then the summary of the round, then its anomalies."""
        outcomes = {outcome.env_id: outcome for outcome in env.ledger.outcomes}
        for member in env.envs:
            outcome = outcomes[member.env_idx]
            if member.counterfactuals == "all" and member.coalitions is not None and member.coalitions.slots:
                emit_attribution(
                    self._env_hub, member.env_idx, member.device, member.coalitions, epoch=outcome.epochs
                )
            emit_episode_outcome(self._env_hub, outcome, device=member.device)
        self._pass_on()
        emit_action_distribution(self.hub, dict(summary.action_counts), dict(summary.action_successes))
        asked = sum(outcome.epochs for outcome in env.ledger.outcomes)
        emit_mask_hit_rates(
            self.hub,
            {
                name: {"hits": asked - legal, "total": asked}
                for name, legal in zip(OP_NAMES, offered.tolist(), strict=True)
            },
        )
        _, stage, slot = env.first_active() or (None, None, None)
        accuracies = {task: figures.mean_accuracy for task, figures in summary.by_task.items()}
        earlier = self._round_accuracies
        emit_batch_completed(
            self.hub,
            summary.round_idx,
            summary.episodes_completed,
            summary.mean_reward,
            summary.mean_accuracy,
            fmean(self._accuracies),
            agent.learning_rate if agent else None,
            agent.entropy_coef if agent else None,
            stage,
            slot,
            self.level,
            rounds=self.config.rounds,
            avg_committed_accuracy=summary.mean_committed_accuracy,
            avg_objective=summary.mean_objective,
            avg_added_params=summary.mean_added_params,
            rollbacks=summary.rollbacks,
            plan_gain=summary.plan_gain,
            explored_gain=summary.explored_gain,
            value_error=summary.value_error,
            env_steps=summary.env_steps,
            baseline_accuracy=fmean(map(fmean, earlier.values())) if earlier else None,
            objective_by_task={task: f.mean_objective for task, f in summary.by_task.items()},
            accuracy_by_task=accuracies,
            baseline_by_task={task: fmean(earlier[task]) for task in accuracies if earlier.get(task)},
            seconds=sum(seconds.values()),
            phase_seconds=seconds,
        )
        self._round_accuracies = {
            task: [*earlier.get(task, ()), accuracy][-BASELINE_ROUNDS:]
            for task, accuracy in accuracies.items()
        }
        emit_anomaly_diagnostics(self.hub, self.detector.report, summary.round_idx, env.max_epochs)
        self.hub.flush()

    # -- steps -----------------------------------------------------------------------------------------------

    def step(
        self,
        env: TaskEnvs,
        seen: Moment,
        step: PolicyStep,
        actions: Sequence[Sequence[int]],
        result: ActionResult,
        record: StepRecord,
        trained: float,
    ) -> None:
        """Emit the decisions of an epoch. `trained` is the training time of this round so far, in seconds."""
        self._accuracies.append(fmean(record.accuracies))
        if self._relay is not None:
            self._relay.next_phase()
        for member in seen.envs:
            panic = seen.panics.get(member.env_idx)
            if panic is not None and not math.isfinite(panic.loss):
                emit_cf_unavailable(
                    self._env_hub, member.env_idx, member.device, "the loss is not finite", epoch=seen.epoch
                )
        if self._relay is not None:
            self._relay.next_phase()
        if self.level >= TelemetryLevel.NORMAL and seen.envs:
            self._decisions(env, seen, step, actions, result, trained)
        self._pass_on()

    def _pass_on(self) -> None:
        """Let the first rank record the events of all ranks' envs."""
        if self._relay is not None:
            self._relay.relay()

    def _decisions(
        self,
        env: TaskEnvs,
        seen: Moment,
        step: PolicyStep,
        actions: Sequence[Sequence[int]],
        result: ActionResult,
        trained: float,
    ) -> None:
        """The actions are on the host already; of each task, probabilities with the observation, and
        confidences of heads take one transfer each."""
        considered = _considered(env, seen, step)
        confidences = (
            torch.cat([step.head_log_probs.exp(), step.log_prob[:, None], step.value[:, None]], 1)
            .cpu()
            .tolist()
        )
        legal = seen.masks.op.tolist()
        ratios = _seed_gradients(env) if self.level >= TelemetryLevel.DEBUG else {}
        each, self._trained = max(trained - self._trained, 1e-9), trained
        for i, (row, member) in enumerate(zip(seen.rows, seen.envs, strict=True)):
            *heads, log_prob, value = confidences[row]
            group, outcome = env.group_of(member), result.outcomes[i]
            op = outcome.spec.op
            emit_last_action(
                self._env_hub,
                member.env_idx,
                member.device,
                op.name,
                outcome.spec.slot_id,
                result.rewards[i],
                member.total_reward,
                dict(zip(OP_NAMES, legal[row], strict=True)),
                self.level,
                indices=actions[row] if op is not LifecycleOp.WAIT else None,
                outcome=outcome,
                log_prob=log_prob,
                value=value,
                op_probs=considered[i].op_probs,
                considered=considered[i].fields,
                confidences=heads,
                epoch=seen.epoch,
                seeds={s: r for s, r in member.model.reports().items() if r.stage is not SeedStage.DORMANT},
                gradient_ratios=ratios.get(member.env_idx),
                accuracy=member.val_accuracy,
                loss=member.val_loss,
            )
            if (components := result.components[i]) is not None:
                emit_reward_summary(
                    self._env_hub,
                    member.env_idx,
                    member.device,
                    components,
                    components.total,
                    epoch=seen.epoch,
                )
            emit_throughput(
                self._env_hub,
                member.env_idx,
                member.device,
                group.batches / each,
                group.samples / each,
                None,
                epoch=seen.epoch,
            )

    def update(self, agent: PPOAgent, metrics: PPOUpdateMetrics) -> None:
        """Emit an update: at level debug with the gradients of the policy's layers, and after a skipped step
        with the names of the non-finite tensors."""
        network, closely = agent.policy.network, self.level >= TelemetryLevel.DEBUG
        layers = self._collect_gradients(network) if closely else None
        nonfinite = self._check_stability(network) if metrics.skipped_steps else None
        emit_ppo_update_event(
            self.hub,
            metrics,
            layers,
            self.level,
            nonfinite=nonfinite,
            clipped_grad_norm=compute_grad_norm_surrogate(network) if closely else None,
        )

    def checkpoint(self, name: str, progress: Progress, *, best: bool) -> None:
        """Announce a checkpoint whose `seq` is `next_seq`. Call it at once, before anything else is
        emitted."""
        emit_event(
            self.hub,
            TelemetryEventType.CHECKPOINT,
            {
                "path": name,
                "finished_rounds": progress.round_idx,
                "finished_epochs": progress.epoch,
                "best": best,
            },
        )
        self.hub.flush()

    # -- checkpoints -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "accuracies": self._accuracies,
            "round_accuracies": self._round_accuracies,
            "level": self.hub.level,
            "round_idx": self.hub.round_idx,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._accuracies, self._round_accuracies = list(state["accuracies"]), dict(state["round_accuracies"])
        self.hub.level, self.hub.round_idx = state["level"], state["round_idx"]


def _seed_gradients(env: TaskEnvs) -> dict[int, dict[str, float]]:
    """The last step's ratio of each learning seed's gradient to its host's, by env and slot."""
    measured = [
        (group, slot, ratio)
        for group in env.groups
        for slot, ratio in collect_seed_gradients_async(group.optimizer).items()
    ]
    by_env: dict[int, dict[str, float]] = {member.env_idx: {} for member in env.envs}
    on_host = to_host([ratio for _, _, ratio in measured]) if measured else []
    for (group, slot, _), ratios in zip(measured, on_host, strict=True):
        for member in group.envs:
            if ratios[member.row] > 0:
                by_env[member.env_idx][slot] = ratios[member.row]
    return by_env


class _Explanation(NamedTuple):
    """Of one decision."""

    op_probs: list[float]
    fields: dict[str, Any]


def _rows(obs: PolicyObservation, rows: Sequence[int]) -> PolicyObservation:
    return map_tensors(obs, lambda tensor: tensor[rows])


def _considered(env: TaskEnvs, seen: Moment, step: PolicyStep) -> list[_Explanation]:
    """What the policy saw and considered, of each env that decided, in env order."""
    parts = {part.task.name: part for part in env.parts}
    explanations = []
    for own in seen.parts:
        part = parts[env.task_of[own.envs[0].env_idx]]
        rows, slots = [member.env_idx for member in own.envs], part.rules.slot_config.slot_ids
        by_slot = None if step.slot_probs is None else step.slot_probs[rows, :, : len(slots)]
        considered = Considered(
            replace(step, op_probs=step.op_probs[rows], slot_probs=by_slot),
            part_of(_rows(seen.obs, rows), slice(None), len(slots)),
            own.masks,
            own.sensors,
            own.reports,
            slots,
            blueprints=part.task.blueprints,
            max_seeds=part.rules.max_seeds,
        )
        explanations += [_Explanation(considered.op_probs[i], considered.fields(i)) for i in range(len(rows))]
    return explanations
