"""`esper train`: train a policy that grows networks, or run a policy that is not trained."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from esper._text import printable
from esper.leyline import STEP_TABLES, EsperError, TelemetryEvent, TelemetryEventType
from esper.nissa import get_hub
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.scripts.cli import BAD_INPUT, DONE, FAILED, fail
from esper.scripts.config import parse
from esper.scripts.launch import launch, take_processes
from esper.scripts.process import use_one_core
from esper.simic.ranks import Ranks, joined, restarted
from esper.simic.training.config import TrainingConfig, flatten

if TYPE_CHECKING:
    from esper.simic.contracts import BatchSummary, TaskSummary
    from esper.simic.training.dual_ab import ABResult

SHOWN_TASKS = 12
"""Up to this number of tasks, output shows figures of each."""
DESCRIPTION = (
    "Train a policy that grows networks, or run a policy that is not trained, for example: "
    "esper train ppo --preset quickstart"
)


class ProgressOutput:
    """Shows the progress of a run: a bar on a terminal, otherwise a line per round, and one per minute in a
    long round; alerts and checkpoints as they happen."""

    wants_step_events = True  # `started` is set by the first epoch, not only by the first round

    def __init__(self, console: Console, rounds: int, *, every: float | None = None) -> None:
        """`every`: seconds without news until an epoch is shown; default: 60, and 1 on a terminal."""
        self.started = False
        self._console, self._rounds, self._alerts = console, rounds, 0
        self._every = every if every is not None else 1.0 if console.is_terminal else 60.0
        self._seconds: list[float] = []  # of each round
        self._epochs: int | None = None  # of a round
        self._first, self._epoch = 0, 0  # of this round: the first that was seen, the last that was shown
        self._began = self._shown = time.monotonic()  # this round; what was shown last
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
        if event.event_type in STEP_TABLES:
            self._show_epoch(event.round_idx or 0, event.epoch or 0)
        elif event.event_type is TelemetryEventType.RUN_STARTED:
            self._epochs = data["episode_length"]
        elif event.event_type is TelemetryEventType.BATCH_COMPLETED:
            self._show_round(data)
        elif event.event_type is TelemetryEventType.ALERT:
            self._alerts += 1
            figures = f"{data['metric']} {data['value']:.4g}, limit {data['limit']:.4g}"
            self._say(f"{data['severity']}: {data['message']} ({figures})")
        elif event.event_type is TelemetryEventType.CHECKPOINT:
            self._say(f"checkpoint {data['path']}{' (best so far)' if data['best'] else ''}")

    def flush(self) -> None: ...

    def close(self) -> None:
        self._bar.stop()

    def _show_epoch(self, round_idx: int, epoch: int) -> None:
        """Once for each epoch, if it is time. What is left is a guess from the epochs of this round."""
        now = time.monotonic()
        self._first = self._first or epoch  # a resumed run begins within a round
        if epoch == self._epoch or now - self._shown < self._every:
            return
        self._epoch, self._shown = epoch, now
        facts = f"epoch {epoch}"
        if self._epochs is not None:
            each = (now - self._began) / (epoch - self._first + 1)
            rounds = self._rounds - round_idx - 1
            left = timedelta(seconds=round(each * (self._epochs - epoch + rounds * self._epochs)))
            facts = f"epoch {epoch}/{self._epochs}, {left} left"
        if self._bar.disable:
            self._say(f"round {round_idx + 1}/{self._rounds}, {facts}")
        self._bar.update(self._task, description=facts, refresh=True)

    def _show_round(self, data: Mapping[str, Any]) -> None:
        done = data["round_idx"] + 1
        self._seconds.append(data["seconds"])
        self._first, self._epoch, self._began = 0, 0, time.monotonic()
        left = timedelta(seconds=round(fmean(self._seconds) * (self._rounds - done)))
        speed = data["env_steps"] / done / data["seconds"]
        tasks = data.get("objective_by_task") or {}
        by_task = ", ".join(f"{task} {value:.3f}" for task, value in tasks.items())
        objective = f"J {data['avg_objective']:.3f}"
        if len(tasks) > 1:
            objective += f" ({by_task})" if len(tasks) <= SHOWN_TASKS else f" in {len(tasks)} tasks"
        if data.get("plan_gain") is not None:
            objective += f", best plans {data['plan_gain']:+.3f} above growing nothing"
        facts = (
            f"accuracy {data['avg_accuracy']:.1f} %, committed {data['avg_committed_accuracy']:.1f} %, "
            f"{objective}, {speed:,.0f} env-steps/s, {left} left, alerts {self._alerts}"
        )
        if self._bar.disable:
            self._say(f"round {done}/{self._rounds}: {facts}")
        self._bar.update(self._task, completed=done, description=facts, refresh=True)

    def _say(self, line: str) -> None:
        self._shown = time.monotonic()
        self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def stop_on_signals(request_stop: Callable[[], None], *, announce: bool = True) -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM asks the run to stop; the second one ends the process. Yields the list of
    received signals."""
    caught: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        request_stop()
        signal.signal(number, before[number])
        if announce:  # print is not safe in a signal handler
            os.write(2, b"stopping after this epoch; send the signal again to stop at once\n")

    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, handle)
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_directory(config: TrainingConfig) -> Path:
    """The directory that records the run: the configured one, that of the checkpoint, or a new one under
    `runs`."""
    if config.telemetry_dir is not None:
        return Path(config.telemetry_dir)
    if config.resume is not None:
        checkpoints = Path(config.resume).absolute().parent
        if checkpoints.name != "checkpoints":
            raise EsperError(
                f"--resume {config.resume} is not in a run's checkpoints directory; name the run that it "
                "continues with --telemetry-dir"
            )
        return checkpoints.parent
    task = re.sub(r"[^\w.-]+", "-", config.task if isinstance(config.task, str) else "-".join(config.task))[
        :100
    ]
    for n in count(1):
        directory = Path("runs") / f"{task}-{config.policy}-{config.seed}-{n}"
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


