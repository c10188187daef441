"""The envs of all tasks of a run as one environment: one policy decides for them, in one batch.

Every task has populations, data and rules of its own; an epoch of one does not depend on the others. Envs are
numbered through all tasks, in the order of the tasks. Tasks may differ in their slots, blueprints and length
of an episode.

E envs of all tasks, S slots of the task that has most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from esper.leyline import (
    ActionMasks,
    EsperError,
    GovernorReport,
    LifecycleOp,
    PolicyObservation,
    PolicyProtocol,
    PolicyStep,
)
from esper.simic.training.action_execution import ActionResult, ActionRules
from esper.simic.training.stacking import part_of, side_by_side, with_empty_rows
from esper.simic.training.vector_env import Ledger, Observation, VectorEnv
from esper.tamiyo.scripted import ScriptedPolicy, as_step

if TYPE_CHECKING:
    from esper.runtime.tasks import TaskSpec
    from esper.simic.training.parallel_env_state import EnvGroup, ParallelEnvState

_Value = TypeVar("_Value")
_Batch = TypeVar("_Batch", PolicyObservation, ActionMasks)


@dataclass(frozen=True, slots=True)
class Roster:
    """The envs of a run: which task has how many, whichever process trains them."""

    tasks: tuple[TaskSpec, ...]
    rules: tuple[ActionRules, ...]
    """Of each task."""
    counts: tuple[int, ...]
    """Number of envs of each task."""

    @classmethod
    def of(cls, parts: Sequence[VectorEnv]) -> Roster:
        """Of envs that are all here."""
        return cls(
            tuple(part.task for part in parts),
            tuple(part.rules for part in parts),
            tuple(len(part.envs) for part in parts),
        )

    def each(self, values: Iterable[_Value]) -> list[_Value]:
        """The value of each env's task, in env order."""
        return [
            value for value, count in zip(values, self.counts, strict=True) for value in repeat(value, count)
        ]


