"""How much do decisions matter? Fixed growth schedules on the embedded tasks, with paired seeds.

A schedule plants up to three seeds (slot, blueprint, epoch), blends each as soon as its gate opens and fossilizes it as soon
as it holds and its leave-one-out contribution is known: one operation per network and epoch, as a policy has it. Networks of
one env share initial weights, batches and the weights of their first, second, third seed, whatever their schedule.

`python -m benchmarks.decision_value` searches a grid of schedules on a few envs, then compares what it picked on fresh ones. For
a task that draws conditions it adds the oracle: for each drawn condition the schedule that was best on some envs, judged on
another. Prints Markdown and writes JSON; every difference is paired, every interval is 95 %.
"""
from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.kasmina import MorphogeneticModel, blended_slots, evaluate_coalitions
from esper.leyline import LifecycleOp, SeedStage, objective, stream_seed
from esper.runtime.data import EvalBatches, SharedBatchIterator, Split, load_dataset, validation_batches, validation_split
from esper.runtime.tasks import Condition, TaskSpec, apply_condition, draw_condition, get_task_spec

TEMPO = 3
CHUNK = 64
"""Networks per population."""
EMBEDDED = ("digits_baseline", "digits_impaired", "digits_scale", "digits_shift")
CONFIRM, CONDITION = 1000, 2000
"""First env of the confirmation, and of the oracle: never those of the search."""


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
"""A plan, and the env whose random numbers it meets."""


@dataclass(frozen=True)
class Result:
    """One network at the end of its episode."""

    value: float  # J
    accuracy: float  # committed, in [0, 1]
    added: int  # parameters of fossilized seeds
    wasted: int


def run(task: TaskSpec, split: Split, pairs: Sequence[Pair], *, root: int = 0, episode: int = 0,
        conditions: Mapping[int, Condition] | None = None) -> list[Result]:
    """One episode of each (plan, env); envs draw their conditions unless these are given."""
    found: dict[Pair, Result] = {}
    order = sorted(set(pairs), key=growth_order)
    for at in range(0, len(order), CHUNK):
        part = order[at:at + CHUNK]
        envs = sorted({env for _, env in part})
        drawn = {env: draw_condition(task, root, episode, env) if conditions is None else conditions[env] for env in envs}
        found |= zip(part, _run(task, split, part, drawn, root, episode), strict=True)
    return [found[pair] for pair in pairs]


def growth_order(pair: Pair) -> tuple[str, str]:
    """Networks that grow alike share banks: side by side they cost least."""
    plan, _ = pair
    return plan if isinstance(plan, str) else str([(p.slot, p.blueprint) for p in plan]), str(pair)


def _run(task: TaskSpec, split: Split, pairs: Sequence[Pair], conditions: Mapping[int, Condition], root: int,
         episode: int) -> list[Result]:
    padded = [*pairs, *[pairs[0]] * (-len(pairs) % 8)]
    envs, rows = list(conditions), len(padded)
    batches = SharedBatchIterator(split, [envs], task.batch_size, steps_per_epoch=task.steps_per_epoch, seed=root)
    whole = len(split.train)
    batches.begin_episode(episode, train_size=[conditions[env].train_size or whole for env in envs],
                          label_noise=[conditions[env].label_noise for env in envs])
    source = torch.tensor([envs.index(env) for _, env in padded])
    model = task.build_model(rows, [stream_seed(root, "init", episode, env) for _, env in padded])
    optimizer = task.build_optimizer(model)
    for row, (_, env) in enumerate(padded):
        apply_condition(model, optimizer, row, conditions[env])
    rates = optimizer.host_lr.clone(), optimizer.seed_lr.clone()
    validation = validation_batches(split, task.val_size)
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
            step = choose_random(model, task, row, dice[row]) if isinstance(plan, str) else follow(model, plan, row, epoch)
            if step is not None:
                act(model, row, *step, stream_seed(root, "germination", episode, env, model.germinations[row]))
        model.step_epoch()
    return [conclude(task, model, row, accuracy)
            for row, accuracy in enumerate(committed_accuracy(model, validation, len(pairs)))]


