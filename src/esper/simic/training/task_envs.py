"""The envs of all tasks of a run as one environment: one policy decides for them, in one batch.

Every task has populations, data and rules of its own; an epoch of one does not depend on the others. Envs are
numbered through all tasks, in the order of the tasks. Tasks may differ in their slots, blueprints and length
of an episode.

E envs of all tasks, S slots of the task that has most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from esper.leyline import (
    ActionMasks,
    EsperError,
    GovernorReport,
    PolicyObservation,
    PolicyProtocol,
    PolicyStep,
)
from esper.simic.training.action_execution import ActionResult
from esper.simic.training.stacking import part_of, side_by_side, with_empty_rows
from esper.simic.training.vector_env import Ledger, Observation, VectorEnv
from esper.tamiyo.scripted import ScriptedPolicy, as_step

if TYPE_CHECKING:
    from esper.simic.training.parallel_env_state import EnvGroup, ParallelEnvState

_Batch = TypeVar("_Batch", PolicyObservation, ActionMasks)


@dataclass(frozen=True, slots=True)
class Moment:
    """The state at a decision. Lists are in env order, without envs whose episode is over."""

    epoch: int
    parts: list[Observation]
    """Of the tasks that are not over."""
    envs: list[ParallelEnvState]
    rows: list[int]
    """Place of each of them among all envs."""
    obs: PolicyObservation  # [E, …]
    masks: ActionMasks  # [E, …], on the CPU
    panics: dict[int, GovernorReport]

    def offered(self) -> Tensor:
        """[6] number of envs that may choose each operation."""
        return torch.stack([part.masks.op.sum(0) for part in self.parts]).sum(0)


class TaskEnvs:
    """One VectorEnv for each task, in order. Envs of all of them share one ledger."""

    def __init__(self, parts: Sequence[VectorEnv]) -> None:
        self.parts = list(parts)
        self.envs: list[ParallelEnvState] = [env for part in self.parts for env in part.envs]
        if [env.env_idx for env in self.envs] != list(range(len(self.envs))):
            raise EsperError("the envs of all tasks must be numbered from 0 without a gap, in order")
        self.groups: list[EnvGroup] = [group for part in self.parts for group in part.groups]
        self._group_of = {env.env_idx: group for group in self.groups for env in group.envs}
        self.tasks = tuple(part.task.name for part in self.parts)
        self.families = tuple(dict.fromkeys(part.task.family_name for part in self.parts))
        """Families of the tasks, each once: the value head has one row for each."""
        self.task_of = [part.task.name for part in self.parts for _ in part.envs]
        """Name of each env's task."""
        self.max_epochs = max(part.rules.max_epochs for part in self.parts)
        """The longest that an episode can last."""
        self.num_slots = max(part.rules.slot_config.num_slots for part in self.parts)
        self.root_seed = self.parts[0].rules.root_seed
        self.ledger = Ledger([], [], [])
        index = [self.families.index(part.task.family_name) for part in self.parts for _ in part.envs]
        self._family = torch.tensor(index)

    @property
    def done(self) -> bool:
        """Whether all episodes of the round are over."""
        return all(part.done for part in self.parts)

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
        size = len(self.envs)
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
        return with_empty_rows(side_by_side(batches, self.num_slots), rows, len(self.envs))

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
        counts = [len(part.envs) for part in env.parts]
        ends = list(accumulate(counts))
        self._envs = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
        self._slots = [part.rules.slot_config.num_slots for part in env.parts]

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
