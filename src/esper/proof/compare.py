"""The comparison: every cohort on the same held-out seeds, figures with intervals, and what the learned
policy has over each other cohort, seed by seed.

Several policies (from several training seeds) have equal parts in every figure. Intervals are resampled
network by network, what all policies made of one together, for they share its luck; every difference is also
given for each policy alone. The result follows from the task, the policies, the schedules and the settings
alone."""

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
from esper.proof.cohorts import oracle, priced, widened, with_fossils
from esper.proof.episodes import Maker, Played, play
from esper.proof.policies import Acting, simple_makers
from esper.proof.search import Track
from esper.runtime.tasks import TaskSpec
from esper.simic.training.evaluation import HELD_OUT
from esper.simic.training.probe import Probing, fit_probe
from esper.tamiyo import FixedSchedule, RecurrentPolicy
from esper.tamiyo.schedules import Schedules

Strata = list[list[Played]]
"""The episodes of one cohort, seed by seed; one list for each policy where a policy has a part in it, else a
single one."""
Array = npt.NDArray[np.float64]
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
    """How to compare."""

    seeds: int = 96
    """Held-out seeds …"""
    first_seed: int = 0
    """… from this one on."""
    sample: bool = False
    """Learned policies sample their actions, without exploration; otherwise they take the most likely
    ones."""
    probe_seeds: int = 256
    """Training seeds that the probe is fitted on."""
    brief: bool = False
    """Only never growing, random, the heuristic and the learned policy."""

    def __post_init__(self) -> None:
        check_number("proof", "seeds", self.seeds, low=2, integer=True)
        check_number("proof", "first_seed", self.first_seed, low=0, integer=True)
        check_number("proof", "probe_seeds", self.probe_seeds, low=2, integer=True)


class Cohorts:
    """Plays cohorts and keeps what they did."""

    def __init__(self, task: TaskSpec, config: ProofConfig, track: Track) -> None:
        self.task, self.config, self.track = task, config, track
        self.played: dict[str, Strata] = {}
        self.absent: dict[str, str] = {}
        """Cohorts that could not be played, and why."""

    def add(self, name: str, make: Maker, task: TaskSpec | None = None, **options: Any) -> None:
        """Play one stratum of a cohort."""
        task, first = task or self.task, self.config.first_seed
        seeds = range(first, first + self.config.seeds)
        advance = self.track(name, len(seeds) * task.episode_length)
        self.played.setdefault(name, []).append(
            play(task, make, root_seed=HELD_OUT, seeds=seeds, advance=advance, **options)
        )

    def values(self, name: str, measure: str) -> Array:
        """[strata, seeds]"""
        return np.array(
            [[MEASURES[measure](p) for p in stratum] for stratum in self.played[name]], np.float64
        )


def prove(
    task: TaskSpec,
    policies: Mapping[str, RecurrentPolicy],
    config: ProofConfig | None = None,
    *,
    schedules: Schedules | None = None,
    track: Track = lambda _what, _steps: lambda _: None,
) -> dict[str, Any]:
    """All cohorts on the same held-out seeds, as plain values for JSON."""
    config = config or ProofConfig()
    cohorts = Cohorts(task, config, track)
    for name, make in simple_makers(task, HELD_OUT).items():
        cohorts.add(name, make)
    if not config.brief:
        _add_scheduled(cohorts, schedules)
    for policy in policies.values():
        cohorts.add(LEARNED, _acting(task, policy, config))
    if policies and not config.brief:
        _add_equals(cohorts)
        for policy in policies.values() if task.conditions is not None else ():
            cohorts.add("learned_shuffled", _acting(task, policy, config, shuffled=True))
    return _result(cohorts, list(policies), schedules)


def _acting(task: TaskSpec, policy: RecurrentPolicy, config: ProofConfig, *, shuffled: bool = False) -> Maker:
    return lambda envs: Acting(
        policy, envs, task.episode_length, root_seed=HELD_OUT, sample=config.sample, shuffled=shuffled
    )


def _add_scheduled(cohorts: Cohorts, schedules: Schedules | None) -> None:
    """Cohorts that follow schedules: one for all, and where blocks are crippled the two rulers."""
    task, seeds = cohorts.task, cohorts.config.probe_seeds
    if schedules is None:
        cohorts.absent["fixed_schedule"] = "no schedule was given, and none ships for this task"
        return
    best, by_pattern = (
        schedules.best.schedule,
        {p: found.schedule for p, found in schedules.by_pattern.items()},
    )
    cohorts.add("fixed_schedule", lambda envs: FixedSchedule([best] * len(envs)))
    if not by_pattern:
        return
    cohorts.add("oracle", oracle(task, by_pattern, HELD_OUT))
    probe = fit_probe(
        task, seeds, root_seed=schedules.root_seed, advance=cohorts.track("fit the probe", seeds)
    )
    cohorts.add("probe", lambda _: Probing(probe, by_pattern))


