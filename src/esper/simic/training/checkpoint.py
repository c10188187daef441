"""Checkpoints of a run: everything that the rest of it depends on, in one file of safetensors and JSON.

A checkpoint is taken between epochs. Between rounds it holds the agent, the normaliser, the history and the
best policy so far; within a round also every network, optimizer row, governor, tracker and the unfinished
rollout, so that the run continues bit for bit. A checkpoint is decoded and restored completely before any
file of the run directory is changed."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor

from esper._archive import load_tensors, read_archive, write_archive
from esper._files import check_version, decode
from esper.kasmina.seed import Seed
from esper.kasmina.snapshot import RowSnapshot, restore_row, snapshot_row
from esper.leyline import EpisodeOutcome, EsperError, LifecycleOp, StructureError, blueprint_ids
from esper.nissa import RunDirectory
from esper.simic.agent.normalization import RewardScaleState
from esper.simic.attribution import CoalitionTable
from esper.simic.contracts import BatchSummary
from esper.simic.training.action_execution import measure
from esper.simic.training.vector_env import Ledger
from esper.tolaria.governor import GovernorState

if TYPE_CHECKING:
    from esper.simic.rewards import RewardEngine
    from esper.simic.training.config import TrainingConfig
    from esper.simic.training.parallel_env_state import EnvGroup, ParallelEnvState
    from esper.simic.training.vectorized_trainer import Decisions, VectorizedPPOTrainer
    from esper.tamiyo.policy import RecurrentPolicy

KIND = "run"
VERSION = 5
"""Of the checkpoint's format. Version 1, whose files carry no version, lacks the best policy. Seeds of
version 2 have a target of their first alpha ramp. Version 3 lacks the names of the blueprints, and holds one
task, all of whose episodes end together. Version 4 lacks action values."""
BEST = "best.safetensors"
MAY_CHANGE = frozenset(
    {"rounds", "telemetry_dir", "telemetry", "checkpoint_every", "keep_last", "resume", "data_root"}
)
"""Settings that a resumed run may change: they decide its length or its records, and no result."""

_log = logging.getLogger(__name__)


class CheckpointError(EsperError):
    """A checkpoint could not be written, or does not fit this run."""


# -- the header ----------------------------------------------------------------------------------------------

Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressState:
    """Finished rounds, finished epochs of the next round, and a summary of each finished round."""

    round_idx: Count
    epoch: Count
    history: list[BatchSummary]


@dataclass(frozen=True, slots=True, kw_only=True)
class BestState:
    """Score and round of the best policy; its tensors have the prefix "best."."""

    score: float
    round_idx: Count | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderState:
    accuracies: list[float]
    round_accuracies: dict[str, list[float]]
    level: Annotated[int, msgspec.Meta(ge=0, le=3)]
    round_idx: Count | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionsState:
    offered: list[Count]
    counts: dict[str, Count]
    successes: dict[str, Count]
    rewards: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    final_accs: list[float]
    total_rewards: list[float]
    rollback_occurred: list[bool]
    outcomes: list[EpisodeOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """The JSON part of a RowSnapshot."""

    seeds: dict[str, Seed]
    germinations: Count

    def snapshot(self, tensors: dict[str, Tensor]) -> RowSnapshot:
        seeds = {slot_id: seed.to_dict() for slot_id, seed in self.seeds.items()}
        return RowSnapshot(seeds, self.germinations, tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoalitionState:
    fossilized: list[str]
    scores: list[tuple[list[str], float, float]]
    """Slots, loss and accuracy of each coalition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvValues:
    """Fields of ParallelEnvState that are stored as they are."""

    train_loss: float
    train_correct: Count
    train_total: Count
    val_loss: float
    val_correct: Count
    val_total: Count
    episode_idx: Count
    max_epochs: Count
    budget_steps: Count
    flops: Count
    done: bool
    sensors: dict[str, list[float]]
    germinated: Count
    fossilized: Count
    pruned: Count
    rollbacks: Count
    last_op: LifecycleOp
    last_success: bool
    total_reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvState:
    env_idx: Count
    values: EnvValues
    measured: bool
    """Whether the env has a measurement of the state after its last step."""
    tracker: dict[str, Any]
    governor: GovernorState
    row: RowState
    good: RowState
    """The governor's snapshot."""
    coalitions: CoalitionState | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """An unfinished round. Data and rewards (one of each for every task) and scalers decode their own
    state."""

    data: list[dict[str, Any]]
    rewards: list[dict[str, Any]]
    decisions: DecisionsState
    ledger: LedgerState
    scalers: list[dict[str, Any]]
    envs: list[EnvState]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The JSON part of a checkpoint."""

    kind: Literal["run"]
    version: int
    config: dict[str, Any]
    seq: Count
    """Number of the log's next event when the checkpoint was taken."""
    blueprints: list[str]
    """Names by index: stored actions, masks and observations hold indices."""
    announced: bool
    """Whether the log announces the checkpoint; one taken because of a stop request is not announced."""
    agent: dict[str, Any] | None
    """Decoded by the agent."""
    progress: ProgressState
    best: BestState
    policy: dict[str, Any]
    """Decoded by the policy, as is the teacher's by the teacher."""
    teacher: dict[str, Any] | None
    planner: dict[str, Any] | None
    """Its tensors have the prefix "planner."."""
    normalizer: RewardScaleState
    recorder: RecorderState
    round: RoundState | None

    @property
    def finished(self) -> tuple[int, int]:
        """Finished rounds, and finished epochs of the next."""
        return self.progress.round_idx, self.progress.epoch


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read completely and fits the run."""

    path: Path
    tensors: dict[str, Tensor]
    header: Header

    @property
    def agent_tensors(self) -> dict[str, Tensor]:
        """The agent's own tensors, by the names that it gave them."""
        return _under(self.tensors, "agent.")

    def part(self, envs: Collection[int]) -> Checkpoint:
        """The checkpoint with the networks of these envs only."""
        tensors = {
            name: tensor
            for name, tensor in self.tensors.items()
            if not name.startswith("env.") or int(name.split(".")[1]) in envs
        }
        return replace(self, tensors=tensors)


