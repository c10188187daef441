"""Many growing networks as one environment: the phases of an epoch in their order, without a policy.

TRAIN → VALIDATE → SENSE, then the caller passes one action per env, then ACT and TICK. A trainer calls the
phases one by one; `step` runs them all. Episodes may end at different times: an env whose episode is over
takes no part in the rest of its round.

E envs, A of them with an episode that goes on, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esper.kasmina.model import cross_entropy
from esper.kasmina.optim import Criterion
from esper.leyline import (
    LIVE_STAGES,
    ActionMasks,
    EpisodeOutcome,
    GovernorReport,
    PolicyObservation,
    ReportArray,
    SeedStateReport,
    TrainingSignals,
    stack_reports,
)
from esper.runtime.data import validation_batches
from esper.simic.training.action_execution import ActionContext, ActionResult, ActionRules, execute_actions
from esper.simic.training.batch_ops import (
    batch_signals_to_features,
    finish_training,
    process_train_batch,
    process_val_batch,
    stack_sensors,
    to_host,
)
from esper.simic.training.budgets import make_budget
from esper.simic.training.counterfactual_eval import Validation
from esper.simic.training.env_factory import reset_group
from esper.simic.training.parallel_env_state import EnvGroup, ParallelEnvState
from esper.simic.training.stacking import with_empty_rows
from esper.tamiyo.masks import build_slot_states, compute_action_masks

if TYPE_CHECKING:
    from esper.runtime.data import EvalBatches, SharedBatchIterator, Split
    from esper.runtime.tasks import TaskSpec


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of the envs that decide, in env order."""

    epoch: int
    envs: list[ParallelEnvState]
    rows: list[int]
    """Place of each of them among all envs."""
    signals: list[TrainingSignals]
    reports: list[dict[str, SeedStateReport]]
    table: ReportArray  # [A, S]
    sensors: dict[str, npt.NDArray[np.float64]]  # by name, [A, S] each
    masks: ActionMasks  # [A, …]
    panics: dict[int, GovernorReport]


@dataclass(slots=True)
class Ledger:
    """Results of a round, filled step by step; the first three are indexed by `env_idx`."""

    final_accs: list[float]
    total_rewards: list[float]
    rollback_occurred: list[bool]
    outcomes: list[EpisodeOutcome] = field(default_factory=list)
    """As episodes end; in env order once the round is over."""


EVALUATION_BATCH = 256
"""Maximum number of samples in one validation pass: larger activations leave the cache and are slower."""


