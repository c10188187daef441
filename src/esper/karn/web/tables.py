"""Figures of the step tables of one round, and one network's episode, decision by decision."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from esper.leyline import OP_NAMES, LifecycleKind, LifecycleOp, SeedStage, TelemetryEventType
from esper.nissa.tables import read_file

Chart = dict[str, Any]
"""`x`, and `series` by name, for a chart over the epochs of a round."""


def reward_terms(path: Path) -> tuple[dict[str, float | None], Chart]:
    """Mean of each term per episode, and per step by epoch."""
    table = read_file(path, "rewards", ["env_id", "epoch", "components"])
    components = table["components"].combine_chunks()
    names = pc.unique(components.keys).to_pylist()
    amounts = {name: pc.map_lookup(components, pa.scalar(name), "first") for name in names}
    envs = max(len(pc.unique(table["env_id"])), 1)
    by_episode = {name: pc.divide(pc.sum(column), envs).as_py() for name, column in amounts.items()}
    return by_episode, _by_epoch(table["epoch"], amounts)


def _by_epoch(epochs: pa.ChunkedArray, columns: Mapping[str, pa.Array]) -> Chart:
    """Means by epoch over the rows that have a value."""
    keys = [f"value {i}" for i in range(len(columns))]  # a column may have any name, that of the epochs too
    table = pa.table([epochs, *columns.values()], ["epoch", *keys])
    means = table.group_by("epoch").aggregate([(key, "mean") for key in keys]).sort_by("epoch")
    series = {name: means[f"{key}_mean"].to_pylist() for name, key in zip(columns, keys, strict=True)}
    return {"x": means["epoch"].to_pylist(), "series": series}


def training_speed(path: Path) -> float | None:
    """Samples per second of all envs together."""
    table = read_file(path, "throughput", ["env_id", "samples_per_second"])
    means = table.group_by("env_id").aggregate([("samples_per_second", "mean")])
    return pc.sum(means["samples_per_second_mean"]).as_py()


@dataclass(frozen=True, slots=True)
class StepFigures:
    acts: Chart
    """Decisions other than WAIT by epoch."""
    course: Chart
    """Accuracy and loss by epoch, mean over envs."""
    refused: Counter[tuple[str, str]]
    """Decisions that were not carried out, by operation and reason."""


def step_figures(path: Path) -> StepFigures:
    table = read_file(path, "steps", ["epoch", "op", "executed", "veto", "gate_failures", "accuracy", "loss"])
    counts = table.group_by(["op", "epoch"]).aggregate([([], "count_all")]).to_pylist()
    acts = {(row["op"], row["epoch"]): row["count_all"] for row in counts}
    epochs = sorted({epoch for _, epoch in acts if epoch is not None})
    ops = [op for op in OP_NAMES if op != LifecycleOp.WAIT.name]
    failed = table.filter(pc.and_(pc.invert(table["executed"]), pc.is_in(table["op"], pa.array(ops))))
    refused = Counter(
        (row["op"], row["veto"] or ", ".join(row["gate_failures"] or ()) or "—")
        for row in failed.select(["op", "veto", "gate_failures"]).to_pylist()
    )
    finite = {name: _finite(table[name]) for name in ("accuracy", "loss")}
    series = {op: [acts.get((op, epoch), 0) for epoch in epochs] for op in ops}
    return StepFigures({"x": epochs, "series": series}, _by_epoch(table["epoch"], finite), refused)


def _finite(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.if_else(pc.is_finite(column), column, None)


def last_row(path: Path, name: str) -> dict[str, Any]:
    """The newest row of a table, without the observation, whose numbers have no names here."""
    table = read_file(path, name)
    rows = _rows(table.slice(max(len(table) - 1, 0)))
    return {name: value for name, value in rows[0].items() if name != "observation"} if rows else {}


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows in order of epochs: maps as dictionaries, the observation in the precision of its record."""
    maps = [field.name for field in table.schema if pa.types.is_map(field.type)]
    rows = sorted(table.to_pylist(), key=lambda row: row["epoch"] or 0)
    for row in rows:
        row |= {name: dict(row[name]) for name in maps if row[name] is not None}
        if row.get("observation") is not None:
            row["observation"] = np.array(row["observation"], np.float32)
    return rows


# -- one round, one episode ----------------------------------------------------------------------------------


