"""The best fixed schedule, found by successive halving within a budget of env-steps: what a policy that looks must beat.

A schedule plants one to three seeds, each a blueprint in a slot, in successive epochs; not to grow is one more. Schedules are
compared by what they gain over not growing on the same seeds, so that different schedules can meet different seeds. Where a
task draws crippled blocks, every pattern of them counts by its probability, and each has a best schedule of its own.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count, islice, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import orjson
import torch

from esper.leyline import ActionMasks, EsperError, PolicyObservation, PolicyStep, allowed, check_number, stream_seed
from esper.leyline.files import write_atomic
from esper.runtime.tasks import TaskSpec, draw_condition
from esper.simic.proof.play import TRAINING, play
from esper.tamiyo import FixedSchedule, Planting
from esper.tamiyo.policy import map_tensors
from esper.tamiyo.scripted import Memoryless, as_step

Schedule = tuple[Planting, ...]
Pattern = tuple[bool, ...]
Track = Callable[[str, int], Callable[[int], None]]
"""(what, its env-steps) → a function that hears of env-steps as they are done."""
KIND, KEEP = "esper-schedule-1", 4
"""One of so many schedules stays in after each rung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The winner of one search."""

    schedule: Schedule
    objective: float
    """Mean J on the seeds that it met."""
    gain: float
    """Mean J over that of not growing, patterns weighted."""
    seeds: int
    env_steps: int
    """Of the whole search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedules:
    """What was found for a task: one schedule for all networks, and one for each pattern of crippled blocks."""

    task: str
    root_seed: int
    candidates: int
    best: Found
    by_pattern: dict[Pattern, Found]