# -- the best policy -----------------------------------------------------------------------------------------


class BestPolicy:
    """The policy with the highest mean objective of a round so far: the weights that played that round, not
    those that the update after it made. Rounds that a teacher decided do not compete.

    If rollouts are shorter than episodes, updates also happen within a round; the weights are then those at
    the beginning of the round."""

    def __init__(self) -> None:
        self.score = -math.inf
        self.round_idx: int | None = None
        self.policy: RecurrentPolicy | None = None
        self.playing: RecurrentPolicy | None = None
        """A copy of the policy at the beginning of the current round."""

    def begin_round(self, policy: RecurrentPolicy | None) -> None:
        self.playing = deepcopy(policy)

    def end_round(self, summary: BatchSummary) -> bool:
        """Whether the finished round is the best so far; its policy is then kept."""
        if not summary.mean_objective > self.score:
            return False
        self.score, self.round_idx, self.policy = summary.mean_objective, summary.round_idx, self.playing
        return True

    def tensors(self, *, within_round: bool) -> dict[str, Tensor]:
        """What a checkpoint keeps: the best policy, and within a round the one that plays it."""
        tensors: dict[str, Tensor] = {}
        if self.policy is not None:
            tensors |= {f"best.{name}": t for name, t in self.policy.network.state_dict().items()}
        if self.playing is not None and within_round:
            tensors |= {f"playing.{name}": t for name, t in self.playing.network.state_dict().items()}
        return tensors

    def load(self, state: BestState, tensors: Mapping[str, Tensor], like: RecurrentPolicy | None) -> None:
        """Restore from a checkpoint; `like` is the agent's policy."""
        self.score, self.round_idx = state.score, state.round_idx
        self.policy = _policy_with(_under(tensors, "best."), like)
        self.playing = _policy_with(_under(tensors, "playing."), like)


def _policy_with(tensors: dict[str, Tensor], like: RecurrentPolicy | None) -> RecurrentPolicy | None:
    if like is None or not tensors:
        return None
    policy = deepcopy(like)
    load_tensors("best policy", policy.network.state_dict(), tensors)
    return policy


# -- the directory -------------------------------------------------------------------------------------------


