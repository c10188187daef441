"""`esper baseline`: capture what a short run does, and check later that it still does it."""

from __future__ import annotations

import ast
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import torch
import tyro

import esper
from esper._files import write_atomic
from esper.leyline import EsperError
from esper.nissa import RunDirectory, TelemetryHub
from esper.runtime.data import MissingDataError
from esper.runtime.tasks import get_task_spec
from esper.simic.rewards import RewardEngine
from esper.simic.training.batch_ops import process_train_batch
from esper.simic.training.config import TrainingConfig
from esper.simic.training.vectorized import build_env, resolve_task, train_ppo_vectorized

RUNS: Mapping[str, dict[str, Any]] = {
    "digits_baseline": {"task": "digits_baseline", "rounds": 2, "envs": 2, "episode_length": 5},
    "cifar_baseline": {"task": "cifar_baseline", "rounds": 1, "envs": 1, "episode_length": 5},
}
"""The second is the short run `esper train ppo --preset cifar_baseline --rounds 1 --envs 1 --episode-length
5`."""
NUM_LOSSES, LOSS_TOLERANCE, LAST_DIGITS = 20, 1e-3, 1e-6
"""Processors of one kind may still differ in the last digits of a sum."""
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
"""Counts that do not depend on what the policy does, and so on no rounding."""


def capture(out: Annotated[Path, tyro.conf.Positional]) -> None:
    """Write the baseline of this checkout to a JSON file. Runs whose data is missing are left out, and said
    to be.

    Args:
        out: The file to write.
    """
    found, missing = measure()
    try:
        write_atomic(out, orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise EsperError(f"cannot write {out}: {error.strerror}") from error
    print(
        f"captured {', '.join(found['runs'])} to {out}"
        + "".join(f"\nleft out {name}: {why}" for name, why in missing.items())
    )


def check(file: Annotated[Path, tyro.conf.Positional]) -> None:
    """Measure again and compare: all equal on the same torch, elsewhere what does not depend on rounding.

    Args:
        file: What `capture` wrote.
    """
    try:
        stored = orjson.loads(file.read_bytes())
        names = list(stored["runs"])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise EsperError(f"{file} is no baseline: {error}") from error
    found, missing = measure(names)
    differences = compare(stored, found)
    for name, why in missing.items():
        print(f"not checked: {name}: {why}")
    if differences:
        raise EsperError("\n".join([f"{len(differences)} differences to {file}", *differences]))
    print(f"{', '.join(found['runs'])}: as in {file}")


def measure(names: Sequence[str] = tuple(RUNS)) -> tuple[dict[str, Any], dict[str, str]]:
    """The baseline as it is now, and why runs are left out."""
    runs, missing = {}, {}
    for name in names:
        if name not in RUNS:
            raise EsperError(f"baseline run {name!r} is unknown; allowed: {', '.join(RUNS)}")
        try:
            runs[name] = measure_run(RUNS[name])
        except MissingDataError as error:
            missing[name] = str(error).splitlines()[0]
    built = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": built, "runs": runs, "imports": import_graph(), "source": source_counts()}, missing


def measure_run(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Events by type (lines of the log and rows of tables), first losses, and how fast it was."""
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
    """Mean training loss over the envs in each of the first steps, without any growth."""
    config = TrainingConfig(**fields)
    task = resolve_task(config, get_task_spec(config.task))
    rewards = RewardEngine(config.reward, task.objective, gamma=config.ppo.gamma, num_envs=config.envs)
    env = build_env(config, task, TelemetryHub(), ["cpu"], rewards)
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
    """Which packages of esper each package imports, from the source."""
    root = Path(esper.__file__).parent
    graph: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        package = parts[0] if len(parts) > 1 else "esper"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
            )
            targets = {name.split(".")[1] for name in names if name.startswith("esper.")}
            graph.setdefault(package, set()).update(targets - {package})
    return {package: sorted(targets) for package, targets in sorted(graph.items())}


def source_counts() -> dict[str, int]:
    """Modules, lint exceptions, and, where the tests are at hand, test functions."""
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


def compare(stored: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What differs and should not. Speed and source counts are information, and the import graph may lose
    edges."""
    differences = []
    same_torch = stored["torch"] == found["torch"]
    for name, now in found["runs"].items():
        was = stored["runs"][name]
        kinds = was["events"].keys() | now["events"].keys() if same_torch else FREE_OF_LIFECYCLE
        differences += [
            f"{name}: {was['events'].get(kind, 0)} {kind} events, now {now['events'].get(kind, 0)}"
            for kind in sorted(kinds)
            if was["events"].get(kind, 0) != now["events"].get(kind, 0)
        ]
        limit = LAST_DIGITS if same_torch else LOSS_TOLERANCE
        differences += [
            f"{name}: loss of step {step} was {old}, now {new}"
            for step, (old, new) in enumerate(zip(was["losses"], now["losses"], strict=True))
            if abs(old - new) > limit
        ]
    for package, targets in found["imports"].items():
        if new := sorted(set(targets) - set(stored["imports"].get(package, []))):
            differences.append(f"{package} imports {', '.join(new)}, which it did not")
    return differences


def main(arguments: Sequence[str] | None = None) -> int:
    torch.set_num_threads(1)
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"capture": capture, "check": check}, prog="esper baseline", args=arguments
        )
    except EsperError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
