"""The comparison: every cohort on the same held-out seeds, figures with intervals, and what the learned policy has over each
other cohort, seed by seed.

Several policies (from several training seeds) are strata: intervals are resampled within each, and every difference is also
given for each policy alone. Everything in the result follows from the task, the policies, the schedules and the settings.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from esper.kasmina.hosts import CNNHost
from esper.leyline import EsperError, LifecycleOp, allowed, check_number
from esper.leyline.slots import parse_slot_id
from esper.leyline.statistics import Estimate, estimate, interquartile_mean, paired
from esper.runtime.tasks import TaskSpec
from esper.simic.proof.cohorts import LOOK, Probing, fit_probe, oracle, priced, widened, with_fossils
from esper.simic.proof.play import HELD_OUT, Maker, Played, play
from esper.simic.proof.policies import Acting, simple_makers
from esper.simic.proof.search import PerEnv, Schedules, Track
from esper.tamiyo import RecurrentPolicy

Strata = list[list[Played]]
"""The episodes of one cohort, seed by seed; one list for each policy where a policy has a part in it, else a single one."""
LEARNED, SHUFFLED, FINAL, EQUAL, AT_FLOPS = "learned", "learned_shuffled", "static_final", "static_equal", "@flops"
MEASURES: Mapping[str, tuple[Callable[[Played], float], str]] = {
    "J": (lambda p: p.outcome.objective, "the objective"),
    "test_accuracy": (lambda p: p.test_accuracy, "points, on the test split"),
    "added_params": (lambda p: p.outcome.added_params, "parameters beyond the task's host"),
    "flops": (lambda p: p.flops, "of training"),
    "accuracy_per_kparam": (lambda p: 1000 * p.test_accuracy / (p.outcome.host_params + p.outcome.added_params),
                            "points of test accuracy per 1,000 parameters"),
    "germinated": (lambda p: p.outcome.germinated, "seeds"),
    "fossilized": (lambda p: p.outcome.fossilized, "seeds"),
    "pruned": (lambda p: p.outcome.pruned, "seeds"),
    "rollbacks": (lambda p: p.outcome.rollbacks, "by the governor"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofConfig:
    """How to compare."""

    seeds: int = 96
    """Held-out seeds."""
    deterministic: bool = False
    """Learned policies take their most likely actions; otherwise they sample, without exploration."""
    equal_flops: tuple[str, ...] = ("static",)
    """Cohorts that are also trained for as many FLOPs as the learned one spends on average, by more steps per epoch."""
    probe_seeds: int = 256
    """Training seeds that the probe is fitted on."""
    brief: bool = False
    """Only never growing, random, the heuristic and the learned policy."""

    def __post_init__(self) -> None:
        check_number("proof", "seeds", self.seeds, low=2, integer=True)
        check_number("proof", "probe_seeds", self.probe_seeds, low=2, integer=True)


class Cohorts:
    """Plays cohorts and keeps what they did."""

    def __init__(self, task: TaskSpec, config: ProofConfig, track: Track) -> None:
        self.task, self.config, self.track = task, config, track
        self.played: dict[str, Strata] = {}
        self.absent: dict[str, str] = {}
        """Cohorts that could not be played, and why."""

    def add(self, name: str, make: Maker, *, task: TaskSpec | None = None, plants: Any = None) -> None:
        """Play one stratum of a cohort."""
        task = task or self.task
        stratum = play(task, make, root_seed=HELD_OUT, seeds=range(self.config.seeds), plant=plants,
                       advance=self.track(name, self.config.seeds * task.episode_length))
        self.played.setdefault(name, []).append(stratum)

    def values(self, name: str, measure: str) -> np.ndarray:
        """[strata, seeds]"""
        return np.array([[MEASURES[measure][0](p) for p in stratum] for stratum in self.played[name]], np.float64)


def prove(task: TaskSpec, policies: Mapping[str, RecurrentPolicy], config: ProofConfig | None = None, *,
          schedules: Schedules | None = None, track: Track = lambda _what, _steps: lambda _: None) -> dict[str, Any]:
    """All cohorts on the same held-out seeds, as plain values for JSON."""
    config = config or ProofConfig()
    cohorts = Cohorts(task, config, track)
    makers = simple_makers(HELD_OUT) | ({} if config.brief else scheduled(cohorts, schedules))
    check_names(config, [*makers, FINAL, EQUAL], policies)
    for name, make in makers.items():
        cohorts.add(name, make)
    for policy in policies.values():
        cohorts.add(LEARNED, learned(task, policy, config))
    if policies and not config.brief:
        for i, policy in enumerate(policies.values()):
            fossils = {p.seed: p.fossils for p in cohorts.played[LEARNED][i]}
            cohorts.add(FINAL, makers["static"], plants=with_fossils(fossils))
            if task.conditions is not None:
                cohorts.add(SHUFFLED, learned(task, policy, config, shuffled=True))
        add_equal(cohorts, makers)
    return result(cohorts, list(policies), schedules)


def learned(task: TaskSpec, policy: RecurrentPolicy, config: ProofConfig, *, shuffled: bool = False) -> Maker:
    return lambda envs: Acting(policy, envs, task.episode_length, root_seed=HELD_OUT, deterministic=config.deterministic,
                               shuffled=shuffled)


def scheduled(cohorts: Cohorts, schedules: Schedules | None) -> dict[str, Maker]:
    """Cohorts that follow schedules: one for all, and where blocks are crippled the two rulers."""
    task = cohorts.task
    if schedules is None:
        cohorts.absent["fixed_schedule"] = "no schedule was given, and none ships for this task"
        return {}
    best = schedules.best.schedule
    makers: dict[str, Maker] = {"fixed_schedule": lambda envs: PerEnv([best] * len(envs))}
    if not schedules.by_pattern:
        return makers
    by_pattern = {pattern: found.schedule for pattern, found in schedules.by_pattern.items()}
    makers["oracle"] = oracle(task, by_pattern, HELD_OUT)
    if task.episode_length < LOOK:
        cohorts.absent["probe"] = f"an episode of {task.episode_length} epochs ends before the probe looks, at epoch {LOOK}"
        return makers
    seeds = cohorts.config.probe_seeds
    probe = fit_probe(task, seeds, root_seed=schedules.root_seed, advance=cohorts.track("fit the probe", seeds * LOOK))
    return makers | {"probe": lambda envs: Probing(probe, by_pattern)}  # noqa: ARG005


def check_names(config: ProofConfig, known: Sequence[str], policies: Mapping[str, RecurrentPolicy]) -> None:
    """Before hours are spent."""
    if unknown := [name for name in config.equal_flops if name not in known]:
        raise EsperError(f"equal_flops names {unknown}; {allowed(known)}")
    if not policies and config.equal_flops not in ((), ("static",)):
        raise EsperError(f"equal_flops names {list(config.equal_flops)}, but there is no policy whose FLOPs they could have")


def add_equal(cohorts: Cohorts, makers: Mapping[str, Maker]) -> None:
    """Hosts of the same size, and cohorts with the same FLOPs, as the learned policy's networks on average."""
    task, still = cohorts.task, makers["static"]
    tasks = {name: task for name in makers}
    if isinstance(task.outline, CNNHost):
        added = cohorts.values(LEARNED, "added_params").mean()
        tasks[EQUAL] = widened(task, task.host_params + added)
        cohorts.add(EQUAL, still, task=tasks[EQUAL])
    else:
        cohorts.absent[EQUAL] = f"a {task.topology} host has no width to change"
    spent = cohorts.values(LEARNED, "flops").mean()
    for name in cohorts.config.equal_flops:
        if name not in cohorts.played:
            continue
        factor = spent / cohorts.values(name, "flops").mean()
        longer = replace(tasks.get(name, task), steps_per_epoch=max(1, round(task.steps_per_epoch * factor)))
        for stratum in cohorts.played[LEARNED] if name == FINAL else [None]:
            plants = None if stratum is None else with_fossils({p.seed: p.fossils for p in stratum})
            cohorts.add(name + AT_FLOPS, makers.get(name, still), task=longer, plants=plants)
    for name in (EQUAL, EQUAL + AT_FLOPS):
        if name in cohorts.played:
            cohorts.played[name] = [[priced(p, task) for p in stratum] for stratum in cohorts.played[name]]