class CheckpointStore:
    """The `checkpoints` directory of a run: the newest checkpoints, and `best.safetensors`, the policy of the
    best round (a policy file)."""

    def __init__(self, directory: str | Path, keep_last: int) -> None:
        self.directory, self.keep_last = Path(directory), keep_last

    def save(self, trainer: VectorizedPPOTrainer, *, announce: bool) -> Path:
        """Write a checkpoint and delete those that are too old. A checkpoint that a stop request caused is
        not announced, so that the log of the resumed run has no trace of it. All ranks call this; the first
        one writes."""
        progress = trainer.progress
        path = self.directory / _name(progress.round_idx, progress.epoch)
        trainer.recorder.hub.flush()  # first: the checkpoint relies on the events before it
        tensors, meta = capture(trainer)
        if not trainer.context.ranks.is_first:
            return path
        try:
            write_archive(path, tensors, meta | {"announced": announce})
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
        self.complete(trainer, path, announce=announce)
        return path

    def complete(self, trainer: VectorizedPPOTrainer, path: Path, *, announce: bool) -> None:
        """What follows once a checkpoint is written. If a run is killed before this, the resumed run does
        it."""
        try:
            for old in stored_checkpoints(self.directory)[: -self.keep_last]:
                old.unlink()
        except OSError as error:
            raise CheckpointError(f"cannot delete from {self.directory}: {error.strerror}") from error
        if announce:
            progress, best = trainer.progress, trainer.best
            is_best = best.round_idx is not None and best.round_idx == progress.round_idx - 1
            trainer.recorder.checkpoint(path.name, progress, best=is_best)

    def save_best(self, best: BestPolicy) -> None:
        """Make `best.safetensors` the best policy so far; delete it if there is none."""
        path = self.directory / BEST
        try:
            if best.policy is None:
                path.unlink(missing_ok=True)
            else:
                best.policy.save(path)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from error

    def go_back_to(self, checkpoint: Checkpoint, best: BestPolicy) -> None:
        """Remove what was written after a checkpoint: the log of the resumed run does not have it, and a
        later resume would take it for the newest."""
        for path in stored_checkpoints(self.directory):
            if path.name > _name(*checkpoint.header.finished):
                path.unlink()
        self.save_best(best)


