"""The training loop: many networks grow side by side, and one policy decides for all of them and learns.

`VectorizedPPOTrainer.run` reads top to bottom: rounds of epochs, each epoch the phases TRAIN, VALIDATE,
SENSE, DECIDE, ACT and RECORD, then the update. A round lasts until the episode of every env is over. An env
whose episode ended before takes no further action and enters no statistic. Telemetry goes to the recorder,
which returns nothing.

E envs of all tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.leyline import (
    PHASES,
    ActionMasks,
    EpisodeOutcome,
    LifecycleOp,
    PolicyProtocol,
    PolicyStep,
)
from esper.simic.contracts import BatchSummary, TaskSummary
from esper.simic.ranks import ALONE, Ranks, fingerprint
from esper.simic.seed_management import run_ppo_updates
from esper.simic.training.checkpoint import BestPolicy
from esper.simic.training.distinct_twins import draw_distinct
from esper.simic.training.granularity import level_after, limit_masks, reopen
from esper.tamiyo.policy import action_uniforms, map_tensors

if TYPE_CHECKING:
    from esper.simic.agent.normalization import RewardNormalizer
    from esper.simic.agent.ppo import PPOAgent
    from esper.simic.agent.ppo_metrics import PPOUpdateMetrics
    from esper.simic.rewards import RewardEngine
    from esper.simic.training.action_execution import ActionResult
    from esper.simic.training.checkpoint import CheckpointStore
    from esper.simic.training.config import Granularity, TrainingConfig
    from esper.simic.training.plan_learner import PlanFigures, PlanLearner
    from esper.simic.training.recording import RunRecorder
    from esper.simic.training.task_envs import Moment, StepRecord, TaskEnvs


@dataclass(slots=True, kw_only=True)
class RunContext:
    """The parts of a run; the entry point builds them."""

    config: TrainingConfig
    env: TaskEnvs
    agent: PPOAgent | None
    """None if the policy does not learn."""
    policy: PolicyProtocol
    teacher: PolicyProtocol | None
    """Decides in the first rounds; the policy imitates it."""
    planner: PlanLearner | None
    """Decides in the first rounds and learns what plans are worth; the policy is taught the best ones."""
    rewards: Sequence[RewardEngine]
    """One for each task."""
    normalizer: RewardNormalizer
    recorder: RunRecorder
    store: CheckpointStore | None
    """None: no checkpoints are written."""
    stop: Callable[[], bool]
    """Whether a stop was requested."""
    ranks: Ranks = ALONE
    """The processes of the run."""


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
        self.rollout_length = self.config.rollout_length or self.env.max_epochs
        self.device = torch.device("cpu") if self.agent is None else self.agent.policy.device
        self.num_envs = self.env.num_envs
        self.hidden = context.policy.initial_hidden(self.num_envs)
        self.reset = self._flags(True)
        self.stopped = self.ended = False
        self._uniforms = torch.empty(0)
        self._figures: PlanFigures | None = None
        """Of the round, if a planner decides in it."""
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def run(self, until: int | None = None) -> tuple[PPOAgent | None, list[BatchSummary]]:
        """Train to the end of the run, or of round `until`. A requested stop takes effect at the end of the
        current epoch."""
        last, first = self.config.rounds if until is None else until, self.progress.round_idx
        while self.progress.round_idx < last and not self.stopped:
            if self.progress.epoch == 0:
                self.begin_round()
            while not self.env.done and not self.stopped:
                epoch = self.progress.epoch + 1
                self.recorder.begin_epoch(self.env, epoch)
                with self._timed("train"):
                    self.env.train_epoch(epoch)
                with self._timed("validate"):
                    self.env.validate(epoch)
                with self._timed("sense"):
                    seen = self.env.sense(epoch, self.device)
                    seen = replace(seen, masks=limit_masks(seen.masks, self.granularity))
                    masks = map_tensors(seen.masks, self._to_device)
                with self._timed("decide"):
                    step = self._decide(seen, masks)
                    actions = step.actions.cpu().tolist()
                with self._timed("act"):
                    result = self.env.act(seen, actions, cut_after=epoch % self.rollout_length == 0)
                    record = self.env.record(seen, result)
                with self._timed("record"):
                    self._record(seen, masks, step, record)
                    self.recorder.step(self.env, seen, step, actions, result, record, self.seconds["train"])
                if record.cut or self.env.done:
                    with self._timed("update"):
                        self._update(result, record.cut)
                self.progress.epoch = epoch
                if not self.env.done:
                    self._heed_stop()
            if not self.stopped:
                self._end_round()
        if self.progress.round_idx == self.config.rounds == last and not self.stopped:
            if first < last:  # a finished run that is resumed has its last checkpoint
                self._save()
            self.end_run("finished")
        return self.agent, self.progress.history

    # -- rounds ----------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Reset networks, policies, rewards and counts."""
        episode = self.progress.round_idx
        self.recorder.begin_round(episode)
        self.env.begin_round(episode)
        self.set_rent()
        self._unlock()
        for rewards in self.context.rewards:
            rewards.begin_round()
        self.context.policy.begin(self.num_envs)
        if self.context.teacher is not None:
            self.context.teacher.begin(self.num_envs)
        if self.context.planner is not None:
            self.context.planner.begin(self.num_envs)
        self.hidden, self.reset = self.context.policy.initial_hidden(self.num_envs), self._flags(True)
        self.decisions, self._figures = Decisions.none(), None
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.draw_uniforms()
        self.best.begin_round(None if self.agent is None else self.agent.policy)
        if self.agent is not None:
            self.agent.begin_rollout(self.agent.initial_hidden())

    @property
    def teacher(self) -> PolicyProtocol | None:
        """The teacher, if it decides in this round instead of the policy."""
        return self.context.teacher if self.progress.round_idx < self.config.teacher_rounds else None

    @property
    def planner(self) -> PlanLearner | None:
        """The learner of plans, if it decides in this round instead of the policy."""
        return self.context.planner if self.progress.round_idx < self.config.values_rounds else None

    @property
    def granularity(self) -> Granularity:
        """What the policy may decide in this round."""
        return self._granularity_after(self.progress.round_idx)

    def _granularity_after(self, rounds: int) -> Granularity:
        means = [summary.mean_objective for summary in self.progress.history[:rounds]]
        return level_after(means, self.config.granularity, self.config.unlock_after)

    def _unlock(self) -> None:
        """Open the policy's last layers for what this round has more than the one before."""
        rounds = self.progress.round_idx
        if self.agent is not None and rounds:
            before = self._granularity_after(rounds - 1)
            if before != self.granularity:
                reopen(self.agent.policy.network, before, self.granularity)

    @property
    def taught(self) -> bool:
        """Whether the policy imitates in this round."""
        return self.teacher is not None or self.planner is not None

    def set_rent(self) -> None:
        """Set the price of size in this round's rewards; policies see what is charged."""
        ramp = self.config.rent_curriculum * self.config.rounds
        share = min(self.progress.round_idx / ramp, 1.0) if ramp else 1.0
        for rules, rewards in zip(self.env.roster.rules, self.context.rewards, strict=True):
            full = rules.objective
            rewards.objective = replace(full, size_price=full.size_price * share)
        charged = self.env.roster.each(rewards.objective for rewards in self.context.rewards)
        for env in self.env.envs:
            env.prices = charged[env.env_idx]

    def draw_uniforms(self) -> None:
        """Draw the round's random numbers for actions, [E, epochs, 8], from each env's own stream: that of
        its number within its task, so that it does not depend on the other tasks."""
        root_seed, round_idx = self.env.root_seed, self.progress.round_idx
        self._uniforms = action_uniforms(root_seed, round_idx, self.env.numbers, self.env.max_epochs)

    def _end_round(self) -> None:
        progress, decisions = self.progress, self.decisions
        self._check_ranks()
        outcomes = self.env.ledger.outcomes
        summary = self._summary(outcomes)
        if self._figures is not None:
            summary = replace(summary, **asdict(self._figures))
        progress.history.append(summary)
        if not self.taught and self.best.end_round(summary):
            store = self.context.store
            if store is not None and self.context.ranks.is_first:
                store.save_best(self.best)
        self._renormalize(decisions.rewards)
        self.recorder.end_round(self.env, summary, self.agent, decisions.offered, self.seconds)
        progress.round_idx, progress.epoch = progress.round_idx + 1, 0
        if progress.round_idx < self.config.rounds:
            every = self.config.checkpoint_every
            if every and progress.round_idx % every == 0:
                self._save()
            self._heed_stop()

    def _renormalize(self, rewards: Sequence[float]) -> None:
        """Update the scale of rewards. Values keep their meaning: without that, the critic would expect
        returns of the old scale. While the policy imitates, values judge nothing and follow by themselves."""
        normalizer = self.context.normalizer
        before = normalizer.scale
        normalizer.update(rewards)
        if self.agent is not None and not self.taught:
            self.agent.popart.change_unit(before / normalizer.scale)

    def _check_ranks(self) -> None:
        """Every rank has made the same update, so all have the same weights, unless their machines compute
        differently."""
        if self.agent is not None and self.context.ranks.size > 1:
            weights = fingerprint(self.agent.policy.network.state_dict())
            self.context.ranks.check_same({"their digest": weights}, "weights of the policy")

    def end_run(self, status: str, message: str | None = None) -> None:
        """Emit the last event of the run."""
        self.ended = True
        self.recorder.end_run(status, self.progress, message=message)

    def _summary(self, outcomes: list[EpisodeOutcome]) -> BatchSummary:
        history = self.progress.history
        return BatchSummary(
            **asdict(TaskSummary.of(outcomes)),
            round_idx=self.progress.round_idx,
            episodes_completed=(self.progress.round_idx + 1) * self.num_envs,
            env_steps=(history[-1].env_steps if history else 0) + sum(o.epochs for o in outcomes),
            objectives=tuple(o.objective for o in outcomes),
            by_task={
                task: TaskSummary.of([o for o in outcomes if o.task == task]) for task in self.env.tasks
            },
            action_counts=self.decisions.counts,
            action_successes=self.decisions.successes,
        )

    # -- phases ----------------------------------------------------------------------------------------------

    def _decide(self, seen: Moment, masks: ActionMasks) -> PolicyStep:
        """The policy's step, with the actions of a teacher or planner in the rounds that are theirs."""
        if self.agent is None:
            return self.context.policy.act(seen.obs, self.hidden, masks)
        given = None
        if self.teacher is not None:
            given = self.teacher.act(seen.obs, None, masks).actions
        elif self.planner is not None:
            given = self.planner.decide(seen.obs, masks)
        elif self.config.distinct_twins:
            assert self.hidden is not None, "a learning policy has a memory"
            given = draw_distinct(
                self.agent.policy,
                seen.obs,
                self.hidden,
                masks,
                twins=self.config.twins,
                epsilon=self.agent.epsilon,
                reset=self.reset,
                seed=self.env.root_seed,
                round_idx=self.progress.round_idx,
                epoch=seen.epoch,
                numbers=self.env.numbers,
            )
        return self.agent.act(
            seen.obs,
            self.hidden,
            masks,
            uniforms=self._uniforms[:, seen.epoch - 1],
            reset=self.reset,
            given=given,
        )

    def _record(self, seen: Moment, masks: ActionMasks, step: PolicyStep, record: StepRecord) -> None:
        """Store one column of the rollout and update the round's counts. Penalties go to columns that are
        stored already, so they come first."""
        decisions, normalizer = self.decisions, self.context.normalizer
        decisions.offered += seen.masks.op[record.rows].sum(0)
        for env_idx, amount in record.penalties:
            decisions.rewards.append(amount)
            if self.agent is not None:
                self.agent.buffer.add_penalty(env_idx, normalizer.normalize(amount))
        decisions.rewards += record.rewards
        for op, decided, executed in zip(record.ops, record.valid, record.executed, strict=True):
            decisions.counts[op.name] += decided
            decisions.successes[op.name] += executed
        valid = self._column(record, record.valid)
        if self.agent is not None:
            rewards = [normalizer.normalize(reward) for reward in record.rewards]
            self.agent.record(
                seen.obs,
                masks,
                step,
                reward=self._column(record, rewards),
                terminal=self._column(record, record.ended),
                reset=self.reset,
                valid=valid,
            )
        going = torch.tensor(self.env.going(), device=self.device)
        self.hidden, self.reset = step.hidden, going & ~valid

    def _column(self, record: StepRecord, values: Sequence[float] | Sequence[bool]) -> Tensor:
        """[E] of the envs that decided; 0 or False for the others."""
        given = torch.tensor(values, device=self.device)
        return given.new_zeros(self.num_envs).index_copy(0, self._index(record.rows), given)

    def _update(self, result: ActionResult, cut: Sequence[int]) -> None:
        """Learn from the rollout. Where it was cut before the end of the episode, the value head estimates
        the rest."""
        if self.agent is None:
            return
        if cut:
            obs = self.env.observe_ahead(result, self.device)
            values = self.agent.policy.value(obs, self.hidden, reset=self.reset)
            last = self.agent.buffer.length - 1
            self.agent.buffer.truncate([(env_idx, last) for env_idx in cut], values[self._index(cut)])
        if self.planner is not None:
            metrics = self._teach(self.agent, self.planner)
        else:
            imitate = self.taught
            updates = self.config.teacher_updates if imitate else self.config.updates_per_round
            metrics = run_ppo_updates(self.agent, updates, [], None, self.config.ppo.bf16, imitate=imitate)
        self.recorder.update(self.agent, metrics)
        if cut:
            assert self.hidden is not None, "a learning policy has a memory"
            self.agent.begin_rollout(self.hidden)

    def _teach(self, agent: PPOAgent, planner: PlanLearner) -> PPOUpdateMetrics:
        """Learn what the plans of the round were worth, and teach the policy, in smaller steps each time."""
        self._figures = planner.finish([outcome.objective for outcome in self.env.ledger.outcomes])
        lesson, weights = planner.lesson(agent.buffer.finish(), agent.buffer.num_steps)
        left = 1 - self.progress.round_idx / self.config.values_rounds
        metrics = agent.teach(lesson, weights, lr_share=left)
        agent.buffer.length = 0
        if self.progress.round_idx + 1 == self.config.values_rounds:
            for lesson, weights, share in planner.final_lessons():
                metrics = agent.teach(lesson, weights, lr_share=share)
            planner.forget()
        return metrics

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

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, device=self.device)

    def _flags(self, value: bool) -> Tensor:
        return torch.full((self.num_envs,), value, device=self.device)