# -- figures -----------------------------------------------------------------------------------------------------------------


def both(make: Callable[..., Estimate], *samples: np.ndarray) -> dict[str, Estimate]:
    """Mean and interquartile mean, resampled within strata; samples are [strata, seeds]."""
    strata = np.repeat(np.arange(len(samples[0])), samples[0].shape[1]).tolist()
    flat = [sample.ravel() for sample in samples]
    return {"mean": make(*flat, strata=strata), "iqm": make(*flat, strata=strata, statistic=interquartile_mean)}


def difference(cohorts: Cohorts, other: str, measure: str) -> dict[str, Any]:
    """Learned − other, seed by seed."""
    ours = cohorts.values(LEARNED, measure)
    theirs = np.broadcast_to(cohorts.values(other, measure), ours.shape)
    return both(paired, ours, theirs) | {"by_policy": [both(paired, a[None], b[None]) for a, b in zip(ours, theirs, strict=True)]}


def growth_by_condition(task: TaskSpec, played: Strata) -> list[dict[str, Any]]:
    """How often a seed was planted and became permanent in each slot: where its block is crippled, where it is whole, and the
    difference."""
    episodes = [p for stratum in played for p in stratum]
    rows = []
    for slot in task.slots:
        _, block = parse_slot_id(slot)
        crippled = np.array([p.condition is not None and p.condition.crippled[block] for p in episodes])
        order = np.argsort(crippled, kind="stable")
        for what, happened in (("planted", lambda p, slot=slot: any(
                d.op == LifecycleOp.GERMINATE.name and d.slot == slot for d in p.decisions)),
                ("permanent", lambda p, slot=slot: any(f.slot == slot for f in p.fossils))):
            rate = np.array([float(happened(p)) for p in episodes])  # type: ignore[no-untyped-call]
            row = {"slot": slot, "what": what, "crippled": None, "healthy": None, "difference": None}
            if 0 < crippled.sum() < len(crippled):
                whole = int((~crippled).sum())
                row |= {"crippled": estimate(rate[crippled]), "healthy": estimate(rate[~crippled]), "difference": estimate(
                    rate[order], strata=crippled[order].astype(int).tolist(),
                    statistic=lambda s, n=whole: s[:, n:].mean(1) - s[:, :n].mean(1))}
            rows.append(row)
    return rows


def result(cohorts: Cohorts, policies: Sequence[str], schedules: Schedules | None) -> dict[str, Any]:
    task, played = cohorts.task, cohorts.played
    others = [name for name in played if name != LEARNED and LEARNED in played]
    found: dict[str, Any] = {
        "task": task.name, "root_seed": HELD_OUT, "settings": asdict(cohorts.config), "host_params": task.host_params,
        "policies": list(policies), "absent": cohorts.absent,
        "schedule": None if schedules is None else [asdict(p) | {"slot": task.slots[p.slot]} for p in schedules.best.schedule],
        "cohorts": {name: {measure: both(estimate, cohorts.values(name, measure)) for measure in MEASURES} for name in played},
        "learned_minus": {other: {measure: difference(cohorts, other, measure) for measure in ("J", "test_accuracy")}
                          for other in others},
        "steps_per_epoch": {name: round(fmean(p.flops for s in strata for p in s) / 1e6, 3) for name, strata in played.items()},
        "episodes": {name: [[asdict(p) for p in stratum] for stratum in strata] for name, strata in played.items()},
    }
    if task.conditions is not None and LEARNED in played:
        found["growth_by_condition"] = growth_by_condition(task, played[LEARNED])
    return found