def stored_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints, oldest first."""
    return sorted(directory.glob("round-*.safetensors"))


def _name(round_idx: int, epoch: int) -> str:
    return f"round-{round_idx:06d}-epoch-{epoch:04d}.safetensors"


def open_checkpoint(config: TrainingConfig, directory: Path | None) -> Checkpoint | None:
    """The checkpoint that `config.resume` names: a file, or with "auto" the newest intact one of the run
    directory. None if there is no checkpoint yet, so that the run must start, or start over."""
    assert config.resume is not None
    if config.resume != "auto":
        return _open_file(Path(config.resume), config)
    if directory is None:
        raise CheckpointError(
            "resume is auto, which needs the run's directory (telemetry_dir) to look for checkpoints in"
        )
    stored = stored_checkpoints(directory / "checkpoints")
    damaged: list[str] = []
    for path in reversed(stored):
        try:
            checkpoint = read_checkpoint(path, config)
        except StructureError as error:
            damaged.append(str(error))
            continue
        for message in damaged:
            _log.warning("warning: damaged checkpoint: %s; the run continues from %s", message, path.name)
        return checkpoint
    if damaged:
        raise CheckpointError("no checkpoint is intact: " + "; ".join(damaged))
    return None


def _open_file(path: Path, config: TrainingConfig) -> Checkpoint:
    if not path.is_file():
        raise CheckpointError(f"resume: no file {path}; allowed: auto or the path of a checkpoint")
    try:
        return read_checkpoint(path, config)
    except StructureError as error:
        for other in reversed(stored_checkpoints(path.parent)):
            if other.name < path.name and _is_intact(other, config):
                raise CheckpointError(
                    f"{error}; the newest intact checkpoint before it is {other}"
                ) from error
        raise


def _is_intact(path: Path, config: TrainingConfig) -> bool:
    try:
        read_checkpoint(path, config)
    except EsperError:
        return False
    return True


def read_checkpoint(path: Path, config: TrainingConfig) -> Checkpoint:
    """Read a checkpoint of a run with these settings. Damage is a StructureError, any other obstacle a
    CheckpointError."""
    try:
        tensors, meta = read_archive(path, kind=KIND)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    _check_version(path, meta)
    header = decode(Header, _unpacked(meta), path, complete=True)
    check_same_run(path, header.config, config)
    _check_blueprints(path, header.blueprints)
    if config.rounds < header.progress.round_idx:
        raise CheckpointError(
            f"{path}: {header.progress.round_idx} rounds are finished; rounds is {config.rounds}, must be no "
            "less"
        )
    return Checkpoint(path, tensors, header)


def _check_version(path: Path, meta: Mapping[str, Any]) -> None:
    version = meta.get("version", 1)
    try:
        check_version(meta, VERSION, path)
    except StructureError as error:
        raise CheckpointError(str(error)) from None  # the file is not damaged
    if isinstance(version, int) and version < VERSION:
        raise CheckpointError(
            f"{path}: version is {version}, written by an older Esper; this one resumes version {VERSION}. "
            "Start the run anew, or resume it with the Esper that wrote it"
        )


def check_same_run(
    origin: Path, stored: Mapping[str, Any], config: TrainingConfig, *, place: str = "checkpoint"
) -> None:
    """A run may only continue with the settings that it began with, except MAY_CHANGE. `place` names what
    holds the stored settings."""
    may_change = MAY_CHANGE
    if config.rent_curriculum:
        may_change = MAY_CHANGE - {"rounds"}  # the curriculum is laid out over all rounds
    for name, value in config.to_json().items():
        if name not in may_change and stored.get(name) != value:
            path, theirs, ours = _difference(name, stored.get(name), value)
            raise CheckpointError(f"{origin}: {path} is {theirs!r} in the {place} and {ours!r} in this run")


def _check_blueprints(path: Path, stored: Sequence[str]) -> None:
    """A run may only continue where each index stands for the same blueprint, and none has come or gone."""
    for index, (theirs, ours) in enumerate(zip_longest(stored, blueprint_ids())):
        if theirs == ours:
            continue
        then = "no blueprint" if theirs is None else f"blueprint {theirs!r}"
        now = "there is none" if ours is None else f"it is {ours!r}"
        raise CheckpointError(
            f"{path}: index {index} stands for {then} in the checkpoint, in this run {now}; import the same "
            "modules with blueprints (--import), in the same order, as the run did when it began"
        )


def _difference(name: str, stored: Any, ours: Any) -> tuple[str, Any, Any]:
    """Path and values of the first field that differs, however deep."""
    if isinstance(stored, dict) and isinstance(ours, dict):
        for key in sorted(stored.keys() | ours.keys()):
            if stored.get(key) != ours.get(key):
                return _difference(f"{name}.{key}", stored.get(key), ours.get(key))
    return name, stored, ours


def start_over(config: TrainingConfig, directory: Path) -> RunDirectory:
    """Begin the run, anew if the directory holds one with the same settings that has no checkpoint yet."""
    if not directory.exists():
        return RunDirectory.create(directory, config=config.to_json())
    if (directory / "run.json").exists():
        stored = RunDirectory.open(directory).config
        check_same_run(directory / "config.json", stored, config, place="run's record")
    return RunDirectory.restart(directory, config=config.to_json())


# -- capture -------------------------------------------------------------------------------------------------


def capture(trainer: VectorizedPPOTrainer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of the run as it stands. All ranks call this; the result is complete on the
    first."""
    progress, context, best = trainer.progress, trainer.context, trainer.best
    tensors = best.tensors(within_round=progress.epoch > 0)
    agent_meta = None
    if trainer.agent is not None:
        agent_tensors, agent_meta = trainer.agent.state()
        tensors |= {f"agent.{name}": tensor for name, tensor in agent_tensors.items()}
    planner_meta = None
    if context.planner is not None:
        planner_tensors, planner_meta = context.planner.state()
        tensors |= {f"planner.{name}": tensor for name, tensor in planner_tensors.items()}
    meta = {
        "kind": KIND,
        "version": VERSION,
        "config": trainer.config.to_json(),
        "seq": trainer.recorder.next_seq,
        "blueprints": list(blueprint_ids()),
        "agent": agent_meta,
        "progress": {
            "round_idx": progress.round_idx,
            "epoch": progress.epoch,
            "history": [asdict(summary) for summary in progress.history],
        },
        "best": {"score": best.score, "round_idx": best.round_idx},
        "policy": context.policy.state(),
        "teacher": None if context.teacher is None else context.teacher.state(),
        "planner": planner_meta,
        "normalizer": context.normalizer.state_dict(),
        "recorder": trainer.recorder.state(),
        "round": _capture_round(trainer, tensors) if progress.epoch else None,
    }
    return tensors, _packed(meta)


@dataclass(frozen=True, slots=True)
class _RankState:
    """What one rank knows of an unfinished round. Keys are a task's number, then those within the task."""

    tensors: dict[str, Tensor]
    envs: list[dict[str, Any]]
    data: dict[int, tuple[list[int], dict[str, Any]]]
    """The numbers of the envs in the order of the batches, and the position."""
    rewards: dict[int, dict[int, Any]]
    scalers: dict[tuple[int, int], dict[str, Any]]
    """By task and population."""


_DATA_BY_ENV = ("envs", "train_size", "label_noise")
"""The parts of a data position that have one value for each env."""


