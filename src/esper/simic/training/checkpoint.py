"""Checkpoints of a run: everything that the rest of it depends on, in one file of safetensors and JSON.

A checkpoint is taken between epochs. Between rounds it holds the agent, the normaliser and the history;
within a round also every network, optimizer row, governor, tracker and the unfinished rollout, so that the
run goes on bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esper._archive import read_archive, require_fields, write_archive
from esper._files import write_atomic
from esper.kasmina.snapshot import RowSnapshot, restore_row, snapshot_row
from esper.leyline import EsperError, LifecycleOp
from esper.simic.attribution import CoalitionTable
from esper.simic.contracts import BatchSummary
from esper.simic.training.action_execution import measure
from esper.simic.training.vector_env import Ledger

if TYPE_CHECKING:
    from esper.simic.training.config import TrainingConfig
    from esper.simic.training.parallel_env_state import EnvGroup, ParallelEnvState
    from esper.simic.training.vectorized_trainer import Decisions, VectorizedPPOTrainer

KIND = "run"
MAY_CHANGE = frozenset(
    {"rounds", "telemetry_dir", "telemetry", "checkpoint_every", "keep_last", "resume", "data_root"}
)
"""Settings that a resumed run may have different: they change how long it goes on or what is written down, no
number."""
_ENV_VALUES = (
    "train_loss",
    "train_correct",
    "train_total",
    "val_loss",
    "val_correct",
    "val_total",
    "episode_idx",
    "sensors",
    "germinated",
    "fossilized",
    "pruned",
    "rollbacks",
    "last_success",
    "total_reward",
)


class CheckpointError(EsperError):
    """A checkpoint could not be written, or does not fit this run."""


class CheckpointStore:
    """The `checkpoints` directory of a run: the last few, and the one after the best round."""

    def __init__(self, directory: str | Path, keep_last: int) -> None:
        self.directory, self.keep_last = Path(directory), keep_last

    def save(self, trainer: VectorizedPPOTrainer, *, announce: bool) -> Path:
        """Write a checkpoint and delete those that are too old. One taken because the run was told to stop is
        not announced: resumed, the run's story has no trace of it."""
        progress = trainer.progress
        path = self.directory / _name(progress.round_idx, progress.epoch)
        own = (
            announce and not progress.epoch and progress.round_idx > trainer.config.teacher_rounds
        )  # not the teacher's J
        best = progress.history[-1].mean_objective if own else -math.inf
        is_best = best > progress.best
        progress.best = max(progress.best, best)
        trainer.recorder.hub.flush()  # first: a checkpoint counts on the events before it
        tensors, meta = capture(trainer)
        try:
            write_archive(path, tensors, meta | {"announced": announce, "is_best": is_best})
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
        self.complete(trainer, path, announce=announce, is_best=is_best)
        return path

    def complete(self, trainer: VectorizedPPOTrainer, path: Path, *, announce: bool, is_best: bool) -> None:
        """What follows once a checkpoint is written. A run that was killed in between does it when it goes
        on."""
        try:
            if is_best:
                write_atomic(self.directory / "best.safetensors", path.read_bytes())
            for old in self.found()[: -self.keep_last]:
                old.unlink()
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.directory}: {error.strerror}") from error
        if announce:
            trainer.recorder.checkpoint(path.name, trainer.progress, best=is_best)

    def found(self) -> list[Path]:
        """Checkpoints, oldest first."""
        return sorted(self.directory.glob("round-*.safetensors"))

    def forget_after(self, finished: tuple[int, int]) -> None:
        """Delete checkpoints of what came after these finished rounds and epochs: a run that goes on from
        there has no log of it, and would take them for its newest."""
        for path in self.found():
            if path.name > _name(*finished):
                path.unlink()


def _name(round_idx: int, epoch: int) -> str:
    return f"round-{round_idx:06d}-epoch-{epoch:04d}.safetensors"


def find_checkpoint(resume: str, directory: Path | None) -> Path:
    """The file that `resume` names: a path, or with "auto" the newest of the run directory."""
    if resume != "auto":
        if not Path(resume).is_file():
            raise CheckpointError(f"resume: no file {resume}; allowed: auto or the path of a checkpoint")
        return Path(resume)
    if directory is None:
        raise CheckpointError(
            "resume is auto, which needs the run's directory (telemetry_dir) to look for checkpoints in"
        )
    found = CheckpointStore(directory / "checkpoints", 1).found()
    if not found:
        raise CheckpointError(f"resume is auto, but {directory / 'checkpoints'} holds no checkpoint")
    return found[-1]


