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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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
    # Networks that grow alike share banks: side by side they cost least.
    order = sorted(set(pairs), key=lambda pair: (str([(p.slot, p.blueprint) for p in pair[0]] if pair[0] != RANDOM else RANDOM), str(pair)))
    for at in range(0, len(order), CHUNK):
        part = order[at:at + CHUNK]
        envs = sorted({env for _, env in part})
        drawn = {env: draw_condition(task, root, episode, env) if conditions is None else conditions[env] for env in envs}
        found |= zip(part, _run(task, split, part, drawn, root, episode), strict=True)
    return [found[pair] for pair in pairs]


def _run(task: TaskSpec, split: Split, pairs: Sequence[Pair], conditions: Mapping[int, Condition], root: int,
         episode: int) -> list[Result]:
    padded = [*pairs, *pairs[:1] * (-len(pairs) % 8)]
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
            step = choose_random(model, task, row, dice[row]) if plan == RANDOM else follow(model, plan, row, epoch)
            if step is not None:
                act(model, row, *step, stream_seed(root, "germination", episode, env, model.germinations[row]))
        model.step_epoch()
    return [conclude(task, model, row, accuracy) for row, accuracy in enumerate(committed_accuracy(model, validation, len(pairs)))]


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
        operation = {LifecycleOp.ADVANCE: model.advance, LifecycleOp.FOSSILIZE: model.fossilize, LifecycleOp.PRUNE: model.prune}[op]
        operation(slot, row=row)


def measure_contributions(model: MorphogeneticModel, validation: EvalBatches, rows: int) -> None:
    """Leave-one-out of the seeds that hold or are about to: nothing else waits for it."""
    wanted = {}
    for row in range(rows):
        on = frozenset(blended_slots(model, row))
        held = [slot for slot in on if model.seed_in(slot, row).stage is SeedStage.HOLDING]  # type: ignore[union-attr]
        if held:
            wanted[row] = [on, *(on - {slot} for slot in held)]
    if not wanted:
        return
    accuracy = accuracies(model, validation, wanted)
    for row, (on, *without) in wanted.items():
        full = accuracy[row, on]
        model.record_epoch(row, full, contributions={next(iter(on - c)): full - accuracy[row, c] for c in without})


def accuracies(model: MorphogeneticModel, data: EvalBatches, wanted: dict[int, list[frozenset[str]]]) -> dict[tuple[int, frozenset[str]], float]:
    """Percentage points by (row, coalition)."""
    correct, total, table = 0, 0, None
    for batch in data:
        table = evaluate_coalitions(model, batch.x, wanted, shared_input=True)
        correct = correct + (table.outputs.argmax(-1) == batch.y.view(1, -1)).sum(1)
        total += batch.y.numel()
    assert table is not None
    return dict(zip(zip(table.rows, table.coalitions, strict=True), (100 * correct / total).tolist(), strict=True))  # type: ignore[union-attr]


