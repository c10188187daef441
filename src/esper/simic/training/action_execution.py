"""The action transaction: decode → validate → preflight → apply → tick → reward → record, for every env in
turn.

A panicking env is rolled back instead, and the penalty for it is returned with the result. Legality here and
in the masks is the same, so an unmasked action always executes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from esper.leyline import (
    ALPHA_CURVE_STEEPNESS,
    ALPHA_CURVE_VALUES,
    ALPHA_SPEED_EPOCHS,
    ALPHA_TARGET_VALUES,
    STYLE_ALPHA_ALGORITHMS,
    STYLE_CURVES,
    TEMPO_EPOCHS,
    ActionMasks,
    EpisodeOutcome,
    FactoredAction,
    GovernorReport,
    LifecycleKind,
    LifecycleOp,
    LifecycleRecord,
    ObjectiveConfig,
    OpResult,
    SeedStage,
    SeedStateReport,
    SlotConfig,
    TelemetryEvent,
    TelemetryEventType,
    TrainingSignals,
    blueprint_id,
    objective,
    stack_reports,
    stream_seed,
)
from esper.simic.contracts import ActionOutcome, ActionSpec, EnvMeasure, RewardInputs
from esper.simic.seed_management import resolve_target_slot
from esper.tamiyo.masks import Bools, build_slot_states, compute_action_masks
from esper.tolaria import preflight

if TYPE_CHECKING:
    from esper.kasmina import NetworkRow
    from esper.kasmina.model import GrowingSlots
    from esper.simic.rewards import RewardComponentsTelemetry
    from esper.simic.training.budgets import Budget
    from esper.simic.training.counterfactual_eval import Validation
    from esper.simic.training.parallel_env_state import EnvGroup, ParallelEnvState


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRules:
    """Rules of one task in the whole run. Without `reward`, every step is paid 0."""

    slot_config: SlotConfig
    blueprints: frozenset[int]
    """Indices of those that may be germinated."""
    blueprint_mask: Bools
    objective: ObjectiveConfig
    root_seed: int
    max_epochs: int
    """The longest that an episode can last."""
    epochs_needed: tuple[int, ...]
    """By tempo: epochs from a germination to the decision that makes the seed permanent."""
    task: str = ""
    """Name of the task, for outcomes."""
    max_seeds: int = 0
    reward: Callable[[RewardInputs], RewardComponentsTelemetry] | None = None
    rollback_reward: Callable[[int], RewardComponentsTelemetry] | None = None
    """Components of the penalty for a rollback, by env index. None charges the objective's price alone."""


@dataclass(frozen=True, slots=True)
class ActionContext:
    """One epoch: its rules, its envs, and which of them panic."""

    rules: ActionRules
    groups: Sequence[EnvGroup]
    budget: Budget
    validation: Validation
    """Measures a network again that was rolled back in its last epoch, before its episode is closed."""
    epoch: int
    panics: Mapping[int, GovernorReport]
    cut_after: bool = False
    """The rollout ends with this step, the episode does not."""

    @property
    def members(self) -> list[tuple[ParallelEnvState, EnvGroup]]:
        """Every env whose episode goes on with its group, in env order."""
        pairs = [(env, group) for group in self.groups for env in group.active]
        return sorted(pairs, key=lambda pair: pair[0].env_idx)


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What happened, in env order, without envs whose episode was over before. The `post_action_*` lists are
    filled where a rollout is cut, in the order of the targets."""

    outcomes: list[ActionOutcome] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    components: list[RewardComponentsTelemetry | None] = field(default_factory=list)
    """The parts of each reward; where an env was rolled back, the parts of its penalty."""
    valid: list[bool] = field(default_factory=list)
    """False where an env was rolled back: it made no decision in this epoch."""
    ended: list[bool] = field(default_factory=list)
    """True where this was the last epoch of an env's episode."""
    penalties: list[tuple[int, float]] = field(default_factory=list)
    """(env, amount) of each rollback. The amount belongs to the env's last decision before this epoch, which
    ends a segment of the rollout."""
    truncated_bootstrap_targets: list[tuple[int, int]] = field(default_factory=list)
    post_action_signals: list[TrainingSignals] = field(default_factory=list)
    post_action_slot_reports: list[dict[str, SeedStateReport]] = field(default_factory=list)
    post_action_masks: list[ActionMasks] = field(default_factory=list)


