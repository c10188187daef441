"""One run as the page shows it: curves over rounds, small tables and facts, read as the run grows.

The log is read on from where the last look ended, each table file once, so a look costs what is new. A log
that was cut back, as by resuming, starts the feed over. Rounds are recorded from 0 and shown from 1.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from esper.karn.summary import is_written
from esper.karn.web import tables
from esper.karn.web.streams import Curves, Stream
from esper.leyline import EVENTS, PHASES, STEP_TABLES, EsperError, LifecycleKind, TelemetryEventType
from esper.leyline.metrics import FieldKind
from esper.nissa import TelemetryError
from esper.nissa.alerts import AlertEngine, event_parts

SHOWN = 200
"""Alerts, rollbacks and checkpoints that are shown: the newest ones."""
PATIENCE = 0.25
"""Seconds of one look that may be spent on tables; what is left is read by the next look."""
MARK = 256
"""Bytes before the place reached that tell whether a log is still the one that was read."""
_T = TelemetryEventType
_NUMBERS = {
    kind: [f.name for f in EVENTS[kind].fields if f.kind in (FieldKind.FLOAT, FieldKind.INT)]
    for kind in (_T.BATCH_COMPLETED, _T.PPO_UPDATE)
}
_EVENT_OF = {table: kind.value for kind, table in STEP_TABLES.items()}
_TABLE = re.compile(r"(steps|rewards|throughput)-(\d+)\.parquet")


_OF_TASK = {
    "objective": "J",
    "final_accuracy": "accuracy",
    "committed_accuracy": "committed accuracy",
    "total_reward": "reward",
    "added_params": "added parameters",
    "epochs": "epochs",
    "germinated": "germinated",
    "fossilized": "fossilized",
    "rollbacks": "rollbacks",
}
"""Figures of an episode that are shown as means over the episodes of each task."""


class LogTail:
    """Events of a log from where the last call ended, with the bytes that each takes."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.count = path, 0, 0
        self._mark = b""

    def was_rewritten(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(self.offset - len(self._mark))
            return file.read(len(self._mark)) != self._mark

    def events(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Offset of each new event, of the next one, and the event. An incomplete last line waits."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    event = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise TelemetryError(f"line {self.count + 1}: not JSON: {error}") from error
                if not isinstance(event, dict) or event.get("seq") != self.count:
                    raise TelemetryError(f"line {self.count + 1}: not event {self.count}")
                start, self.offset = self.offset, self.offset + len(line)
                self.count += 1
                self._mark = line[-MARK:]
                yield start, self.offset, event


class Mean:
    """A mean of which only sum and count are kept. Values that are None do not count."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total, self.count = self.total + value, self.count + 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


class Feed(Stream):
    """One run directory, complete, growing or broken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__()

    def begin(self) -> None:
        super().begin()
        self.log = LogTail(self.path / "events.jsonl")
        self.curves = Curves()
        self.rounds: dict[int, tuple[int, int]] = {}
        """Bytes of the log that hold each round's events."""
        self.start: Mapping[str, Any] = {}
        self.last: dict[str, Mapping[str, Any]] = {}
        """The newest payload of each event type."""
        self._parts: dict[str, tuple[int, bytes, Any]] = {}
        self._problems: dict[str, str] = {}
        self._engine = AlertEngine()
        self._end: Mapping[str, Any] | None = None
        self._times = (0.0, 0.0)
        self._counts: Counter[str] = Counter()
        self._newest: dict[_T, deque[dict[str, Any]]] = {
            kind: deque(maxlen=SHOWN) for kind in (_T.ALERT, _T.ROLLBACK, _T.CHECKPOINT)
        }
        self._objectives: list[float] = []
        self._fates: dict[str, Mean] = defaultdict(Mean)
        self._by_task: dict[str, dict[str, Mean]] = defaultdict(lambda: defaultdict(Mean))
        self._tasks: list[dict[str, Any]] = []
        self._births: dict[tuple[Any, Any], str] = {}
        self._shares: dict[str, dict[str, Mean]] = defaultdict(lambda: defaultdict(Mean))
        self._blueprints: dict[str, dict[str, Mean]] = defaultdict(lambda: defaultdict(Mean))
        self._seeds: dict[tuple[str, str], tuple[Mean, Mean]] = defaultdict(lambda: (Mean(), Mean()))
        self._pairs: dict[str, Mean] = defaultdict(Mean)
        self._best: tuple[float, int] | None = None
        self._files: dict[str, tuple[int, int]] = {}
        self._refused: dict[int, Counter[tuple[str, str]]] = {}
        self._last_round: dict[str, Any] = {}
        self._seen: tuple[object, ...] = ()

    # -- messages --------------------------------------------------------------------------------------------

    def everything(self) -> dict[str, Any]:
        return {
            "curves": self.curves.thinned(),
            "parts": {name: value for name, (_, _, value) in self._parts.items()},
        }

    def changes(self, revision: int) -> dict[str, Any] | None:
        added = self.curves.added(revision)
        if added is None:
            return None
        parts = {name: value for name, (number, _, value) in self._parts.items() if number > revision}
        return {"curves": added, "parts": parts}

    def curve(self, key: str) -> tuple[list[float], list[float]]:
        self.look()
        return self.curves.thinned().get(key, ([], []))

    def round(self, index: int) -> dict[str, Any]:
        """The networks of a round, by its number from 0."""
        steps, events, _ = self._files_of(index)
        return {"round": index + 1, **tables.read_round(steps, events)}

    def episode(self, index: int, env: int) -> dict[str, Any]:
        """The decisions of one network."""
        steps, events, rewards = self._files_of(index)
        episode = tables.read_episode(steps, rewards, events, env)
        if episode is None:
            raise LookupError(f"round {index + 1} has no env {env}")
        return {"round": index + 1, "env": env, **episode}

    def _files_of(self, index: int) -> tuple[Path, list[dict[str, Any]], Path | None]:
        self.look()
        files = self.table_files()
        if (index, "steps") not in files:
            raise LookupError(f"round {index + 1} has no recorded steps: they are written when it ends")
        events = tables.round_events(self.log.path, self.rounds.get(index, (0, 0)))
        return files[index, "steps"], events, files.get((index, "rewards"))

    @property
    def damage(self) -> list[str]:
        """What could not be read."""
        return [problem for name, problem in self._problems.items() if name != "start"]

    # -- reading ---------------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        state = self._state()
        if state == self._seen and not self.busy:
            return False
        more = False
        try:
            if self.log.was_rewritten():
                self.begin()
            self._read_log()
            more = self._read_tables()
        except OSError as error:
            self._problems["files"] = f"{Path(error.filename or self.path).name}: {error.strerror}"
        else:
            self._problems.pop("files", None)
        self._seen = state
        changed = self.curves.commit(self.revision + 1)
        for name, value in self._describe().items():
            encoded = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)
            if name not in self._parts or self._parts[name][1] != encoded:
                self._parts[name] = (self.revision + 1, encoded, value)
                changed = True
        self.revision += changed
        return more

    def _state(self) -> tuple[object, ...]:
        """A value that changes when the run writes, ends or dies."""
        state: list[object] = [self.status]
        for name in ("events.jsonl", "tables", "run.json", "config.json"):
            try:
                status = (self.path / name).stat()
                state += [status.st_size, status.st_mtime_ns]
            except OSError:
                state.append(None)
        return tuple(state)

    def _read_log(self) -> None:
        if "log" in self._problems:
            return
        try:
            for begin, end, event in self.log.events():
                kind, data, nonfinite = event_parts(event)
                self._engine.observe(kind, data, nonfinite)
                self.last[kind.value] = data
                self._times = (self._times[0] or event.get("t_wall", 0.0), event.get("t_wall", 0.0))
                round_idx = event.get("round_idx")
                if round_idx is not None:
                    self.rounds[round_idx] = (self.rounds.get(round_idx, (begin, 0))[0], end)
                handle = self._HANDLERS.get(kind)
                if handle is not None:
                    handle(self, event, data)
        except (EsperError, TypeError, ValueError, AttributeError, KeyError) as error:
            place = f"{self.log.path} is damaged and was read up to line {self.log.count}"
            self._problems["log"] = f"{place}: {error}"

    def _on_start(self, _event: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        self.start, self._end = data, None

    def _on_end(self, _event: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        self._end = data

    def _on_update(self, event: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        x = event.get("round_idx", 0) + 1
        self.curves.add_all("updates", x, {name: data.get(name) for name in _NUMBERS[_T.PPO_UPDATE]})
        for name in ("head_entropy", "head_kl"):
            self.curves.add_all(f"updates/{name}", x, data.get(name) or {})

    def _on_actions(self, event: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        counts = data.get("action_counts") or {}
        total = sum(counts.values()) or 1
        self.curves.add_all("mix", event.get("round_idx", 0) + 1, {op: n / total for op, n in counts.items()})

    def _on_masks(self, event: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        self.curves.add_all("masked", event.get("round_idx", 0) + 1, data.get("hit_rates") or {})

    def _on_lifecycle(self, event: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        blueprint, kind = data.get("blueprint_id"), data.get("kind")
        if blueprint is None:
            return
        score = self._blueprints[blueprint]
        if kind == LifecycleKind.GERMINATED:
            self._births[event.get("env_id"), event.get("slot_id")] = blueprint
            score[kind].add(1)
        elif kind in (LifecycleKind.FOSSILIZED, LifecycleKind.PRUNED):
            score[kind].add(1)
            for name in ("contribution", "params", "epochs_total"):
                score[f"{kind} {name}"].add(data.get(name))

    def _on_attribution(self, event: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        for slot in data.get("slots") or ():
            blueprint = self._births.get((event.get("env_id"), slot), "unknown")
            for i, name in enumerate(("shapley", "leave_one_out")):
                value = (data.get(name) or {}).get(slot)
                self._shares[name][slot].add(value)
                self._seeds[slot, blueprint][i].add(value)
            self._shares["blended"][slot].add(1)
        for pair, value in (data.get("interactions") or {}).items():
            self._pairs[pair].add(value)

    def _on_outcome(self, _event: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        if len(self.start.get("envs_by_task") or ()) > 1:
            for name in _OF_TASK:
                self._by_task[data.get("task") or ""][name].add(data.get(name))
        if data.get("objective") is not None:
            self._objectives.append(data["objective"])
        fossilized, pruned, germinated = (data.get(n) for n in ("fossilized", "pruned", "germinated"))
        if fossilized is None or pruned is None or germinated is None:
            return
        for name, value in (("fossilized", fossilized), ("pruned", pruned)):
            self._fates[name].add(value)
        self._fates["unfinished"].add(germinated - fossilized - pruned)

    def _on_round(self, event: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        index = data.get("round_idx", event.get("round_idx")) or 0
        x = index + 1
        self.curves.add_all("rounds", x, {name: data.get(name) for name in _NUMBERS[_T.BATCH_COMPLETED]})
        self.curves.add_all("phases", x, {phase: data.get(f"{phase}_seconds") for phase in PHASES})
        self.curves.add_all("health", x, self._engine.round)
        if self._objectives:
            low, high = np.quantile(self._objectives, (0.1, 0.9)).tolist()
            self.curves.add_all("spread", x, {"low": low, "high": high})
        self.curves.add_all("fates", x, {name: mean.value for name, mean in self._fates.items()})
        for name, by_slot in self._shares.items():
            values = {slot: m.count if name == "blended" else m.value for slot, m in by_slot.items()}
            self.curves.add_all(name, x, values)
        objective = data.get("avg_objective")
        if objective is not None and (self._best is None or objective > self._best[0]):
            self._best = (objective, index)
        if self._by_task:
            self.curves.add_all("objective_by_task", x, data.get("objective_by_task") or {})
            self._tasks = [
                {"task": task, "episodes": means["objective"].count}
                | {shown: means[name].value for name, shown in _OF_TASK.items()}
                for task, means in self._by_task.items()
            ]
        self._counts["rounds"] += 1
        self._counts["seconds"] += data.get("seconds") or 0
        self._objectives = []
        for group in (self._fates, self._births, self._shares, self._by_task):
            group.clear()

    def _on_kept(self, event: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        where = {"round": event.get("round_idx"), "env": event.get("env_id"), "epoch": event.get("epoch")}
        if where["round"] is not None:
            where["round"] += 1
        kind = _T(event["event_type"])
        self._newest[kind].append({k: v for k, v in where.items() if v is not None} | dict(data))
        self._counts[kind.value] += 1

    _HANDLERS: Mapping[_T, Any] = {
        _T.RUN_STARTED: _on_start,
        _T.RUN_ENDED: _on_end,
        _T.PPO_UPDATE: _on_update,
        _T.ACTION_DISTRIBUTION: _on_actions,
        _T.MASK_HIT_RATES: _on_masks,
        _T.SEED_LIFECYCLE: _on_lifecycle,
        _T.ATTRIBUTION: _on_attribution,
        _T.EPISODE_OUTCOME: _on_outcome,
        _T.BATCH_COMPLETED: _on_round,
        _T.ALERT: _on_kept,
        _T.ROLLBACK: _on_kept,
        _T.CHECKPOINT: _on_kept,
    }

    # -- tables ----------------------------------------------------------------------------------------------

    def table_files(self) -> dict[tuple[int, str], Path]:
        """The files of the step tables by round and table, oldest round first."""
        found = {}
        for path in (self.path / "tables").iterdir():
            match = _TABLE.fullmatch(path.name)
            if match:
                found[int(match[2]), match[1]] = path
        return dict(sorted(found.items()))

    def _read_tables(self) -> bool:
        """Read files that are new or were extended. True if some are left for the next look."""
        files = self.table_files()
        last, deadline = max((r for r, _ in files), default=0), time.monotonic() + PATIENCE
        for (round_idx, table), path in files.items():
            if round_idx < last - 1 and path.name in self._files:
                continue  # only the newest files still grow: a run of a thousand rounds has thousands
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if self._files.get(path.name) == stamp:
                continue
            if time.monotonic() > deadline:
                return True
            self._files[path.name] = stamp
            try:
                self._read_table(table, round_idx, path, is_last=round_idx == last)
            except TelemetryError as error:
                self._problems[path.name] = str(error)
        return False

    def _read_table(self, table: str, round_idx: int, path: Path, *, is_last: bool) -> None:
        x = round_idx + 1
        if table == "rewards":
            by_episode, by_epoch = tables.reward_terms(path)
            self.curves.add_all("terms", x, by_episode)
            if is_last:
                self._last_round["terms"] = by_epoch
        elif table == "throughput":
            self.curves.add("speed/samples", x, tables.training_speed(path))
        else:
            steps = tables.step_figures(path)
            self._refused[round_idx] = steps.refused
            if is_own(self.start):
                self._follow(steps.course)
            elif is_last:
                self._last_round |= {"acts": steps.acts, "course": steps.course}
        if is_last:
            self.last[_EVENT_OF[table]] = tables.last_row(path, table)

    def _follow(self, course: tables.Chart) -> None:
        """Add the epochs of a single network that are new."""
        for name, values in course["series"].items():
            reached = self.curves.latest(f"course/{name}")[0]
            for epoch, value in zip(course["x"], values, strict=True):
                if not reached or epoch > reached[-1]:
                    self.curves.add(f"course/{name}", epoch, value)

    # -- parts -----------------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        if self._end is not None:
            return str(self._end.get("status"))
        try:
            return "running" if is_written(self.path / "events.jsonl") else "cut off"
        except OSError:
            return "cut off"

    def _describe(self) -> dict[str, Any]:
        """The parts of the page that are not curves. Each is sent again only when it has changed."""
        info, config = self._json("run.json"), self._json("config.json")
        if not self.start:
            self._problems["start"] = "the run has not started: its log has no run_started"
        else:
            self._problems.pop("start", None)
        refused = sum(self._refused.values(), Counter())
        return {
            "facts": self._facts(info),
            "start": self.start,
            "info": info,
            "config": config,
            "problems": list(self._problems.values()),
            "last": self.last,
            "alerts": [_alert_row(alert) for alert in self._newest[_T.ALERT]],
            "rollbacks": list(self._newest[_T.ROLLBACK]),
            "checkpoints": list(self._newest[_T.CHECKPOINT]),
            "refused": [
                {"operation": op, "times": n, "reason for refusal": why}
                for (op, why), n in refused.most_common(12)
            ],
            "seeds": self._seed_rows(),
            "pairs": [
                {"pair of slots": pair, "episodes": m.count, "mean interaction": m.value}
                for pair, m in sorted(self._pairs.items())
            ],
            "blueprints": self._blueprint_rows(),
            "tasks": self._tasks,
            "last_round": self._last_round,
            "recorded": {
                "rounds": [index + 1 for index in self.recorded()],
                "best": None if self.best is None else self.best + 1,
            },
        }

    def recorded(self) -> list[int]:
        """Rounds whose steps were read, from 0."""
        names = (_TABLE.fullmatch(name) for name in self._files)
        return sorted(int(name[2]) for name in names if name and name[1] == "steps")

    @property
    def best(self) -> int | None:
        """The round with the highest mean J, from 0."""
        return None if self._best is None else self._best[1]

    def _json(self, name: str) -> Any:
        try:
            content = orjson.loads((self.path / name).read_bytes())
        except OSError as error:
            self._problems[name] = f"{name} is missing: {error.strerror}"
        except orjson.JSONDecodeError as error:
            self._problems[name] = f"{name}: not JSON: {error}"
        else:
            self._problems.pop(name, None)
            return content
        return {}

    def _facts(self, info: Any) -> dict[str, Any]:
        done = self.last.get(_T.BATCH_COMPLETED.value, {})
        message = None if self._end is None else self._end.get("message")
        facts = {
            "name": self.path.resolve().name,
            "status": self.status,
            "message": message,
            **{name: self.start.get(name) for name in ("task", "policy", "seed", "envs")},
            "rounds_done": self._counts["rounds"],
            "rounds": done.get("rounds") or self.start.get("rounds"),
            "objective": done.get("avg_objective"),
            "best": None if self._best is None else self._best[0],
            "alerts": self._counts[_T.ALERT.value],
            "seconds": self._counts["seconds"] or self._times[1] - self._times[0],
            "started": info.get("started") if isinstance(info, dict) else None,
            "own": is_own(self.start),
        }
        return {name: value for name, value in facts.items() if value is not None}

    def _seed_rows(self) -> list[dict[str, Any]]:
        rows = [
            {
                "slot": slot,
                "blueprint": blueprint,
                "episodes": shapley.count,
                "mean shapley": shapley.value,
                "mean leave one out": loo.value,
            }
            for (slot, blueprint), (shapley, loo) in self._seeds.items()
        ]
        return sorted(rows, key=lambda row: -(row["mean shapley"] or 0.0))

    def _blueprint_rows(self) -> list[dict[str, Any]]:
        rows = []
        for blueprint, score in self._blueprints.items():
            fossilized, pruned = score[LifecycleKind.FOSSILIZED].count, score[LifecycleKind.PRUNED].count
            rows.append(
                {
                    "blueprint": blueprint,
                    "germinated": score[LifecycleKind.GERMINATED].count,
                    "fossilized": fossilized,
                    "pruned": pruned,
                    "survival": fossilized / (fossilized + pruned) if fossilized + pruned else None,
                    "mean contribution": score["fossilized contribution"].value,
                    "mean pruned contribution": score["pruned contribution"].value,
                    "mean params": score["fossilized params"].value,
                    "mean age": score["fossilized epochs_total"].value,
                }
            )
        return sorted(rows, key=lambda row: (-row["fossilized"], -row["germinated"], row["blueprint"]))


def is_own(start: Mapping[str, Any]) -> bool:
    """Whether a run is a user's own network, recorded by `esper.attach`: nothing rewards its policy."""
    return bool(start) and start.get("reward_mode") is None and start.get("envs") == 1


def _alert_row(alert: Mapping[str, Any]) -> dict[str, Any]:
    names = ("round", "severity", "code", "message", "metric", "value", "limit")
    return {name: alert.get(name) for name in names} | {"times in a row": alert.get("streak")}