def read_checkpoint(path: Path, config: TrainingConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint's content, once it is whole and was made by a run with these settings."""
    try:
        tensors, meta = read_archive(path, kind=KIND)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    meta = _unpacked(meta)
    require_fields(
        path,
        "header",
        meta,
        (
            "kind",
            "config",
            "seq",
            "announced",
            "is_best",
            "agent",
            "progress",
            "policy",
            "teacher",
            "normalizer",
            "recorder",
            "round",
        ),
    )
    may_change = (
        MAY_CHANGE - {"rounds"} if config.rent_curriculum else MAY_CHANGE
    )  # it is laid out over all rounds
    for name, value in config.to_json().items():
        stored = meta["config"].get(name)
        if name not in may_change and stored != value:
            raise CheckpointError(f"{path}: {_difference(name, stored, value)}")
    if config.rounds < finished_of(meta)[0]:
        raise CheckpointError(
            f"{path}: {finished_of(meta)[0]} rounds are finished; rounds is {config.rounds}, must be no less"
        )
    return tensors, meta


def _difference(name: str, stored: Any, ours: Any) -> str:
    """Names the first field that differs, however deep."""
    if isinstance(stored, dict) and isinstance(ours, dict):
        for key in sorted(stored.keys() | ours.keys()):
            if stored.get(key) != ours.get(key):
                return _difference(f"{name}.{key}", stored.get(key), ours.get(key))
    return f"{name} is {stored!r} in the checkpoint and {ours!r} in this run"


# -- capture -------------------------------------------------------------------------------------------------


def capture(trainer: VectorizedPPOTrainer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The run as it stands."""
    progress, context = trainer.progress, trainer.context
    tensors: dict[str, Tensor] = {}
    agent_meta = None
    if trainer.agent is not None:
        found, agent_meta = trainer.agent.state()
        tensors |= {f"agent.{name}": tensor for name, tensor in found.items()}
    meta = {
        "kind": KIND,
        "config": trainer.config.to_json(),
        "seq": trainer.recorder.next_seq,
        "agent": agent_meta,
        "progress": {
            "round_idx": progress.round_idx,
            "epoch": progress.epoch,
            "best": progress.best,
            "history": [asdict(summary) for summary in progress.history],
        },
        "policy": context.policy.state(),
        "teacher": None if context.teacher is None else context.teacher.state(),
        "normalizer": context.normalizer.state_dict(),
        "recorder": trainer.recorder.state(),
        "round": _capture_round(trainer, tensors) if progress.epoch else None,
    }
    return tensors, _packed(meta)


def _capture_round(trainer: VectorizedPPOTrainer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    env = trainer.env
    if trainer.hidden is not None:
        tensors |= {"hidden.h": trainer.hidden[0], "hidden.c": trainer.hidden[1]}
    tensors["reset"] = trainer.reset
    return {
        "data": env.train.state(),
        "rewards": trainer.context.rewards.state(),
        "decisions": _decided(trainer.decisions),
        "ledger": {
            "final_accs": env.ledger.final_accs,
            "total_rewards": env.ledger.total_rewards,
            "rollback_occurred": env.ledger.rollback_occurred,
        },
        "scalers": [group.scaler.state_dict() for group in env.groups],
        "envs": [_capture_env(group, member, tensors) for group in env.groups for member in group.envs],
    }


def _capture_env(group: EnvGroup, env: ParallelEnvState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    name = f"env.{env.env_idx}"
    now, good = snapshot_row(group.model, env.row), env.governor.last_good
    tensors |= {f"{name}.row.{key}": tensor for key, tensor in now.tensors.items()}
    tensors |= {f"{name}.good.{key}": tensor for key, tensor in good.tensors.items()}
    tensors |= {
        f"{name}.optimizer.{key}": tensor for key, tensor in group.optimizer.row_state(env.row).items()
    }
    table = env.coalitions
    return {
        "env_idx": env.env_idx,
        **{key: getattr(env, key) for key in _ENV_VALUES},
        "last_op": int(env.last_op),
        "measured": env.last_measure is not None,
        "tracker": env.signal_tracker.state_dict(),
        "governor": env.governor.state(),
        "row": {"seeds": now.seeds, "germinations": now.germinations},
        "good": {"seeds": good.seeds, "germinations": good.germinations},
        "coalitions": None
        if table is None
        else {
            "fossilized": sorted(table.fossilized),
            "scores": [[sorted(c), *score] for c, score in table.scores.items()],
        },
    }


def _decided(decisions: Decisions) -> dict[str, Any]:
    return {
        "offered": decisions.offered.tolist(),
        "counts": decisions.counts,
        "successes": decisions.successes,
        "rewards": decisions.rewards,
    }


# -- restore -------------------------------------------------------------------------------------------------


def restore(
    trainer: VectorizedPPOTrainer, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], origin: Path
) -> None:
    """Make a fresh trainer what the captured one was. Its agent was made from the checkpoint already."""
    try:
        progress, stored = trainer.progress, meta["progress"]
        progress.round_idx, progress.epoch, progress.best = (
            stored["round_idx"],
            stored["epoch"],
            stored["best"],
        )
        progress.history[:] = [
            BatchSummary(**summary | {"objectives": tuple(summary["objectives"])})
            for summary in stored["history"]
        ]
        trainer.context.policy.load_state(meta["policy"])
        if trainer.context.teacher is not None:
            trainer.context.teacher.load_state(meta["teacher"])
        trainer.context.normalizer.load_state_dict(meta["normalizer"])
        trainer.recorder.load_state(meta["recorder"])
        if meta["round"] is not None:
            _restore_round(trainer, tensors, meta["round"])
    except EsperError as error:
        raise CheckpointError(f"{origin}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{origin}: a value is missing or of the wrong kind: {error}") from error


def finished_of(meta: Mapping[str, Any]) -> tuple[int, int]:
    """Finished rounds, and finished epochs of the next."""
    return meta["progress"]["round_idx"], meta["progress"]["epoch"]


def agent_part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The agent's own tensors, by the names that it gave them."""
    return _under(tensors, "agent.")


def _restore_round(
    trainer: VectorizedPPOTrainer, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    env = trainer.env
    env.begin_round(trainer.progress.round_idx)
    env.train.load_state(meta["data"])
    trainer.context.rewards.load_state(meta["rewards"])
    decisions = meta["decisions"]
    trainer.decisions.offered[:] = torch.tensor(decisions["offered"])
    trainer.decisions.counts, trainer.decisions.successes = decisions["counts"], decisions["successes"]
    trainer.decisions.rewards = decisions["rewards"]
    env.ledger = Ledger(**meta["ledger"])
    hidden = [tensors[name].to(trainer.device) for name in ("hidden.h", "hidden.c") if name in tensors]
    trainer.hidden = (hidden[0], hidden[1]) if hidden else None
    trainer.reset = tensors["reset"].to(trainer.device)
    if trainer.agent is not None and trainer.hidden is not None and not trainer.agent.buffer.length:
        trainer.agent.begin_rollout(trainer.hidden)  # stopped between two rollouts of one episode
    by_idx = {stored["env_idx"]: stored for stored in meta["envs"]}
    for group, scaler in zip(env.groups, meta["scalers"], strict=True):
        group.scaler.load_state_dict(scaler)
        for member in group.envs:
            _restore_env(group, member, _under(tensors, f"env.{member.env_idx}."), by_idx[member.env_idx])
    trainer.draw_uniforms()
    trainer.set_rent()


def _restore_env(
    group: EnvGroup, env: ParallelEnvState, tensors: dict[str, Tensor], meta: Mapping[str, Any]
) -> None:
    restore_row(group.model, RowSnapshot(**meta["row"], tensors=_under(tensors, "row.")), env.row)
    group.optimizer.load_row_state(env.row, _under(tensors, "optimizer."))
    env.governor.load_state(meta["governor"], RowSnapshot(**meta["good"], tensors=_under(tensors, "good.")))
    env.signal_tracker.load_state_dict(meta["tracker"])
    for name in _ENV_VALUES:
        setattr(env, name, meta[name])
    env.last_op = LifecycleOp(meta["last_op"])
    if (table := meta["coalitions"]) is not None:
        env.coalitions = CoalitionTable(
            {frozenset(slots): (loss, accuracy) for slots, loss, accuracy in table["scores"]},
            frozenset(table["fossilized"]),
        )
    # Nothing has changed since the network was measured, so measuring it again gives what was measured.
    env.last_measure = measure(env) if meta["measured"] else None


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# JSON has no infinity: a network that blew up has, and its checkpoint must say so.


def _packed(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Mapping):
        return {key: _packed(v) for key, v in value.items()}
    return [_packed(v) for v in value] if isinstance(value, (list, tuple)) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        return (
            float(value["float"])
            if set(value) == {"float"}
            else {key: _unpacked(v) for key, v in value.items()}
        )
    return [_unpacked(v) for v in value] if isinstance(value, list) else value
