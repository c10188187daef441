"""The comparison over many worlds: every cohort in each of them, every finished world kept in a file, and
figures whose intervals resample worlds, then networks within worlds.

A cohort that cannot be played in some world is compared in the others; its figures say in how many. The
result depends only on the worlds, the policies, the schedule and the settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import orjson
from msgspec import Meta

from esper._files import decode, decode_file, write_atomic
from esper._statistics import Estimate, nested
from esper.leyline import EsperError, check_number
from esper.leyline.errors import unknown_name
from esper.proof.compare import LEARNED, MEASURES, Cohorts, ProofConfig, acting, play_cohorts
from esper.proof.controls import hide_quotes, random_placement, show_reversed_prices
from esper.proof.episodes import Played
from esper.runtime.tasks import TaskSpec, parse_task
from esper.runtime.worlds import FAMILIES, HELD_OUT_WORLDS, TRAINING_WORLDS, TUNING_WORLDS
from esper.simic.ranks import alone, current, fingerprint, for_all, share_work, software
from esper.simic.training.evaluation import HELD_OUT
from esper.tamiyo import FixedSchedule, RecurrentPolicy
from esper.tamiyo.schedules import RelativePlanting, in_world

Array = npt.NDArray[np.float64]
VERSION = 1
"""Of the files of worlds."""
HINDSIGHT, BEST_SINGLE, NEVER = "ladder_hindsight", "best_single_rung", "static"
RUNG = "rung "
"""Prefix of cohorts that are rungs of the ladder; the rung that has nothing is `static`."""
PROFILE = tuple(round(-0.5 + 0.05 * i, 2) for i in range(41))
"""Normalised scores at which performance profiles are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldsConfig:
    """Settings of a comparison over worlds."""

    family: str = "worlds_small"
    """Name of the family, optionally with other sizes, as in worlds_small:val_size=64."""
    first_world: int = HELD_OUT_WORLDS[0]
    num_worlds: int = 96
    networks: int = 2
    """Number of held-out networks of each world."""
    first_network: int = 0
    sample: bool = False
    """Learned policies sample their actions."""
    falsifiers: bool = False
    """Also play the learned policies with hidden quotes and with reversed prices."""

    def __post_init__(self) -> None:
        name = self.family.partition(":")[0].lower()
        if name not in FAMILIES:
            raise unknown_name("family", name, [*FAMILIES])
        check_number("worlds", "first_world", self.first_world, low=0, integer=True)
        check_number("worlds", "num_worlds", self.num_worlds, low=2, integer=True)
        ProofConfig(networks=self.networks, first_network=self.first_network)
        self.use()

    @property
    def numbers(self) -> range:
        return range(self.first_world, self.first_world + self.num_worlds)

    def use(self) -> str:
        """What these worlds are for. Worlds of two uses are not mixed."""
        uses = {"training": TRAINING_WORLDS, "tuning": TUNING_WORLDS, "held-out": HELD_OUT_WORLDS}
        for use, worlds in uses.items():
            if self.numbers[0] in worlds and self.numbers[-1] in worlds:
                return use
        ranges = ", ".join(f"{worlds[0]:,} to {worlds[-1]:,} ({use})" for use, worlds in uses.items())
        raise EsperError(
            f"worlds {self.numbers[0]:,} to {self.numbers[-1]:,} are not of one use; allowed: {ranges}"
        )

    def task(self, number: int) -> TaskSpec:
        name, _, sizes = self.family.partition(":")
        return parse_task(f"{name}:{number},{sizes}" if sizes else f"{name}:{number}")


# -- one world -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldRecord:
    """What was played in one world: the content of its file."""

    number: int
    settings: dict[str, Any]
    """What decides the episodes, beside the number. A file with other settings is refused."""
    dataset: str
    host_params: int
    size_price: float
    waste_price: float
    episodes: dict[str, list[list[Played]]]
    """By cohort: one list for each policy if the cohort depends on a policy, else a single list."""
    absent: dict[str, str]
    version: Annotated[int, Meta(ge=1)] = 1

    def mean(self, cohort: str, measure: str = "J") -> float:
        return float(self.values(cohort, measure).mean())

    def values(self, cohort: str, measure: str = "J") -> Array:
        """[strata, networks]"""
        read = MEASURES[measure]
        return np.array([[read(p) for p in stratum] for stratum in self.episodes[cohort]], np.float64)


Play = Callable[[TaskSpec], Cohorts]
"""Plays all cohorts of one world."""


