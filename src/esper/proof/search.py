"""The best fixed schedule, found by successive halving within a budget of env-steps: what a policy that looks
must beat.

A schedule plants one to three seeds, each a blueprint in a slot, in successive epochs; not to grow is one
more. Schedules are compared by what they gain over not growing on the same seeds, so that different schedules
can meet different seeds. Where a task draws crippled blocks, every pattern of them counts by its probability,
and each has a best schedule of its own. Winners can be refined: each meets its neighbours, which differ in
one seed, all on the same networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, count, islice, product
from statistics import fmean, stdev

import numpy as np

from esper.leyline import EsperError, GerminationStyle, check_number, stream_seed
from esper.proof.episodes import play
from esper.runtime.tasks import TaskSpec, draw_condition
from esper.simic.training.evaluation import TRAINING
from esper.tamiyo import FixedSchedule, Planting
from esper.tamiyo.schedules import Pattern, Schedule, ScheduleResult, Schedules, marks

Track = Callable[[str, int], Callable[[int], None]]
"""(what, its env-steps) → a function that hears of env-steps as they are done."""
KEEP = 4
"""One of so many schedules stays in after each rung."""
REFINING = 1_000_000
"""The first seed on which winners meet their neighbours."""


def patterns(task: TaskSpec) -> dict[Pattern, float]:
    """The patterns of crippled blocks that a task can draw, with their probabilities; none where it draws
    none."""
    if task.conditions is None or not task.conditions.cripple_probability:
        return {}
    chance = task.conditions.cripple_probability
    blocks = len(draw_condition(task, TRAINING, 0, 0).crippled)
    found = {
        pattern: math.prod(chance if mark else 1 - chance for mark in pattern)
        for pattern in product((False, True), repeat=blocks)
    }
    return {pattern: probability for pattern, probability in found.items() if probability}


def draw_schedules(task: TaskSpec, size: int, root_seed: int) -> list[Schedule]:
    """Not to grow, and `size` different schedules: half of them start at once, the others any time until it
    is too late."""
    rng = np.random.default_rng(stream_seed(root_seed, "sampling"))
    needs = task.pacing.min_training_epochs + task.pacing.min_blending_epochs + 6
    latest = max(1, task.episode_length - needs)
    found: dict[Schedule, None] = {(): None}
    misses = 0
    while len(found) <= size:
        if misses == 1000:
            raise EsperError(
                f"task {task.name!r} has hardly more than {len(found)} schedules; {size} candidates are too many"
            )
        seeds = int(rng.integers(1, min(3, len(task.slots)) + 1))
        start = 1 if rng.random() < 0.5 else int(rng.integers(1, latest + 1))
        slots = sorted(rng.choice(len(task.slots), seeds, replace=False).tolist())
        plan = tuple(
            Planting(start + i, slot, task.blueprints[rng.integers(len(task.blueprints))])
            for i, slot in enumerate(slots)
        )
        misses = misses + 1 if plan in found else 0
        found[plan] = None
    return sorted(found, key=lambda s: ([(p.slot, p.blueprint) for p in s], s[0].epoch if s else 0))


def search_schedules(
    task: TaskSpec,
    budget_env_steps: int,
    *,
    candidates: int = 208,
    root_seed: int = TRAINING,
    population: int | None = None,
    track: Track = lambda _what, _steps: lambda _: None,
) -> Schedules:
    """The best schedule within the budget. Where blocks are crippled, as many env-steps again, shared evenly,
    for the best of each pattern, beginning with the quarter of all schedules that did best on it so far."""
    for name, value in (("candidates", candidates), ("budget_env_steps", budget_env_steps)):
        check_number("search", name, value, low=1, integer=True)
    plans, chances = draw_schedules(task, candidates, root_seed), patterns(task)
    search, quarter = _Search(task, root_seed, population or task.population), -(-len(plans) // KEEP)
    least = max(search.least(len(plans)), len(chances) * search.least(quarter))
    if budget_env_steps < least:
        raise EsperError(
            f"search: {budget_env_steps} env-steps are too few for {len(plans)} schedules of {task.episode_length} "
            f"epochs; allowed: {least} or more"
        )
    share = budget_env_steps // max(len(chances), 1)
    best, by_pattern = search.halve(plans, budget_env_steps, chances, track("search", budget_env_steps)), {}
    for pattern in chances:
        alone = {pattern: 1.0}
        first = sorted(plans, key=lambda plan, alone=alone: -search.gain(plan, alone))[:quarter]  # type: ignore[misc]
        by_pattern[pattern] = search.halve(first, share, alone, track(f"search {marks(pattern)}", share))
    return Schedules(
        task=task.name, root_seed=root_seed, candidates=len(plans), best=best, by_pattern=by_pattern
    )


def neighbours(task: TaskSpec, plan: Schedule) -> list[Schedule]:
    """Schedules with one seed less, one seed more (up to three), one seed elsewhere or of another kind, or
    all seeds blended in another way."""
    start, seeds = min((p.epoch for p in plan), default=1), {p.slot: p.blueprint for p in plan}
    style = plan[0].style if plan else GerminationStyle.SIGMOID_ADD
    fewer = [{slot: kind for slot, kind in seeds.items() if slot != gone} for gone in seeds]
    others = [
        rest | {slot: kind}
        for rest in [*fewer, *[seeds] * (len(seeds) < 3)]
        for slot in range(len(task.slots))
        if slot not in rest
        for kind in task.blueprints
    ]
    found = [
        tuple(Planting(start + i, slot, kind, style) for i, (slot, kind) in enumerate(sorted(one.items())))
        for one in (*fewer, *others)
    ]
    found += [tuple(replace(p, style=way) for p in plan) for way in GerminationStyle]
    return [one for one in dict.fromkeys(found) if one != plan]


def refine_schedules(
    task: TaskSpec,
    found: Schedules,
    *,
    population: int | None = None,
    track: Track = lambda _what, _steps: lambda _: None,
) -> Schedules:
    """The same with the best of each winner and its neighbours: all meet the same seeds, half a population of
    them, and the winner and the best quarter a whole one. A neighbour takes the winner's place if it gains
    more than the winner did here and in the search, by two standard errors of their difference here, for it
    is the best of many. What that took is added to what the search had taken."""

    def refine(one: ScheduleResult, chances: Mapping[Pattern, float], what: str) -> ScheduleResult:
        search, plans = (
            _Search(task, found.root_seed, population or task.population),
            neighbours(task, one.schedule),
        )
        fresh, quarter, used = search.seeds(chances, REFINING), -(-len(plans) // KEEP), one.env_steps
        advance = track(
            what, (len({*plans, one.schedule, ()}) + 2 * quarter + 4) * search.size * task.episode_length // 2
        )
        for size in (max(2, search.size // 2), max(4, search.size)):
            met = list(islice(fresh, size))
            used += sum(
                search.meet(dict.fromkeys(met, plan), advance)
                for plan in dict.fromkeys([one.schedule, *plans, ()])
            )
            plans = sorted(plans, key=lambda plan: -search.gain(plan, chances))[:quarter]
        gaps = [value - search.values[one.schedule][seed] for seed, value in search.values[plans[0]].items()]
        share = one.networks / (one.networks + len(gaps))
        gained = share * one.gain + (1 - share) * search.gain(one.schedule, chances)
        better = search.gain(plans[0], chances) - gained > 2 * stdev(gaps) / math.sqrt(len(gaps))
        return replace(search.found(plans[0] if better else one.schedule, chances), env_steps=used)

    return replace(
        found,
        best=refine(found.best, patterns(task), "refine"),
        by_pattern={
            pattern: refine(one, {pattern: 1.0}, f"refine {marks(pattern)}")
            for pattern, one in found.by_pattern.items()
        },
    )


class _Search:
    """What is known of each plan on each seed, and how to know more."""

    def __init__(self, task: TaskSpec, root_seed: int, size: int) -> None:
        self.task, self.root_seed, self.size = task, root_seed, size
        self.values: dict[Schedule, dict[int, float]] = {(): {}}
        self.pattern = cache(lambda seed: draw_condition(task, root_seed, 0, seed).crippled)

    def least(self, plans: int) -> int:
        """Env-steps without which not every plan meets a seed."""
        return _rungs(plans) * self.task.episode_length * (plans + self.size)

    def halve(
        self,
        plans: Sequence[Schedule],
        budget: int,
        chances: Mapping[Pattern, float],
        advance: Callable[[int], None],
    ) -> ScheduleResult:
        """In each rung the plans that are left meet more seeds, and a quarter of them stay."""
        rungs, alive, used, fresh = _rungs(len(plans)), list(plans), 0, self.seeds(chances)
        for rung in range(rungs):
            per_rung = (budget - used) // (rungs - rung) // self.task.episode_length  # episodes
            # Each plan meets `each` seeds; not growing meets all of the rung's, for the others are measured
            # against it.
            many = per_rung >= self.size * (len(alive) + 1)
            each = per_rung // (len(alive) + 1) if many else (per_rung - self.size) // len(alive)
            side_by_side = max(1, self.size // each)
            met = list(islice(fresh, each * side_by_side))
            for at in range(0, len(alive), side_by_side):
                used += self.meet(
                    {
                        seed: plan
                        for i, plan in enumerate(alive[at : at + side_by_side])
                        if plan
                        for seed in met[each * i : each * (i + 1)]
                    },
                    advance,
                )
            used += self.meet(dict.fromkeys(met, ()), advance)
            best = sorted(alive, key=lambda plan: -self.gain(plan, chances))
            alive = sorted(best[: 1 if rung == rungs - 1 else -(-len(alive) // KEEP)], key=plans.index)
        return replace(self.found(alive[0], chances), env_steps=used)

    def found(self, plan: Schedule, chances: Mapping[Pattern, float]) -> ScheduleResult:
        known = [
            value for seed, value in self.values[plan].items() if not chances or self.pattern(seed) in chances
        ]
        return ScheduleResult(
            schedule=plan,
            objective=fmean(known),
            gain=self.gain(plan, chances),
            networks=len(known),
            env_steps=0,
        )

    def meet(self, plan_of: Mapping[int, Schedule], advance: Callable[[int], None]) -> int:
        """Let each seed follow its plan, note its J, and return the env-steps that it took."""
        for played in play(
            self.task,
            lambda envs: FixedSchedule([plan_of[env] for env in envs]),
            root_seed=self.root_seed,
            seeds=list(plan_of),
            population=self.size,
            advance=advance,
        ):
            self.values.setdefault(plan_of[played.seed], {})[played.seed] = played.outcome.objective
        return len(plan_of) * self.task.episode_length

    def gain(self, plan: Schedule, chances: Mapping[Pattern, float]) -> float:
        """Mean gain over not growing; where patterns are drawn, the mean of each by its probability. −∞ if
        nothing is known."""
        gains: dict[Pattern, list[float]] = {}
        for seed, value in self.values.get(plan, {}).items():
            gains.setdefault(self.pattern(seed) if chances else (), []).append(value - self.values[()][seed])
        weight = (
            {pattern: chances[pattern] for pattern in gains if pattern in chances}
            if chances
            else dict.fromkeys(gains, 1.0)
        )
        return (
            sum(weight[p] * fmean(gains[p]) for p in weight) / sum(weight.values()) if weight else -math.inf
        )

    def seeds(self, chances: Mapping[Pattern, float], first: int = 0) -> Iterator[int]:
        """Seeds that nothing has met, without end; where patterns are drawn, one of each in turn."""
        first = max(first, 1 + max(self.values[()], default=-1))
        if not chances:
            return count(first)
        return chain.from_iterable(zip(*(self._with(pattern, first) for pattern in chances), strict=True))

    def _with(self, pattern: Pattern, first: int) -> Iterator[int]:
        return (seed for seed in count(first) if self.pattern(seed) == pattern)


def _rungs(plans: int) -> int:
    return max(1, math.ceil(math.log(plans, KEEP)))
