"""A/B of reward modes: one policy per mode, on the same random streams, with their rounds interleaved.

Networks, data order and action noise of env i in round r are the same in every group, so results are compared
in pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from esper._statistics import Estimate, estimate, paired
from esper.leyline import EsperError, TelemetryEvent, TelemetryEventType
from esper.nissa import TelemetryHub
from esper.simic.training import vectorized
from esper.simic.training.config import TrainingConfig

LAST_SHARE = 0.25
"""Groups are compared over the last quarter of their rounds, when training is nearly complete."""


@dataclass(frozen=True, slots=True)
class ABResult:
    """Objective J of each mode, and the estimates that follow.

    All rounds of one env are resampled together, with those of its twins: they were decided by one trained
    policy, so rounds × envs are no independent sample."""

    objectives: dict[str, npt.NDArray[np.float64]]
    """[rounds, envs] of the rounds that all groups have finished."""
    means: dict[str, Estimate]
    differences: dict[tuple[str, str], Estimate]
    """One − other, paired by round and env."""
    stopped: bool = False
    covers: ClassVar[str] = (
        "Intervals cover the differences between networks, not those between training runs: each mode "
        "trained one policy. Repeat the comparison with other random seeds to cover both."
    )
    """Meaning of the intervals, to be printed with them."""

    @classmethod
    def of(
        cls,
        played: Mapping[str, Mapping[int, Sequence[float]]],
        *,
        twins: int = 1,
        stopped: bool = False,
    ) -> ABResult:
        """Compare objectives by mode and round; `twins` consecutive envs share weights, data and
        condition."""
        common = sorted(set[int].intersection(*(set(rounds) for rounds in played.values())))
        if not common and stopped:
            return cls({}, {}, {}, stopped)
        if not common:
            raise EsperError("A/B: no round was finished by every group, so there is nothing to compare")
        objectives = {mode: np.array([rounds[r] for r in common]) for mode, rounds in played.items()}
        count = max(1, int(len(common) * LAST_SHARE))
        units = {mode: _units(values[-count:], twins) for mode, values in objectives.items()}
        return cls(
            objectives,
            {mode: estimate(values) for mode, values in units.items()},
            {(a, b): paired(units[a], units[b]) for a, b in combinations(units, 2)},
            stopped,
        )


def _units(objectives: npt.NDArray[np.float64], twins: int) -> npt.NDArray[np.float64]:
    """[rounds, envs] → [envs / twins, rounds · twins]: one row for each unit of resampling."""
    rounds, envs = objectives.shape
    by_group = objectives.reshape(rounds, envs // twins, twins)
    return by_group.transpose(1, 0, 2).reshape(envs // twins, rounds * twins)


def train_dual_ab(**fields: Any) -> ABResult:
    """Train one policy per mode of `ab_reward_modes`; each has its own subdirectory of the run directory."""
    config = TrainingConfig(**fields)
    if len(config.ab_reward_modes) < 2:
        raise EsperError(f"A/B: ab_reward_modes is {config.ab_reward_modes}, needs two or more modes")
    from esper.runtime.tasks import get_task_spec

    tasks = vectorized.resolve_tasks(config, [get_task_spec(name) for name in config.tasks])
    with ExitStack() as runs:
        runs.callback(vectorized.clear_stop)
        groups = {
            mode: runs.enter_context(
                vectorized.open_trainer(
                    _group(config, mode), tasks, TelemetryHub([_Progress(vectorized.get_hub())])
                )
            )
            for mode in config.ab_reward_modes
        }
        for finished in range(1, config.rounds + 1):
            for trainer in groups.values():
                trainer.run(until=finished)
        stopped = any(trainer.stopped for trainer in groups.values())
    return ABResult.of(
        {
            mode: {summary.round_idx: summary.objectives for summary in trainer.progress.history}
            for mode, trainer in groups.items()
        },
        twins=config.twins,
        stopped=stopped,
    )


class _Progress:
    """Passes finished rounds and alerts of each group on to the process's hub."""

    def __init__(self, hub: TelemetryHub) -> None:
        self.hub = hub

    def emit(self, seq: int, event: TelemetryEvent) -> None:
        if event.event_type in (TelemetryEventType.BATCH_COMPLETED, TelemetryEventType.ALERT):
            self.hub.emit(event)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _group(config: TrainingConfig, mode: str) -> TrainingConfig:
    directory = None if config.telemetry_dir is None else str(Path(config.telemetry_dir) / mode)
    return config.replace(
        ab_reward_modes=(), reward={**config.to_json()["reward"], "mode": mode}, telemetry_dir=directory
    )
