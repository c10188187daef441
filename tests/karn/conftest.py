"""A small real run that every reader is tried on, and a way to write one by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from esper.leyline import TelemetryEvent, TelemetryEventType
from esper.nissa import RunDirectory, TelemetryHub
from esper.simic import train_ppo_vectorized

SMALL: dict[str, Any] = {
    "task": "digits_impaired",
    "rounds": 2,
    "envs": 4,
    "episode_length": 6,
    "steps_per_epoch": 3,
    "val_size": 64,
    "permissive_gates": True,
    "population": 8,
    "seed": 5,
}


@pytest.fixture(scope="session")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("karn") / "small"
    train_ppo_vectorized(**SMALL, telemetry_dir=str(path))
    return path


@pytest.fixture(scope="session")
def random_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same task and seed, decided at random."""
    path = tmp_path_factory.mktemp("karn") / "random"
    train_ppo_vectorized(**SMALL, policy="random", telemetry_dir=str(path))
    return path


Write = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> Write:
    """Record events, given as (type, payload) or (type, payload, context), in a run directory of their
    own."""

    def write(events: Iterable[tuple[Any, ...]], name: str = "written", **config: Any) -> Path:
        run = RunDirectory.create(tmp_path / name, config=config)
        with TelemetryHub().attached(*run.outputs()) as hub:
            for kind, data, *context in events:
                hub.emit(
                    TelemetryEvent(
                        event_type=TelemetryEventType(kind), data=data, **(context[0] if context else {})
                    )
                )
        return run.path

    return write