class PerEnv(Memoryless):
    """A schedule of its own for every env."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self._policies = [FixedSchedule(schedule, 1) for schedule in schedules]

    def act(self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False) -> PolicyStep:  # noqa: ARG002
        parts = [policy.act(obs, None, map_tensors(masks, lambda m, i=i: m[i:i + 1]))  # type: ignore[misc]
                 for i, policy in enumerate(self._policies)]
        return as_step(torch.cat([part.actions for part in parts]))


def patterns(task: TaskSpec) -> dict[Pattern, float]:
    """The patterns of crippled blocks that a task can draw, with their probabilities; none where it draws none."""
    if task.conditions is None or not task.conditions.cripple_probability:
        return {}
    chance = task.conditions.cripple_probability
    blocks = len(draw_condition(task, TRAINING, 0, 0).crippled)
    found = {pattern: math.prod(chance if mark else 1 - chance for mark in pattern)
             for pattern in product((False, True), repeat=blocks)}
    return {pattern: probability for pattern, probability in found.items() if probability}


def draw_schedules(task: TaskSpec, size: int, root_seed: int) -> list[Schedule]:
    """Not to grow, and `size` different schedules: half of them start at once, the others any time until it is too late."""
    rng = np.random.default_rng(stream_seed(root_seed, "sampling"))
    needs = task.pacing.min_training_epochs + task.pacing.min_blending_epochs + 6
    latest = max(1, task.episode_length - needs)
    found: dict[Schedule, None] = {(): None}
    for _ in range(100 * size):
        if len(found) > size:
            return sorted(found, key=lambda s: ([(p.slot, p.blueprint) for p in s], s[0].epoch if s else 0))
        seeds = int(rng.integers(1, min(3, len(task.slots)) + 1))
        start = 1 if rng.random() < 0.5 else int(rng.integers(1, latest + 1))
        slots = sorted(rng.choice(len(task.slots), seeds, replace=False).tolist())
        found[tuple(Planting(start + i, slot, task.blueprints[rng.integers(len(task.blueprints))])
                    for i, slot in enumerate(slots))] = None
    raise EsperError(f"task {task.name!r} has hardly {len(found)} different schedules, {size} are wanted; ask for fewer")


def search_schedules(task: TaskSpec, budget_env_steps: int, *, candidates: int = 208, root_seed: int = TRAINING,
                     population: int | None = None, track: Track = lambda _what, _steps: lambda _: None) -> Schedules:
    """The best schedule within the budget; and within as much again, shared evenly, the best for each pattern."""
    check_number("search", "candidates", candidates, low=1, integer=True)
    plans, chances = draw_schedules(task, candidates, root_seed), patterns(task)
    best = halve(task, plans, budget_env_steps, chances, root_seed, population, track("search", budget_env_steps))
    share = budget_env_steps // max(len(chances), 1)
    by_pattern = {pattern: halve(task, plans, share, {pattern: 1.0}, root_seed, population,
                                 track(f"search {marks(pattern)}", share)) for pattern in chances}
    return Schedules(task=task.name, root_seed=root_seed, candidates=len(plans), best=best, by_pattern=by_pattern)


def halve(task: TaskSpec, plans: Sequence[Schedule], budget: int, chances: Mapping[Pattern, float], root_seed: int,
          population: int | None, advance: Callable[[int], None]) -> Found:
    """Successive halving: in each rung the plans that are left meet more seeds, and a quarter of them stay."""
    size, rungs = population or task.population, max(1, math.ceil(math.log(len(plans), KEEP)))
    per_rung = budget // rungs // task.episode_length  # episodes
    seeds, used = training_seeds(task, chances, root_seed), 0
    values: dict[Schedule, dict[int, float]] = {plan: {} for plan in plans}
    alive = list(plans)
    for rung in range(rungs):
        # Each plan meets `each` seeds; not growing meets all of the rung's, for the others are measured against it.
        each = (per_rung - size) // len(alive) if per_rung < size * (len(alive) + 1) else per_rung // (len(alive) + 1)
        if each < 1:
            raise EsperError(f"search: {budget} env-steps are few for {len(plans)} schedules of {task.episode_length} epochs; "
                             f"allowed: {rungs * task.episode_length * (len(plans) + size)} or more")
        side_by_side = max(1, size // each)
        met = list(islice(seeds, each * side_by_side))
        for at in range(0, len(alive), side_by_side):
            plan_of = {seed: plan for i, plan in enumerate(alive[at:at + side_by_side]) if plan
                       for seed in met[each * i:each * (i + 1)]}
            used += _play(task, plan_of, values, root_seed, size, advance)
        used += _play(task, dict.fromkeys(met, ()), values, root_seed, size, advance)
        gains = {plan: _gain(task, values[plan], values[()], chances, root_seed) for plan in alive}
        alive.sort(key=lambda plan: -gains[plan])
        alive = sorted(alive[:1 if rung == rungs - 1 else -(-len(alive) // KEEP)], key=plans.index)
    winner = alive[0]
    return Found(schedule=winner, objective=fmean(values[winner].values()), gain=gains[winner], seeds=len(values[winner]),
                 env_steps=used)


def _play(task: TaskSpec, plan_of: Mapping[int, Schedule], values: dict[Schedule, dict[int, float]], root_seed: int, size: int,
          advance: Callable[[int], None]) -> int:
    """Let each seed follow its plan, note its J, and return the env-steps that it took."""
    for played in play(task, lambda envs: PerEnv([plan_of[env] for env in envs]), root_seed=root_seed, seeds=list(plan_of),
                       population=size, advance=advance):
        values[plan_of[played.seed]][played.seed] = played.outcome.objective
    return len(plan_of) * task.episode_length


def _gain(task: TaskSpec, values: Mapping[int, float], static: Mapping[int, float], chances: Mapping[Pattern, float],
          root_seed: int) -> float:
    """Mean gain over not growing; where patterns are drawn, the mean of each by its probability."""
    gains: dict[Pattern, list[float]] = {}
    for seed, value in values.items():
        pattern = draw_condition(task, root_seed, 0, seed).crippled if chances else ()
        gains.setdefault(pattern, []).append(value - static[seed])
    weight = {pattern: chances.get(pattern, 1.0) for pattern in gains}
    return sum(weight[p] * fmean(found) for p, found in gains.items()) / sum(weight.values())


def training_seeds(task: TaskSpec, chances: Mapping[Pattern, float], root_seed: int) -> Iterator[int]:
    """Seeds without end; where patterns are drawn, one of each in turn."""
    if not chances:
        return count()
    return chain.from_iterable(zip(*(_with_pattern(task, pattern, root_seed) for pattern in chances), strict=True))


def _with_pattern(task: TaskSpec, pattern: Pattern, root_seed: int) -> Iterator[int]:
    return (seed for seed in count() if draw_condition(task, root_seed, 0, seed).crippled == pattern)


# -- files -------------------------------------------------------------------------------------------------------------------


def marks(pattern: Pattern) -> str:
    """One digit for each block: 1 where it is crippled."""
    return "".join("01"[mark] for mark in pattern)


def save_schedules(path: str | Path, found: Schedules, task: TaskSpec, command: str) -> None:
    """JSON, with slots by name and the command that made it."""
    def plain(one: Found) -> dict[str, Any]:
        return asdict(one) | {"schedule": [{"epoch": p.epoch, "slot": task.slots[p.slot], "blueprint": p.blueprint}
                                           for p in one.schedule]}

    content = {"kind": KIND, "task": found.task, "command": command, "root_seed": found.root_seed, "candidates": found.candidates,
               "best": plain(found.best), "by_pattern": {marks(p): plain(one) for p, one in found.by_pattern.items()}}
    write_atomic(Path(path), orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def load_schedules(path: str | Path, task: TaskSpec) -> Schedules:
    """What `save_schedules` wrote; a file for another task is refused."""
    def read(one: dict[str, Any]) -> Found:
        for entry in one["schedule"]:
            if entry["slot"] not in task.slots or entry["blueprint"] not in task.blueprints:
                raise EsperError(f"{path}: {entry} does not fit task {task.name!r}; {allowed((*task.slots, *task.blueprints))}")
        return Found(**one | {"schedule": tuple(Planting(e["epoch"], task.slots.index(e["slot"]), e["blueprint"])
                                                for e in one["schedule"])})

    try:
        content = orjson.loads(Path(path).read_bytes())
        if content["kind"] != KIND:
            raise EsperError(f"{path}: kind is {content['kind']!r}; {allowed([KIND])}")
        if content["task"] != task.name:
            raise EsperError(f"{path}: these schedules are for task {content['task']!r}, not for {task.name!r}")
        return Schedules(task=task.name, root_seed=content["root_seed"], candidates=content["candidates"],
                         best=read(content["best"]),
                         by_pattern={tuple(mark == "1" for mark in key): read(one) for key, one in content["by_pattern"].items()})
    except OSError as error:
        raise EsperError(f"cannot read the schedules in {path}: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise EsperError(f"{path} does not hold schedules: {error}") from error