def round_events(log: Path, span: tuple[int, int]) -> list[dict[str, Any]]:
    """The events of one round, which are consecutive bytes of the log."""
    begin, end = span
    with log.open("rb") as file:
        file.seek(begin)
        return [orjson.loads(line) for line in file.read(end - begin).splitlines()]


@dataclass(frozen=True, slots=True)
class Birth:
    epoch: int
    blueprint: str | None
    params: int | None


def read_round(steps: Path, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every network of a round: its outcome, and the life of each of its seeds."""
    table = read_file(steps, "steps", ["env_id", "epoch", "stages", "alphas", "contributions"])
    births, outcomes = _births(events), _outcomes(events)
    networks: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    epochs = 0
    for row in sorted(table.to_pylist(), key=lambda row: (row["env_id"], row["epoch"] or 0)):
        epochs = max(epochs, row["epoch"] or 0)
        network = networks[row["env_id"]]
        alphas, contributions = dict(row["alphas"] or ()), dict(row["contributions"] or ())
        for slot, stage in row["stages"] or ():
            _live(
                network[slot],
                births.get((row["env_id"], slot), ()),
                row["epoch"],
                SeedStage(stage).name,
                (alphas.get(slot), contributions.get(slot)),
            )
    return {
        "epochs": epochs,
        "envs": [
            {"env": env, "outcome": outcomes.get(env), "slots": slots} for env, slots in networks.items()
        ],
    }


def _live(
    bands: list[dict[str, Any]],
    births: Sequence[Birth],
    epoch: int,
    stage: str,
    values: tuple[float | None, float | None],
) -> None:
    """Extend the slot's last band of one stage of one seed by an epoch, or begin a new band."""
    birth = next((b for b in reversed(births) if b.epoch <= epoch), Birth(0, None, None))
    seed = {"stage": stage, "blueprint": birth.blueprint, "params": birth.params, "born": birth.epoch}
    if bands and bands[-1]["to"] == epoch - 1 and seed.items() <= bands[-1].items():
        bands[-1]["to"] = epoch
    else:
        bands.append({"from": epoch, "to": epoch, **seed, "alpha": [], "contribution": []})
    bands[-1]["alpha"].append(values[0])
    bands[-1]["contribution"].append(values[1])


def _births(events: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], list[Birth]]:
    births: dict[tuple[int, str], list[Birth]] = defaultdict(list)
    for event, data in _of_kind(events, TelemetryEventType.SEED_LIFECYCLE):
        if data.get("kind") == LifecycleKind.GERMINATED:
            place = event.get("env_id", 0), str(event.get("slot_id"))
            births[place].append(Birth(event.get("epoch", 0), data.get("blueprint_id"), data.get("params")))
    return births


def _outcomes(events: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    return {e.get("env_id", 0): d for e, d in _of_kind(events, TelemetryEventType.EPISODE_OUTCOME)}


def _of_kind(
    events: Sequence[Mapping[str, Any]], kind: TelemetryEventType
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return ((event, event["data"]) for event in events if event.get("event_type") == kind)


def read_episode(
    steps: Path, rewards: Path | None, events: Sequence[Mapping[str, Any]], env: int
) -> dict[str, Any] | None:
    """One network's episode: each decision with all that was recorded of it, and what became of its seeds.
    None if the round has no such env."""
    rows = _rows_of(steps, "steps", env)
    paid = [] if rewards is None else _rows_of(rewards, "rewards", env)
    terms = {row["epoch"]: row["components"] for row in paid}
    if not rows:
        return None
    return {
        "steps": [row | {"terms": terms.get(row["epoch"])} for row in rows],
        "lifecycle": [
            {"epoch": event.get("epoch"), "slot": event.get("slot_id"), **data}
            for event, data in _of_kind(events, TelemetryEventType.SEED_LIFECYCLE)
            if event.get("env_id") == env
        ],
        "rollbacks": [
            {"epoch": event.get("epoch"), **data}
            for event, data in _of_kind(events, TelemetryEventType.ROLLBACK)
            if event.get("env_id") == env
        ],
        "attribution": next(
            (
                data
                for event, data in _of_kind(events, TelemetryEventType.ATTRIBUTION)
                if event.get("env_id") == env
            ),
            None,
        ),
        "outcome": _outcomes(events).get(env),
    }


def _rows_of(path: Path, name: str, env: int) -> list[dict[str, Any]]:
    table = read_file(path, name)
    return _rows(table.filter(pc.equal(table["env_id"], env)))