def play_worlds(
    config: WorldsConfig,
    play: Play,
    settings: Mapping[str, Any],
    directory: Path,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> list[WorldRecord]:
    """The records of all worlds, in order. Each is written to `directory` as soon as it is finished; those
    that are there already are read. Ranks share the worlds. `settings` are what decides the episodes."""
    ranks, plain = current(), _plain(settings)
    directory.mkdir(parents=True, exist_ok=True)
    paths = {number: directory / f"{number}.json" for number in config.numbers}
    there: dict[int, WorldRecord] = {}
    if ranks.is_first:
        there = {number: _read(path, plain) for number, path in paths.items() if path.is_file()}
    there = ranks.from_first(there, "finished worlds")
    pending = [number for number in config.numbers if number not in there]
    advance(len(there))
    advance = for_all(advance, [1] * len(pending), ranks)

    def work(index: int) -> WorldRecord:
        number = pending[index]
        with alone():
            record = _record(number, config.task(number), play, plain)
        content = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
        write_atomic(paths[number], content)
        advance(1)
        return decode(WorldRecord, content, paths[number])

    played = share_work(len(pending), work, ranks, "worlds")
    records = there | dict(zip(pending, played, strict=True))
    return [records[number] for number in config.numbers]


def _record(number: int, task: TaskSpec, play: Play, settings: dict[str, Any]) -> WorldRecord:
    cohorts = play(task)
    return WorldRecord(
        number=number,
        settings=settings,
        dataset=task.dataset,
        host_params=task.host_params,
        size_price=task.objective.size_price,
        waste_price=task.objective.waste_price,
        episodes=cohorts.played,
        absent=cohorts.absent,
        version=VERSION,
    )


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from a file."""
    plain: dict[str, Any] = orjson.loads(orjson.dumps(settings))
    return plain


def _read(path: Path, settings: Mapping[str, Any]) -> WorldRecord:
    record = decode_file(WorldRecord, path, version=VERSION)
    for name in {**settings, **record.settings}:
        theirs, ours = record.settings.get(name), settings.get(name)
        if theirs != ours:
            raise EsperError(
                f"{path} was made with other settings: {name} is {theirs!r} there and {ours!r} now; choose "
                "another --out, or remove the file"
            )
    return record


# -- the cohorts of `esper prove --worlds` -------------------------------------------------------------------


def prove_worlds(
    config: WorldsConfig,
    policies: Mapping[str, RecurrentPolicy],
    directory: Path,
    *,
    schedule: Sequence[RelativePlanting] | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """All cohorts in all worlds, as plain values for JSON. Finished worlds are kept in `directory`."""
    settings = worlds_settings(config) | {
        "sample": config.sample,
        "falsifiers": config.falsifiers,
        "policies": [fingerprint(policy.network.state_dict()) for policy in policies.values()],
        "schedule": None if schedule is None else [asdict(planting) for planting in schedule],
    }

    def play(task: TaskSpec) -> Cohorts:
        return _play_world(task, policies, config, schedule)

    records = play_worlds(config, play, settings, directory, advance=advance)
    return figures(records, config, list(policies))


def worlds_settings(config: WorldsConfig) -> dict[str, Any]:
    """The settings and the software that decide the episodes of every cohort."""
    names, parts = ("family", "networks", "first_network"), ("Esper", "source of Esper", "torch")
    return {name: getattr(config, name) for name in names} | {part: software()[part] for part in parts}


def _play_world(
    task: TaskSpec,
    policies: Mapping[str, RecurrentPolicy],
    config: WorldsConfig,
    schedule: Sequence[RelativePlanting] | None,
) -> Cohorts:
    proof = ProofConfig(networks=config.networks, first_network=config.first_network, sample=config.sample)
    cohorts = play_cohorts(task, policies, proof)
    if schedule is None:
        cohorts.absent["fixed_schedule"] = "no schedule was given, and none ships for this family"
    else:
        del cohorts.absent["fixed_schedule"]
        order = [slot for slot in task.outline.execution_order() if slot in task.slots]
        plan = in_world(
            schedule, slots=task.slots, order=order, blueprints=task.blueprints, epochs=task.episode_length
        )
        cohorts.add("fixed_schedule", lambda envs: FixedSchedule([plan] * len(envs)))
    for stratum in tuple(cohorts.played.get(LEARNED, ())):
        cohorts.add("random_placement", random_placement(stratum, root_seed=HELD_OUT, tempo=task.tempo))
    if config.falsifiers:
        for policy in policies.values():
            cohorts.add("learned_hidden_quotes", acting(task, policy, proof, see=hide_quotes))
            cohorts.add("learned_reversed_prices", acting(task, policy, proof), plant=show_reversed_prices)
    return cohorts


# -- figures -------------------------------------------------------------------------------------------------


def with_cohorts(records: Sequence[WorldRecord], *cohorts: str) -> list[WorldRecord]:
    """The worlds in which all these cohorts were played."""
    return [record for record in records if all(cohort in record.episodes for cohort in cohorts)]


def figure(records: Sequence[WorldRecord], cohort: str, measure: str = "J") -> Estimate:
    """The mean over the worlds that have the cohort. Policies have equal weight."""
    return nested(np.stack([r.values(cohort, measure).mean(0) for r in with_cohorts(records, cohort)]))


def gaps(records: Sequence[WorldRecord], one: str, other: str, measure: str = "J") -> Array:
    """[strata, worlds, networks]: one − other, network by network, in the worlds that have both."""
    shared = with_cohorts(records, one, other)
    return np.stack([r.values(one, measure) - r.values(other, measure) for r in shared], axis=1)


def improvement(differences: Array) -> Estimate:
    """The probability of improvement (Agarwal et al. 2021): the share of worlds in which the mean of
    differences [worlds, networks] is above 0; a tie counts half."""

    def share(drawn: Array) -> Array:
        means = drawn.mean(2)
        return np.asarray(((means > 0) + 0.5 * (means == 0)).mean(1))

    return nested(differences, statistic=share)


def best_single_rung(records: Sequence[WorldRecord]) -> str:
    """The cohort of the rung with the highest mean J over these worlds. It is chosen on the worlds that it is
    judged on, in its favour."""
    rungs = [name for name in records[0].episodes if name == NEVER or name.startswith(RUNG)]
    return max(rungs, key=lambda rung: float(np.mean([record.mean(rung) for record in records])))


def profiles(records: Sequence[WorldRecord], cohorts: Sequence[str]) -> dict[str, list[float]]:
    """Performance profiles: the share of worlds in which a cohort's normalised score is at least each value
    of PROFILE. The score of a world is 0 at the mean J of its worst rung and 1 at that of its best."""
    shares = {}
    for cohort in cohorts:
        scores = np.array([_score(record, cohort) for record in with_cohorts(records, cohort)])
        shares[cohort] = [float((scores >= tau).mean()) for tau in PROFILE]
    return shares


def _score(record: WorldRecord, cohort: str) -> float:
    rungs = [record.mean(name) for name in record.episodes if name == NEVER or name.startswith(RUNG)]
    low, high, own = min(rungs), max(rungs), record.mean(cohort)
    if low == high:  # every rung is the best one
        return 1.0 if own == high else math.copysign(math.inf, own - high)
    return (own - low) / (high - low)


def halving_multiple(records: Sequence[WorldRecord]) -> dict[str, Any]:
    """How many times the FLOPs of the learned policy successive halving needs for the same mean J: between
    its two budgets by interpolation in log FLOPs, otherwise None and why."""
    shared = with_cohorts(records, LEARNED, "halving", "halving_8x")
    if not shared:
        return {"multiple": None, "worlds": 0, "why": "no world has the learned policy and both halvings"}

    def point(cohort: str) -> tuple[float, float]:
        """Mean J, and log FLOPs in those of the learned policy, averaged over worlds."""
        spent = [math.log(r.mean(cohort, "flops") / r.mean(LEARNED, "flops")) for r in shared]
        return float(np.mean([r.mean(cohort) for r in shared])), float(np.mean(spent))

    wanted = point(LEARNED)[0]
    (first, start), (last, end) = point("halving"), point("halving_8x")
    found: dict[str, Any] = {"multiple": None, "worlds": len(shared), "why": None}
    if last <= first:
        return found | {"why": "halving is no better with more FLOPs"}
    if wanted < first:
        return found | {"why": f"halving is ahead with {math.exp(start):.2f} times the FLOPs"}
    if wanted > last:
        return found | {"why": f"halving is behind with {math.exp(end):.2f} times the FLOPs"}
    share = (wanted - first) / (last - first)
    return found | {"multiple": math.exp(start + share * (end - start))}


def _seeds(records: Sequence[WorldRecord], cohort: str) -> Estimate:
    """Permanent seeds."""
    return figure(records, cohort, "fossilized")


def _size(records: Sequence[WorldRecord], cohort: str) -> Estimate:
    """ln(1 + added/host parameters), which λ is the price of."""
    return nested(
        np.stack([np.log1p(r.values(cohort, "added_params") / r.host_params).mean(0) for r in records])
    )


def growth_by_price(
    records: Sequence[WorldRecord],
    cohorts: Sequence[str],
    growth: Callable[[Sequence[WorldRecord], str], Estimate],
) -> list[dict[str, Any]]:
    """How much grows in worlds without λ, with a low and with a high one, divided at its median."""
    prices = [record.size_price for record in records if record.size_price]
    middle = float(np.median(prices)) if prices else 0.0
    groups = {
        "0": [r for r in records if not r.size_price],
        f"up to {middle:.4f}": [r for r in records if 0 < r.size_price <= middle],
        f"above {middle:.4f}": [r for r in records if r.size_price > middle],
    }
    return [
        {"size_price": name, "worlds": len(members)} | {cohort: growth(members, cohort) for cohort in cohorts}
        for name, members in groups.items()
        if members
    ]


def figures(records: Sequence[WorldRecord], config: WorldsConfig, policies: Sequence[str]) -> dict[str, Any]:
    """All figures of the comparison."""
    single = best_single_rung(records)
    records = [replace(r, episodes=r.episodes | {BEST_SINGLE: r.episodes[single]}) for r in records]
    names = list(dict.fromkeys(name for record in records for name in record.episodes))
    learned = LEARNED in names
    priced = [n for n in (LEARNED, "learned_reversed_prices") if n in names]
    return {
        "task": config.family,
        "root_seed": HELD_OUT,
        "settings": asdict(config) | {"use": config.use()},
        "policies": policies,
        "absent": _absent(records),
        "best_single_rung": single,
        "cohorts": {name: _cohort(records, name) for name in names},
        "learned_minus": {n: _difference(records, n) for n in names if n != LEARNED} if learned else {},
        "regret": nested(-gaps(records, LEARNED, HINDSIGHT).mean(0)) if learned else None,
        "halving_multiple": halving_multiple(records),
        "profile_scores": PROFILE,
        "profiles": profiles(records, names),
        "growth_by_price": growth_by_price(records, priced, _seeds),
        "size_by_price": growth_by_price(records, priced, _size),
        "by_world": [_world(record) for record in records],
    }


def _cohort(records: Sequence[WorldRecord], name: str) -> dict[str, Any]:
    return {"worlds": len(with_cohorts(records, name))} | {
        measure: figure(records, name, measure) for measure in MEASURES
    }


def _difference(records: Sequence[WorldRecord], other: str) -> dict[str, Any]:
    """Learned − other."""
    by_policy = gaps(records, LEARNED, other)
    return {
        "worlds": by_policy.shape[1],
        "J": nested(by_policy.mean(0)),
        "test_accuracy": nested(gaps(records, LEARNED, other, "test_accuracy").mean(0)),
        "by_policy": [nested(one) for one in by_policy],
        "improvement": improvement(by_policy.mean(0)),
    }


def _world(record: WorldRecord) -> dict[str, Any]:
    """A row of the table by world."""
    row: dict[str, Any] = {
        "world": record.number,
        "dataset": record.dataset,
        "size_price": record.size_price,
        "waste_price": record.waste_price,
        "host_params": record.host_params,
        "best_rungs": [_rung_of(record, network) for network in range(len(record.episodes[HINDSIGHT][0]))],
        "J": {cohort: record.mean(cohort) for cohort in record.episodes},
        "regret": None,
    }
    if LEARNED in record.episodes:
        row["regret"] = record.mean(HINDSIGHT) - record.mean(LEARNED)
    return row


def _rung_of(record: WorldRecord, network: int) -> str:
    """The name of the best rung of a network in hindsight."""
    best = record.episodes[HINDSIGHT][0][network].fossils
    names = [name for name in record.episodes if name.startswith(RUNG)]
    chosen = [n.removeprefix(RUNG) for n in names if record.episodes[n][0][network].fossils == best]
    return chosen[0] if chosen else "nothing"


def _absent(records: Sequence[WorldRecord]) -> dict[str, str]:
    """Cohorts that some world lacks: in how many worlds, and why in the first of them."""
    absent: dict[str, str] = {}
    for name in dict.fromkeys(name for record in records for name in record.absent):
        lacking = [record for record in records if name in record.absent]
        where = "" if len(lacking) == len(records) else f"in {len(lacking)} of {len(records)} worlds: "
        absent[name] = where + lacking[0].absent[name]
    return absent
