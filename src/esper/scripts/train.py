"""`esper train`: train a policy that grows networks, or let one decide that does not learn."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from esper.leyline import EsperError, TelemetryEvent, TelemetryEventType
from esper.nissa import get_hub
from esper.runtime.tasks import get_task_spec
from esper.scripts.config import make_parser, parse
from esper.simic.training.config import TrainingConfig

if TYPE_CHECKING:
    from esper.simic.contracts import BatchSummary
    from esper.simic.training.dual_ab import ABResult

DONE, FAILED, BAD_INPUT = 0, 1, 2
"""Exit codes; a run that a signal stopped ends with 128 + its number."""


class ProgressOutput:
    """Shows a run while it goes on: a bar on a terminal, else a line per round; alerts and checkpoints as
    they come."""

    wants_step_events = True  # the first epoch already shows that the run has started

    def __init__(self, console: Console, rounds: int) -> None:
        self.started = False
        self._console, self._rounds, self._alerts = console, rounds, 0
        self._seconds: list[float] = []
        self._bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=rounds)

    def emit(self, seq: int, event: TelemetryEvent) -> None:
        if not self.started:
            self.started = True
            self._bar.start()
        data = event.data
        if event.event_type is TelemetryEventType.BATCH_COMPLETED:
            self._show_round(data)
        elif event.event_type is TelemetryEventType.ALERT:
            self._alerts += 1
            self._say(
                f"{data['severity']}: {data['message']} ({data['metric']} {data['value']:.4g}, limit {data['limit']:.4g})"
            )
        elif event.event_type is TelemetryEventType.CHECKPOINT:
            self._say(f"checkpoint {data['path']}{' (best so far)' if data['best'] else ''}")

    def flush(self) -> None: ...

    def close(self) -> None:
        self._bar.stop()

    def _show_round(self, data: Mapping[str, Any]) -> None:
        done = data["round_idx"] + 1
        self._seconds.append(data["seconds"])
        left = timedelta(seconds=round(fmean(self._seconds) * (self._rounds - done)))
        facts = (
            f"accuracy {data['avg_accuracy']:.1f} %, committed {data['avg_committed_accuracy']:.1f} %, "
            f"J {data['avg_objective']:.3f}, {data['env_steps'] / done / data['seconds']:,.0f} env-steps/s, {left} left, "
            f"alerts {self._alerts}"
        )
        if self._bar.disable:
            self._say(f"round {done}/{self._rounds}: {facts}")
        self._bar.update(self._task, completed=done, description=facts, refresh=True)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def stop_on_signals(request_stop: Callable[[], None]) -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM asks the run to stop, a second one ends the process. Yields the signals
    that came."""
    caught: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        request_stop()
        signal.signal(number, before[number])
        os.write(
            2, b"stopping after this epoch; once more to stop at once\n"
        )  # print may not be called in a handler

    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, handle)
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_directory(config: TrainingConfig) -> Path:
    """Where the run is recorded: as configured, where its checkpoint lies, or a new directory under
    `runs`."""
    if config.telemetry_dir is not None:
        return Path(config.telemetry_dir)
    if config.resume is not None:
        checkpoints = Path(config.resume).absolute().parent
        if checkpoints.name != "checkpoints":
            raise EsperError(
                f"--resume {config.resume} does not lie in a run's checkpoints directory; name the run that it "
                "continues with --telemetry-dir"
            )
        return checkpoints.parent
    for n in count(1):
        directory = Path("runs") / f"{config.task}-{config.policy}-{config.seed}-{n}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise EsperError(
                f"cannot make {directory}: {error.strerror}; choose another place with --telemetry-dir"
            ) from error
        return directory
    raise AssertionError


def show_results(history: Sequence[BatchSummary]) -> None:
    """The first, the best and the last round."""
    table = Table("round", "accuracy", "committed", "J", "reward", "added parameters", "rollbacks")
    best = max(history, key=lambda summary: summary.mean_objective)
    for name, row in {"first": history[0], "best J": best, "last": history[-1]}.items():
        table.add_row(
            f"{row.round_idx + 1} ({name})",
            f"{row.mean_accuracy:.1f} %",
            f"{row.mean_committed_accuracy:.1f} %",
            f"{row.mean_objective:.3f}",
            f"{row.mean_reward:.3f}",
            f"{row.mean_added_params:,.0f}",
            str(row.rollbacks),
        )
    Console().print(table)


def show_comparison(result: ABResult) -> None:
    """Each reward mode, and each pair of them."""
    table = Table("reward mode", "J over the last quarter of rounds, 95 % interval")
    for mode, figure in result.means.items():
        table.add_row(mode, str(figure))
    for (one, other), figure in result.differences.items():
        table.add_row(f"{one} − {other}", str(figure))
    Console().print(table)


def run(config: TrainingConfig, arguments: Sequence[str]) -> int:
    """Train, show it, and return the exit code."""
    from esper.simic.training import dual_ab, vectorized

    assert config.telemetry_dir is not None
    records, progress = _records(config.telemetry_dir), ProgressOutput(Console(stderr=True), config.rounds)
    try:
        with stop_on_signals(vectorized.request_stop) as caught, get_hub().attached(progress):
            if config.ab_reward_modes:
                result = dual_ab.train_dual_ab(**config.to_train_kwargs())
            else:
                _, history = vectorized.train_ppo_vectorized(**config.to_train_kwargs())
    except EsperError as error:
        print(f"error: {error}", file=sys.stderr)
        if not progress.started and _records(config.telemetry_dir) == records:
            return BAD_INPUT
        print(f"the run failed; what it recorded is in {config.telemetry_dir}", file=sys.stderr)
        return FAILED
    if config.ab_reward_modes:
        show_comparison(result)
    elif history:
        show_results(history)
    print(f"results: {config.telemetry_dir}")
    if not caught or (not result.stopped if config.ab_reward_modes else len(history) == config.rounds):
        return DONE
    place = [] if "--telemetry-dir" in arguments else ["--telemetry-dir", config.telemetry_dir]
    again = [*arguments, *place, "--resume", "auto"]  # the last of a kind counts
    print(f"stopped; to go on: python -m esper.scripts.train {shlex.join(again)}")
    return 128 + caught[0]


def _records(directory: str) -> set[Path]:
    """Runs that have begun here: the directory's own, or one for each group of a comparison."""
    return {*Path(directory).glob("run.json"), *Path(directory).glob("*/run.json")}


def main(arguments: Sequence[str] | None = None) -> int:
    torch.set_num_threads(1)
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(
        "esper train", f"{__doc__} Unless told otherwise, the run is recorded in a new directory under runs."
    )
    try:
        config, _ = parse(parser, given)
        get_task_spec(config.task)
        directory = run_directory(config)
    except EsperError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    try:
        return run(config.replace(telemetry_dir=str(directory)), given)
    finally:
        if config.telemetry_dir is None:
            with suppress(OSError):
                directory.rmdir()  # only where nothing was recorded


if __name__ == "__main__":
    sys.exit(main())