def parse_sampled_action(
    env_idx: int,
    indices: Sequence[int],
    reports: Mapping[str, SeedStateReport],
    rules: ActionRules,
    *,
    epochs_left: int,
    val_loss: float,
    val_accuracy: float,
) -> ActionSpec:
    """Decode the eight head indices, and let the governor's preflight decide whether the action can be
    executed with so many epochs left after this one. Pure."""
    action = FactoredAction.from_indices(*indices)
    slot_id, position = resolve_target_slot(
        action.slot_idx, enabled_slots=rules.slot_config.slot_ids, slot_config=rules.slot_config
    )
    return ActionSpec(
        env_idx=env_idx,
        op=action.op,
        slot_id=slot_id,
        slot_index=position,
        blueprint_id=blueprint_id(action.blueprint),
        algorithm=STYLE_ALPHA_ALGORITHMS[action.style],
        ramp_curve=STYLE_CURVES[action.style],
        tempo_epochs=TEMPO_EPOCHS[action.tempo],
        alpha_target=ALPHA_TARGET_VALUES[action.alpha_target],
        alpha_steps=ALPHA_SPEED_EPOCHS[action.alpha_speed],
        alpha_curve=ALPHA_CURVE_VALUES[action.alpha_curve],
        alpha_steepness=ALPHA_CURVE_STEEPNESS[action.alpha_curve],
        veto=preflight(
            action,
            reports,
            slots=rules.slot_config,
            blueprints=rules.blueprints,
            val_loss=val_loss,
            val_accuracy=val_accuracy,
            max_seeds=rules.max_seeds,
            epochs_left=epochs_left,
            epochs_needed=rules.epochs_needed,
        ),
    )


def execute_actions(
    context: ActionContext,
    actions: Sequence[Sequence[int]],
    *,
    env_final_accs: list[float],
    env_total_rewards: list[float],
    episode_history: list[EpisodeOutcome],
    episode_outcomes: list[EpisodeOutcome],
    env_rollback_occurred: list[bool],
) -> ActionResult:
    """Carry out one sampled action per env whose episode goes on. The keyword lists are changed in place:
    those named `env_*` are indexed by env; both lists of episodes receive the same outcome, once per finished
    episode."""
    result = ActionResult()
    for (env, group), indices in zip(context.members, actions, strict=True):
        spec = parse_sampled_action(
            env.env_idx,
            indices,
            env.model.reports(),
            context.rules,
            epochs_left=env.planned.certain,
            val_loss=env.val_loss,
            val_accuracy=env.val_accuracy,
        )
        panicked = env.env_idx in context.panics
        env_rollback_occurred[env.env_idx] = panicked
        reward = 0.0
        if panicked:
            outcome, paid, penalty = _roll_back(env, group, spec, context)
            result.penalties.append((env.env_idx, penalty))
            env.total_reward += penalty
        else:
            outcome = _act(env, spec, context)
            paid = _reward(env, outcome, context)
            if paid is not None:
                reward = paid.total
            env.total_reward += reward
            env.epoch_rewards[spec.slot_id] += reward
        result.outcomes.append(outcome)
        result.rewards.append(reward)
        result.components.append(paid)
        result.valid.append(not panicked)
        env.done = env.is_last_epoch
        result.ended.append(env.done)
        if env.done:
            env_final_accs[env.env_idx] = env.val_accuracy
            env_total_rewards[env.env_idx] = env.total_reward
            finished = finish_episode(env, context)
            episode_history.append(finished)
            episode_outcomes.append(finished)
        elif context.cut_after:
            result.truncated_bootstrap_targets.append((env.env_idx, context.epoch - 1))
    if result.truncated_bootstrap_targets:
        _look_ahead(context, result)
    return result


def _act(env: ParallelEnvState, spec: ActionSpec, context: ActionContext) -> ActionOutcome:
    """Apply the action, tick the clock, take a snapshot if one is due, and count."""
    applied = _apply(env, spec, context) if spec.veto is None else OpResult(False)
    executed = applied.done
    records = (*applied.records, *env.model.step_epoch())
    if any(record.kind is LifecycleKind.FOSSILIZED for record in records):
        env.governor.request_snapshot()  # by the action or by the clock
    if env.governor.due(context.epoch):
        env.governor.snapshot()
    _count(env, records)
    _emit(env, records, context.epoch)
    env.last_op, env.last_success = spec.op, executed
    env.epoch_counts[spec.slot_id] += 1
    env.epoch_successes[spec.slot_id] += executed
    return ActionOutcome(
        spec=spec,
        executed=executed,
        effective_op=spec.op if executed else LifecycleOp.WAIT,
        gate=applied.gate,
        records=records,
    )


