"""The training loop: many networks grow side by side, and one policy decides for all of them and learns.

`VectorizedPPOTrainer.run` reads top to bottom: rounds of epochs, each epoch the phases TRAIN, VALIDATE,
SENSE, DECIDE, ACT and RECORD, then the update. Telemetry goes to the recorder, which returns nothing.

E envs, S slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.leyline import (
    PHASES,
    ActionMasks,
    EpisodeOutcome,
    LifecycleOp,
    PolicyObservation,
    PolicyProtocol,
    PolicyStep,
    stack_reports,
)
from esper.simic.contracts import BatchSummary
from esper.simic.seed_management import run_ppo_updates
from esper.simic.training.batch_ops import batch_signals_to_features
from esper.simic.training.checkpoint import BestPolicy
from esper.tamiyo.policy import action_uniforms, map_tensors

if TYPE_CHECKING:
    from esper.simic.agent.normalization import RewardNormalizer
    from esper.simic.agent.ppo import PPOAgent
    from esper.simic.rewards import RewardEngine
    from esper.simic.training.action_execution import ActionResult
    from esper.simic.training.checkpoint import CheckpointStore
    from esper.simic.training.config import TrainingConfig
    from esper.simic.training.recording import RunRecorder
    from esper.simic.training.vector_env import Observation, VectorEnv


@dataclass(slots=True, kw_only=True)
class RunContext:
    """The parts of a run; the entry point builds them."""

    config: TrainingConfig
    env: VectorEnv
    agent: PPOAgent | None
    """None if the policy does not learn."""
    policy: PolicyProtocol
    teacher: PolicyProtocol | None
    """Decides in the first rounds; the policy imitates it."""
    rewards: RewardEngine
    normalizer: RewardNormalizer
    recorder: RunRecorder
    store: CheckpointStore | None
    """None: no checkpoints are written."""
    stop: Callable[[], bool]
    """Whether a stop was requested."""


@dataclass(slots=True)
class Progress:
    """Position in a run: numbers of finished rounds and epochs."""

    round_idx: int = 0
    epoch: int = 0
    """Finished epochs of the current round; 0 between rounds."""
    history: list[BatchSummary] = field(default_factory=list)


@dataclass(slots=True)
class Decisions:
    """Counts and rewards of the current round."""

    offered: Tensor  # [6] number of steps at which an op was legal
    counts: dict[str, int]
    successes: dict[str, int]
    rewards: list[float] = field(default_factory=list)
    """Every raw reward and penalty, for the normaliser."""

    @classmethod
    def none(cls) -> Decisions:
        names = [op.name for op in LifecycleOp]
        offered = torch.zeros(len(names), dtype=torch.int64)
        return cls(offered, counts=dict.fromkeys(names, 0), successes=dict.fromkeys(names, 0))


class VectorizedPPOTrainer:
    """One run. Its result depends on the config and its random seed alone."""

    def __init__(self, context: RunContext) -> None:
        self.context, self.config, self.env, self.agent = context, context.config, context.env, context.agent
        self.recorder = context.recorder
        self.progress = Progress()
        self.best = BestPolicy()
        self.decisions = Decisions.none()
        self.max_epochs = self.env.rules.max_epochs
        self.rollout_length = self.config.rollout_length or self.max_epochs
        self.device = torch.device("cpu") if self.agent is None else self.agent.policy.device
        self.num_envs = len(self.env.envs)
        self.hidden = context.policy.initial_hidden(self.num_envs)
        self.reset = self._flags(True)
        self.stopped = self.ended = False
        self._uniforms = torch.empty(0)
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def run(self, until: int | None = None) -> tuple[PPOAgent | None, list[BatchSummary]]:
        """Train to the end of the run, or of round `until`. A requested stop takes effect at the end of the
        current epoch."""
        last = self.config.rounds if until is None else until
        while self.progress.round_idx < last and not self.stopped:
            if self.progress.epoch == 0:
                self.begin_round()
            while self.progress.epoch < self.max_epochs and not self.stopped:
                epoch = self.progress.epoch + 1
                self.recorder.begin_epoch(self.env, epoch)
                with self._timed("train"):
                    self.env.train_epoch(epoch)
                with self._timed("validate"):
                    self.env.validate(epoch)
                with self._timed("sense"):
                    seen = self.env.sense(epoch)
                    obs = batch_signals_to_features(seen.signals, seen.table, self.env.envs, self.device)
                    masks = map_tensors(seen.masks, self._to_device)
                with self._timed("decide"):
                    step = self._decide(seen, obs, masks)
                    actions = step.actions.cpu().tolist()
                with self._timed("act"):
                    result = self.env.act(seen, actions, cut_after=self._cut_after(epoch))
                with self._timed("record"):
                    self._record(seen, obs, masks, step, result)
                    self.recorder.step(self.env, seen, obs, step, actions, result, self.seconds["train"])
                if result.truncated_bootstrap_targets or epoch == self.max_epochs:
                    with self._timed("update"):
                        self._update(result)
                self.progress.epoch = epoch
                if epoch < self.max_epochs:
                    self._heed_stop()
            if not self.stopped:
                self._end_round()
        if self.progress.round_idx == self.config.rounds == last and not self.stopped:
            self._finish()
        return self.agent, self.progress.history

    # -- rounds ----------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Reset networks, policies, rewards and counts."""
        episode = self.progress.round_idx
        self.recorder.begin_round(episode)
        self.env.begin_round(episode)
        self.set_rent()
        for env in self.env.envs:
            self.context.rewards.begin_episode(env.env_idx)
        self.context.policy.begin(self.num_envs)
        if self.context.teacher is not None:
            self.context.teacher.begin(self.num_envs)
        self.hidden, self.reset = self.context.policy.initial_hidden(self.num_envs), self._flags(True)
        self.decisions = Decisions.none()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.draw_uniforms()
        self.best.begin_round(None if self.agent is None else self.agent.policy)
        if self.agent is not None:
            self.agent.begin_rollout(self.agent.initial_hidden())

    @property
    def teacher(self) -> PolicyProtocol | None:
        """The teacher, if it decides in this round instead of the policy."""
        return self.context.teacher if self.progress.round_idx < self.config.teacher_rounds else None

    def set_rent(self) -> None:
        """Set the price of size in this round's rewards."""
        full, ramp = self.env.rules.objective, self.config.rent_curriculum * self.config.rounds
        share = min(self.progress.round_idx / ramp, 1.0) if ramp else 1.0
        self.context.rewards.objective = replace(full, size_price=full.size_price * share)

    def draw_uniforms(self) -> None:
        """Draw the round's random numbers for actions, [E, epochs, 8], from each env's own stream."""
        envs = [env.env_idx for env in self.env.envs]
        self._uniforms = action_uniforms(
            self.env.rules.root_seed, self.progress.round_idx, envs, self.max_epochs
        )

    def _end_round(self) -> None:
        progress, decisions = self.progress, self.decisions
        summary = self._summary(self.env.ledger.outcomes)
        progress.history.append(summary)
        if self.teacher is None and self.best.end_round(summary) and self.context.store is not None:
            self.context.store.save_best(self.best)
        self.context.normalizer.update(decisions.rewards)
        self.recorder.end_round(self.env, summary, self.agent, decisions.offered, self.seconds)
        progress.round_idx, progress.epoch = progress.round_idx + 1, 0
        if progress.round_idx < self.config.rounds:
            every = self.config.checkpoint_every
            if every and progress.round_idx % every == 0:
                self._save()
            self._heed_stop()

    def end_run(self, status: str, message: str | None = None) -> None:
        """Emit the last event of the run."""
        self.ended = True
        self.recorder.end_run(status, self.progress, max_epochs=self.max_epochs, message=message)

    def _finish(self) -> None:
        self._save()
        self.end_run("finished")

    def _summary(self, outcomes: list[EpisodeOutcome]) -> BatchSummary:
        return BatchSummary(
            round_idx=self.progress.round_idx,
            episodes_completed=(self.progress.round_idx + 1) * self.num_envs,
            mean_accuracy=fmean(o.final_accuracy for o in outcomes),
            mean_committed_accuracy=fmean(o.committed_accuracy for o in outcomes),
            mean_objective=fmean(o.objective for o in outcomes),
            objectives=tuple(o.objective for o in outcomes),
            mean_reward=fmean(o.total_reward for o in outcomes),
            mean_added_params=fmean(o.added_params for o in outcomes),
            rollbacks=sum(o.rollbacks for o in outcomes),
            action_counts=self.decisions.counts,
            action_successes=self.decisions.successes,
        )

    # -- phases ----------------------------------------------------------------------------------------------

    def _decide(self, seen: Observation, obs: PolicyObservation, masks: ActionMasks) -> PolicyStep:
        if self.agent is not None:
            given = None if self.teacher is None else self.teacher.act(obs, None, masks).actions
            return self.agent.act(
                obs,
                self.hidden,
                masks,
                uniforms=self._uniforms[:, seen.epoch - 1],
                reset=self.reset,
                given=given,
            )
        return self.context.policy.act(obs, self.hidden, masks)

    def _record(
        self,
        seen: Observation,
        obs: PolicyObservation,
        masks: ActionMasks,
        step: PolicyStep,
        result: ActionResult,
    ) -> None:
        """Store one column of the rollout and update the round's counts. Penalties go to columns that are
        stored already, so they come first."""
        decisions, normalizer = self.decisions, self.context.normalizer
        decisions.offered += seen.masks.op.sum(0)
        for env_idx, amount in result.penalties:
            decisions.rewards.append(amount)
            if self.agent is not None:
                self.agent.buffer.add_penalty(env_idx, normalizer.normalize(amount))
        decisions.rewards += result.rewards
        for outcome, decided in zip(result.outcomes, result.valid, strict=True):
            decisions.counts[outcome.spec.op.name] += decided
            decisions.successes[outcome.spec.op.name] += outcome.executed
        valid = torch.tensor(result.valid, device=self.device)
        if self.agent is not None:
            reward = torch.tensor(
                [normalizer.normalize(reward) for reward in result.rewards], device=self.device
            )
            self.agent.record(
                obs,
                masks,
                step,
                reward=reward,
                terminal=self._flags(seen.epoch == self.max_epochs),
                reset=self.reset,
                valid=valid,
            )
        self.hidden, self.reset = step.hidden, ~valid

    def _update(self, result: ActionResult) -> None:
        """Learn from the rollout. Where it was cut before the end of the episode, the value head estimates
        the rest."""
        if self.agent is None:
            return
        if targets := result.truncated_bootstrap_targets:
            table = stack_reports(result.post_action_slot_reports, self.env.rules.slot_config)
            obs = batch_signals_to_features(result.post_action_signals, table, self.env.envs, self.device)
            values = self.agent.policy.value(obs, self.hidden, reset=self.reset)
            last = self.agent.buffer.length - 1
            self.agent.buffer.truncate([(env_idx, last) for env_idx, _ in targets], values)
        imitate = self.teacher is not None
        updates = self.config.teacher_updates if imitate else self.config.updates_per_round
        metrics = run_ppo_updates(self.agent, updates, [], None, self.config.ppo.bf16, imitate=imitate)
        self.recorder.update(self.agent, metrics)
        if targets:
            assert self.hidden is not None, "a learning policy has a memory"
            self.agent.begin_rollout(self.hidden)

    def _cut_after(self, epoch: int) -> bool:
        return epoch % self.rollout_length == 0 and epoch < self.max_epochs

    # -- stops -----------------------------------------------------------------------------------------------

    def _heed_stop(self) -> None:
        if self.context.stop():
            self.stopped = True
            self._save(announce=False)
            self.end_run("stopped")

    def _save(self, *, announce: bool = True) -> None:
        if self.context.store is not None:
            self.context.store.save(self, announce=announce)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _flags(self, value: bool) -> Tensor:
        return torch.full((self.num_envs,), value, device=self.device)
