"""Schedules: plans of which blueprint grows in which slot at which epoch, and the files that keep them.

A file holds the best schedule of a search for one task. Where the task draws crippled blocks, it also holds one
schedule for each pattern of crippled blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from esper._files import write_atomic
from esper.leyline import EsperError, GerminationStyle, allowed
from esper.tamiyo.scripted import Planting

Schedule = tuple[Planting, ...]
Pattern = tuple[bool, ...]
"""One mark for each block of the host: True where it is crippled."""
KIND = "esper-schedule-2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleResult:
    """The winner of one search."""

    schedule: Schedule
    objective: float
    """Mean J on the networks that it was measured on."""
    gain: float
    """Mean J minus that of not growing, patterns weighted by their probability."""
    networks: int
    """Number of networks that it was measured on."""
    env_steps: int
    """Of the whole search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedules:
    """The schedules of a task: one for all networks, and one for each pattern of crippled blocks."""

    task: str
    root_seed: int
    candidates: int
    best: ScheduleResult
    by_pattern: dict[Pattern, ScheduleResult]


def marks(pattern: Pattern) -> str:
    """One digit for each block: 1 where it is crippled."""
    return "".join("1" if crippled else "0" for crippled in pattern)


def save_schedules(path: str | Path, schedules: Schedules, slots: Sequence[str], command: str) -> None:
    """Write JSON, with slots by name and the command that produced it. `slots` are those of the task."""

    def plain(result: ScheduleResult) -> dict[str, Any]:
        plantings = [
            {"epoch": p.epoch, "slot": slots[p.slot], "blueprint": p.blueprint, "style": p.style.name}
            for p in result.schedule
        ]
        return {
            "schedule": plantings,
            "objective": result.objective,
            "gain": result.gain,
            "seeds": result.networks,
            "env_steps": result.env_steps,
        }

    content = {
        "kind": KIND,
        "task": schedules.task,
        "command": command,
        "root_seed": schedules.root_seed,
        "candidates": schedules.candidates,
        "best": plain(schedules.best),
        "by_pattern": {marks(pattern): plain(result) for pattern, result in schedules.by_pattern.items()},
    }
    write_atomic(Path(path), orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def load_schedules(
    path: str | Path, task: str, *, slots: Sequence[str], blueprints: Sequence[str]
) -> Schedules:
    """Read what `save_schedules` wrote. A file for another task, slot or blueprint is refused."""

    def read(one: dict[str, Any]) -> ScheduleResult:
        for entry in one["schedule"]:
            for name, known in (
                ("slot", slots),
                ("blueprint", blueprints),
                ("style", GerminationStyle.__members__),
            ):
                if entry[name] not in known:
                    raise EsperError(
                        f"{path}: {name} is {entry[name]!r} in {entry}, for task {task!r}; {allowed(known)}"
                    )
        schedule = tuple(
            Planting(e["epoch"], slots.index(e["slot"]), e["blueprint"], GerminationStyle[e["style"]])
            for e in one["schedule"]
        )
        return ScheduleResult(
            schedule=schedule,
            objective=one["objective"],
            gain=one["gain"],
            networks=one["seeds"],
            env_steps=one["env_steps"],
        )

    try:
        content = orjson.loads(Path(path).read_bytes())
        if content["kind"] != KIND:
            raise EsperError(f"{path}: kind is {content['kind']!r}; {allowed([KIND])}")
        if content["task"] != task:
            raise EsperError(f"{path}: these schedules are for task {content['task']!r}, not for {task!r}")
        return Schedules(
            task=task,
            root_seed=content["root_seed"],
            candidates=content["candidates"],
            best=read(content["best"]),
            by_pattern={
                tuple(mark == "1" for mark in key): read(one) for key, one in content["by_pattern"].items()
            },
        )
    except OSError as error:
        raise EsperError(f"cannot read the schedules in {path}: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise EsperError(f"{path} does not hold schedules: {error}") from error
