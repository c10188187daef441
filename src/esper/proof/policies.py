"""Policies and schedules by name or file. What ships with the package lies in `esper/policies`: weights, and
beside them a JSON file with the command, settings, seed and commit that made them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson

import esper
from esper._archive import read_archive
from esper._files import write_atomic
from esper.leyline import ActionMasks, EsperError, PolicyObservation, PolicyStep, allowed
from esper.nissa import RunDirectory
from esper.proof.episodes import Maker
from esper.runtime.tasks import TaskSpec
from esper.simic.training.checkpoint import find_checkpoint
from esper.tamiyo import AlwaysWait, RandomValid, RecurrentPolicy
from esper.tamiyo.features import schema
from esper.tamiyo.heuristic import Heuristic, HeuristicConfig
from esper.tamiyo.network import Hidden
from esper.tamiyo.policy import action_uniforms, map_tensors

SHIPPED = Path(esper.__file__).parent / "policies"
WEIGHTS, SCHEDULE, THRESHOLDS = ".safetensors", ".schedule.json", ".heuristic.json"


def shipped_policies() -> list[str]:
    return sorted(path.name.removesuffix(WEIGHTS) for path in SHIPPED.glob(f"*{WEIGHTS}"))


def shipped_schedules(task: TaskSpec) -> Path:
    """The file of the schedules that were found for a task; it may not be there."""
    return SHIPPED / f"{task.name}{SCHEDULE}"


def load_policy(name_or_path: str | Path) -> RecurrentPolicy:
    """A policy that ships, by name; one in a file: its own, or a checkpoint in a run's `checkpoints`; or a
    run's newest."""
    path = Path(name_or_path)
    if str(name_or_path) in shipped_policies():
        path = SHIPPED / f"{name_or_path}{WEIGHTS}"
    elif path.is_dir():
        path = find_checkpoint("auto", path)
    elif not path.is_file():
        raise EsperError(
            f"policy {str(name_or_path)!r} is neither a file nor one that ships; "
            + allowed([*shipped_policies(), "a run's directory", "the path of a policy or checkpoint"])
        )
    if path.absolute().parent.name != "checkpoints":
        return RecurrentPolicy.load(path, feature_schema=schema())
    tensors, meta = read_archive(path, kind="run")
    if meta["agent"] is None:
        raise EsperError(f"{path}: this run's policy did not learn, there is none to load")
    prefix = "agent.network."
    return RecurrentPolicy.rebuild(
        {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)},
        meta["agent"]["schema"],
        origin=path,
        feature_schema=schema(),
    )


def ship_policy(run_directory: str | Path, name: str, directory: str | Path = SHIPPED) -> Path:
    """Write the policy of a run's newest checkpoint, and where it came from, under a name."""
    run, path = RunDirectory.open(Path(run_directory)), Path(directory) / f"{name}{WEIGHTS}"
    checkpoint = find_checkpoint("auto", Path(run_directory))
    load_policy(checkpoint).save(path)
    git = run.info["git"] or {}
    origin = {
        "command": run.info["command"],
        "seed": run.config["seed"],
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "checkpoint": checkpoint.name,
        "versions": run.info["versions"],
        "config": run.config,
    }
    write_atomic(
        path.with_suffix(".json"),
        orjson.dumps(origin, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE),
    )
    return path


class Acting:
    """A learned policy without exploration: its most likely actions, or sampled ones, with each seed's own
    numbers."""

    def __init__(
        self,
        policy: RecurrentPolicy,
        envs: Sequence[int],
        steps: int,
        *,
        root_seed: int,
        sample: bool = False,
        shuffled: bool = False,
    ) -> None:
        """`shuffled` shows each env what its neighbour should see, all through the episode; its masks stay
        its own."""
        if shuffled and len(envs) < 2:
            raise EsperError("observations of a single env cannot be shuffled; play two or more side by side")
        self.policy, self.sample, self.shuffled, self._epoch = policy, sample, shuffled, 0
        self._uniforms = action_uniforms(root_seed, 0, envs, steps)

    def initial_hidden(self, num_envs: int) -> Hidden:
        return self.policy.initial_hidden(num_envs)

    def act(
        self,
        obs: PolicyObservation,
        hidden: Hidden | None,
        masks: ActionMasks,
        *,
        deterministic: bool = False,
    ) -> PolicyStep:
        shown = map_tensors(obs, lambda t: t.roll(1, 0)) if self.shuffled else obs
        self._epoch += 1
        return self.policy.act(
            shown,
            hidden,
            masks,
            deterministic=deterministic or not self.sample,
            uniforms=self._uniforms[:, self._epoch - 1],
        )


def simple_makers(task: TaskSpec, root_seed: int) -> dict[str, Maker]:
    """Policies that do not learn, by name."""
    thresholds = tuned_thresholds(task.name)
    return {
        "static": lambda envs: AlwaysWait(),  # noqa: ARG005
        "random": lambda envs: RandomValid(root_seed, envs),
        "heuristic": lambda envs: Heuristic(thresholds, len(envs)),
    }


def tuned_thresholds(task_name: str) -> HeuristicConfig:
    """The heuristic's thresholds that ship for a task, else the defaults."""
    path = SHIPPED / f"{task_name}{THRESHOLDS}"
    if not path.is_file():
        return HeuristicConfig()
    stored = orjson.loads(path.read_bytes())["config"]
    return HeuristicConfig(**stored | {"blueprints": tuple(stored["blueprints"])})
