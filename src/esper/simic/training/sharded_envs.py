"""The envs of a run that several processes train. Each rank has some of the populations, by number; what one
policy needs of all envs is gathered to every rank, in env order, so that every rank decides and learns alike.

Per epoch the ranks exchange observations with masks, and what each step brought. The first rank also gets the
events of the others' envs.

E envs of the run, L of them on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from esper.leyline import (
    STEP_TABLES,
    ActionMasks,
    EpisodeOutcome,
    PolicyObservation,
    TelemetryEvent,
)
from esper.nissa.hub import LOG_LEVEL, NORMAL, TelemetryHub
from esper.simic.ranks import RankError, Ranks
from esper.simic.training.action_execution import ActionResult
from esper.simic.training.stacking import with_empty_rows
from esper.simic.training.task_envs import Moment, Roster, StepRecord, TaskEnvs
from esper.simic.training.vector_env import Ledger, VectorEnv

if TYPE_CHECKING:
    from esper.runtime.tasks import TaskSpec

_Batch = TypeVar("_Batch", PolicyObservation, ActionMasks)


def own_populations(tasks: Sequence[TaskSpec], envs: int, rank: int, size: int) -> list[list[int]]:
    """For each task, the numbers of the populations that a rank trains. All populations of the run are dealt
    out in turn, so that every rank gets its share of each task."""
    counts = [-(-envs // task.population) for task in tasks]
    if size > sum(counts):
        each = ", ".join(f"{task.name} {count}" for task, count in zip(tasks, counts, strict=True))
        raise RankError(
            f"{size} ranks for {sum(counts)} populations ({each}); allowed: 1 to {sum(counts)} ranks. With "
            f"{envs} envs, a smaller population makes more of them"
        )
    owned, first = [], 0
    for count in counts:
        owned.append([number - first for number in range(first, first + count) if number % size == rank])
        first += count
    return owned


def own_envs(tasks: Sequence[TaskSpec], envs: int, rank: int, size: int) -> list[int]:
    """`env_idx` of every env that a rank trains."""
    owned = own_populations(tasks, envs, rank, size)
    return [
        task_number * envs + env
        for task_number, (task, populations) in enumerate(zip(tasks, owned, strict=True))
        for number in populations
        for env in range(number * task.population, min((number + 1) * task.population, envs))
    ]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a batch, ready to travel."""

    rows: list[int]
    """Place of each among all envs."""
    forms: list[tuple[str, torch.dtype, tuple[int, ...]]]
    """Name, type and shape of each tensor."""
    data: bytes


@dataclass(frozen=True, slots=True)
class _Step:
    """What the step of one rank's envs brought."""

    record: StepRecord
    outcomes: list[EpisodeOutcome]
    """Of episodes that ended."""
    ledger: list[tuple[float, float, bool]]
    """Final accuracy, total reward and rollback of each env that decided."""


