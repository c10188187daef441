"""Grafting a seed against incubating it and ramping it up: the same seeds in the same slots at the same time
of the same networks, so that only the way of growing differs.

`graft`           the seed is part of the network at full alpha from its first step
`incubate+ramp`   the lifecycle: isolation for the task's `min_training_epochs`, then a ramp of 3 epochs
`incubate only`   isolation, then full alpha at once
`ramp only`       no isolation, a ramp of 3 epochs from the start
`from the start`  for reference: the network has the seeds before its first epoch
`never`           for reference: no seeds

All seeds of a network are planted at once: after the first epoch, after a quarter and after half of the
episode. Two comparisons: at equal steps, and at equal training FLOPs, where the ways that cost more than the
graft (a shadow pass, or more epochs with seeds) train for fewer steps. A shorter episode has a learning rate
that decays faster, so that it ends where the episode does.

A seed at full alpha counts as permanent at the end: making it so changes nothing in the network. Seeds that
have not arrived are removed and count as waste. Gates are permissive in every task.

`python -m benchmarks.graft --out graft.json` prints Markdown and keeps what every network scored. With
`--warmup 0 10 30 100` it compares grafts whose newborn parameters' learning rate rises over so many steps.
With `--one-operation` it runs the lifecycle as a policy does that has one operation per network and epoch and
opens the gates G2 and G5 by hand: the second and third seed then wait for the first.
Every difference is paired over networks, with its 95 % interval."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks import decision_value
from benchmarks.play import EMBEDDED, interval
from esper.kasmina import FlopMeter, MorphogeneticModel
from esper.kasmina.model import cross_entropy
from esper.leyline import (
    LIVE_STAGES,
    GateConfig,
    GateLevel,
    SeedStage,
    TempoAction,
    objective,
    stream_seed,
)
from esper.runtime.data import (
    EvalBatches,
    SharedBatchIterator,
    Split,
    test_batches,
    validation_batches,
)
from esper.runtime.tasks import TaskSpec, parse_task
from esper.scripts.process import use_one_core
from esper.simic.training.evaluation import split_of

FIRST_NETWORK = 500_000
"""No policy, schedule or threshold was chosen on these networks."""
RAMP = 3
"""Epochs of the fastest tempo."""
EVALUATED = 256
"""Samples per pass of an evaluation."""
TESTED = 1024
"""Test samples at most: the first ones of the test part."""
AUTOMATIC = frozenset({GateLevel.G1, GateLevel.G2, GateLevel.G3})
FULL = frozenset({SeedStage.HOLDING, SeedStage.FOSSILIZED})


class Way(StrEnum):
    GRAFT = "graft"
    LIFECYCLE = "incubate+ramp"
    INCUBATE = "incubate only"
    RAMP = "ramp only"
    BIRTH = "from the start"
    NEVER = "never"


GROWING = (Way.GRAFT, Way.LIFECYCLE, Way.INCUBATE, Way.RAMP)
DEARER = (Way.LIFECYCLE, Way.INCUBATE, Way.BIRTH)
"""Ways that spend more FLOPs than a graft in the same number of steps."""
OTHERS = (Way.LIFECYCLE, Way.INCUBATE, Way.RAMP, Way.BIRTH)


@dataclass(frozen=True, slots=True)
class Study:
    """Seeds and sizes of one task, fixed before anything was measured."""

    task: str
    """With the sizes that were reduced so that the task takes minutes."""
    networks: int
    seeds: tuple[tuple[str, str], ...]
    """Slot and blueprint."""


# Seeds of the digits are those of the schedules that ship; `digits_mlp` has none.
STUDIES = {
    "digits_baseline": Study(
        "digits_baseline", 48, (("r0c0", "conv_light"), ("r0c1", "norm"), ("r1c0", "norm"))
    ),
    "digits_impaired": Study("digits_impaired", 48, (("r0c0", "conv_light"), ("r0c1", "conv_light"))),
    "digits_scale": Study(
        "digits_scale", 48, (("r0c0", "conv_light"), ("r0c1", "conv_light"), ("r0c3", "depthwise"))
    ),
    "digits_shift": Study("digits_shift", 48, (("r0c0", "conv_light"),)),
    "digits_mlp": Study("digits_mlp", 48, (("r0c0", "mlp_small"), ("r0c1", "mlp_small"))),
    "fashion_baseline": Study(
        "fashion_baseline:base=4,steps_per_epoch=6,population=16",
        16,
        (("r0c0", "conv_light"), ("r0c1", "conv_light"), ("r0c2", "conv_light")),
    ),
    "cifar_baseline": Study(
        "cifar_baseline:base=4,steps_per_epoch=6,population=8",
        8,
        (("r0c0", "conv_light"), ("r0c1", "conv_light"), ("r0c2", "conv_light")),
    ),
    "sotu": Study(
        "sotu:context=32,steps_per_epoch=6,population=8", 8, (("r0c1", "attention"), ("r0c2", "mlp"))
    ),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of all networks of a study."""

    way: Way
    epoch: int
    """Seeds are planted after this epoch."""
    steps: int
    """Length of the run."""
    warmup: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """One network at the end of its run."""

    objective: float
    """J, in points."""
    test_accuracy: float
    """Percentage points."""
    test_loss: float
    wasted: int
    """Seeds that were planted and have not arrived at full alpha."""


