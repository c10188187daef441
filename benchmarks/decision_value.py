"""How much do decisions matter? Fixed growth schedules on the embedded tasks, with paired seeds.

A schedule plants up to three seeds (slot, blueprint, epoch). It blends each as soon as its gate opens, and
fossilizes it as soon as it holds and its leave-one-out contribution is known. Like a policy, it performs one
operation per network and epoch. All networks of one env share initial weights, batches and the weights of
their first, second and third seed, whatever their schedule.

`python -m benchmarks.decision_value` screens a grid of schedules on few envs, measures the best of them on
more, and evaluates the chosen ones on envs that were not used for choosing. For a task that draws conditions
it also searches the best schedule for each pattern of crippled blocks: the difference to the best single
schedule is what a policy could gain by observing. Prints Markdown and writes JSON; every difference is
paired, every interval is 95 %."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.play import EMBEDDED, interval, show
from esper.kasmina import MorphogeneticModel, blended_slots, evaluate_coalitions
from esper.leyline import TEMPO_EPOCHS, LifecycleOp, SeedStage, objective, stream_seed
from esper.runtime.data import EvalBatches, SharedBatchIterator, Split, validation_batches
from esper.runtime.tasks import Condition, TaskSpec, apply_condition, draw_condition, get_task_spec
from esper.scripts.process import use_one_core
from esper.simic.training.evaluation import split_of

CHUNK = 64
"""Networks per population."""
SCREEN, NARROW, JUDGE = 0, 100_000, 200_000
"""First envs of the three parts, which have no env in common."""
LOOK = 3
"""Earliest epoch of planting for a second oracle: shows the cost of observing for longer."""


@dataclass(frozen=True, order=True)
class Planting:
    epoch: int
    slot: str
    blueprint: str


Schedule = tuple[Planting, ...]
STATIC: Schedule = ()
RANDOM = "random"
Plan = Schedule | str
Pair = tuple[Plan, int]
"""A plan, and the number of the env that it runs in."""


@dataclass(frozen=True)
class Result:
    """One network at the end of its episode."""

    value: float  # J
    accuracy: float  # committed, in [0, 1]
    added: int  # parameters of fossilized seeds
    wasted: int


def run(
    task: TaskSpec, split: Split, pairs: Iterable[Pair], *, root: int = 0, episode: int = 0
) -> dict[Pair, Result]:
    """One episode of each (plan, env)."""
    results: dict[Pair, Result] = {}
    order = sorted(set(pairs), key=growth_order)
    for at in range(0, len(order), CHUNK):
        part = order[at : at + CHUNK]
        drawn = {env: draw_condition(task, root, episode, env) for env in sorted({env for _, env in part})}
        results |= zip(part, _run(task, split, part, drawn, root, episode), strict=True)
    return results


def growth_order(pair: Pair) -> tuple[str, str]:
    """Networks that grow alike share banks, which is cheapest within one population."""
    plan, _ = pair
    return plan if isinstance(plan, str) else str([(p.slot, p.blueprint) for p in plan]), str(pair)


def _run(
    task: TaskSpec,
    split: Split,
    pairs: Sequence[Pair],
    conditions: Mapping[int, Condition],
    root: int,
    episode: int,
) -> list[Result]:
    padded = [*pairs, *[pairs[0]] * (-len(pairs) % 8)]
    envs, rows = list(conditions), len(padded)
    batches = SharedBatchIterator(
        split, [envs], task.batch_size, steps_per_epoch=task.steps_per_epoch, seed=root
    )
    whole = len(split.train)
    batches.begin_episode(
        episode,
        train_size=[conditions[env].train_size or whole for env in envs],
        label_noise=[conditions[env].label_noise for env in envs],
    )
    source = torch.tensor([envs.index(env) for _, env in padded])
    model = task.build_model(rows, [stream_seed(root, "init", episode, env) for _, env in padded])
    optimizer = task.build_optimizer(model)
    for row, (_, env) in enumerate(padded):
        apply_condition(model, optimizer, row, conditions[env])
    rates = optimizer.host_lr.clone(), optimizer.seed_lr.clone()
    validation = validation_batches(split, task.val_size)
    final = validation_batches(split, len(split.final), final=True)
    dice = [np.random.default_rng(stream_seed(root, "action", episode, env)) for _, env in pairs]
    for epoch in range(1, task.episode_length + 1):
        optimizer.host_lr, optimizer.seed_lr = (rate * task.lr_factor(epoch) for rate in rates)
        for (batch,) in batches:
            optimizer.zero_grad()
            # Digits have one channel, so that channel i is env i.
            x = batch.x.permute(0, 2, 3, 1).index_select(3, source).permute(0, 3, 1, 2)
            model.losses(x, batch.y.index_select(0, source)).total().backward()
            optimizer.step()
        assert optimizer.stats is not None
        model.record_gradients(optimizer.stats)
        measure_contributions(model, validation, len(pairs))
        for row, (plan, env) in enumerate(pairs):
            if isinstance(plan, str):
                step = choose_random(model, task, row, dice[row])
            else:
                step = follow(model, plan, row, epoch)
            if step is not None:
                init_seed = stream_seed(root, "germination", episode, env, model.germinations[row])
                act(model, row, *step, init_seed, TEMPO_EPOCHS[task.tempo])
        model.step_epoch()
    return [
        conclude(task, model, row, accuracy)
        for row, accuracy in enumerate(committed_accuracy(model, final, len(pairs)))
    ]


Step = tuple[LifecycleOp, str, str]


def follow(model: MorphogeneticModel, schedule: Schedule, row: int, epoch: int) -> Step | None:
    """The schedule's next operation, as in tamiyo's FixedSchedule: plant what is due, then fossilize, then
    advance."""
    for planting in schedule[model.germinations[row] :]:
        if planting.epoch <= epoch:
            return LifecycleOp.GERMINATE, planting.slot, planting.blueprint
    reports = model.reports(row)
    for slot, report in reports.items():
        if report.can_fossilize:
            return LifecycleOp.FOSSILIZE, slot, ""
    for slot, report in reports.items():
        if report.can_advance:
            return LifecycleOp.ADVANCE, slot, ""
    return None


def choose_random(
    model: MorphogeneticModel, task: TaskSpec, row: int, dice: np.random.Generator
) -> Step | None:
    """One of the operations that are possible now, including WAIT, with equal probabilities."""
    reports = model.reports(row)
    places = {
        LifecycleOp.WAIT: [""],
        LifecycleOp.GERMINATE: [slot for slot in task.slots if slot not in reports],
        LifecycleOp.ADVANCE: [slot for slot, report in reports.items() if report.can_advance],
        LifecycleOp.FOSSILIZE: [slot for slot, report in reports.items() if report.can_fossilize],
        LifecycleOp.PRUNE: [slot for slot, report in reports.items() if report.can_prune],
    }
    possible = [op for op, slots in places.items() if slots]
    op = possible[dice.integers(len(possible))]
    slot = places[op][dice.integers(len(places[op]))]
    blueprint = task.blueprints[dice.integers(len(task.blueprints))]
    return None if op is LifecycleOp.WAIT else (op, slot, blueprint)


def act(
    model: MorphogeneticModel,
    row: int,
    op: LifecycleOp,
    slot: str,
    blueprint: str,
    init_seed: int,
    tempo_epochs: int,
) -> None:
    if op is LifecycleOp.GERMINATE:
        model.germinate(slot, blueprint, row=row, tempo_epochs=tempo_epochs, init_seed=init_seed)
    elif op is LifecycleOp.ADVANCE:
        model.advance(slot, row=row)
    elif op is LifecycleOp.FOSSILIZE:
        model.fossilize(slot, row=row)
    else:
        model.prune(slot, row=row)


def measure_contributions(model: MorphogeneticModel, validation: EvalBatches, rows: int) -> None:
    """Leave-one-out of holding seeds. No other operation of a schedule needs it."""
    wanted = {}
    for row in range(rows):
        on = frozenset(blended_slots(model, row))
        held = [slot for slot in on if model.seed_in(slot, row).stage is SeedStage.HOLDING]
        if held:
            wanted[row] = [on, *(on - {slot} for slot in held)]
    if not wanted:
        return
    accuracy = accuracies(model, validation, wanted)
    for row, (on, *without) in wanted.items():
        full = accuracy[row, on]
        model.record_epoch(
            row, full, contributions={next(iter(on - c)): full - accuracy[row, c] for c in without}
        )


def accuracies(
    model: MorphogeneticModel, data: EvalBatches, wanted: Mapping[int, Sequence[frozenset[str]]]
) -> dict[tuple[int, frozenset[str]], float]:
    """Percentage points by (row, coalition), on one batch that holds all of the data."""
    (batch,) = data
    table = evaluate_coalitions(model, batch.x, wanted, shared_input=True)
    accuracy = 100 * (table.outputs.argmax(-1) == batch.y.view(1, -1)).float().mean(1)
    return dict(zip(zip(table.rows, table.coalitions, strict=True), accuracy.tolist(), strict=True))


def committed_accuracy(model: MorphogeneticModel, data: EvalBatches, rows: int) -> list[float]:
    """In [0, 1]: fossilized seeds on, live ones off."""
    wanted = {
        row: frozenset(
            slot for slot, report in model.reports(row).items() if report.stage is SeedStage.FOSSILIZED
        )
        for row in range(rows)
    }
    accuracy = accuracies(model, data, {row: [coalition] for row, coalition in wanted.items()})
    return [accuracy[key] / 100 for key in wanted.items()]


def conclude(task: TaskSpec, model: MorphogeneticModel, row: int, accuracy: float) -> Result:
    fossils = sum(report.stage is SeedStage.FOSSILIZED for report in model.reports(row).values())
    added, wasted = model.seed_params(row, stages=[SeedStage.FOSSILIZED]), model.germinations[row] - fossils
    value = objective(
        task.objective,
        committed_accuracy=accuracy,
        added_params=added,
        host_params=model.host_params,
        wasted_seeds=wasted,
        rollbacks=0,
    )
    return Result(value, accuracy, added, wasted)


# -- the search ----------------------------------------------------------------------------------------------

Pattern = tuple[bool, ...]


@dataclass(frozen=True)
class Question:
    """Which schedule has the highest (or lowest) J or accuracy, over all envs or those with one pattern of
    crippled blocks?"""

    label: str
    measure: str = "value"
    sign: int = 1
    pattern: Pattern | None = None
    earliest: int = 1
    """Schedules that plant before this epoch do not count."""
    keep: int = 12
    """Finalists."""

    def finalists(
        self,
        results: Mapping[Pair, Result],
        plans: Sequence[Schedule],
        envs: Mapping[Pattern, Sequence[int]],
        keep: int,
    ) -> list[Schedule]:
        """The best plans, best first, of those that ran in all of these envs."""
        needed = self.envs(envs)
        scores = {
            plan: statistics.mean(self.sign * getattr(results[plan, env], self.measure) for env in needed)
            for plan in plans
            if all((plan, env) in results for env in needed) and all(p.epoch >= self.earliest for p in plan)
        }
        return sorted(scores, key=lambda plan: (-scores[plan], str(plan)))[:keep]

    def envs(self, envs: Mapping[Pattern, Sequence[int]]) -> list[int]:
        return [env for pattern in envs if self.pattern in (None, pattern) for env in envs[pattern]]


def grid(task: TaskSpec, size: int) -> list[Schedule]:
    """About `size` schedules, a third each with one, two and three seeds in different slots: up to a quarter
    of `size` start in the first epoch, the others are evenly spaced over later starts."""
    chosen: list[Schedule] = []
    for count in (1, 2, 3):
        by_start = [
            [
                tuple(
                    Planting(start + i, *place) for i, place in enumerate(zip(slots, blueprints, strict=True))
                )
                for slots in itertools.combinations(task.slots, count)
                for blueprints in itertools.product(task.blueprints, repeat=count)
            ]
            for start in range(1, task.episode_length - 8, 2)
        ]
        early = spaced(by_start[0], size // 4)
        chosen += early + spaced([plan for plans in by_start[1:] for plan in plans], size // 3 - len(early))
    return chosen


def spaced(plans: Sequence[Schedule], count: int) -> list[Schedule]:
    count = min(count, len(plans))
    return [plans[i * len(plans) // count] for i in range(count)]


def envs_by_pattern(task: TaskSpec, first: int, count: int) -> dict[Pattern, list[int]]:
    """`count` envs of each pattern that the task can draw; a task without conditions has one pattern."""
    blocks = len(draw_condition(task, 0, 0, first).crippled)
    patterns = (
        [(False,) * blocks]
        if task.conditions is None
        else list(itertools.product((False, True), repeat=blocks))
    )
    envs_of: dict[Pattern, list[int]] = {pattern: [] for pattern in patterns}
    for env in itertools.count(first):
        mine = envs_of[draw_condition(task, 0, 0, env).crippled]
        if len(mine) < count:
            mine.append(env)
        elif all(len(envs) == count for envs in envs_of.values()):
            return envs_of
    raise AssertionError("unreachable")


def questions(task: TaskSpec) -> list[Question]:
    asked = [
        Question("best J"),
        Question("worst J", sign=-1, keep=4),
        Question("best accuracy", "accuracy", keep=4),
        Question("worst accuracy", "accuracy", sign=-1, keep=4),
    ]
    if task.conditions is not None:
        for pattern in envs_by_pattern(task, SCREEN, 1):
            marks = "".join("01"[crippled] for crippled in pattern)
            asked += [
                Question(f"oracle {marks}", pattern=pattern),
                Question(f"oracle {marks} from epoch {LOOK}", pattern=pattern, earliest=LOOK, keep=6),
            ]
    return asked


def search(
    task: TaskSpec,
    split: Split,
    plans: Sequence[Schedule],
    asked: Sequence[Question],
    *,
    screen: int,
    narrow: int,
) -> dict[Question, Schedule]:
    """Successive halving: every plan on `screen` envs of each pattern, each question's finalists on `narrow`
    more."""
    envs, more = envs_by_pattern(task, SCREEN, screen), envs_by_pattern(task, NARROW, narrow)
    results = run(task, split, [(plan, env) for plan in plans for part in envs.values() for env in part])
    finalists = {question: question.finalists(results, plans, envs, question.keep) for question in asked}
    again = {
        (plan, env) for question, kept in finalists.items() for plan in kept for env in question.envs(more)
    }
    results |= run(task, split, again)
    both = {pattern: [*envs[pattern], *more[pattern]] for pattern in envs}
    return {question: question.finalists(results, kept, both, 1)[0] for question, kept in finalists.items()}


# -- the evaluation ------------------------------------------------------------------------------------------


def name(plan: Plan) -> str:
    if isinstance(plan, str):
        return plan
    return " + ".join(f"{p.blueprint} {p.slot} @{p.epoch}" for p in plan) or "static"


def compare(task: TaskSpec, split: Split, plans: Mapping[str, Plan], envs: Sequence[int]) -> dict[str, Any]:
    """No growth, random growth, and the schedules that the search chose for all envs."""
    outcomes = run(task, split, [(plan, env) for plan in {*plans.values()} for env in envs])
    results = {label: [outcomes[plan, env] for env in envs] for label, plan in plans.items()}
    print("| plan | schedule | J | J − static | accuracy | added parameters |\n|---|---|---|---|---|---|")
    for label, rows in results.items():
        gain = ""
        if label != "static":
            gain = show([r.value - s.value for r, s in zip(rows, results["static"], strict=True)])
        print(
            f"| {label} | {name(plans[label])} | {show([r.value for r in rows])} | {gain} | "
            f"{show([r.accuracy for r in rows])} | {statistics.mean(r.added for r in rows):.0f} |"
        )
    extremes = zip(results["best accuracy"], results["worst accuracy"], strict=True)
    spread = [best.accuracy - worst.accuracy for best, worst in extremes]
    print(f"\nBest − worst schedule in accuracy: **{show(spread)} points**.", flush=True)
    return {
        "spread_accuracy": interval(spread),
        "plans": {
            label: {"schedule": name(plans[label]), "results": [asdict(r) for r in rows]}
            for label, rows in results.items()
        },
    }


def oracle(
    task: TaskSpec, split: Split, chosen: Mapping[Question, Schedule], envs: Sequence[int]
) -> dict[str, Any]:
    """On envs as the task draws them: the schedule chosen for each pattern against the one chosen for all."""
    pattern = {env: draw_condition(task, 0, 0, env).crippled for env in envs}
    by_pattern = {(q.pattern, q.earliest): plan for q, plan in chosen.items() if q.pattern is not None}
    single = next(plan for q, plan in chosen.items() if q.label == "best J")
    plans: dict[str, dict[int, Schedule]] = {
        "static": dict.fromkeys(envs, STATIC),
        "best single": dict.fromkeys(envs, single),
        "oracle": {env: by_pattern[pattern[env], 1] for env in envs},
        f"oracle from epoch {LOOK}": {env: by_pattern[pattern[env], LOOK] for env in envs},
    }
    outcomes = run(task, split, {(plan, env) for by_env in plans.values() for env, plan in by_env.items()})
    value = {
        label: np.array([outcomes[plan, env].value for env, plan in by_env.items()])
        for label, by_env in plans.items()
    }
    columns = ["crippled", "envs", *(f"J {label}" for label in plans), "chosen"]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for crippled in [*sorted({*pattern.values()}), None]:
        at = [i for i, env in enumerate(envs) if crippled in (None, pattern[env])]
        cells = " | ".join(show(value[label][at].tolist()) for label in plans)
        marks = "all" if crippled is None else "".join("01"[c] for c in crippled)
        plan = single if crippled is None else by_pattern[crippled, 1]
        print(f"| {marks} | {len(at)} | {cells} | {name(plan)} |")
    margins = {
        label: (value[label] - value["best single"]).tolist() for label in plans if label.startswith("oracle")
    }
    for label, margin in margins.items():
        print(f"\n{label} − best single: **{show(margin)} points of J**.", flush=True)
    return {
        "margins": {label: interval(margin) for label, margin in margins.items()},
        "crippled": [list(pattern[env]) for env in envs],
        "value": {label: v.tolist() for label, v in value.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=EMBEDDED)
    parser.add_argument("--schedules", type=int, default=240, help="size of the grid")
    parser.add_argument("--screen", type=int, default=2, help="envs of each pattern for the whole grid")
    parser.add_argument("--narrow", type=int, default=6, help="envs of each pattern for the finalists")
    parser.add_argument("--judge", type=int, default=32, help="new envs for the comparison")
    parser.add_argument("--oracle", type=int, default=192, help="new envs for the oracle")
    parser.add_argument("--out", type=Path, default=Path("decision_value.json"))
    options = parser.parse_args()
    use_one_core()
    reports = []
    for task in map(get_task_spec, options.tasks):
        start = time.process_time()
        split = split_of(task, 0)
        plans, asked = [STATIC, *grid(task, options.schedules)], questions(task)
        print(
            f"\n**{task.name}**: {len(plans)} schedules on {options.screen} envs of each pattern, "
            f"finalists on {options.narrow} more, evaluated on {options.judge} others; "
            f"host {task.host_params} parameters, "
            f"λ {task.objective.size_price}, κ {task.objective.waste_price}\n",
            flush=True,
        )
        chosen = search(task, split, plans, asked, screen=options.screen, narrow=options.narrow)
        picked: dict[str, Plan] = {
            "static": STATIC,
            "random": RANDOM,
            **{q.label: plan for q, plan in chosen.items() if q.pattern is None},
        }
        report = {
            "task": task.name,
            "grid": len(plans),
            "chosen": {q.label: name(plan) for q, plan in chosen.items()},
            **compare(task, split, picked, range(JUDGE, JUDGE + options.judge)),
        }
        if task.conditions is not None:
            report["oracle"] = oracle(task, split, chosen, range(JUDGE, JUDGE + options.oracle))
        report["cpu_seconds"] = time.process_time() - start
        print(f"\n{report['cpu_seconds']:.0f} s of CPU time", flush=True)
        reports.append(report)
        options.out.write_text(json.dumps(reports, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