def _apply(env: ParallelEnvState, spec: ActionSpec, context: ActionContext) -> OpResult:
    init_seed = stream_seed(
        context.rules.root_seed, "germination", env.episode_idx, env.world, env.germinated
    )
    return apply_action(env.model, spec, init_seed)


def apply_action(network: NetworkRow | GrowingSlots, spec: ActionSpec, init_seed: int) -> OpResult:
    """Carry out a decoded action. `init_seed` is the random seed of a newborn's weights."""
    if spec.op is LifecycleOp.WAIT:
        return OpResult(True)
    if spec.op is LifecycleOp.GERMINATE:
        return network.germinate(
            spec.slot_id,
            spec.blueprint_id,
            init_seed=init_seed,
            algorithm=spec.algorithm,
            ramp_curve=spec.ramp_curve,
            tempo_epochs=spec.tempo_epochs,
        )
    if spec.op is LifecycleOp.SET_ALPHA_TARGET:
        return network.set_alpha_target(
            spec.slot_id,
            spec.alpha_target,
            steps=spec.alpha_steps,
            curve=spec.alpha_curve,
            steepness=spec.alpha_steepness,
            algorithm=spec.algorithm,
        )
    if spec.op is LifecycleOp.PRUNE:
        return network.schedule_prune(
            spec.slot_id, steps=spec.alpha_steps, curve=spec.alpha_curve, steepness=spec.alpha_steepness
        )
    if spec.op is LifecycleOp.FOSSILIZE:
        return network.fossilize(spec.slot_id)
    return network.advance(spec.slot_id)


def _count(env: ParallelEnvState, records: Sequence[LifecycleRecord]) -> None:
    env.germinated += sum(r.kind is LifecycleKind.GERMINATED for r in records)
    env.fossilized += sum(r.kind is LifecycleKind.FOSSILIZED for r in records)
    env.pruned += sum(r.kind is LifecycleKind.PRUNED for r in records)


def _emit(env: ParallelEnvState, records: Sequence[LifecycleRecord], epoch: int) -> None:
    if env.telemetry is not None and env.slot_telemetry.get("lifecycle", True):
        for record in records:
            env.telemetry(lifecycle_event(record, epoch, env.slot_telemetry.get("global_epoch")))


def lifecycle_event(record: LifecycleRecord, epoch: int, global_epoch: int | None = None) -> TelemetryEvent:
    return TelemetryEvent(
        event_type=TelemetryEventType.SEED_LIFECYCLE,
        epoch=epoch,
        slot_id=record.slot_id,
        seed_id=record.seed_id,
        data={
            "kind": record.kind,
            "blueprint_id": record.blueprint_id,
            "stage_from": record.stage_from.name,
            "stage_to": record.stage_to.name,
            "alpha": record.alpha,
            "params": record.params,
            "epochs_total": record.epochs_total,
            "contribution": record.contribution,
            "gate_failures": [] if record.gate is None else [f.reason for f in record.gate.failures],
            "cause": None if record.cause is None else record.cause.name,
            "global_epoch": global_epoch,
        },
    )


