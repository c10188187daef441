"""A growing model recorded as a run of one round and one env, so that every reader of runs works on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.grower.body import Body
from esper.leyline import (
    OP_NAMES,
    EsperError,
    LifecycleOp,
    LifecycleRecord,
    ObjectiveConfig,
    SeedStage,
    TelemetryEventType,
    TrainingSignals,
    objective,
)
from esper.nissa import RunDirectory, TelemetryHub
from esper.simic.contracts import ActionOutcome
from esper.simic.telemetry.decision import observed_names
from esper.simic.telemetry.emitters import (
    emit_action_distribution,
    emit_batch_completed,
    emit_event,
    emit_last_action,
)
from esper.simic.telemetry.telemetry_config import TelemetryLevel
from esper.simic.training.action_execution import lifecycle_event

if TYPE_CHECKING:
    from esper.grower.decide import Decided
    from esper.grower.grower import Grower, StepResult

LEVEL = TelemetryLevel.NORMAL


class Recorder:
    """Writes the events of one run. The last of a known number of epochs ends it, and so does `close`; if an
    epoch comes later, the end is cut off and written again after it.

    A directory that holds a run is continued by `resume`, from the epoch at which the state was taken. A run
    of which no epoch is recorded, because its process was killed before, is begun anew."""

    def __init__(
        self,
        path: str | Path,
        body: Body,
        *,
        model: str,
        policy: str,
        epochs: int | None,
        classes: int | None,
        blueprints: Sequence[str],
        seed: int,
        prices: ObjectiveConfig,
    ) -> None:
        self._prices = prices
        self._path, self._body, self._epochs, self._blueprints = Path(path), body, epochs, blueprints
        self._start = {"task": model, "policy": policy, "seed": seed}
        self._config = {**self._start, "epochs": epochs, "classes": classes, "slots": body.names}
        self._hub, self._stack = TelemetryHub(level=LEVEL), ExitStack()
        self._began = time.perf_counter()
        self._is_open = self._has_ended = False
        self._seq = self._epoch = 0
        """Number of the event after the last recorded epoch, and that epoch."""
        if _holds_an_epoch(self._path):
            return
        begin = RunDirectory.restart if _was_begun(self._path) else RunDirectory.create
        self._open(begin(self._path, config=self._config))
        self._announce()
        self._seq = self._hub.next_seq

    def _open(self, run: RunDirectory) -> None:
        self._stack.enter_context(self._hub.attached(*run.outputs()))
        self._hub.round_idx = 0
        self._is_open, self._has_ended = True, False

    def _announce(self) -> None:
        emit_event(
            self._hub,
            TelemetryEventType.RUN_STARTED,
            {
                **self._start,
                "reward_mode": None,
                "rounds": 1,
                "envs": 1,
                "episode_length": self._epochs,
                "slots": self._body.names,
                "host_params": self._body.host_params,
                "depths": dict(zip(self._body.names, self._body.slot_depths, strict=True)),
                "slots_by_task": {self._start["task"]: self._body.names},
                "envs_by_task": {self._start["task"]: 1},
                "observed_by_task": {self._start["task"]: observed_names(self._body.names, self._blueprints)},
            },
        )
        self._hub.flush()

    def resume(self, state: Mapping[str, Any], epoch: int) -> None:
        """Go on after an epoch: what was recorded later is cut off. The end of a run that had ended stays
        until the next epoch comes."""
        if self._is_open:
            return  # a new directory: the rest of the run is recorded there
        self._seq, self._epoch = int(state["seq"]), epoch
        self._has_ended = bool(state["has_ended"])
        if not self._has_ended:
            self._go_on()

    def _go_on(self) -> None:
        self._open(RunDirectory.resume(self._path, self._seq, (0, self._epoch)))

    def state(self) -> dict[str, Any]:
        return {"seq": self._seq, "has_ended": self._has_ended}

    def step(
        self,
        grower: Grower,
        result: StepResult,
        signals: TrainingSignals,
        indices: Sequence[int],
        decided: Decided | None,
        outcome: ActionOutcome,
        records: Sequence[LifecycleRecord],
    ) -> None:
        """Record one epoch; the last of a known number ends the run."""
        if self._has_ended:
            self._go_on()
        if not self._is_open:
            raise EsperError(
                f"record: {self._path} holds a run; continue it with grower.load_state_dict, or name a new "
                "directory"
            )
        for record in records:
            self._hub.emit(lifecycle_event(record, result.epoch))
        legal = [True] + [False] * (len(OP_NAMES) - 1) if decided is None else decided.legal
        emit_last_action(
            self._hub,
            0,
            str(self._body.slot(self._body.slot_config.slot_ids[0]).anchor.device),
            result.op,
            result.slot,
            0.0,
            0.0,
            dict(zip(OP_NAMES, legal, strict=True)),
            LEVEL,
            indices=indices if outcome.spec.op is not LifecycleOp.WAIT else None,
            outcome=outcome,
            op_probs=None if decided is None else decided.op_probs,
            considered=None if decided is None else decided.considered,
            epoch=result.epoch,
            seeds=grower.reports(),
            accuracy=signals.val_accuracy,
            loss=signals.val_loss,
        )
        self._hub.flush()
        self._seq, self._epoch = self._hub.next_seq, result.epoch
        if self._epochs is not None and result.epoch >= self._epochs:
            self.close(grower)

    def close(self, grower: Grower) -> None:
        """End the run: its outcome, the summary of its one round, and the log."""
        if not self._is_open:
            return
        if grower.history:
            self._finish(grower)
        emit_event(
            self._hub,
            TelemetryEventType.RUN_ENDED,
            {
                "status": "finished",
                "message": None,
                "rounds_completed": 1,
                "episodes_completed": 1,
                "env_steps": grower.epoch,
                "seconds": time.perf_counter() - self._began,
            },
        )
        self._hub.flush()
        self._stack.close()
        self._is_open, self._has_ended = False, True

    def _finish(self, grower: Grower) -> None:
        changes = Counter(change.split(" ")[-1] for r in grower.history for change in r.changes)
        accuracy = grower.accuracies[-1]
        fossils = self._body.seed_params(stages=(SeedStage.FOSSILIZED,))
        committed = grower.committed_accuracy()
        germinated, fossilized = changes["germinated"], grower.count_fossils()
        value = None
        if committed is not None:
            value = objective(
                self._prices,
                committed_accuracy=committed / 100.0,
                added_params=fossils,
                host_params=self._body.host_params,
                wasted_seeds=germinated - fossilized,
                rollbacks=0,
            )
        outcome = {
            "episode_idx": 0,
            "epochs": grower.epoch,
            "final_accuracy": accuracy,
            "committed_accuracy": committed,
            "objective": value,
            "total_reward": 0.0,
            "host_params": self._body.host_params,
            "added_params": fossils,
            "germinated": germinated,
            "fossilized": fossilized,
            "pruned": changes["pruned"],
            "rollbacks": 0,
        }
        emit_event(self._hub, TelemetryEventType.EPISODE_OUTCOME, outcome, env_id=0, epoch=grower.epoch)
        counts = Counter(result.op for result in grower.history)
        successes = Counter(result.op for result in grower.history if result.executed)
        emit_action_distribution(self._hub, dict(counts), dict(successes))
        emit_batch_completed(
            self._hub,
            0,
            1,
            0.0,
            accuracy,
            sum(grower.accuracies) / len(grower.accuracies),
            None,
            None,
            None,
            None,
            LEVEL,
            rounds=1,
            avg_committed_accuracy=committed,
            avg_objective=value,
            avg_added_params=float(fossils),
            rollbacks=0,
            env_steps=grower.epoch,
            seconds=time.perf_counter() - self._began,
        )


def _holds_an_epoch(path: Path) -> bool:
    """Whether the directory holds a run that lasted longer than its announcement."""
    if not (path / "run.json").exists():
        return False
    events = islice(RunDirectory.open(path).events(), 2)
    return len(list(events)) > 1 or any((path / "tables").glob("*.parquet"))


def _was_begun(path: Path) -> bool:
    """Whether a process has created a run there, or was about to."""
    return (path / "run.json").exists() or (path / "events.jsonl").exists()
