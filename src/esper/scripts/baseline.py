"""`esper baseline`: capture the results of short runs, and check later that they are still the same.

Everything that needs torch is imported where it is used: a bad argument must not take seconds to report."""

from __future__ import annotations

import ast
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
import tyro

import esper
from esper._files import write_atomic
from esper.leyline.errors import EsperError
from esper.scripts.cli import DONE, FAILED, fail, import_modules
from esper.scripts.karn import without_escapes

RUNS: Mapping[str, dict[str, Any]] = {
    "digits_baseline": {"task": "digits_baseline", "rounds": 2, "envs": 2, "episode_length": 5},
    "cifar_baseline": {"task": "cifar_baseline", "rounds": 1, "envs": 1, "episode_length": 5},
}
"""The second is the short run `esper train ppo --preset cifar_baseline --rounds 1 --envs 1 --episode-length
5`."""
NUM_LOSSES = 20
LOSS_TOLERANCE, LAST_DIGITS = 1e-3, 1e-6
"""Largest difference of a loss on another build of torch, and on the same one: even processors of one kind
may differ in the last digits of a sum."""
FREE_OF_LIFECYCLE = (
    "run_started",
    "run_ended",
    "batch_completed",
    "ppo_update",
    "action_distribution",
    "mask_hit_rates",
    "episode_outcome",
    "last_action",
    "reward_summary",
    "throughput",
    "checkpoint",
)
"""Events whose number does not depend on the policy's decisions, and so not on rounding."""


File = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]