def _capture_round(trainer: VectorizedPPOTrainer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if trainer.hidden is not None:
        tensors |= {"hidden.h": trainer.hidden[0], "hidden.c": trainer.hidden[1]}
    tensors["reset"] = trainer.reset
    ranks = trainer.context.ranks.gather(_capture_rank(trainer), "networks")
    for state in ranks:
        tensors |= state.tensors
    scalers = {key: scaler for state in ranks for key, scaler in state.scalers.items()}
    envs = [env for state in ranks for env in state.envs]
    tasks = range(len(trainer.env.tasks))
    return {
        "data": [_merged_data([s.data[task] for s in ranks if task in s.data]) for task in tasks if ranks],
        "rewards": [
            _merged_rewards(engine, [state.rewards.get(task, {}) for state in ranks])
            for task, engine in enumerate(trainer.context.rewards)
        ],
        "decisions": _decided(trainer.decisions),
        "ledger": asdict(trainer.env.ledger),
        "scalers": [scalers[key] for key in sorted(scalers)],
        "envs": sorted(envs, key=itemgetter("env_idx")),
    }


def _capture_rank(trainer: VectorizedPPOTrainer) -> _RankState:
    """The envs of this rank."""
    env, state = trainer.env, _RankState({}, [], {}, {}, {})
    for part in env.parts:
        task = env.tasks.index(part.task.name)
        memories = trainer.context.rewards[task].state()["envs"]
        members = [member for group in part.groups for member in group.envs]
        numbers = [member.number for member in members]
        state.data[task] = (numbers, part.train.state())
        state.rewards[task] = {number: memories[number] for number in numbers}
        for group in part.groups:
            state.scalers[task, _population_of(group)] = group.scaler.state_dict()
            state.envs.extend(_capture_env(group, member, state.tensors) for member in group.envs)
    return state


def _population_of(group: EnvGroup) -> int:
    """The group's number within its task."""
    return group.envs[0].number // group.model.population


def _merged_data(parts: Sequence[tuple[list[int], dict[str, Any]]]) -> dict[str, Any]:
    """The position of all envs of a task, in env order."""
    numbers = [number for own, _ in parts for number in own]
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    merged = dict(parts[0][1])
    for name in _DATA_BY_ENV:
        values = [value for _, state in parts for value in state[name]]
        merged[name] = [values[i] for i in order]
    return merged


def _data_of(state: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """The inverse of `_merged_data` for these envs."""
    return {**state, **{name: [state[name][number] for number in numbers] for name in _DATA_BY_ENV}}


def _merged_rewards(engine: RewardEngine, parts: Sequence[Mapping[int, Any]]) -> dict[str, Any]:
    """The state of a task's rewards, with each env's memory from the rank that trains it."""
    state = engine.state()
    for own in parts:
        for number, memory in own.items():
            state["envs"][number] = memory
    return state


def _capture_env(group: EnvGroup, env: ParallelEnvState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    name = f"env.{env.env_idx}"
    now, good = snapshot_row(group.model, env.row), env.governor.last_good
    for part, part_tensors in (
        ("row", now.tensors),
        ("good", good.tensors),
        ("optimizer", group.optimizer.row_state(env.row)),
    ):
        tensors |= {f"{name}.{part}.{key}": tensor for key, tensor in part_tensors.items()}
    table = env.coalitions
    coalitions = None
    if table is not None:
        coalitions = {
            "fossilized": sorted(table.fossilized),
            "scores": [[sorted(slots), *score] for slots, score in table.scores.items()],
        }
    return {
        "env_idx": env.env_idx,
        "values": {field.name: getattr(env, field.name) for field in fields(EnvValues)},
        "measured": env.last_measure is not None,
        "tracker": env.signal_tracker.state_dict(),
        "governor": env.governor.state(),
        "row": {"seeds": now.seeds, "germinations": now.germinations},
        "good": {"seeds": good.seeds, "germinations": good.germinations},
        "coalitions": coalitions,
    }


def _decided(decisions: Decisions) -> dict[str, Any]:
    return {
        "offered": decisions.offered.tolist(),
        "counts": decisions.counts,
        "successes": decisions.successes,
        "rewards": decisions.rewards,
    }


# -- restore -------------------------------------------------------------------------------------------------


def restore(trainer: VectorizedPPOTrainer, checkpoint: Checkpoint) -> None:
    """Give a fresh trainer the captured state. Its agent was built from the checkpoint already. Nothing but
    the trainer changes, so a checkpoint that does not fit leaves the run directory as it is."""
    header = checkpoint.header
    try:
        progress, context = trainer.progress, trainer.context
        progress.round_idx, progress.epoch = header.finished
        progress.history[:] = header.progress.history
        like = None if trainer.agent is None else trainer.agent.policy
        trainer.best.load(header.best, checkpoint.tensors, like)
        context.normalizer.load_state_dict(asdict(header.normalizer))
        trainer.recorder.load_state(asdict(header.recorder))
        context.policy.load_state(header.policy)
        if context.teacher is not None:
            if header.teacher is None:
                raise StructureError("field teacher is null, but this run has a teacher")
            context.teacher.load_state(header.teacher)
        if context.planner is not None:
            if header.planner is None:
                raise StructureError("field planner is null, but this run has action values")
            context.planner.load_state(_under(checkpoint.tensors, "planner."), header.planner)
        if header.round is not None:
            _restore_round(trainer, checkpoint.tensors, header.round)
    except EsperError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        # Parts that decode their own state (data, trackers, policies) may refuse a wrong value like this.
        raise CheckpointError(
            f"{checkpoint.path}: a value is missing or of the wrong kind: {type(error).__name__}: {error}"
        ) from error


def _restore_round(trainer: VectorizedPPOTrainer, tensors: Mapping[str, Tensor], state: RoundState) -> None:
    env = trainer.env
    env.begin_round(trainer.progress.round_idx)
    for part in env.parts:
        numbers = [member.number for group in part.groups for member in group.envs]
        part.train.load_state(_data_of(state.data[env.tasks.index(part.task.name)], numbers))
    for engine, memory in zip(trainer.context.rewards, state.rewards, strict=True):
        engine.load_state(memory)
    decisions = trainer.decisions
    decisions.offered[:] = torch.tensor(state.decisions.offered)
    decisions.counts, decisions.successes = state.decisions.counts, state.decisions.successes
    decisions.rewards = state.decisions.rewards
    env.share(Ledger(**{field.name: getattr(state.ledger, field.name) for field in fields(LedgerState)}))
    hidden = [tensors[name].to(trainer.device) for name in ("hidden.h", "hidden.c") if name in tensors]
    trainer.hidden = (hidden[0], hidden[1]) if hidden else None
    trainer.reset = tensors["reset"].to(trainer.device)
    if trainer.agent is not None and trainer.hidden is not None and not trainer.agent.buffer.length:
        trainer.agent.begin_rollout(trainer.hidden)  # stopped between two rollouts of one episode
    by_idx = {stored.env_idx: stored for stored in state.envs}
    env.end_episodes([stored.env_idx for stored in state.envs if stored.values.done])
    scalers = iter(state.scalers)
    stored_scalers = {
        (task.name, number): next(scalers)
        for task, count in zip(env.roster.tasks, env.roster.counts, strict=True)
        for number in range(-(-count // task.population))
    }
    for group in env.groups:
        group.scaler.load_state_dict(
            stored_scalers[env.task_of[group.envs[0].env_idx], _population_of(group)]
        )
        for member in group.envs:
            _restore_env(group, member, _under(tensors, f"env.{member.env_idx}."), by_idx[member.env_idx])
    trainer.draw_uniforms()
    trainer.set_rent()


def _restore_env(group: EnvGroup, env: ParallelEnvState, tensors: dict[str, Tensor], state: EnvState) -> None:
    restore_row(group.model, state.row.snapshot(_under(tensors, "row.")), env.row)
    group.optimizer.load_row_state(env.row, _under(tensors, "optimizer."))
    env.governor.load_state(asdict(state.governor), state.good.snapshot(_under(tensors, "good.")))
    env.signal_tracker.load_state_dict(state.tracker)
    for field in fields(EnvValues):
        setattr(env, field.name, getattr(state.values, field.name))
    if state.coalitions is not None:
        env.coalitions = CoalitionTable(
            {frozenset(slots): (loss, accuracy) for slots, loss, accuracy in state.coalitions.scores},
            frozenset(state.coalitions.fossilized),
        )
    # The network has not changed since it was measured, so a new measurement gives the same numbers.
    env.last_measure = measure(env) if state.measured else None


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# JSON has no infinity, but the losses of a diverged network may be infinite.


def _packed(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Mapping):
        return {key: _packed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_packed(item) for item in value]
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"float"} and value["float"] in ("inf", "-inf", "nan"):
        return float(value["float"])
    return {key: _unpacked(item) for key, item in value.items()}
