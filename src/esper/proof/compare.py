"""The comparison: every cohort on the same held-out networks, figures with intervals, and the paired
difference between the learned policy and each other cohort.

Several policies (from several training runs) have equal weight in every figure. Intervals resample networks:
the results of all policies on one network are drawn together, because they share its weights and data. Every
difference is also given for each policy alone. The result depends only on the task, the policies, the
schedules and the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from esper._statistics import Estimate, estimate, interquartile_mean, paired
from esper.kasmina.hosts import CNNHost
from esper.leyline import check_number
from esper.proof.cohorts import at_equal_flops, oracle, planned_fossils, priced, widened, with_fossils
from esper.proof.episodes import Fossil, Maker, Played, play
from esper.proof.ladder import CHOOSERS, BudgetError, halve, hindsight, ladder, train_ladder
from esper.proof.policies import Acting, Sight, last_slot_first, rule_makers, simple_makers, unchanged
from esper.proof.search import Track
from esper.runtime.tasks import TaskSpec
from esper.simic.training.evaluation import HELD_OUT
from esper.simic.training.probe import ProbePolicy, fit_probe
from esper.tamiyo import FixedSchedule, RecurrentPolicy
from esper.tamiyo.schedules import Schedules

Strata = list[list[Played]]
"""The episodes of one cohort, one list for each policy if the cohort depends on a policy, else a single
list."""
Array = npt.NDArray[np.float64]
VERSION = 1
"""Of proof.json, which `esper prove` writes from the result."""
LEARNED = "learned"
MEASURES: Mapping[str, Callable[[Played], float]] = {
    "J": lambda p: p.outcome.objective,
    "test_accuracy": lambda p: p.test_accuracy,
    "added_params": lambda p: p.outcome.added_params,
    "flops": lambda p: p.flops,
    "accuracy_per_kparam": lambda p: (
        1000 * p.test_accuracy / (p.outcome.host_params + p.outcome.added_params)
    ),
    "germinated": lambda p: p.outcome.germinated,
    "fossilized": lambda p: p.outcome.fossilized,
    "pruned": lambda p: p.outcome.pruned,
    "rollbacks": lambda p: p.outcome.rollbacks,
}
"""Accuracy per parameter is in points of test accuracy per 1,000 parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofConfig:
    """Settings of a comparison."""

    networks: int = 96
    """Number of held-out networks."""
    first_network: int = 0
    """Number of the first of them."""
    sample: bool = False
    """Learned policies sample their actions, without exploration; otherwise they take the most likely
    ones."""
    probe_networks: int = 256
    """Number of training networks that the probe is fitted on."""
    brief: bool = False
    """Only never growing, random, the heuristic and the learned policy."""

    def __post_init__(self) -> None:
        check_number("proof", "networks", self.networks, low=2, integer=True)
        check_number("proof", "first_network", self.first_network, low=0, integer=True)
        check_number("proof", "probe_networks", self.probe_networks, low=2, integer=True)


class Cohorts:
    """Plays cohorts and keeps their episodes."""

    def __init__(self, task: TaskSpec, config: ProofConfig, track: Track) -> None:
        self.task, self.config, self.track = task, config, track
        self.played: dict[str, Strata] = {}
        self.absent: dict[str, str] = {}
        """Cohorts that could not be played, and why."""

    def add(self, name: str, make: Maker, task: TaskSpec | None = None, **options: Any) -> None:
        """Play one stratum of a cohort."""
        task, first = task or self.task, self.config.first_network
        networks = range(first, first + self.config.networks)
        advance = self.track(name, len(networks) * task.episode_length)
        stratum = play(task, make, root_seed=HELD_OUT, networks=networks, advance=advance, **options)
        self.played.setdefault(name, []).append(stratum)

    def add_grown(
        self, name: str, stratum: Sequence[Played], fossils: Mapping[int, Sequence[Fossil]]
    ) -> None:
        """Play networks that have these seeds, by number, from the first epoch, with the FLOPs of
        `stratum`."""
        flops = float(np.mean([p.flops for p in stratum]))
        task, last_steps = at_equal_flops(self.task, fossils.values(), flops)
        self.add(
            name,
            simple_makers(task, HELD_OUT)["static"],
            task,
            plant=with_fossils(fossils),
            last_steps=last_steps,
            static=True,
        )

    def values(self, name: str, measure: str) -> Array:
        """[strata, networks]"""
        return np.array(
            [[MEASURES[measure](p) for p in stratum] for stratum in self.played[name]], np.float64
        )


def prove(
    task: TaskSpec,
    policies: Mapping[str, RecurrentPolicy],
    config: ProofConfig | None = None,
    *,
    schedules: Schedules | None = None,
    track: Track = lambda _name, _steps: lambda _: None,
) -> dict[str, Any]:
    """All cohorts on the same held-out networks, as plain values for JSON."""
    cohorts = play_cohorts(task, policies, config or ProofConfig(), schedules=schedules, track=track)
    return _result(cohorts, list(policies), schedules)


