"""The best fixed schedule, by successive halving within a budget of env-steps: the reference that a policy
with observations must beat.

A schedule plants one to three seeds, each a blueprint in a slot, in successive epochs; not to grow is one
more schedule. Schedules are compared by their gain over not growing on the same networks, so that different
schedules can be measured on different networks. If a task draws crippled blocks, every pattern of them counts
by its probability, and each pattern has a best schedule of its own. Winners can be refined: each is compared
with its neighbours, which differ in one seed, on the same networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, count, islice, product
from statistics import fmean, stdev

import numpy as np

from esper.leyline import (
    TEMPO_EPOCHS,
    EsperError,
    GerminationStyle,
    TempoAction,
    check_number,
    stream_seed,
)
from esper.proof.episodes import Job, play_jobs
from esper.runtime.tasks import TaskSpec, draw_condition
from esper.simic.training.evaluation import TRAINING
from esper.simic.training.probe import patterns
from esper.tamiyo import FixedSchedule, Planting
from esper.tamiyo.schedules import Pattern, Schedule, ScheduleResult, Schedules, marks

Track = Callable[[str, int], Callable[[int], None]]
"""(name of a part of the work, its env-steps) → a function to call with the number of env-steps just done."""
KEEP = 4
"""After each rung, one of this many schedules stays."""
REFINING = 1_000_000
"""Number of the first network on which winners are refined."""


def draw_schedules(task: TaskSpec, size: int, root_seed: int) -> list[Schedule]:
    """Not to grow, and `size` different schedules. Half of them start in the first epoch, the others at any
    epoch that leaves time for a seed to become permanent."""
    rng = np.random.default_rng(stream_seed(root_seed, "sampling"))
    tempo = TEMPO_EPOCHS[task.tempo]
    needed = task.pacing.epochs_to_permanence(tempo, strict=not task.gates.permissive)
    # Three seeds are planted in successive epochs.
    latest = max(1, task.episode_length - needed - 2)
    drawn: dict[Schedule, None] = {(): None}
    misses = 0
    while len(drawn) <= size:
        if misses == 1000:
            raise EsperError(
                f"task {task.name!r} has hardly more than {len(drawn)} schedules; "
                f"{size} candidates are too many"
            )
        seeds = int(rng.integers(1, min(3, len(task.slots)) + 1))
        start = 1 if rng.random() < 0.5 else int(rng.integers(1, latest + 1))
        slots = sorted(rng.choice(len(task.slots), seeds, replace=False).tolist())
        plan = tuple(
            Planting(start + i, slot, task.blueprints[rng.integers(len(task.blueprints))], tempo=task.tempo)
            for i, slot in enumerate(slots)
        )
        misses = misses + 1 if plan in drawn else 0
        drawn[plan] = None
    return sorted(
        drawn, key=lambda plan: ([(p.slot, p.blueprint) for p in plan], plan[0].epoch if plan else 0)
    )


def search_schedules(
    task: TaskSpec,
    budget_env_steps: int,
    *,
    candidates: int = 208,
    root_seed: int = TRAINING,
    population: int | None = None,
    track: Track = lambda _name, _steps: lambda _: None,
) -> Schedules:
    """The best schedule within the budget. If blocks are crippled, the same number of env-steps again is
    divided evenly among the patterns: the search for each starts with the quarter of all schedules that is
    best on it so far."""
    for name, value in (("candidates", candidates), ("budget_env_steps", budget_env_steps)):
        check_number("search", name, value, low=1, integer=True)
    plans, chances = draw_schedules(task, candidates, root_seed), patterns(task)
    search, quarter = _Search(task, root_seed, population or task.population), -(-len(plans) // KEEP)
    least = max(search.least(len(plans)), len(chances) * search.least(quarter))
    if budget_env_steps < least:
        raise EsperError(
            f"search: {budget_env_steps} env-steps are too few for {len(plans)} schedules of "
            f"{task.episode_length} epochs; allowed: {least} or more"
        )
    share = budget_env_steps // max(len(chances), 1)
    best = search.halve(plans, budget_env_steps, chances, track("search", budget_env_steps))
    by_pattern = {}
    for pattern in chances:
        alone = {pattern: 1.0}
        first = search.ranked(plans, alone)[:quarter]
        by_pattern[pattern] = search.halve(first, share, alone, track(f"search {marks(pattern)}", share))
    return Schedules(
        task=task.name, root_seed=root_seed, candidates=len(plans), best=best, by_pattern=by_pattern
    )


def neighbours(task: TaskSpec, plan: Schedule) -> list[Schedule]:
    """Schedules with one seed less, one seed more (up to three), one seed in another slot or of another
    blueprint, or all seeds in another style."""
    start = min((p.epoch for p in plan), default=1)
    style = plan[0].style if plan else GerminationStyle.SIGMOID_ADD
    seeds = {p.slot: p.blueprint for p in plan}
    fewer = [{slot: kind for slot, kind in seeds.items() if slot != removed} for removed in seeds]
    extendable = [*fewer, seeds] if len(seeds) < 3 else fewer
    others = [
        rest | {slot: blueprint}
        for rest in extendable
        for slot, blueprint in product(range(len(task.slots)), task.blueprints)
        if slot not in rest
    ]
    near = [
        tuple(
            Planting(start + i, slot, kind, style, task.tempo)
            for i, (slot, kind) in enumerate(sorted(one.items()))
        )
        for one in (*fewer, *others)
    ]
    styles = list(GerminationStyle)
    if task.tempo is TempoAction.INSTANT:
        styles.remove(GerminationStyle.LINEAR_ADD)  # it differs from SIGMOID_ADD in its ramp alone
    near += [tuple(replace(p, style=other) for p in plan) for other in styles]
    return [one for one in dict.fromkeys(near) if one != plan]


def refine_schedules(
    task: TaskSpec,
    schedules: Schedules,
    *,
    population: int | None = None,
    track: Track = lambda _name, _steps: lambda _: None,
) -> Schedules:
    """Compare each winner with its neighbours: all are measured on the same networks, half a population of
    them, then the winner and the best quarter on a whole population. A neighbour replaces the winner if it
    gains more than the winner did here and in the search, by two standard errors of their difference here,
    because it is the best of many. The env-steps are added to those of the search."""

    def refine(winner: ScheduleResult, chances: Mapping[Pattern, float], name: str) -> ScheduleResult:
        search = _Search(task, schedules.root_seed, population or task.population)
        plans = neighbours(task, winner.schedule)
        fresh, quarter, used = search.networks(chances, REFINING), -(-len(plans) // KEEP), winner.env_steps
        halves = len({*plans, winner.schedule, ()}) + 2 * quarter + 4
        advance = track(name, halves * search.size * task.episode_length // 2)
        for size in (max(2, search.size // 2), max(4, search.size)):
            networks = list(islice(fresh, size))
            compared = dict.fromkeys([winner.schedule, *plans, ()])
            used += search.measure([dict.fromkeys(networks, plan) for plan in compared], advance)
            plans = search.ranked(plans, chances)[:quarter]
        ours, theirs = search.values[winner.schedule], search.values[plans[0]]
        gaps = [value - ours[network] for network, value in theirs.items()]
        share = winner.networks / (winner.networks + len(gaps))
        gained = share * winner.gain + (1 - share) * search.gain(winner.schedule, chances)
        better = search.gain(plans[0], chances) - gained > 2 * stdev(gaps) / math.sqrt(len(gaps))
        return replace(search.result(plans[0] if better else winner.schedule, chances), env_steps=used)

    return replace(
        schedules,
        best=refine(schedules.best, patterns(task), "refine"),
        by_pattern={
            pattern: refine(result, {pattern: 1.0}, f"refine {marks(pattern)}")
            for pattern, result in schedules.by_pattern.items()
        },
    )


class _Search:
    """J of each schedule on each network that it was measured on, and how to measure more.

    `chances` are the patterns that count, with their weights; empty if the task draws none."""

    def __init__(self, task: TaskSpec, root_seed: int, size: int) -> None:
        self.task, self.root_seed, self.size = task, root_seed, size
        self.values: dict[Schedule, dict[int, float]] = {(): {}}
        self.pattern = cache(lambda network: draw_condition(task, root_seed, 0, network).crippled)

    def least(self, plans: int) -> int:
        """Smallest budget with which every schedule is measured on at least one network."""
        return _rungs(plans) * self.task.episode_length * (plans + self.size)

    def ranked(self, plans: Sequence[Schedule], chances: Mapping[Pattern, float]) -> list[Schedule]:
        """Best first; ties keep their order."""
        return sorted(plans, key=lambda plan: -self.gain(plan, chances))

    def halve(
        self,
        plans: Sequence[Schedule],
        budget: int,
        chances: Mapping[Pattern, float],
        advance: Callable[[int], None],
    ) -> ScheduleResult:
        """In each rung the remaining schedules are measured on more networks, and the best quarter stays."""
        rungs, alive, used, fresh = _rungs(len(plans)), list(plans), 0, self.networks(chances)
        for rung in range(rungs):
            episodes = (budget - used) // (rungs - rung) // self.task.episode_length
            # Each schedule is measured on `each` networks. Not growing is measured on all networks of the
            # rung, because the others are compared with it.
            if episodes >= self.size * (len(alive) + 1):
                each = episodes // (len(alive) + 1)
            else:
                each = (episodes - self.size) // len(alive)
            together = max(1, self.size // each)
            networks = list(islice(fresh, each * together))
            plans_of = [
                _assign(alive[at : at + together], networks, each) for at in range(0, len(alive), together)
            ]
            used += self.measure([*plans_of, dict.fromkeys(networks, ())], advance)
            kept = 1 if rung == rungs - 1 else -(-len(alive) // KEEP)
            alive = sorted(self.ranked(alive, chances)[:kept], key=plans.index)
        return replace(self.result(alive[0], chances), env_steps=used)

    def result(self, plan: Schedule, chances: Mapping[Pattern, float]) -> ScheduleResult:
        known = [
            value
            for network, value in self.values[plan].items()
            if not chances or self.pattern(network) in chances
        ]
        return ScheduleResult(
            schedule=plan,
            objective=fmean(known),
            gain=self.gain(plan, chances),
            networks=len(known),
            env_steps=0,
        )

    def measure(self, plans_of: Sequence[Mapping[int, Schedule]], advance: Callable[[int], None]) -> int:
        """Let each network of each mapping follow its schedule, store its J, and return the number of
        env-steps."""
        jobs = [Job(partial(_following, plan_of), list(plan_of)) for plan_of in plans_of]
        results = play_jobs(self.task, jobs, root_seed=self.root_seed, population=self.size, advance=advance)
        for plan_of, episodes in zip(plans_of, results, strict=True):
            for played in episodes:
                plan = plan_of[played.network]
                self.values.setdefault(plan, {})[played.network] = played.outcome.objective
        return sum(map(len, plans_of)) * self.task.episode_length

    def gain(self, plan: Schedule, chances: Mapping[Pattern, float]) -> float:
        """Mean gain over not growing. If patterns are drawn, the means of the patterns are weighted by their
        probability. −∞ if the schedule was not measured."""
        gains: dict[Pattern, list[float]] = {}
        for network, value in self.values.get(plan, {}).items():
            pattern = self.pattern(network) if chances else ()
            gains.setdefault(pattern, []).append(value - self.values[()][network])
        weights = chances or {(): 1.0}
        measured = [pattern for pattern in gains if pattern in weights]
        if not measured:
            return -math.inf
        total = sum(weights[pattern] * fmean(gains[pattern]) for pattern in measured)
        return total / sum(weights[pattern] for pattern in measured)

    def networks(self, chances: Mapping[Pattern, float], first: int = 0) -> Iterator[int]:
        """Numbers of networks that no schedule was measured on, without end; if patterns are drawn, one of
        each in turn."""
        first = max(first, 1 + max(self.values[()], default=-1))
        if not chances:
            return count(first)
        return chain.from_iterable(zip(*(self._with(pattern, first) for pattern in chances), strict=True))

    def _with(self, pattern: Pattern, first: int) -> Iterator[int]:
        return (network for network in count(first) if self.pattern(network) == pattern)


def _following(plan_of: Mapping[int, Schedule], networks: Sequence[int]) -> FixedSchedule:
    return FixedSchedule([plan_of[network] for network in networks])


def _assign(plans: Sequence[Schedule], networks: Sequence[int], each: int) -> dict[int, Schedule]:
    """`each` networks for every schedule in turn; not growing gets none, because it runs on all of them."""
    plan_of = {}
    for i, plan in enumerate(plans):
        if plan:
            plan_of.update(dict.fromkeys(networks[each * i : each * (i + 1)], plan))
    return plan_of


def _rungs(plans: int) -> int:
    return max(1, math.ceil(math.log(plans, KEEP)))