def check_memory(config: TrainingConfig, tasks: Sequence[TaskSpec]) -> None:
    """Refuse a run on the CPU whose largest parts alone exceed the memory of this machine."""
    if any(not device.startswith("cpu") for device in config.devices):
        return
    parts = Counter({f"a policy with {config.hidden:,} units": 128 * config.hidden**2})
    for task in tasks:
        parts.update(memory_parts(config, task))
    needed = parts.total()
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        (largest, size), *_ = parts.most_common(1)
        raise EsperError(
            f"the run needs at least {needed / 1e9:,.0f} GB of memory, {size / 1e9:,.0f} GB for "
            f"{largest}; this machine has {available / 1e9:,.0f} GB. Reduce envs, batch_size, "
            "steps_per_epoch, episode_length or hidden"
        )


def memory_parts(config: TrainingConfig, task: TaskSpec) -> dict[str, int]:
    """Bytes that the envs of one task need at least, by purpose."""
    population = config.population or task.population
    rows = -(-config.envs // population) * population
    batch_size = config.batch_size or task.batch_size
    batches = config.steps_per_epoch or task.steps_per_epoch
    steps = config.rollout_length or config.episode_length or task.episode_length
    size = task.host.get("size", 1)
    sample = task.host.get("channels", 1) * task.host.get("height", size) * size
    return {
        f"{rows:,} networks": rows * task.host_params * 16,  # weights, gradients, momentum, a snapshot
        f"one batch of {batch_size:,} samples for each of them": rows * batch_size * sample * 4,
        "the order of the samples in one epoch": config.envs * batch_size * batches * 8,
        f"a rollout of {steps:,} steps in {config.envs:,} envs": config.envs * steps * len(task.slots) * 256,
    }


def show_results(history: Sequence[BatchSummary]) -> None:
    """The first, the best and the last round; with a few tasks also each task in them."""
    heads = ("accuracy", "committed", "J", "reward", "added parameters", "rollbacks")
    table = Table(Column("round", no_wrap=True), *heads)
    best = max(history, key=lambda summary: summary.mean_objective)
    for name, row in {"first": history[0], "best J": best, "last": history[-1]}.items():
        table.add_row(f"{row.round_idx + 1} ({name})", *_figures(row))
        if 1 < len(row.by_task) <= SHOWN_TASKS:
            for task, figures in row.by_task.items():
                table.add_row(f"  {task}", *_figures(figures))
    console = Console(markup=False)
    console.print(table)
    if len(history[-1].by_task) > SHOWN_TASKS:
        console.print(
            f"means of {len(history[-1].by_task)} tasks; `esper report RUN` shows each", highlight=False
        )


def _figures(row: BatchSummary | TaskSummary) -> tuple[str, ...]:
    return (
        f"{row.mean_accuracy:.1f} %",
        f"{row.mean_committed_accuracy:.1f} %",
        f"{row.mean_objective:.3f}",
        f"{row.mean_reward:.3f}",
        f"{row.mean_added_params:,.0f}",
        str(row.rollbacks),
    )


def show_comparison(result: ABResult) -> None:
    """Each reward mode, and each pair of them."""
    table = Table("reward mode", "J over the last quarter of rounds, 95 % interval")
    for mode, figure in result.means.items():
        table.add_row(mode, str(figure))
    for (one, other), figure in result.differences.items():
        table.add_row(f"{one} − {other}", str(figure))
    console = Console(markup=False)
    console.print(table)
    console.print(result.covers, highlight=False)


def run(config: TrainingConfig, arguments: Sequence[str], ranks: Ranks) -> int:
    """Train, show the results and return the exit code. Only the first rank shows anything."""
    from esper.simic.training import vectorized

    with stop_on_signals(vectorized.request_stop, announce=ranks.is_first) as caught:
        progress = ProgressOutput(Console(stderr=True), config.rounds)
        try:
            with get_hub().attached(*([progress] if ranks.is_first else [])):
                history, comparison = train(config)
        except EsperError as error:
            if ranks.fail(str(error)):
                return FAILED
            fail(error)
            if not progress.started and ranks.is_first:  # nothing was run, so the input is the reason
                code = BAD_INPUT
            else:
                place = config.telemetry_dir and f"; its records are in {printable(config.telemetry_dir)}"
                print(f"the run failed{place or ''}", file=sys.stderr)
                code = FAILED
            ranks.reported()
            return code
    if not ranks.is_first:
        return 128 + caught[0] if caught else DONE
    if comparison is not None:
        show_comparison(comparison)
        complete = not comparison.stopped
    else:
        if history:
            show_results(history)
        complete = len(history) == config.rounds
    recorded = config.telemetry_dir is not None
    print(f"results: {printable(config.telemetry_dir)}" if recorded else "nothing was recorded")
    if not caught or complete:
        return DONE
    if recorded:
        named = [] if "--telemetry-dir" in arguments else ["--telemetry-dir", str(config.telemetry_dir)]
        again = shlex.join([*arguments, *named, "--resume", "auto"])  # the last of a kind counts
        print(f"stopped; to resume: python -m esper.scripts.train {printable(again)}")
    else:
        print("stopped; the run cannot be resumed, because nothing was recorded")
    return 128 + caught[0]


def train(config: TrainingConfig) -> tuple[list[BatchSummary], ABResult | None]:
    """The history of a run, or the comparison of reward modes."""
    from esper.simic.training import dual_ab, vectorized

    if config.ab_reward_modes:
        return [], dual_ab.train_dual_ab(**config.to_train_kwargs())
    return vectorized.train_ppo_vectorized(**config.to_train_kwargs())[1], None


def main(arguments: Sequence[str] | None = None) -> int:
    use_one_core()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        processes, remaining = take_processes(given)
        config, origins = parse("esper train", DESCRIPTION, remaining)
        tasks = [get_task_spec(name) for name in config.tasks]
        check_memory(config, tasks)
        if processes > 1:
            return launch("esper.scripts.train", remaining, processes)
        settings = flatten(config.to_json(), "config")
        with joined({name: value for name, value in settings.items() if name not in LOCAL}) as ranks:
            return _main(config, remaining, ranks, records=origins["telemetry_dir"] == "default")
    except EsperError as error:
        return fail(error)


LOCAL = {"telemetry_dir", "data_root"}
"""Settings in which ranks may differ: the first one's directory is used, and each reads its own data."""


def _main(config: TrainingConfig, given: Sequence[str], ranks: Ranks, *, records: bool) -> int:
    """`records`: the run is recorded, in a new directory if none is named."""
    if restarted() and config.telemetry_dir is not None and config.resume is None:
        config = config.replace(resume="auto")
    directory = None
    if ranks.is_first and (config.telemetry_dir is not None or records):
        directory = run_directory(config)
    made_here = directory is not None and config.telemetry_dir is None
    place = ranks.from_first(None if directory is None else str(directory), "run directory")
    try:
        return run(config.replace(telemetry_dir=place), given, ranks)
    finally:
        if made_here and directory is not None:
            with suppress(OSError):
                directory.rmdir()  # succeeds only if nothing was recorded


if __name__ == "__main__":
    sys.exit(main())