def play_cohorts(
    task: TaskSpec,
    policies: Mapping[str, RecurrentPolicy],
    config: ProofConfig,
    *,
    schedules: Schedules | None = None,
    track: Track = lambda _name, _steps: lambda _: None,
) -> Cohorts:
    """The episodes of all cohorts."""
    cohorts = Cohorts(task, config, track)
    for name, make in simple_makers(task, HELD_OUT).items():
        cohorts.add(name, make, static=name == "static")
    if not config.brief:
        for name, make in rule_makers(task).items():
            cohorts.add(name, make)
        _add_scheduled(cohorts, schedules)
        if task.budget == "flops":
            cohorts.add("last_slot_first", last_slot_first(task))
            add_ladder(cohorts)
    for policy in policies.values():
        cohorts.add(LEARNED, acting(task, policy, config))
    if policies and not config.brief:
        # A policy that grows with a chance of .3 in each epoch grows when sampled and never when it takes the
        # most likely action, so both are told.
        other = replace(config, sample=not config.sample)
        for policy in policies.values():
            cohorts.add("learned_sampled" if other.sample else "learned_greedy", acting(task, policy, other))
        _add_equals(cohorts)
        if task.conditions is not None:
            for policy in policies.values():
                cohorts.add("learned_shuffled", acting(task, policy, config, shuffled=True))
    return cohorts


def acting(
    task: TaskSpec,
    policy: RecurrentPolicy,
    config: ProofConfig,
    *,
    shuffled: bool = False,
    see: Sight = unchanged,
) -> Maker:
    """Makes the learned policy of a cohort. `see` changes what it observes."""
    return lambda envs: Acting(
        policy,
        envs,
        task.episode_length,
        root_seed=HELD_OUT,
        sample=config.sample,
        shuffled=shuffled,
        see=see,
    )


def _add_scheduled(cohorts: Cohorts, schedules: Schedules | None) -> None:
    """Cohorts that follow schedules: one for all networks, networks that have its seeds from the first epoch
    and, if blocks are crippled, oracle and probe."""
    task, networks = cohorts.task, cohorts.config.probe_networks
    if schedules is None:
        cohorts.absent["fixed_schedule"] = "no schedule was given, and none ships for this task"
        return
    best = schedules.best.schedule
    by_pattern = {pattern: result.schedule for pattern, result in schedules.by_pattern.items()}
    cohorts.add("fixed_schedule", lambda envs: FixedSchedule([best] * len(envs)))
    fossils = planned_fossils(task, best)
    (stratum,) = cohorts.played["fixed_schedule"]
    cohorts.add_grown("schedule_final", stratum, {p.network: fossils for p in stratum})
    if not by_pattern:
        return
    cohorts.add("oracle", oracle(task, by_pattern, HELD_OUT))
    advance = cohorts.track("fit the probe", networks)
    probe = fit_probe(task, networks, root_seed=schedules.root_seed, advance=advance)
    cohorts.add("probe", lambda _: ProbePolicy(probe, by_pattern))


def add_ladder(cohorts: Cohorts) -> None:
    """Static networks at equal FLOPs: each rung of the ladder, the best one in hindsight, and what successive
    halving finds with the FLOPs of one network and of eight. The first rung is `static`. The best rung is
    chosen on three other networks, so a comparison of fewer than four trains the ladder on more."""
    task, first, count = cohorts.task, cohorts.config.first_network, cohorts.config.networks
    networks, rungs = range(first, first + count), ladder(task)
    trained = range(first, first + max(count, 1 + CHOOSERS))
    advance = cohorts.track("ladder", len(trained) * len(rungs))
    played = train_ladder(task, trained, root_seed=HELD_OUT, rungs=rungs, advance=advance)
    for rung, stratum in zip(rungs[1:], played[1:], strict=True):
        cohorts.played[f"rung {rung.name}"] = [stratum[:count]]
    chosen = hindsight(np.array([[p.outcome.objective for p in stratum] for stratum in played]))
    best = [played[rung][network] for network, rung in enumerate(chosen[:count])]
    cohorts.played["ladder_hindsight"] = [best]
    for name, budgets in (("halving", 1), ("halving_8x", 8)):
        advance = cohorts.track(name, len(networks))
        try:
            winners = halve(task, networks, root_seed=HELD_OUT, budgets=budgets, rungs=rungs, advance=advance)
        except BudgetError as error:
            cohorts.absent[name] = str(error)
        else:
            cohorts.played[name] = [winners]


