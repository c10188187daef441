"""Schedules: plans of which blueprint grows in which slot at which epoch, and the files that keep them.

A file holds the best schedule of a search for one task. If the task draws crippled blocks, it also holds one
schedule for each pattern of crippled blocks. A schedule for a family of worlds names no slots and no epochs,
which differ from world to world, but places and shares of the episode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import orjson
from msgspec import Meta

from esper._files import decode_file, write_atomic
from esper.leyline import EsperError, GerminationStyle, StructureError, TempoAction, allowed
from esper.tamiyo.scripted import Planting

Schedule = tuple[Planting, ...]
Pattern = tuple[bool, ...]
"""One mark for each block of the host: True where it is crippled."""
VERSION = 2
"""Of the file. Plantings of version 1 have no tempo; they were made at the fastest ramp."""


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


# -- files ---------------------------------------------------------------------------------------------------

Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class _StoredPlanting:
    epoch: Annotated[int, Meta(ge=1)]
    slot: str
    blueprint: str
    style: str
    tempo: str = TempoAction.FAST.name


@dataclass(frozen=True, slots=True)
class _StoredResult:
    schedule: list[_StoredPlanting]
    objective: float
    gain: float
    seeds: Count
    """The field is called so in files: the number of networks."""
    env_steps: Count


@dataclass(frozen=True, slots=True)
class _StoredSchedules:
    kind: Literal["esper-schedule-2"]
    task: str
    command: str
    root_seed: int
    candidates: Count
    best: _StoredResult
    by_pattern: dict[Annotated[str, Meta(pattern="^[01]+$")], _StoredResult]
    version: Annotated[int, Meta(ge=1)] = 1


def save_schedules(path: str | Path, schedules: Schedules, slots: Sequence[str], command: str) -> None:
    """Write JSON, with slots by name and the command that produced it. `slots` are those of the task."""

    def stored(result: ScheduleResult) -> _StoredResult:
        plantings = [
            _StoredPlanting(p.epoch, slots[p.slot], p.blueprint, p.style.name, p.tempo.name)
            for p in result.schedule
        ]
        return _StoredResult(
            plantings, result.objective, result.gain, seeds=result.networks, env_steps=result.env_steps
        )

    content = _StoredSchedules(
        kind="esper-schedule-2",
        task=schedules.task,
        command=command,
        root_seed=schedules.root_seed,
        candidates=schedules.candidates,
        best=stored(schedules.best),
        by_pattern={marks(pattern): stored(result) for pattern, result in schedules.by_pattern.items()},
        version=VERSION,
    )
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    write_atomic(Path(path), orjson.dumps(asdict(content), option=options))


def load_schedules(
    path: str | Path, task: str, *, slots: Sequence[str], blueprints: Sequence[str]
) -> Schedules:
    """Read what `save_schedules` wrote. A file for another task, slot or blueprint is refused."""
    content = decode_file(_StoredSchedules, Path(path), version=VERSION)
    if content.task != task:
        raise EsperError(f"{path}: these schedules are for task {content.task!r}, not for {task!r}")

    def read(result: _StoredResult, place: str) -> ScheduleResult:
        for number, planting in enumerate(result.schedule):
            for name, known in (
                ("slot", slots),
                ("blueprint", blueprints),
                ("style", GerminationStyle.__members__),
                ("tempo", TempoAction.__members__),
            ):
                value = getattr(planting, name)
                if value not in known:
                    raise StructureError(
                        f"{path}: {place}.schedule[{number}].{name} is {value!r}, for task {task!r}; "
                        f"{allowed(known)}"
                    )
        return ScheduleResult(
            schedule=tuple(
                Planting(
                    p.epoch,
                    slots.index(p.slot),
                    p.blueprint,
                    GerminationStyle[p.style],
                    TempoAction[p.tempo],
                )
                for p in result.schedule
            ),
            objective=result.objective,
            gain=result.gain,
            networks=result.seeds,
            env_steps=result.env_steps,
        )

    return Schedules(
        task=task,
        root_seed=content.root_seed,
        candidates=content.candidates,
        best=read(content.best, "best"),
        by_pattern={
            tuple(mark == "1" for mark in key): read(result, f"by_pattern.{key}")
            for key, result in content.by_pattern.items()
        },
    )


# -- schedules for a family of worlds ------------------------------------------------------------------------

FAMILY_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativePlanting:
    """One entry of a schedule for all worlds of a family."""

    place: Annotated[int, Meta(ge=1)]
    """Of the slot among those of the task, in the order in which activations pass them, from 1."""
    share: Annotated[float, Meta(ge=0.0, le=1.0)]
    """Of the episode that is over when the seed is planted."""
    blueprint: str
    style: str = GerminationStyle.SIGMOID_ADD.name
    tempo: str = TempoAction.INSTANT.name


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySchedule:
    """The file of a schedule for all worlds of a family."""

    kind: Literal["esper-family-schedule"]
    family: str
    command: str
    schedule: list[RelativePlanting]
    version: Annotated[int, Meta(ge=1)] = 1


def load_family_schedule(path: str | Path, family: str) -> FamilySchedule:
    """A schedule for another family is refused."""
    content = decode_file(FamilySchedule, Path(path), version=FAMILY_VERSION)
    if content.family != family:
        raise EsperError(f"{path}: this schedule is for the family {content.family!r}, not for {family!r}")
    for number, planting in enumerate(content.schedule):
        for name, known in (("style", GerminationStyle.__members__), ("tempo", TempoAction.__members__)):
            value = getattr(planting, name)
            if value not in known:
                raise StructureError(f"{path}: schedule[{number}].{name} is {value!r}; {allowed(known)}")
    return content


def in_world(
    schedule: Sequence[RelativePlanting],
    *,
    slots: Sequence[str],
    order: Sequence[str],
    blueprints: Sequence[str],
    epochs: int,
) -> Schedule:
    """The schedule for one world with these slots, in the order of its task and in that of execution."""
    plantings = []
    for entry in schedule:
        if entry.place > len(order) or entry.blueprint not in blueprints:
            raise EsperError(
                f"schedule: {entry.blueprint!r} at place {entry.place} is not possible; allowed: places 1 to "
                f"{len(order)}, blueprints {', '.join(blueprints)}"
            )
        plantings.append(
            Planting(
                max(1, math.ceil(entry.share * epochs - 1e-9)),
                slots.index(order[entry.place - 1]),
                entry.blueprint,
                GerminationStyle[entry.style],
                TempoAction[entry.tempo],
            )
        )
    return tuple(plantings)