class ShardedEnvs(TaskEnvs):
    """The envs of this rank, with the interface of all envs of the run."""

    def __init__(self, parts: Sequence[VectorEnv], roster: Roster, ranks: Ranks) -> None:
        super().__init__(parts, roster)
        self.ranks = ranks
        self._going = [True] * self.num_envs
        self._scratch = Ledger([], [], [])

    @property
    def done(self) -> bool:
        return not any(self._going)

    def going(self) -> list[bool]:
        return list(self._going)

    def first_active(self) -> tuple[int, str, str] | None:
        found = self.ranks.all_gather(super().first_active(), "active seed")
        return min((seed for seed in found if seed is not None), default=None)

    def begin_round(self, episode: int) -> None:
        super().begin_round(episode)
        self._going = [True] * self.num_envs

    def share(self, ledger: Ledger) -> None:
        """Make this the ledger of the run. The envs here write to one of their own, which is merged with
        those of the other ranks after each step."""
        self.ledger = ledger
        size = self.num_envs
        self._scratch = Ledger([0.0] * size, [0.0] * size, [False] * size)
        for part in self.parts:
            part.ledger = self._scratch

    def end_episodes(self, env_ids: Sequence[int]) -> None:
        """Note that the episodes of these envs are over, wherever they are trained."""
        for env_idx in env_ids:
            self._going[env_idx] = False

    # -- the phases ------------------------------------------------------------------------------------------

    def sense(self, epoch: int, device: torch.device | str = "cpu") -> Moment:
        own = super().sense(epoch, device) if self.running else None
        here = [env.env_idx for part in self.running for env in part.envs]
        packed = [] if own is None else [_packed(own.obs, here), _packed(own.masks, here)]
        parts = [part for part in self.ranks.all_gather(packed, "observations") if part]
        obs = self._with_family(self._unpacked([part[0] for part in parts], PolicyObservation, device))
        masks = self._unpacked([part[1] for part in parts], ActionMasks, "cpu")
        if own is None:
            return Moment(epoch, [], [], [], obs, masks, {})
        return Moment(epoch, own.parts, own.envs, own.rows, obs, masks, own.panics)

    def observe_ahead(self, result: ActionResult, device: torch.device | str = "cpu") -> PolicyObservation:
        rows = [env_idx for env_idx, _ in result.truncated_bootstrap_targets]
        packed = _packed(super().observe_ahead(result, device), rows) if rows else None
        parts = self.ranks.all_gather(packed, "next observations")
        given = [part for part in parts if part is not None]
        return self._with_family(self._unpacked(given, PolicyObservation, device))

    def record(self, seen: Moment, result: ActionResult) -> StepRecord:
        ledger = self._scratch
        own = _Step(
            StepRecord.of(seen, result),
            list(ledger.outcomes),
            [
                (ledger.final_accs[row], ledger.total_rewards[row], ledger.rollback_occurred[row])
                for row in seen.rows
            ],
        )
        ledger.outcomes.clear()
        steps = self.ranks.all_gather(own, "steps")
        for step in steps:
            for row, (accuracy, reward, rollback) in zip(step.record.rows, step.ledger, strict=True):
                self.ledger.final_accs[row] = accuracy
                self.ledger.total_rewards[row] = reward
                self.ledger.rollback_occurred[row] = rollback
        record = _merged([step.record for step in steps])
        self.end_episodes([row for row, ended in zip(record.rows, record.ended, strict=True) if ended])
        outcomes = [outcome for step in steps for outcome in step.outcomes]
        self.ledger.outcomes += sorted(outcomes, key=attrgetter("env_id"))
        tasks_now = {self.task_of[outcome.env_id] for outcome in outcomes}
        tasks_later = {task for task, going in zip(self.task_of, self._going, strict=True) if going}
        if tasks_now - tasks_later:  # as one process does when a task is over
            self.ledger.outcomes.sort(key=attrgetter("env_id"))
        return record

    def _unpacked(self, parts: Sequence[_Rows], kind: type[_Batch], device: torch.device | str) -> _Batch:
        """The rows of all ranks in env order; rows that no rank has are empty."""
        rows = [row for part in parts for row in part.rows]
        order = sorted(range(len(rows)), key=rows.__getitem__)
        tensors = [_tensors(part) for part in parts]
        whole = {name: torch.cat([own[name] for own in tensors])[order].to(device) for name in tensors[0]}
        return with_empty_rows(kind(**whole), [rows[i] for i in order], self.num_envs)


def _packed(batch: PolicyObservation | ActionMasks, rows: list[int]) -> _Rows:
    """These rows of a batch [E, …] in one copy to the host."""
    tensors = {field.name: getattr(batch, field.name)[rows] for field in fields(batch)}
    forms = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    return _Rows(rows, forms, flat.cpu().numpy().tobytes())


def _tensors(part: _Rows) -> dict[str, Tensor]:
    """The inverse of `_packed`."""
    flat, at, tensors = torch.frombuffer(bytearray(part.data), dtype=torch.uint8), 0, {}
    for name, dtype, shape in part.forms:
        size = dtype.itemsize * torch.Size(shape).numel()
        # A copy: a slice of bytes need not lie where the type may be read.
        tensors[name] = flat[at : at + size].clone().view(dtype).view(shape)
        at += size
    return tensors


_BY_ROW = tuple(field.name for field in fields(StepRecord) if field.name not in ("penalties", "cut"))


def _merged(records: Sequence[StepRecord]) -> StepRecord:
    """The records of all ranks, in env order."""
    lists: dict[str, list[Any]] = {
        field.name: [item for record in records for item in getattr(record, field.name)]
        for field in fields(StepRecord)
    }
    order = sorted(range(len(lists["rows"])), key=lists["rows"].__getitem__)
    by_row = {name: [lists[name][i] for i in order] for name in _BY_ROW}
    return StepRecord(**by_row, penalties=sorted(lists["penalties"]), cut=sorted(lists["cut"]))


class RelayHub(TelemetryHub):
    """Collects the events of this rank's envs. `relay` passes those of all ranks to the run's hub, on the
    first rank, in the order in which one process would have emitted them: phase by phase, and in env order
    within a phase."""

    def __init__(self, hub: TelemetryHub, ranks: Ranks) -> None:
        super().__init__()
        self._hub, self._ranks = hub, ranks
        self._phases: list[list[TelemetryEvent]] = [[]]

    def emit(self, event: TelemetryEvent) -> None:
        level = self._hub.level
        if level >= (NORMAL if event.event_type in STEP_TABLES else LOG_LEVEL[event.event_type]):
            self._phases[-1].append(event)

    def next_phase(self) -> None:
        """What is emitted from now on follows what any env has emitted before."""
        self._phases.append([])

    def relay(self) -> None:
        own, self._phases = self._phases, [[]]
        for phases in zip(*self._ranks.gather(own, "events"), strict=True):
            for event in sorted((e for part in phases for e in part), key=_env_of):
                self._hub.emit(event)


def _env_of(event: TelemetryEvent) -> int:
    assert event.env_id is not None, "only events of envs are relayed"
    return event.env_id