def _add_equals(cohorts: Cohorts) -> None:
    """Networks that never grow but equal the learned policy's final networks in their seeds, their size or
    their FLOPs."""
    task, wait = cohorts.task, simple_makers(cohorts.task, HELD_OUT)["static"]
    for stratum in cohorts.played[LEARNED]:
        cohorts.add_grown("static_final", stratum, {p.network: p.fossils for p in stratum})
    if isinstance(task.outline, CNNHost):
        params = task.host_params + cohorts.values(LEARNED, "added_params").mean()
        cohorts.add("static_equal", wait, widened(task, params), static=True)
        (stratum,) = cohorts.played["static_equal"]
        cohorts.played["static_equal"] = [[priced(played, task) for played in stratum]]
    else:
        cohorts.absent["static_equal"] = f"a {task.topology} host has no width to change"
    if task.budget == "flops":
        cohorts.absent["static_flops"] = "every cohort of this task has the same FLOPs, static too"
        return
    factor = cohorts.values(LEARNED, "flops").mean() / cohorts.values("static", "flops").mean()
    steps = max(1, round(task.steps_per_epoch * factor))
    cohorts.add("static_flops", wait, replace(task, steps_per_epoch=steps))


# -- figures -------------------------------------------------------------------------------------------------


def _both(make: Callable[..., Estimate], *samples: Array) -> dict[str, Any]:
    """Mean and interquartile mean; samples are [strata, networks]."""
    by_network = [sample.T for sample in samples]
    return {"mean": make(*by_network), "iqm": make(*by_network, statistic=interquartile_mean)}


def _difference(cohorts: Cohorts, other: str, measure: str) -> dict[str, Any]:
    """Learned − other, network by network."""
    ours = cohorts.values(LEARNED, measure)
    theirs = np.broadcast_to(cohorts.values(other, measure), ours.shape)
    return _both(paired, ours, theirs) | {
        "by_policy": [_both(paired, a[None], b[None]) for a, b in zip(ours, theirs, strict=True)]
    }


def growth_by_condition(task: TaskSpec, played: Strata) -> list[dict[str, Any]]:
    """Share of networks with a permanent seed in each slot: those with a crippled block, those with a healthy
    one, and the difference."""
    conditions = np.array(
        [p.condition.crippled for p in played[0] if p.condition is not None]
    )  # [networks, blocks]
    return [
        _growth_row(slot, block, _grown_in(slot, played), conditions[:, block])
        for slot, block in product(task.slots, range(conditions.shape[1]))
    ]


def _grown_in(slot: str, played: Strata) -> Array:
    """[networks, strata]: 1 where a network ends with a permanent seed in this slot."""
    strata = [[any(fossil.slot == slot for fossil in p.fossils) for p in stratum] for stratum in played]
    return np.array(strata, np.float64).T


def _growth_row(slot: str, block: int, grown: Array, crippled: npt.NDArray[np.bool_]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "slot": slot,
        "block": block,
        "crippled": None,
        "healthy": None,
        "difference": None,
    }
    if crippled.all() or not crippled.any():
        return row
    healthy_part, crippled_part = grown[~crippled], grown[crippled]
    split = healthy_part.size

    def gap(samples: Array) -> Array:
        return np.asarray(samples[:, split:].mean(1) - samples[:, :split].mean(1))

    return row | {
        "crippled": estimate(crippled_part),
        "healthy": estimate(healthy_part),
        "difference": estimate(
            np.concatenate([healthy_part, crippled_part]),
            strata=[0] * len(healthy_part) + [1] * len(crippled_part),
            statistic=gap,
        ),
    }


def _schedule(task: TaskSpec, schedules: Schedules | None) -> list[dict[str, Any]] | None:
    if schedules is None:
        return None
    return [
        asdict(p) | {"slot": task.slots[p.slot], "style": p.style.name, "tempo": p.tempo.name}
        for p in schedules.best.schedule
    ]


def _result(cohorts: Cohorts, policies: Sequence[str], schedules: Schedules | None) -> dict[str, Any]:
    task, played = cohorts.task, cohorts.played
    others = [name for name in played if name != LEARNED] if LEARNED in played else []
    result: dict[str, Any] = {
        "task": task.name,
        "root_seed": HELD_OUT,
        "settings": asdict(cohorts.config),
        "host_params": task.host_params,
        "policies": policies,
        "absent": cohorts.absent,
        "schedule": _schedule(task, schedules),
        "cohorts": {
            name: {measure: _both(estimate, cohorts.values(name, measure)) for measure in MEASURES}
            for name in played
        },
        "learned_minus": {
            other: {measure: _difference(cohorts, other, measure) for measure in ("J", "test_accuracy")}
            for other in others
        },
        "episodes": played,
    }
    if task.conditions is not None and task.conditions.cripple_probability > 0 and LEARNED in played:
        result["growth_by_condition"] = growth_by_condition(task, played[LEARNED])
    return result