def _roll_back(
    env: ParallelEnvState, group: EnvGroup, spec: ActionSpec, context: ActionContext
) -> tuple[ActionOutcome, RewardComponentsTelemetry | None, float]:
    """Restore the network's last good state. Returns the outcome, the parts of the penalty and its amount."""
    report, rules = context.panics[env.env_idx], context.rules
    paid = None if rules.rollback_reward is None else rules.rollback_reward(env.env_idx)
    amount = -rules.objective.rollback_price if paid is None else paid.total
    records = (*env.governor.rollback(), *env.model.step_epoch())
    _count(env, records)
    _emit(env, records, context.epoch)
    if env.telemetry is not None:
        env.telemetry(
            TelemetryEvent(
                event_type=TelemetryEventType.ROLLBACK,
                epoch=context.epoch,
                data={"reason": report.reason, "loss": report.loss, "limit": report.limit, "amount": amount},
            )
        )
    # A seed that was fossilized after the last good state is lost too.
    kept = sum(report.stage is SeedStage.FOSSILIZED for report in env.model.reports().values())
    env.pruned += env.fossilized - kept
    env.fossilized = kept
    env.rollbacks += 1
    env.last_op, env.last_success, env.last_measure = LifecycleOp.WAIT, False, None
    env.reset_lstm_hidden()
    if env.is_last_epoch:
        context.validation.measure([group.only([env])], context.epoch)
    spec = replace(spec, op=LifecycleOp.WAIT)
    outcome = ActionOutcome(spec=spec, executed=False, effective_op=LifecycleOp.WAIT, records=records)
    return outcome, paid, amount


def measure(env: ParallelEnvState) -> EnvMeasure:
    """The env's accuracies of this epoch and its structure as it is now."""
    assert env.coalitions is not None, "measured after validation"
    reports = env.model.reports()
    fossils = frozenset(s for s, r in reports.items() if r.stage is SeedStage.FOSSILIZED)
    network, committed = env.model, env.coalitions[fossils]
    return EnvMeasure(
        accuracy=env.val_accuracy,
        committed_accuracy=committed.accuracy,
        loss=env.val_loss,
        committed_loss=committed.loss,
        host_params=network.model.host_params,
        committed_params=network.model.seed_params(network.row, stages=(SeedStage.FOSSILIZED,)),
        germinated=env.germinated,
        fossilized=env.fossilized,
        pruned=env.pruned,
        rollbacks=env.rollbacks,
        reports=reports,
        contributions=env.coalitions.contributions(),
    )


def _reward(
    env: ParallelEnvState, outcome: ActionOutcome, context: ActionContext
) -> RewardComponentsTelemetry | None:
    after, rules = measure(env), context.rules
    before, env.last_measure = env.last_measure, after
    if rules.reward is None:
        return None
    return rules.reward(
        RewardInputs(
            env_idx=env.env_idx,
            epoch=context.epoch,
            max_epochs=context.epoch + math.ceil(env.planned.time.epochs_left),
            outcome=outcome,
            before=before,
            after=after,
        )
    )


def finish_episode(env: ParallelEnvState, context: ActionContext) -> EpisodeOutcome:
    """The outcome of the episode, with J of the network as it is now."""
    final, prices = measure(env), context.rules.objective
    return EpisodeOutcome(
        env_id=env.env_idx,
        task=context.rules.task,
        episode_idx=env.episode_idx,
        epochs=context.epoch,
        final_accuracy=final.accuracy,
        committed_accuracy=final.committed_accuracy,
        total_reward=env.total_reward,
        host_params=final.host_params,
        added_params=final.committed_params,
        germinated=env.germinated,
        fossilized=env.fossilized,
        pruned=env.pruned,
        rollbacks=env.rollbacks,
        objective=objective(
            prices,
            committed_accuracy=final.committed_accuracy / 100.0,
            added_params=final.committed_params,
            host_params=final.host_params,
            wasted_seeds=env.germinated - env.fossilized,
            rollbacks=env.rollbacks,
        ),
    )


def _look_ahead(context: ActionContext, result: ActionResult) -> None:
    """Add the observations that the cut envs would have next: the same measurements, one epoch later."""
    rules = context.rules
    wanted = {env_idx for env_idx, _ in result.truncated_bootstrap_targets}
    for env, _ in context.members:
        if env.env_idx not in wanted:
            continue
        reports = env.model.reports()
        states = build_slot_states(stack_reports([reports], rules.slot_config))
        ahead = context.budget.plan(env, context.epoch + 1)
        result.post_action_signals.append(
            env.signal_tracker.peek(
                ahead.time,
                train_loss=env.train_loss,
                train_accuracy=env.train_accuracy,
                val_loss=env.val_loss,
                val_accuracy=env.val_accuracy,
            )
        )
        result.post_action_slot_reports.append(reports)
        result.post_action_masks.append(
            compute_action_masks(
                states,
                rules.blueprint_mask,
                epochs_left=ahead.certain,
                epochs_needed=rules.epochs_needed,
                max_seeds=rules.max_seeds,
            )
        )