def capture(out: File) -> int:
    """Write the baseline of this checkout to a JSON file. Runs whose dataset is missing are left out and
    named.

    Args:
        out: JSON file to write.
    """
    _check_writable(out)
    baseline, missing = measure()
    try:
        write_atomic(out, orjson.dumps(baseline, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise EsperError(f"cannot write {out}: {error.strerror}") from error
    print(f"captured {', '.join(baseline['runs'])} to {out}")
    for name, reason in missing.items():
        print(f"left out {name}: {reason}")
    return DONE


def check(file: File) -> int:
    """Run again and compare with a captured baseline. On the same build of torch everything must be equal, on
    another build everything that does not depend on rounding.

    Args:
        file: JSON file that `capture` wrote.
    """
    stored = read_baseline(file)
    now, missing = measure(list(stored["runs"]))
    differences = compare(stored, now)
    for name, reason in missing.items():
        print(f"not checked: {name}: {reason}")
    if differences:
        fail("\n".join([f"{len(differences)} differences from {file}", *differences]))
        return FAILED
    print(f"{', '.join(now['runs'])}: as in {file}")
    return DONE


def _check_writable(out: Path) -> None:
    """Refuse a place that cannot be written to before minutes are spent on measuring."""
    try:
        writable = out.parent.is_dir() and os.access(out.parent, os.W_OK) and not out.is_dir()
        out.exists()  # fails if the name is too long
    except (OSError, ValueError) as error:
        raise EsperError(f"cannot write {out}: {error}") from None
    if not writable:
        raise EsperError(f"cannot write {out}: {out.parent} is not a directory that can be written to")


def read_baseline(file: Path) -> dict[str, Any]:
    """The content of a baseline file, checked as far as `compare` uses it."""
    try:
        stored = msgspec.json.decode(file.read_bytes(), type=_Baseline)
    except (OSError, ValueError, RecursionError) as error:
        raise EsperError(f"{file} is not a baseline: {getattr(error, 'strerror', None) or error}") from None
    for name in stored.runs:
        if name not in RUNS:
            raise EsperError(f"{file}: run {name[:80]!r} is unknown; allowed: {', '.join(RUNS)}")
    return dict(msgspec.to_builtins(stored))


class _Run(msgspec.Struct):
    events: dict[str, int]
    losses: Annotated[list[float], msgspec.Meta(min_length=NUM_LOSSES, max_length=NUM_LOSSES)]


class _Baseline(msgspec.Struct):
    torch: str
    runs: dict[str, _Run]
    imports: dict[str, list[str]]


def measure(names: Sequence[str] = tuple(RUNS)) -> tuple[dict[str, Any], dict[str, str]]:
    """The baseline as it is now, and for each run that was left out the reason."""
    import torch

    from esper.runtime.data import MissingDataError
    from esper.scripts.process import use_one_core

    use_one_core()
    runs, missing = {}, {}
    for name in names:
        try:
            runs[name] = measure_run(RUNS[name])
        except MissingDataError as error:
            missing[name] = str(error).splitlines()[0]
    build = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": build, "runs": runs, "imports": import_graph(), "source": source_counts()}, missing


def measure_run(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Number of events by type (lines of the log and rows of tables), first losses, and speed."""
    from esper.nissa import RunDirectory
    from esper.simic.training.vectorized import train_ppo_vectorized

    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "run"
        start = time.perf_counter()
        _, history = train_ppo_vectorized(**fields, telemetry_dir=str(directory))
        seconds = time.perf_counter() - start
        run = RunDirectory.open(directory)
        counts = Counter(event["event_type"] for event in run.events())
        for table, kind in (
            ("steps", "last_action"),
            ("rewards", "reward_summary"),
            ("throughput", "throughput"),
        ):
            counts[kind] += run.table(table).num_rows
    steps = sum(sum(summary.action_counts.values()) for summary in history)
    return {
        "events": dict(sorted(counts.items())),
        "losses": first_losses(fields),
        "env_steps_per_second": steps / seconds,
    }


def first_losses(fields: Mapping[str, Any]) -> list[float]:
    """Mean training loss over the envs in each of the first steps, without growth."""
    from esper.nissa import TelemetryHub
    from esper.runtime.tasks import get_task_spec
    from esper.simic.training.batch_ops import process_train_batch
    from esper.simic.training.config import TrainingConfig
    from esper.simic.training.vectorized import build_env, build_rewards, resolve_task

    config = TrainingConfig(**fields)
    task = resolve_task(config, get_task_spec(config.tasks[0]))
    env = build_env(config, task, TelemetryHub(), ["cpu"], build_rewards(config, task, first_env=0))
    env.begin_round(0)
    losses: list[float] = []
    while len(losses) < NUM_LOSSES:
        for (batch,) in env.train:
            (group,) = env.groups
            before = group.loss_sum.clone()
            process_train_batch(group, batch.x, batch.y, env.criterion)
            losses.append((group.loss_sum - before)[: config.envs].mean().item())
    return losses[:NUM_LOSSES]


def import_graph() -> dict[str, list[str]]:
    """For each package of esper, the other packages that its source imports."""
    root = Path(esper.__file__).parent
    graph: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        package = parts[0] if len(parts) > 1 else "esper"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            targets = {name.split(".")[1] for name in names if name.startswith("esper.")}
            graph.setdefault(package, set()).update(targets - {package})
    return {package: sorted(targets) for package, targets in sorted(graph.items())}


def source_counts() -> dict[str, int]:
    """Number of modules, of lint exceptions and, in a checkout, of test functions."""
    root = Path(esper.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in root.rglob("*.py")]
    tests = [path.read_text(encoding="utf-8") for path in (root.parents[1] / "tests").rglob("test_*.py")]
    return {
        "modules": len(sources),
        "noqa": sum(text.count("# noqa") for text in sources),
        "test_functions": sum(
            isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            for text in tests
            for node in ast.walk(ast.parse(text))
        ),
    }


def compare(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences that must not be. Speed and source counts are for information, and the import graph may
    lose edges."""
    differences = []
    same_torch = stored["torch"] == now["torch"]
    for name, new_run in now["runs"].items():
        old_run = stored["runs"][name]
        old_events, new_events = old_run["events"], new_run["events"]
        kinds = old_events.keys() | new_events.keys() if same_torch else FREE_OF_LIFECYCLE
        for kind in sorted(kinds):
            old_count, new_count = old_events.get(kind, 0), new_events.get(kind, 0)
            if old_count != new_count:
                differences.append(f"{name}: {old_count} {kind} events, now {new_count}")
        limit = LAST_DIGITS if same_torch else LOSS_TOLERANCE
        for step, (old, new) in enumerate(zip(old_run["losses"], new_run["losses"], strict=True)):
            if abs(old - new) > limit:
                differences.append(f"{name}: loss of step {step} was {old}, now {new}")
    for package, targets in now["imports"].items():
        added = sorted(set(targets) - set(stored["imports"].get(package, [])))
        if added:
            differences.append(f"{package} imports {', '.join(added)}, which it did not")
    return differences


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            {"capture": capture, "check": check},
            prog="esper baseline",
            description="Capture the results of short runs, and check later that they are still the same.",
            args=import_modules(without_escapes(arguments)),
        )
    except EsperError as error:
        return fail(error)
    assert isinstance(code, int)
    return code


if __name__ == "__main__":
    sys.exit(main())