Step = tuple[LifecycleOp, str, str]


def follow(model: MorphogeneticModel, schedule: Schedule, row: int, epoch: int) -> Step | None:
    """The schedule's next operation: fossilize first, then advance, then plant what is due."""
    reports = model.reports(row)
    for slot, report in reports.items():
        if report.can_fossilize:
            return LifecycleOp.FOSSILIZE, slot, ""
    for slot, report in reports.items():
        if report.can_advance:
            return LifecycleOp.ADVANCE, slot, ""
    for planting in schedule[model.germinations[row]:]:
        if planting.epoch <= epoch:
            return LifecycleOp.GERMINATE, planting.slot, planting.blueprint
    return None


def choose_random(model: MorphogeneticModel, task: TaskSpec, row: int, dice: np.random.Generator) -> Step | None:
    """Any operation that is possible now, WAIT included, each with the same probability."""
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


def act(model: MorphogeneticModel, row: int, op: LifecycleOp, slot: str, blueprint: str, init_seed: int) -> None:
    if op is LifecycleOp.GERMINATE:
        model.germinate(slot, blueprint, row=row, tempo_epochs=TEMPO, init_seed=init_seed)
    else:
        {LifecycleOp.ADVANCE: model.advance, LifecycleOp.FOSSILIZE: model.fossilize, LifecycleOp.PRUNE: model.prune}[op](
            slot, row=row)


def measure_contributions(model: MorphogeneticModel, validation: EvalBatches, rows: int) -> None:
    """Leave-one-out of the seeds that hold or are about to: nothing else waits for it."""
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
        model.record_epoch(row, full, contributions={next(iter(on - c)): full - accuracy[row, c] for c in without})


def accuracies(model: MorphogeneticModel, data: EvalBatches,
               wanted: Mapping[int, Sequence[frozenset[str]]]) -> dict[tuple[int, frozenset[str]], float]:
    """Percentage points by (row, coalition), on one batch that holds all of the data."""
    (batch,) = data
    table = evaluate_coalitions(model, batch.x, wanted, shared_input=True)
    accuracy = 100 * (table.outputs.argmax(-1) == batch.y.view(1, -1)).float().mean(1)
    return dict(zip(zip(table.rows, table.coalitions, strict=True), accuracy.tolist(), strict=True))


def committed_accuracy(model: MorphogeneticModel, data: EvalBatches, rows: int) -> list[float]:
    """In [0, 1]: fossilized seeds on, live ones off."""
    wanted = {row: frozenset(slot for slot, report in model.reports(row).items() if report.stage is SeedStage.FOSSILIZED)
              for row in range(rows)}
    found = accuracies(model, data, {row: [coalition] for row, coalition in wanted.items()})
    return [found[key] / 100 for key in wanted.items()]


def conclude(task: TaskSpec, model: MorphogeneticModel, row: int, accuracy: float) -> Result:
    fossils = sum(report.stage is SeedStage.FOSSILIZED for report in model.reports(row).values())
    added, wasted = model.seed_params(row, stages=[SeedStage.FOSSILIZED]), model.germinations[row] - fossils
    value = objective(task.objective, committed_accuracy=accuracy, added_params=added, host_params=model.host_params,
                      wasted_seeds=wasted, rollbacks=0)
    return Result(value, accuracy, added, wasted)


# -- the study ---------------------------------------------------------------------------------------------------------------