def _add_equals(cohorts: Cohorts) -> None:
    """Hosts that never grow and have what the learned policy's networks end with: their seeds, their size,
    their FLOPs."""
    task, still = cohorts.task, simple_makers(cohorts.task, HELD_OUT)["static"]
    for stratum in cohorts.played[LEARNED]:
        cohorts.add("static_final", still, plant=with_fossils({p.seed: p.fossils for p in stratum}))
    if isinstance(task.outline, CNNHost):
        cohorts.add(
            "static_equal",
            still,
            widened(task, task.host_params + cohorts.values(LEARNED, "added_params").mean()),
        )
        cohorts.played["static_equal"] = [
            [priced(p, task) for p in stratum] for stratum in cohorts.played["static_equal"]
        ]
    else:
        cohorts.absent["static_equal"] = f"a {task.topology} host has no width to change"
    factor = cohorts.values(LEARNED, "flops").mean() / cohorts.values("static", "flops").mean()
    cohorts.add(
        "static_flops", still, replace(task, steps_per_epoch=max(1, round(task.steps_per_epoch * factor)))
    )


# -- figures -------------------------------------------------------------------------------------------------


def _both(make: Callable[..., Estimate], *samples: Array) -> dict[str, Any]:
    """Mean and interquartile mean; samples are [strata, seeds]."""
    by_seed = [sample.T for sample in samples]
    return {"mean": make(*by_seed), "iqm": make(*by_seed, statistic=interquartile_mean)}


def _difference(cohorts: Cohorts, other: str, measure: str) -> dict[str, Any]:
    """Learned − other, seed by seed."""
    ours = cohorts.values(LEARNED, measure)
    theirs = np.broadcast_to(cohorts.values(other, measure), ours.shape)
    return _both(paired, ours, theirs) | {
        "by_policy": [_both(paired, a[None], b[None]) for a, b in zip(ours, theirs, strict=True)]
    }


def growth_by_condition(task: TaskSpec, played: Strata) -> list[dict[str, Any]]:
    """How often a seed became permanent in each slot: where a block is crippled, where it is whole, and the
    difference."""
    conditions = np.array(
        [p.condition.crippled for p in played[0] if p.condition is not None]
    )  # [seeds, blocks]
    rows: list[dict[str, Any]] = []
    for slot, block in product(task.slots, range(conditions.shape[1])):
        grown = np.array(
            [
                [float(any(fossil.slot == slot for fossil in p.fossils)) for p in seed]
                for seed in zip(*played, strict=True)
            ]
        )  # [seeds, strata]
        crippled = conditions[:, block]
        row: dict[str, Any] = {
            "slot": slot,
            "block": block,
            "crippled": None,
            "healthy": None,
            "difference": None,
        }
        if crippled.any() and not crippled.all():
            parts = grown[~crippled], grown[crippled]

            def gap(samples: Array, healthy: int = parts[0].size) -> Array:
                return np.asarray(samples[:, healthy:].mean(1) - samples[:, :healthy].mean(1))

            row |= {
                "crippled": estimate(parts[1]),
                "healthy": estimate(parts[0]),
                "difference": estimate(
                    np.concatenate(parts),
                    strata=np.repeat([0, 1], [len(part) for part in parts]).tolist(),
                    statistic=gap,
                ),
            }
        rows.append(row)
    return rows


def _result(cohorts: Cohorts, policies: Sequence[str], schedules: Schedules | None) -> dict[str, Any]:
    task, played = cohorts.task, cohorts.played
    others = [name for name in played if name != LEARNED] if LEARNED in played else []
    found: dict[str, Any] = {
        "task": task.name,
        "root_seed": HELD_OUT,
        "settings": asdict(cohorts.config),
        "host_params": task.host_params,
        "policies": policies,
        "absent": cohorts.absent,
        "schedule": None
        if schedules is None
        else [
            asdict(p) | {"slot": task.slots[p.slot], "style": p.style.name} for p in schedules.best.schedule
        ],
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
    if task.conditions is not None and LEARNED in played:
        found["growth_by_condition"] = growth_by_condition(task, played[LEARNED])
    return found