@dataclass(frozen=True, slots=True)
class Outcome:
    plan: Plan
    scores: tuple[Score, ...]
    flops: tuple[float, ...]
    """Of one training step in each epoch, mean over the networks."""
    total_flops: float
    seconds: float

    def series(self, figure: str) -> list[float]:
        return [getattr(score, figure) for score in self.scores]


def open_task(study: Study) -> tuple[TaskSpec, Split]:
    task = parse_task(study.task)
    task = replace(
        task,
        gates=GateConfig(permissive=True),
        pacing=replace(task.pacing, auto_forward_gates=AUTOMATIC),
    )
    return task, split_of(task, 0)


def moments(task: TaskSpec) -> dict[str, int]:
    """Epochs after which seeds are planted."""
    return {"early": 1, "middle": task.episode_length // 4, "late": task.episode_length // 2}


def run(task: TaskSpec, split: Split, study: Study, plan: Plan, *, first: int = FIRST_NETWORK) -> Outcome:
    """All networks of a study, grown in one way."""
    began = time.perf_counter()
    rows = range(study.networks)
    envs = [first + row for row in rows]
    epochs = -(-plan.steps // task.steps_per_epoch)
    task = replace(task, episode_length=epochs)
    if plan.way is Way.RAMP:
        task = replace(task, pacing=replace(task.pacing, min_training_epochs=0))
    if plan.warmup:
        task = replace(task, optimizer=replace(task.optimizer, newborn_warmup=plan.warmup))
    batches = SharedBatchIterator(
        split, [envs], task.batch_size, steps_per_epoch=task.steps_per_epoch, seed=0, rows=[study.networks]
    )
    batches.begin_episode(0, **task.data_conditions(0, 0, envs))
    model = task.build_model(study.networks, [stream_seed(0, "init", 0, env) for env in envs])
    optimizer = task.build_optimizer(model)
    for row, env in enumerate(envs):
        task.prepare_row(model, optimizer, row, root_seed=0, episode=0, env=env)
    rates = optimizer.host_lr.clone(), optimizer.seed_lr.clone()
    meter = FlopMeter(model)
    if plan.way is Way.BIRTH:
        plant(model, study, plan.way, envs)
    flops, total = [], 0.0
    for epoch in range(1, epochs + 1):
        optimizer.host_lr, optimizer.seed_lr = (rate * task.lr_factor(epoch) for rate in rates)
        steps = min(task.steps_per_epoch, plan.steps - (epoch - 1) * task.steps_per_epoch)
        per_sample = sum(meter.per_sample(model.reports(row)) for row in rows) / study.networks
        flops.append(per_sample * task.batch_size)
        total += flops[-1] * steps
        for (batch,) in islice(batches, steps):
            optimizer.zero_grad()
            model.losses(batch.x, batch.y).total().backward()
            optimizer.step()
        assert optimizer.stats is not None
        model.record_gradients(optimizer.stats)
        if epoch == plan.epoch and plan.way in GROWING:
            plant(model, study, plan.way, envs)
        model.step_epoch()
    scores = conclude(task, split, model)
    return Outcome(plan, tuple(scores), tuple(flops), total, time.perf_counter() - began)


def plant(model: MorphogeneticModel, study: Study, way: Way, envs: Sequence[int]) -> None:
    """Plant the seeds in every network; their initial weights depend on the network alone."""
    tempo = {Way.GRAFT: 0, Way.INCUBATE: 1}.get(way, RAMP)
    for row, env in enumerate(envs):
        for number, (slot, blueprint) in enumerate(study.seeds):
            init_seed = stream_seed(0, "germination", 0, env, number)
            if way is Way.BIRTH:
                model.plant_fossil(slot, blueprint, row=row, init_seed=init_seed)
                continue
            model.germinate(slot, blueprint, row=row, tempo_epochs=tempo, init_seed=init_seed)
            if way is Way.RAMP:
                seed = model.seed_in(slot, row)
                assert seed is not None
                # A newborn seed has no measured gradient yet, which the gate to blending asks for.
                seed.update_metrics(gradient_health=1.0, gradient_ratio=1.0)
                assert model.advance(slot, row=row).done
                assert model.advance(slot, row=row).done


def conclude(task: TaskSpec, split: Split, model: MorphogeneticModel) -> Iterator[Score]:
    """Remove the seeds that have not arrived, then measure every network."""
    for row in range(model.population):
        for slot, report in model.reports(row).items():
            if report.stage in LIVE_STAGES - FULL:
                model.prune(slot, row=row)
    validated, _ = measure(model, validation_batches(split, EVALUATED, final=True))
    tests = test_batches(split, EVALUATED)
    tested, losses = measure(model, replace(tests, x=tests.x[:TESTED], y=tests.y[:TESTED]))
    for row in range(model.population):
        reports = model.reports(row).values()
        arrived = sum(report.stage in FULL for report in reports)
        wasted = model.germinations[row] - arrived
        value = objective(
            task.objective,
            committed_accuracy=validated[row],
            added_params=model.seed_params(row, stages=FULL),
            host_params=model.host_params,
            wasted_seeds=wasted,
            rollbacks=0,
        )
        yield Score(100 * value, 100 * tested[row], losses[row], wasted)


@torch.no_grad()
def measure(model: MorphogeneticModel, data: EvalBatches) -> tuple[list[float], list[float]]:
    """Accuracy in [0, 1] and mean loss of each network."""
    model.eval()
    correct, loss, total = torch.zeros(model.population), torch.zeros(model.population), 0
    for batch in data.batches(model.population):
        outputs = model(batch.x)
        targets = batch.y[0].numel()
        correct += (outputs.argmax(-1) == batch.y).flatten(1).sum(1)
        loss += cross_entropy(outputs, batch.y) * targets
        total += targets
    model.train()
    return (correct / total).tolist(), (loss / total).tolist()


def steps_for(flops: Sequence[float], budget: float, steps_per_epoch: int) -> int:
    """Number of steps whose FLOPs come nearest to the budget, from the FLOPs of a step in each epoch."""
    steps = 0
    for step in flops:
        if budget < step * steps_per_epoch:
            return steps + round(budget / step)
        budget -= step * steps_per_epoch
        steps += steps_per_epoch
    return steps


# -- the comparisons -----------------------------------------------------------------------------------------


def compare(name: str, study: Study, *, first: int = FIRST_NETWORK) -> dict[str, Any]:
    """All ways at all moments, at equal steps and at equal FLOPs."""
    task, split = open_task(study)
    steps = task.episode_length * task.steps_per_epoch

    def played(plan: Plan) -> Outcome:
        outcome = run(task, split, study, plan, first=first)
        mean, _ = interval(outcome.series("objective"))
        print(
            f"{name}: {plan.way} after epoch {plan.epoch}, {plan.steps} steps: J {mean:.2f}, "
            f"{outcome.total_flops:.3g} FLOPs, {outcome.seconds:.1f} s",
            flush=True,
        )
        return outcome

    birth, never = played(Plan(Way.BIRTH, 0, steps)), played(Plan(Way.NEVER, 0, steps))
    found: dict[str, Any] = {"never": asdict(never), "equal steps": {}, "equal FLOPs": {}}
    for moment, epoch in moments(task).items():
        equal = {way: played(Plan(way, epoch, steps)) for way in GROWING} | {Way.BIRTH: birth}
        budget = equal[Way.GRAFT].total_flops
        shorter = {
            way: played(Plan(way, epoch, steps_for(equal[way].flops, budget, task.steps_per_epoch)))
            for way in DEARER
        }
        found["equal steps"][moment] = {way: asdict(outcome) for way, outcome in equal.items()}
        found["equal FLOPs"][moment] = {way: asdict(outcome) for way, outcome in (equal | shorter).items()}
    return found


def compare_warmups(
    name: str, study: Study, warmups: Sequence[int], *, first: int = FIRST_NETWORK
) -> dict[str, Any]:
    """Grafts with each warm-up, at all moments."""
    task, split = open_task(study)
    steps, found = task.episode_length * task.steps_per_epoch, {}
    for moment, epoch in moments(task).items():
        found[moment] = {}
        for warmup in warmups:
            outcome = run(task, split, study, Plan(Way.GRAFT, epoch, steps, warmup), first=first)
            mean, _ = interval(outcome.series("objective"))
            print(f"{name}: after epoch {epoch}, warm-up of {warmup} steps: J {mean:.2f}", flush=True)
            found[moment][str(warmup)] = asdict(outcome)
    return found


def one_operation(study: Study, *, first: int = FIRST_NETWORK) -> dict[str, list[float]]:
    """J in points of every network by moment, if a schedule plants, advances and fossilizes the seeds one by
    one. For images of one channel."""
    task, split = open_task(study)
    pacing = replace(task.pacing, auto_forward_gates=AUTOMATIC - {GateLevel.G2})
    task = replace(task, pacing=pacing, tempo=TempoAction.FAST)
    found = {}
    for moment, epoch in moments(task).items():
        schedule = tuple(decision_value.Planting(epoch, *seed) for seed in study.seeds)
        pairs = [(schedule, first + row) for row in range(study.networks)]
        results = decision_value.run(task, split, pairs)
        found[moment] = [100 * results[pair].value for pair in pairs]
    return found


# -- tables --------------------------------------------------------------------------------------------------


def series(outcome: Mapping[str, Any], figure: str) -> list[float]:
    return [score[figure] for score in outcome["scores"]]


def difference(one: Mapping[str, Any], other: Mapping[str, Any], figure: str) -> str:
    return paired(series(one, figure), series(other, figure), 3 if figure == "test_loss" else 1)


def paired(one: Sequence[float], other: Sequence[float], digits: int = 1) -> str:
    mean, half = interval([a - b for a, b in zip(one, other, strict=True)])
    text = f"{mean:+.{digits}f} ± {half:.{digits}f}"
    return f"**{text}**" if abs(mean) > half else text


def table(tasks: Mapping[str, Any], budget: str, figure: str) -> list[str]:
    """Graft minus each other way; bold where the interval excludes 0."""
    digits = 3 if figure == "test_loss" else 1
    lines = [
        "| task | planted after epoch | graft | " + " | ".join(f"− {way}" for way in OTHERS) + " |",
        "|---|---|---|" + "---|" * len(OTHERS),
    ]
    for name, found in tasks.items():
        for outcomes in found[budget].values():
            graft = outcomes[Way.GRAFT]
            mean, _ = interval(series(graft, figure))
            cells = [difference(graft, outcomes[way], figure) for way in OTHERS]
            lines.append(
                f"| `{name}` | {graft['plan']['epoch']} | {mean:.{digits}f} | " + " | ".join(cells) + " |"
            )
    return lines


def costs(tasks: Mapping[str, Any]) -> list[str]:
    """What the ways cost beside a graft, how many steps that is worth, and what remains of the difference."""
    lines = [
        "| task | planted after epoch | steps | "
        + " | ".join(f"{way}: FLOPs at equal steps, steps at equal FLOPs" for way in DEARER)
        + " | largest residual |",
        "|---|---|---|" + "---|" * (len(DEARER) + 1),
    ]
    for name, found in tasks.items():
        for moment, equal in found["equal steps"].items():
            shorter = found["equal FLOPs"][moment]
            graft = equal[Way.GRAFT]
            budget, steps = graft["total_flops"], graft["plan"]["steps"]
            cells = [
                f"{100 * (equal[way]['total_flops'] / budget - 1):+.1f} %, {shorter[way]['plan']['steps']}"
                for way in DEARER
            ]
            residual = max(abs(outcome["total_flops"] / budget - 1) for outcome in shorter.values())
            lines.append(
                f"| `{name}` | {graft['plan']['epoch']} | {steps} | "
                + " | ".join(cells)
                + f" | {100 * residual:.2f} % |"
            )
    return lines


def one_operation_table(serial: Mapping[str, Any], tasks: Mapping[str, Any]) -> list[str]:
    """Graft and automatic lifecycle minus the lifecycle with one operation per epoch, in points of J."""
    ways = (Way.GRAFT, Way.LIFECYCLE)
    lines = [
        "| task | planted after epoch | one operation per epoch | "
        + " | ".join(f"{way} − one operation" for way in ways)
        + " |",
        "|---|---|---|---|---|",
    ]
    for name, found in serial.items():
        for moment, values in found.items():
            outcomes = tasks[name]["equal steps"][moment]
            cells = [paired(series(outcomes[way], "objective"), values) for way in ways]
            lines.append(
                f"| `{name}` | {outcomes[Way.GRAFT]['plan']['epoch']} | {interval(values)[0]:.1f} | "
                + " | ".join(cells)
                + " |"
            )
    return lines


def warmup_table(tasks: Mapping[str, Any], figure: str) -> list[str]:
    """Grafts with each warm-up minus those with the first."""
    first, *later = next(iter(next(iter(tasks.values())).values()))
    lines = [
        f"| task | planted after epoch | {first} steps | "
        + " | ".join(f"{warmup} − {first}" for warmup in later)
        + " |",
        "|---|---|---|" + "---|" * len(later),
    ]
    for name, found in tasks.items():
        for outcomes in found.values():
            base = outcomes[first]
            mean, _ = interval(series(base, figure))
            cells = [difference(outcomes[warmup], base, figure) for warmup in later]
            lines.append(f"| `{name}` | {base['plan']['epoch']} | {mean:.1f} | " + " | ".join(cells) + " |")
    return lines


def report(results: Mapping[str, Any]) -> str:
    """Everything that the results hold, as Markdown."""
    lines, tasks, warmups, serial = [], results["tasks"], results["warmups"], results["one operation"]
    if tasks:
        lines += [
            "| task | networks | seeds | J with no seeds | seeds that did not arrive |",
            "|---|---|---|---|---|",
        ]
        for found in tasks.values():
            study = found["study"]
            mean, _ = interval(series(found["never"], "objective"))
            outcomes = [o for at in found["equal steps"].values() for o in at.values()]
            outcomes += [at[way] for at in found["equal FLOPs"].values() for way in DEARER]
            wasted = sum(sum(series(outcome, "wasted")) for outcome in outcomes)
            seeds = ", ".join(f"{blueprint} in {slot}" for slot, blueprint in study["seeds"])
            lines.append(f"| `{study['task']}` | {study['networks']} | {seeds} | {mean:.1f} | {wasted} |")
        texts = {name: found for name, found in tasks.items() if parse_task(found["study"]["task"]).block}
        for budget in ("equal steps", "equal FLOPs"):
            lines += ["", f"J in points, graft minus the others, at {budget}:", ""]
            lines += table(tasks, budget, "objective")
            lines += ["", f"Test accuracy in points, graft minus the others, at {budget}:", ""]
            lines += table(tasks, budget, "test_accuracy")
            if texts:
                lines += ["", f"Test loss (lower is better), graft minus the others, at {budget}:", ""]
                lines += table(texts, budget, "test_loss")
        lines += ["", "FLOPs beside a graft:", "", *costs(tasks)]
    if serial:
        lines += ["", "J in points, beside the lifecycle with one operation per epoch:", ""]
        lines += one_operation_table(serial, tasks)
    if warmups:
        lines += ["", "J in points, grafts with a warm-up of the newborn parameters' learning rate:", ""]
        lines += warmup_table(warmups, "objective")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="*", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument(
        "--warmup", nargs="+", type=int, metavar="STEPS", help="compare warm-ups of grafts instead"
    )
    parser.add_argument(
        "--one-operation",
        action="store_true",
        help="run the lifecycle with one operation per epoch as well, on four tasks",
    )
    parser.add_argument("--out", type=Path, help="JSON; what it holds of other tasks is kept")
    given = parser.parse_args(arguments)
    use_one_core()
    results: dict[str, Any] = {"tasks": {}, "warmups": {}, "one operation": {}}
    if given.out is not None and given.out.exists():
        results |= json.loads(given.out.read_text())
    for name in given.tasks:
        study = STUDIES[name]
        if given.warmup:
            results["warmups"][name] = compare_warmups(name, study, given.warmup)
        else:
            results["tasks"][name] = {"study": asdict(study)} | compare(name, study)
            if given.one_operation and name in EMBEDDED:
                results["one operation"][name] = one_operation(study)
        if given.out is not None:
            given.out.write_text(json.dumps(results))
    print(report(results))


if __name__ == "__main__":
    main()