def grid(task: TaskSpec, size: int) -> list[Schedule]:
    """Schedules of one, two and three seeds in different slots: every single seed, and evenly spaced ones of the others."""
    starts = range(1, task.episode_length - 8, 2)
    kinds: list[list[Schedule]] = []
    for count in (1, 2, 3):
        kinds.append([tuple(Planting(start + i, *place) for i, place in enumerate(zip(slots, blueprints, strict=True)))
                      for slots in itertools.combinations(task.slots, count)
                      for blueprints in itertools.product(task.blueprints, repeat=count) for start in starts])
    chosen, share = kinds[0], (size - len(kinds[0])) // 2
    for kind in kinds[1:]:
        chosen = [*chosen, *(kind[i * len(kind) // share] for i in range(min(share, len(kind))))]
    return chosen


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval; the t quantile by its expansion around the normal one."""
    z, n = 1.959964, len(values) - 1
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return statistics.mean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def name(plan: Plan) -> str:
    if isinstance(plan, str):
        return plan
    return " + ".join(f"{p.blueprint} {p.slot} @{p.epoch}" for p in plan) or "static"


def show(values: Sequence[float], scale: float = 100) -> str:
    mean, half = interval(values)
    return f"{scale * mean:.1f} ± {scale * half:.1f}"


def study(task: TaskSpec, split: Split, found: Mapping[Plan, Sequence[Result]], confirm: int) -> dict[str, Any]:
    """Compare what the search found best and worst with static and random growth, on fresh envs."""
    by_value = sorted(found.keys() - {STATIC}, key=lambda plan: (statistics.mean(r.value for r in found[plan]), str(plan)))
    by_accuracy = sorted(by_value, key=lambda plan: statistics.mean(r.accuracy for r in found[plan]))
    picked: dict[str, Plan] = {"static": STATIC, "random": RANDOM, "best J": by_value[-1], "worst J": by_value[0],
              "best accuracy": by_accuracy[-1], "worst accuracy": by_accuracy[0]}
    results = tabulate(task, split, list(dict.fromkeys(picked.values())), range(CONFIRM, CONFIRM + confirm))
    print("| plan | schedule | J | J − static | accuracy | added parameters |\n|---|---|---|---|---|---|")
    for label, plan in picked.items():
        rows = results[plan]
        gain = show([r.value - s.value for r, s in zip(rows, results[STATIC], strict=True)]) if plan else ""
        print(f"| {label} | {name(plan)} | {show([r.value for r in rows])} | {gain} | {show([r.accuracy for r in rows])} | "
              f"{statistics.mean(r.added for r in rows):.0f} |")
    extremes = zip(results[by_accuracy[-1]], results[by_accuracy[0]], strict=True)
    spread = [best.accuracy - worst.accuracy for best, worst in extremes]
    print(f"\nBest − worst schedule in accuracy: **{show(spread)} points**.", flush=True)
    return {"spread_accuracy": interval(spread), "plans": {
        label: {"schedule": name(plan), "results": [asdict(r) for r in results[plan]]} for label, plan in picked.items()}}


def tabulate(task: TaskSpec, split: Split, plans: Sequence[Plan], envs: Sequence[int],
             conditions: Mapping[int, Condition] | None = None) -> dict[Plan, list[Result]]:
    results = iter(run(task, split, [(plan, env) for plan in plans for env in envs], conditions=conditions))
    return {plan: [next(results) for _ in envs] for plan in plans}


def oracle(task: TaskSpec, split: Split, plans: Sequence[Plan], *, conditions: int, repeats: int) -> dict[str, Any]:
    """Per drawn condition: choose on all envs but one, judge on that one, each in turn. The single schedule is chosen in the
    same way, over all conditions."""
    drawn = [draw_condition(task, 0, 0, CONDITION + i) for i in range(conditions)]
    envs = {CONDITION + i * repeats + k: condition for i, condition in enumerate(drawn) for k in range(repeats)}
    results = tabulate(task, split, plans, list(envs), envs)
    value = np.array([[r.value for r in results[plan]] for plan in plans]).reshape(len(plans), conditions, repeats)
    best, single = np.zeros((2, conditions, repeats))
    for k in range(repeats):
        known = np.delete(value, k, axis=2).mean(2)
        best[:, k] = value[known.argmax(0), np.arange(conditions), k]
        single[:, k] = value[known.mean(1).argmax(), :, k]
    margin = (best - single).mean(1).tolist()
    print(f"\nOracle over {len(plans)} schedules, {conditions} drawn conditions × {repeats} envs, chosen on {repeats - 1} and "
          f"judged on the other: J {show(best.mean(1).tolist())}; best single schedule "
          f"({name(plans[int(value.mean((1, 2)).argmax())])}) {show(single.mean(1).tolist())}; static "
          f"{show(value[plans.index(STATIC)].mean(1).tolist())}; oracle − best single **{show(margin)} points of J**.\n")
    print("| crippled blocks | conditions | J static | J best single | J oracle | best on all envs |\n|---|---|---|---|---|---|")
    choice = value.mean(2).argmax(0)
    for pattern in sorted({c.crippled for c in drawn}):
        at = [i for i, c in enumerate(drawn) if c.crippled == pattern]
        chosen = Counter(name(plans[choice[i]]) for i in at).most_common()
        print(f"| {''.join('01'[c] for c in pattern)} | {len(at)} | {100 * value[plans.index(STATIC), at].mean():.1f} | "
              f"{100 * single[at].mean():.1f} | {100 * best[at].mean():.1f} | "
              f"{', '.join(f'{plan} ({count})' for plan, count in chosen)} |", flush=True)
    return {"margin": interval(margin), "conditions": [asdict(c) for c in drawn], "plans": [name(p) for p in plans],
            "value": value.tolist()}


def shortlist(found: Mapping[Plan, Sequence[Result]], size: int) -> list[Plan]:
    """Static, the best on average, and the best of each env of the search, as far as there is room."""
    value = {plan: np.array([r.value for r in results]) for plan, results in found.items()}
    average = sorted(value, key=lambda plan: -value[plan].mean())
    # One env's result is mostly luck, so the average has a say in each env's ranking.
    by_env = [sorted(value, key=partial(_rank, value, env)) for env in range(len(value[STATIC]))]
    ranked = [STATIC, *average[:size // 4], *(plan for place in zip(*by_env, strict=True) for plan in place)]
    return list(dict.fromkeys(ranked))[:size]


def _rank(value: Mapping[Plan, np.ndarray], env: int, plan: Plan) -> float:
    return -float(value[plan][env] + 0.25 * value[plan].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=EMBEDDED)
    parser.add_argument("--schedules", type=int, default=208, help="size of the grid")
    parser.add_argument("--search", type=int, default=1, help="envs of the search; twelve times as many with conditions")
    parser.add_argument("--confirm", type=int, default=16, help="fresh envs of the comparison")
    parser.add_argument("--candidates", type=int, default=14, help="schedules that the oracle may choose from")
    parser.add_argument("--conditions", type=int, default=28, help="drawn conditions of the oracle")
    parser.add_argument("--repeats", type=int, default=4, help="envs per condition")
    parser.add_argument("--out", type=Path, default=Path("decision_value.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    reports = []
    for task in map(get_task_spec, options.tasks):
        start, shifts = time.perf_counter(), task.conditions is not None
        split = validation_split(load_dataset(task.dataset), task.val_size, 0)
        plans, envs = grid(task, options.schedules), options.search * (12 if shifts else 1)
        print(f"\n**{task.name}**: {len(plans)} schedules searched on {envs} envs, compared on {options.confirm} others; host "
              f"{task.host_params} parameters, λ {task.objective.size_price}, κ {task.objective.waste_price}\n", flush=True)
        found = tabulate(task, split, [STATIC, *plans], range(envs))
        report = {"task": task.name, "search_envs": envs, "confirm_envs": options.confirm,
                  "grid": {name(plan): [asdict(r) for r in results] for plan, results in found.items()},
                  **study(task, split, found, options.confirm)}
        if shifts:
            report["oracle"] = oracle(task, split, shortlist(found, options.candidates), conditions=options.conditions,
                                      repeats=options.repeats)
        report["seconds"] = time.perf_counter() - start
        print(f"\n{report['seconds']:.0f} s", flush=True)
        reports.append(report)
        options.out.write_text(json.dumps(reports, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
