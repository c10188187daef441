"""Policies that are compared: a learned one without exploration, and those that do not learn, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from esper._files import write_atomic
from esper.leyline import ActionMasks, EsperError, PolicyObservation, PolicyStep, TelemetryEventType
from esper.nissa import RunDirectory
from esper.proof.episodes import Maker
from esper.runtime.tasks import TaskSpec
from esper.tamiyo import AlwaysWait, FixedSchedule, Planting, RandomValid, RecurrentPolicy
from esper.tamiyo.heuristic import Heuristic
from esper.tamiyo.network import Hidden
from esper.tamiyo.policy import action_uniforms, map_tensors
from esper.tamiyo.rules import Periodic, Plateau
from esper.tamiyo.shipped import SHIPPED, WEIGHTS, load_policy, newest_checkpoint, tuned_thresholds


def ship_policy(run_directory: str | Path, name: str, directory: str | Path = SHIPPED) -> Path:
    """Write the policy of a run's newest checkpoint under a name, and its origin beside it. No directory of
    this machine is named there: the run's is called runs/NAME."""
    run, path = RunDirectory.open(Path(run_directory)), Path(directory) / f"{name}{WEIGHTS}"
    checkpoint = newest_checkpoint(run_directory)
    load_policy(checkpoint).save(path)
    git, (program, *arguments) = run.info["git"] or {}, run.info["command"]
    place, ours = str(run.config["telemetry_dir"]), f"runs/{name}"
    if Path(program).name == "train.py":  # as the ranks of a launcher are started
        arguments = ["train", *arguments]
    origin = {
        "command": ["esper", *(word.replace(place, ours) for word in arguments)],
        "seed": run.config["seed"],
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "checkpoint": checkpoint.name,
        "versions": run.info["versions"],
        "config": run.config | {"telemetry_dir": ours},
        "curve": learning_curve(run),
    }
    write_atomic(
        path.with_suffix(".json"),
        orjson.dumps(origin, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE),
    )
    return path


def learning_curve(run: RunDirectory) -> list[dict[str, float | None]]:
    """Each round of a run: env-steps so far, mean J, J of the best plans above growing nothing (None without
    action values), and seconds."""
    names = {"env_steps": "env_steps", "J": "avg_objective", "plan_gain": "plan_gain", "seconds": "seconds"}
    return [
        {name: event["data"][field] for name, field in names.items()}
        for event in run.events()
        if event["event_type"] == TelemetryEventType.BATCH_COMPLETED
    ]


Sight = Callable[[PolicyObservation], PolicyObservation]
"""Changes what a policy observes."""


def unchanged(obs: PolicyObservation) -> PolicyObservation:
    return obs


class Acting:
    """A learned policy without exploration. It takes the most likely actions, or samples them with each
    network's own random numbers."""

    def __init__(
        self,
        policy: RecurrentPolicy,
        networks: Sequence[int],
        steps: int,
        *,
        root_seed: int,
        sample: bool = False,
        shuffled: bool = False,
        see: Sight = unchanged,
    ) -> None:
        """`shuffled` gives each network the observations of its neighbour throughout the episode; its masks
        stay its own. `see` changes the observations."""
        if shuffled and len(networks) < 2:
            raise EsperError("observations of a single network cannot be shuffled; play two or more together")
        self.policy, self.sample, self.shuffled, self.see = policy, sample, shuffled, see
        self._uniforms = action_uniforms(root_seed, 0, networks, steps)
        self._epoch = 0

    def initial_hidden(self, num_envs: int) -> Hidden:
        return self.policy.initial_hidden(num_envs)

    def begin(self, num_envs: int) -> None:
        if num_envs != len(self._uniforms):
            raise EsperError(f"{num_envs} envs, this policy was made for {len(self._uniforms)}")
        self._epoch = 0

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch = state["epoch"]

    def act(
        self,
        obs: PolicyObservation,
        hidden: Hidden | None,
        masks: ActionMasks,
        *,
        deterministic: bool = False,
    ) -> PolicyStep:
        observed = map_tensors(obs, lambda t: t.roll(1, 0)) if self.shuffled else obs
        self._epoch += 1
        return self.policy.act(
            self.see(observed),
            hidden,
            masks,
            deterministic=deterministic or not self.sample,
            uniforms=self._uniforms[:, self._epoch - 1],
        )


def simple_makers(task: TaskSpec, root_seed: int) -> dict[str, Maker]:
    """Policies that do not learn, by name."""
    thresholds = tuned_thresholds(task.name)
    return {
        "static": lambda networks: AlwaysWait(),  # noqa: ARG005
        "random": lambda networks: RandomValid(root_seed, networks),
        "heuristic": lambda networks: Heuristic(thresholds, len(networks)),
    }


def rule_makers(task: TaskSpec) -> dict[str, Maker]:
    """Rules of thumb about when to grow, by name. They plant the first blueprint of the task, last slot
    first."""
    offered = task.blueprints
    return {
        "periodic": lambda networks: Periodic(len(networks), blueprints=offered),
        "plateau": lambda networks: Plateau(len(networks), blueprints=offered),
    }


def last_slot_first(task: TaskSpec) -> Maker:
    """Plants the first blueprint of the task in every slot, one per epoch from the first on, last slot
    first."""
    order = [slot for slot in task.outline.execution_order() if slot in task.slots]
    schedule = tuple(
        Planting(1 + i, task.slots.index(slot), task.blueprints[0], tempo=task.tempo)
        for i, slot in enumerate(reversed(order))
    )
    return lambda networks: FixedSchedule([schedule] * len(networks))