def committed_accuracy(model: MorphogeneticModel, data: EvalBatches, rows: int) -> list[float]:
    wanted = {row: [frozenset(slot.slot_id for slot in model.slots()
                              if (seed := slot.seeds[row]) is not None and seed.stage is SeedStage.FOSSILIZED)] for row in range(rows)}
    found = accuracies(model, data, wanted)
    return [found[row, coalitions[0]] / 100 for row, coalitions in wanted.items()]


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
        kinds.append([tuple(Planting(start + i, slot, blueprint) for i, (slot, blueprint) in enumerate(zip(slots, chosen, strict=True)))
                      for slots in itertools.combinations(task.slots, count)
                      for chosen in itertools.product(task.blueprints, repeat=count) for start in starts])
    chosen, rest = kinds[0], (size - len(kinds[0])) // 2
    for kind in kinds[1:]:
        chosen = [*chosen, *(kind[i * len(kind) // rest] for i in range(min(rest, len(kind))))]
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


def study(task: TaskSpec, *, schedules: int, search: int, confirm: int) -> dict:
    """Search the grid, then compare static, random, best and worst on fresh envs."""
    split = validation_split(load_dataset(task.dataset), task.val_size, 0)
    plans = [STATIC, *grid(task, schedules)]
    found = tabulate(task, split, plans, range(search))
    by_accuracy = sorted(plans[1:], key=lambda plan: statistics.mean(r.accuracy for r in found[plan]))
    by_value = sorted(plans[1:], key=lambda plan: statistics.mean(r.value for r in found[plan]))
    picked = {"static": STATIC, "random": RANDOM, "best J": by_value[-1], "worst J": by_value[0], "best accuracy": by_accuracy[-1],
              "worst accuracy": by_accuracy[0]}
    results = tabulate(task, split, list(dict.fromkeys(picked.values())), range(CONFIRM, CONFIRM + confirm))
    print(f"\n**{task.name}**: {len(plans) - 1} schedules × {search} envs searched, {confirm} fresh envs; host {task.host_params} "
          f"parameters, λ {task.objective.size_price}, κ {task.objective.waste_price}\n")
    print("| plan | schedule | J | J − static | accuracy | added parameters |\n|---|---|---|---|---|---|")
    for label, plan in picked.items():
        rows, static = results[plan], results[STATIC]
        gain = "" if plan == STATIC else show([r.value - s.value for r, s in zip(rows, static, strict=True)])
        print(f"| {label} | {name(plan)} | {show([r.value for r in rows])} | {gain} | {show([r.accuracy for r in rows])} | "
              f"{statistics.mean(r.added for r in rows):.0f} |")
    spread = [b.accuracy - w.accuracy for b, w in zip(results[picked["best accuracy"]], results[picked["worst accuracy"]], strict=True)]
    print(f"\nBest − worst schedule in accuracy: **{show(spread)} points**.", flush=True)
    return {"task": task.name, "schedules": len(plans) - 1, "search_envs": search, "confirm_envs": confirm,
            "spread_accuracy": interval(spread),
            "plans": {label: {"schedule": name(plan), "results": [asdict(r) for r in results[plan]]} for label, plan in picked.items()},
            "grid": {name(plan): [[r.value, r.accuracy, r.added] for r in found[plan]] for plan in plans},
            "_ranked": {"plans": plans, "found": found}}


def tabulate(task: TaskSpec, split: Split, plans: Sequence[Plan], envs: Sequence[int],
             conditions: Mapping[int, Condition] | None = None) -> dict[Plan, list[Result]]:
    results = iter(run(task, split, [(plan, env) for plan in plans for env in envs], conditions=conditions))
    return {plan: [next(results) for _ in envs] for plan in plans}


def oracle(task: TaskSpec, found: Mapping[Plan, Sequence[Result]], *, candidates: int, conditions: int, repeats: int) -> dict:
    """Per drawn condition: choose on all envs but one, judge on that one, each in turn. The single schedule is chosen alike, over
    all conditions."""
    split = validation_split(load_dataset(task.dataset), task.val_size, 0)
    plans = shortlist(found, candidates)
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
    fixed, choice = plans[int(value.mean((1, 2)).argmax())], value.mean(2).argmax(0)
    print(f"\nOracle over {len(plans)} schedules, {conditions} drawn conditions × {repeats} envs, chosen on {repeats - 1} and judged on "
          f"the other: J {show(best.mean(1))}; best single schedule ({name(fixed)}) {show(single.mean(1))}; static "
          f"{show(value[0].mean(1))}; oracle − best single **{show(margin)} points of J**.\n")
    print("| crippled blocks | conditions | J static | J best single | J oracle | chosen |\n|---|---|---|---|---|---|")
    for pattern in sorted({c.crippled for c in drawn}):
        at = [i for i, c in enumerate(drawn) if c.crippled == pattern]
        names = ", ".join(sorted({name(plans[choice[i]]) for i in at}))
        print(f"| {''.join('01'[c] for c in pattern)} | {len(at)} | {100 * value[0, at].mean():.1f} | {100 * single[at].mean():.1f} | "
              f"{100 * best[at].mean():.1f} | {names} |", flush=True)
    return {"margin": interval(margin), "conditions": [asdict(c) for c in drawn], "plans": [name(p) for p in plans],
            "value": value.tolist()}


def shortlist(found: Mapping[Plan, Sequence[Result]], size: int) -> list[Plan]:
    """Static, the best on average, and the best of each env of the search, as far as there is room."""
    value = {plan: np.array([r.value for r in results]) for plan, results in found.items()}
    average = sorted(value, key=lambda plan: -value[plan].mean())
    # Where one env speaks, its voice is mixed with the average: one result is mostly luck.
    by_env = [[plan for plan in sorted(value, key=lambda plan: -(value[plan][i] + 0.25 * value[plan].mean()))]
              for i in range(len(next(iter(value.values()))))]
    ranked = [STATIC, *average[:size // 4], *(plan for place in zip(*by_env, strict=True) for plan in place)]
    return list(dict.fromkeys(ranked))[:size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=EMBEDDED)
    parser.add_argument("--schedules", type=int, default=208, help="size of the grid")
    parser.add_argument("--search", type=int, default=2, help="envs of the search; tasks with conditions take four times as many")
    parser.add_argument("--confirm", type=int, default=16, help="fresh envs of the comparison")
    parser.add_argument("--candidates", type=int, default=16, help="schedules that the oracle may choose from")
    parser.add_argument("--conditions", type=int, default=32, help="drawn conditions of the oracle")
    parser.add_argument("--repeats", type=int, default=4, help="envs per condition")
    parser.add_argument("--out", type=Path, default=Path("decision_value.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    reports = []
    for task in map(get_task_spec, options.tasks):
        start, shifts = time.perf_counter(), task.conditions is not None
        report = study(task, schedules=options.schedules, search=options.search * (6 if shifts else 1), confirm=options.confirm)
        ranked = report.pop("_ranked")
        if shifts:
            report["oracle"] = oracle(task, ranked["found"], candidates=options.candidates, conditions=options.conditions,
                                      repeats=options.repeats)
        report["seconds"] = time.perf_counter() - start
        print(f"\n{report['seconds']:.0f} s", flush=True)
        reports.append(report)
        options.out.write_text(json.dumps(reports, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