class VectorEnv:
    """Groups of envs with their data and rules."""

    def __init__(
        self,
        task: TaskSpec,
        groups: Sequence[EnvGroup],
        train: SharedBatchIterator,
        split: Split,
        rules: ActionRules,
        *,
        criterion: Criterion = cross_entropy,
    ) -> None:
        self.task, self.groups, self.train, self.criterion = task, list(groups), train, criterion
        self.rules = rules
        self.budget = make_budget(task, [group.model for group in groups], root_seed=rules.root_seed)
        size = min(len(split.val), EVALUATION_BATCH)
        self.validation = Validation(list(validation_batches(split, size)), criterion, rules.root_seed)
        self.final_validation = self.validation
        if len(split.final) > len(split.val):
            batches = list(validation_batches(split, size, final=True))
            self.final_validation = Validation(batches, criterion, rules.root_seed)
        self.envs: list[ParallelEnvState] = sorted(
            (env for group in self.groups for env in group.envs), key=lambda e: e.env_idx
        )
        self.ledger = Ledger([], [], [])
        self.episode = 0

    def begin_round(self, episode: int) -> None:
        """Reset every env to a fresh network. All envs play the same episode number, each from its own random
        streams."""
        self.episode = episode
        worlds = [env.world for group in self.groups for env in group.envs]  # the order of the batches
        self.train.begin_episode(episode, **self.task.data_conditions(self.rules.root_seed, episode, worlds))
        for group in self.groups:
            reset_group(group, self.task, root_seed=self.rules.root_seed, first_episode=episode)
        size = 1 + max(env.env_idx for env in self.envs)
        self.ledger = Ledger([0.0] * size, [0.0] * size, [False] * size)

    @property
    def done(self) -> bool:
        """Whether all episodes of the round are over."""
        return all(env.done for env in self.envs)

    # -- the phases ------------------------------------------------------------------------------------------

    def train_epoch(self, epoch: int, *, steps: int | None = None, sense: bool = True) -> None:
        """One epoch of training of every population that has an env whose episode goes on. Each env takes as
        many steps as its budget allows. `steps` ends the epoch early for all; only the last epoch of an
        episode may be shorter than the others. Without `sense` nothing is measured, for networks that nobody
        decides for."""
        running = [group for group in self.groups if group.active]
        for group in running:
            for env in group.active:
                plan = self.budget.plan(env, epoch)
                env.plan = plan if steps is None else replace(plan, steps=min(plan.steps, steps))
                env.flops = plan.flops
            group.begin_epoch()
        ends = [{env.planned.steps for env in group.active} for group in self.groups]
        changes = {0, *chain(*ends)} if self.task.budget == "flops" else set()
        batches = iter(self.train)
        for step in range(1, 1 + max(chain(*ends), default=0)):
            if step - 1 in changes:
                self._gather(step)
            for group, end, batch in zip(self.groups, ends, next(batches), strict=True):
                if max(end, default=0) >= step:
                    last = sense and step in end
                    senses = last and self.task.senses(epoch)
                    process_train_batch(group, batch.x, batch.y, self.criterion, last=last, sense=senses)
        if changes:
            self.train.skip_epoch()
        elif steps is None:
            next(batches, None)  # all were taken: the iterator ends its epoch
        if sense:
            finish_training(running)

    def _gather(self, step: int) -> None:
        """Let the batches from this step on hold the rows alone that take it; the others rest. Where all rows
        take the same steps, those without an env train along."""
        for group in self.groups:
            rows = [env.row for env in group.active if env.planned.steps >= step]
            group.gathered = group.model.padded(rows) if rows else []
            if rows:
                group.model.train_only(rows)
        self.train.gather([group.gathered for group in self.groups])

    def validate(self, epoch: int) -> None:
        """Evaluate every coalition of every env on the shared validation set. That of an env's last epoch may
        be larger: it decides J."""
        for validation, is_last in ((self.validation, False), (self.final_validation, True)):
            groups = [
                group.only(chosen)
                for group in self.groups
                if (chosen := [env for env in group.active if env.is_last_epoch is is_last])
            ]
            if groups:
                validation.measure(groups, epoch)

    def sense(self, epoch: int) -> Observation:
        """Check the losses, and collect signals, reports, sensors and masks."""
        rows = [row for row, env in enumerate(self.envs) if not env.done]
        envs = [self.envs[row] for row in rows]
        checked = {env.env_idx: env.governor.check_vital_signs(env.val_loss) for env in envs}
        panics = {env_idx: report for env_idx, report in checked.items() if report is not None}
        signals = [
            env.signal_tracker.update(
                env.planned.time,
                train_loss=env.train_loss,
                train_accuracy=env.train_accuracy,
                val_loss=env.val_loss,
                val_accuracy=env.val_accuracy,
            )
            for env in envs
        ]
        reports = [env.model.reports() for env in envs]
        table = stack_reports(reports, self.rules.slot_config)
        masks = compute_action_masks(
            build_slot_states(table),
            self.rules.blueprint_mask,
            epochs_left=[env.planned.certain for env in envs],
            epochs_needed=self.rules.epochs_needed,
            max_seeds=self.rules.max_seeds,
        )
        return Observation(epoch, envs, rows, signals, reports, table, stack_sensors(envs), masks, panics)

    def observe(
        self, seen: Observation, device: torch.device | str = "cpu"
    ) -> tuple[PolicyObservation, ActionMasks]:
        """Input of a policy that decides for all envs, [E, …]; rows of envs that decide nothing are empty."""
        obs = batch_signals_to_features(seen.signals, seen.table, seen.envs, device)
        count = len(self.envs)
        return with_empty_rows(obs, seen.rows, count), with_empty_rows(seen.masks, seen.rows, count)

    def observe_ahead(self, result: ActionResult, device: torch.device | str = "cpu") -> PolicyObservation:
        """The states that follow the steps at which a rollout was cut, [E, …]; other rows are empty."""
        cut = [env_idx for env_idx, _ in result.truncated_bootstrap_targets]
        rows = [row for row, env in enumerate(self.envs) if env.env_idx in cut]
        table = stack_reports(result.post_action_slot_reports, self.rules.slot_config)
        envs = [self.envs[row] for row in rows]
        obs = batch_signals_to_features(result.post_action_signals, table, envs, device)
        return with_empty_rows(obs, rows, len(self.envs))

    def act(
        self, seen: Observation, actions: Sequence[Sequence[int]], *, cut_after: bool = False
    ) -> ActionResult:
        """Execute one action for each env that decides (indices in head order), tick the clock, and close the
        episodes whose last epoch this was."""
        context = ActionContext(
            self.rules,
            self.groups,
            self.budget,
            self.final_validation,
            seen.epoch,
            seen.panics,
            cut_after,
        )
        ledger = self.ledger
        result = execute_actions(
            context,
            actions,
            env_final_accs=ledger.final_accs,
            env_total_rewards=ledger.total_rewards,
            episode_history=[],
            episode_outcomes=ledger.outcomes,
            env_rollback_occurred=ledger.rollback_occurred,
        )
        if self.done:
            ledger.outcomes.sort(key=attrgetter("env_id"))
        return result

    def step(self, epoch: int, decide: Callable[[Observation], Sequence[Sequence[int]]]) -> ActionResult:
        """One epoch, all phases."""
        self.train_epoch(epoch)
        self.validate(epoch)
        seen = self.sense(epoch)
        return self.act(seen, decide(seen))

    def test(self, batches: EvalBatches) -> list[float]:
        """Accuracy of the committed networks in percent, in env order. This ends the episode: live seeds are
        pruned."""
        for env in self.envs:
            for slot_id, report in env.model.reports().items():
                if report.stage in LIVE_STAGES:
                    env.model.prune(slot_id)
        counts = [self._count_correct(group, batches) for group in self.groups]
        for group in self.groups:
            group.synchronize()
        targets = sum(batch.y.numel() for batch in batches.batches())
        accuracy = {}
        for group, correct in zip(self.groups, to_host(counts), strict=True):
            for env in group.envs:
                accuracy[env.env_idx] = 100.0 * correct[env.row] / targets
        return [accuracy[env.env_idx] for env in self.envs]

    def _count_correct(self, group: EnvGroup, batches: EvalBatches) -> Tensor:
        """[P] correct answers of each row, on the device."""
        correct = torch.zeros(group.model.population, dtype=torch.int64, device=group.device)
        for batch in batches.batches(group.model.population):
            x, y = batch.x.to(group.device), batch.y.to(group.device)
            correct = correct + process_val_batch(group, x, y, self.criterion)[1]
        return correct