@dataclass(frozen=True, slots=True)
class Moment:
    """The state at a decision. Observation and masks are of all envs; lists are of those that this process
    trains, in env order, without envs whose episode is over."""

    epoch: int
    parts: list[Observation]
    """Of the tasks that are not over."""
    envs: list[ParallelEnvState]
    rows: list[int]
    """Place of each of them among all envs."""
    obs: PolicyObservation  # [E, …]
    masks: ActionMasks  # [E, …], on the CPU
    panics: dict[int, GovernorReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a run keeps of one step of all envs that decided, in env order."""

    rows: list[int]
    """Place of each of them among all envs."""
    ops: list[LifecycleOp]
    executed: list[bool]
    rewards: list[float]
    valid: list[bool]
    ended: list[bool]
    accuracies: list[float]
    """Of validation, in percent."""
    penalties: list[tuple[int, float]]
    """(env, amount) of each rollback."""
    cut: list[int]
    """Envs whose rollout is cut before the end of their episode."""

    @classmethod
    def of(cls, seen: Moment, result: ActionResult) -> StepRecord:
        return cls(
            rows=seen.rows,
            ops=[outcome.spec.op for outcome in result.outcomes],
            executed=[outcome.executed for outcome in result.outcomes],
            rewards=result.rewards,
            valid=result.valid,
            ended=result.ended,
            accuracies=[env.val_accuracy for env in seen.envs],
            penalties=result.penalties,
            cut=[env_idx for env_idx, _ in result.truncated_bootstrap_targets],
        )


class TaskEnvs:
    """One VectorEnv for each task, in order. Envs of all of them share one ledger."""

    def __init__(self, parts: Sequence[VectorEnv], roster: Roster | None = None) -> None:
        """`roster`: all envs of the run, if some of them are not here."""
        self.parts = list(parts)
        self.roster = Roster.of(self.parts) if roster is None else roster
        self.envs: list[ParallelEnvState] = [env for part in self.parts for env in part.envs]
        """Those that this process trains."""
        self.groups: list[EnvGroup] = [group for part in self.parts for group in part.groups]
        self._group_of = {env.env_idx: group for group in self.groups for env in group.envs}
        tasks, rules = self.roster.tasks, self.roster.rules
        self.num_envs = sum(self.roster.counts)
        if roster is None and [env.env_idx for env in self.envs] != list(range(self.num_envs)):
            raise EsperError("the envs of all tasks must be numbered from 0 without a gap, in order")
        self.numbers = [number for count in self.roster.counts for number in range(count)]
        """Number of each env within its task."""
        self.tasks = tuple(task.name for task in tasks)
        self.families = tuple(dict.fromkeys(task.family_name for task in tasks))
        """Families of the tasks, each once: the value head has one row for each."""
        self.task_of = self.roster.each(self.tasks)
        """Name of each env's task."""
        self.max_epochs = max(own.max_epochs for own in rules)
        """The longest that an episode can last."""
        self.num_slots = max(own.slot_config.num_slots for own in rules)
        self.root_seed = rules[0].root_seed
        self.ledger = Ledger([], [], [])
        family_index = [self.families.index(task.family_name) for task in tasks]
        self._family = torch.tensor(self.roster.each(family_index))

    @property
    def done(self) -> bool:
        """Whether all episodes of the round are over."""
        return all(part.done for part in self.parts)

    def going(self) -> list[bool]:
        """Of each env of the run, whether its episode goes on."""
        return [not env.done for env in self.envs]

    def end_episodes(self, env_ids: Sequence[int]) -> None:
        """Note that the episodes of these envs are over. Envs that are here know it by themselves."""

    def first_active(self) -> tuple[int, str, str] | None:
        """The first env with a seed that may still be pruned: its number, the seed's stage and its slot."""
        active = ((env, env.active_slot) for env in self.envs)
        return next(((env.env_idx, env.seed_stage.name, slot) for env, slot in active if slot), None)

    def group_of(self, env: ParallelEnvState) -> EnvGroup:
        """The group that an env belongs to."""
        return self._group_of[env.env_idx]

    @property
    def running(self) -> list[VectorEnv]:
        """The tasks with an episode that goes on."""
        return [part for part in self.parts if not part.done]

    def begin_round(self, episode: int) -> None:
        for part in self.parts:
            part.begin_round(episode)
        size = self.num_envs
        self.share(Ledger([0.0] * size, [0.0] * size, [False] * size))

    def share(self, ledger: Ledger) -> None:
        """Make this the ledger of all tasks."""
        self.ledger = ledger
        for part in self.parts:
            part.ledger = ledger

    # -- the phases ------------------------------------------------------------------------------------------

    def train_epoch(self, epoch: int) -> None:
        for part in self.running:
            part.train_epoch(epoch)

    def validate(self, epoch: int) -> None:
        for part in self.running:
            part.validate(epoch)

    def sense(self, epoch: int, device: torch.device | str = "cpu") -> Moment:
        """Check the losses, and collect what one policy sees of all envs."""
        parts = self.running
        seen = [part.sense(epoch) for part in parts]
        inputs = [part.observe(own, device) for part, own in zip(parts, seen, strict=True)]
        envs = [env for own in seen for env in own.envs]
        return Moment(
            epoch,
            seen,
            envs,
            [env.env_idx for env in envs],
            self._with_family(self._join(parts, [obs for obs, _ in inputs])),
            self._join(parts, [masks for _, masks in inputs]),
            {env_idx: panic for own in seen for env_idx, panic in own.panics.items()},
        )

    def observe_ahead(self, result: ActionResult, device: torch.device | str = "cpu") -> PolicyObservation:
        """The states that follow the steps at which a rollout was cut, [E, …]; other rows are empty."""
        own = [(part, _of_part(part, result)) for part in self.parts]
        cut = [(part, mine) for part, mine in own if mine.truncated_bootstrap_targets]
        observed = [part.observe_ahead(mine, device) for part, mine in cut]
        return self._with_family(self._join([part for part, _ in cut], observed))

    def _join(self, parts: Sequence[VectorEnv], batches: Sequence[_Batch]) -> _Batch:
        rows = [env.env_idx for part in parts for env in part.envs]
        return with_empty_rows(side_by_side(batches, self.num_slots), rows, self.num_envs)

    def _with_family(self, obs: PolicyObservation) -> PolicyObservation:
        return replace(obs, family=self._family.to(obs.base.device))

    def act(self, seen: Moment, actions: Sequence[Sequence[int]], *, cut_after: bool = False) -> ActionResult:
        """Execute one action per env (indices in head order). Those of envs whose episode is over are
        ignored."""
        results = [
            part.act(own, [actions[env.env_idx] for env in own.envs], cut_after=cut_after)
            for part, own in zip(self.running, seen.parts, strict=True)
        ]
        lists = {f.name: [getattr(result, f.name) for result in results] for f in fields(ActionResult)}
        return ActionResult(**{name: list(chain.from_iterable(parts)) for name, parts in lists.items()})

    def record(self, seen: Moment, result: ActionResult) -> StepRecord:
        """The step of all envs of the run. Call it once after each `act`."""
        return StepRecord.of(seen, result)


def _of_part(part: VectorEnv, result: ActionResult) -> ActionResult:
    """The steps of this task at which the rollout was cut."""
    numbers = {env.env_idx for env in part.envs}
    mine = [i for i, (env_idx, _) in enumerate(result.truncated_bootstrap_targets) if env_idx in numbers]
    return ActionResult(
        truncated_bootstrap_targets=[result.truncated_bootstrap_targets[i] for i in mine],
        post_action_signals=[result.post_action_signals[i] for i in mine],
        post_action_slot_reports=[result.post_action_slot_reports[i] for i in mine],
        post_action_masks=[result.post_action_masks[i] for i in mine],
    )


class TaskPolicies(ScriptedPolicy):
    """A policy of its own for each task, none of which learns. Each sees the envs and slots of its task."""

    def __init__(self, policies: Sequence[PolicyProtocol], env: TaskEnvs) -> None:
        self.policies = list(policies)
        counts = env.roster.counts
        self._envs = [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
        self._slots = [rules.slot_config.num_slots for rules in env.roster.rules]

    def begin(self, num_envs: int) -> None:
        for policy, envs in zip(self.policies, self._envs, strict=True):
            policy.begin(envs.stop - envs.start)

    def state(self) -> dict[str, Any]:
        return {"tasks": [policy.state() for policy in self.policies]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for policy, own in zip(self.policies, state["tasks"], strict=True):
            policy.load_state(own)

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        steps = [
            policy.act(part_of(obs, envs, slots), None, part_of(masks, envs, slots))
            for policy, envs, slots in zip(self.policies, self._envs, self._slots, strict=True)
        ]
        return as_step(torch.cat([step.actions for step in steps]))
