"""Populations: many networks at once are many networks, each with its own life, whatever lives beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.kasmina import (
    CNNHost,
    MorphogeneticModel,
    OptimizerConfig,
    PopulationOptimizer,
    evaluate_coalitions,
    snapshot_row,
)
from esper.leyline import AlphaAlgorithm, AlphaCurve, EsperError, Incubation, SeedStage
from helpers import (
    EAGER,
    HOSTS,
    LINE,
    all_tensors,
    blueprints,
    bring,
    differing,
    distance,
    fuse,
    make,
    measure,
    network_batch,
    population_batch,
    row_tensors,
    stage_of,
    train_step,
    wanted_coalitions,
)

topologies = pytest.mark.parametrize("topology", [*HOSTS, *LINE])

Event = tuple[str, dict[str, Any]]


def life(env: int, steps: int, model: MorphogeneticModel) -> list[list[Event]]:
    """What happens to one network before each step of its training: a random life, the same wherever it is
    lived."""
    random, slots, names = Random(env), list(model.seed_slots), blueprints(model.host.topology)
    events: list[list[Event]] = []
    for step in range(steps):
        now: list[Event] = []
        for _ in range(random.choice((0, 1, 1, 2))):
            kind = random.choice((*["germinate"] * 4, *["onwards"] * 8, "retarget", "prune", "schedule"))
            options: dict[str, Any] = {"slot_id": random.choice(slots)}
            if kind == "germinate":
                options |= {
                    "blueprint_id": random.choice(names),
                    "algorithm": random.choice(list(AlphaAlgorithm)),
                    "init_seed": random.randrange(2**40),
                    "tempo_epochs": random.choice((0, 1, 1, 2)),
                    "seed_id": f"{env}-{step}",
                }
            elif kind == "retarget":
                options |= {
                    "target": random.choice((0.5, 0.7, 1.0)),
                    "steps": random.choice((0, 2)),
                    "algorithm": random.choice(list(AlphaAlgorithm)),
                    "curve": random.choice(list(AlphaCurve)),
                }
            elif kind == "schedule":
                options |= {"steps": random.choice((0, 1, 3))}
            now.append((kind, options))
        if random.random() < 0.6:
            now.append(("tick", {}))
        events.append(now)
    return events


METHODS = {"retarget": "set_alpha_target", "schedule": "schedule_prune"}
PLACES = {
    "cnn": ("r0c0", "r1c0", "r0c1"),
    "line": ("r0c0", "r1c0", "r0c1"),
    "transformer": ("r0c0", "r0c1"),
    "mlp": ("r0c0", "r0c1"),
}


def live_through(model: MorphogeneticModel, row: int, events: list[Event]) -> list[str]:
    """Let it happen; what cannot happen is an error, which is part of the life."""
    told = []
    for kind, options in events:
        measure(model, row)
        try:
            if kind == "onwards":
                holding = stage_of(model, options["slot_id"], row) is SeedStage.HOLDING
                kind = "fossilize" if holding else "advance"
            if kind == "tick":
                records = model.step_epoch([row])
            else:
                records = getattr(model, METHODS.get(kind, kind))(row=row, **options).records
            told.append(str([(r.kind, r.stage_from, r.stage_to, r.alpha, r.params) for r in records]))
        except EsperError as error:
            told.append(str(error).replace(f"row {row}", "row"))
    return told


# -- against separate networks, in float64 -------------------------------------------------------------------


def mostly_slow(*fast: tuple[Any, ...]) -> Any:
    """Both incubations with both optimizers; the fast suite runs the combinations named."""
    return pytest.mark.parametrize(
        ("incubation", "kind"),
        [
            pytest.param(i, k, marks=() if (i, k) in fast else pytest.mark.slow, id=f"{i.name.lower()}-{k}")
            for i in Incubation
            for k in ("sgd", "adamw")
        ],
    )


@topologies
@mostly_slow((Incubation.SHADOW, "sgd"), (Incubation.STE, "adamw"))
def test_a_population_equals_separate_networks(topology, incubation, kind):
    """Eight random lives side by side, and the same lives each on its own: 20 steps later the weights agree
    to 1e-9."""
    steps, seeds = 20, [50 + row for row in range(8)]
    config = OptimizerConfig(kind=kind, host_lr=0.02, seed_lr=0.03, seed_decay=0.01, newborn_warmup=3)
    model = make(
        topology, 8, dtype=torch.float64, incubation=incubation, random_seeds=seeds, slots=PLACES[topology]
    )
    optimizer = PopulationOptimizer(model, config)
    singles = [
        make(topology, dtype=torch.float64, incubation=incubation, random_seeds=[s], slots=PLACES[topology])
        for s in seeds
    ]
    optimizers = [PopulationOptimizer(single, config) for single in singles]
    for row in range(8):  # rates of their own
        optimizer.host_lr[row] *= 1 + row / 8
        optimizer.clip[row] = 0.2 + row / 4
        optimizers[row].host_lr[0] = optimizer.host_lr[row]
        optimizers[row].clip[0] = optimizer.clip[row]
    lives = [life(row, steps, model) for row in range(8)]
    stages, tempos = set(), set()
    for step in range(steps):
        batches = [network_batch(model, 100 * step + row) for row in range(8)]
        for row, single in enumerate(singles):
            assert live_through(model, row, lives[row][step]) == live_through(single, 0, lives[row][step])
            train_step(single, optimizers[row], *fuse(single, [batches[row]]))
            stages |= {report.stage for report in single.reports().values()}
            tempos |= {report.tempo_epochs for report in single.reports().values()}
        train_step(model, optimizer, *fuse(model, batches))
    for row, single in enumerate(singles):
        assert distance(row_tensors(model, optimizer, row), row_tensors(single, optimizers[row], 0)) < 1e-9, (
            row
        )
    x, _ = population_batch(model, 7)
    assert torch.isfinite(model(x)).all()
    assert stages >= {SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.PRUNED}, (
        "lives with something in them"
    )
    assert tempos == {0, 1, 2}, "grafts among them"


# -- bit for bit, in float32 ---------------------------------------------------------------------------------


class Run:
    """A population in which some rows are envs with lives, and the rest idles."""

    def __init__(
        self,
        topology: Any,
        population: int,
        envs: dict[int, int],
        *,
        incubation: Incubation,
        steps: int,
        kind: str = "sgd",
    ) -> None:
        seeds = [envs.get(row, 999) for row in range(population)]
        self.model = make(
            topology, population, incubation=incubation, random_seeds=seeds, slots=PLACES[topology]
        )
        config = OptimizerConfig(kind=kind, host_lr=0.02, newborn_warmup=3 if kind == "adamw" else 0)
        self.optimizer = PopulationOptimizer(self.model, config)
        self.envs = envs
        self.lives = {row: life(env, steps, self.model) for row, env in envs.items()}
        idle = [row for row in range(population) if row not in envs]
        self.optimizer.host_lr[idle] = 0.0
        self.optimizer.host_decay[idle] = 0.0

    def step(self, step: int) -> None:
        for row, events in self.lives.items():
            live_through(self.model, row, events[step])
        batches = [
            network_batch(self.model, 10_000 * self.envs.get(row, 999) + step)
            for row in range(self.model.population)
        ]
        self.main = train_step(self.model, self.optimizer, *fuse(self.model, batches))

    def trace(self, env: int) -> dict[str, Tensor]:
        """Everything that could tell where an env lives: weights, optimizer, loss, gradient norms."""
        row = next(row for row, e in self.envs.items() if e == env)
        stats = self.optimizer.stats
        here = self.model.reports(row)
        slots = {
            slot_id: norm[row] for slot_id, norm in stats.norm.items() if slot_id in here and norm[row] > 0
        }
        return (
            row_tensors(self.model, self.optimizer, row)
            | {"loss": self.main[row], "host_norm": stats.host_norm[row]}
            | slots
        )

    def table(self, env: int) -> dict[str, Tensor]:
        """The env's coalition table on an input of its own, evaluated with all the others."""
        row = next(row for row, e in self.envs.items() if e == env)
        batches = [network_batch(self.model, self.envs.get(r, 999)) for r in range(self.model.population)]
        out = evaluate_coalitions(self.model, fuse(self.model, batches)[0], wanted_coalitions(self.model))
        return {
            str(sorted(c)): o
            for r, c, o in zip(out.rows, out.coalitions, out.outputs, strict=True)
            if r == row
        }


NEIGHBOURHOODS: dict[str, tuple[int, dict[int, int]]] = {
    "1 of 16": (16, {0: 0}),
    "4 of 16": (16, {row: row for row in range(4)}),
    "8 of 16": (16, {row: row for row in range(8)}),
    "16 of 16": (16, {row: row for row in range(16)}),
    "8 of 8": (8, {row: row for row in range(8)}),
    "other neighbours": (8, {0: 0} | {row: 30 + row for row in range(1, 8)}),
    "another row": (16, {row: row - 11 for row in range(11, 16)} | {row: 50 + row for row in range(11)}),
}


def check_neighbourhoods(
    topology: Any, incubation: Incubation, kind: str, steps: int, names: Iterable[str]
) -> None:
    reference = Run(topology, 8, {0: 0}, incubation=incubation, steps=steps, kind=kind)
    runs = {
        name: Run(topology, population, envs, incubation=incubation, steps=steps, kind=kind)
        for name in names
        for population, envs in [NEIGHBOURHOODS[name]]
    }
    grown: set[str] = set()
    for step in range(steps):
        reference.step(step)
        expected = reference.trace(0)
        grown |= {report.blueprint_id for report in reference.model.reports(0).values()}
        for name, run in runs.items():
            run.step(step)
            assert differing(expected, run.trace(0)) == [], f"{name}, step {step}"
    expected = reference.table(0)
    for name, run in runs.items():
        assert differing(expected, run.table(0)) == [], name
    assert len(grown) >= 2, "a life with something in it"


SIZES, COMPANY = ("1 of 16", "4 of 16", "8 of 16", "16 of 16"), ("8 of 8", "other neighbours", "another row")


@pytest.mark.parametrize(
    ("topology", "incubation", "kind", "names"),
    [
        ("cnn", Incubation.SHADOW, "sgd", SIZES),
        ("cnn", Incubation.STE, "adamw", COMPANY),
        ("transformer", Incubation.SHADOW, "adamw", COMPANY),
        ("mlp", Incubation.STE, "sgd", SIZES),
        ("line", Incubation.SHADOW, "adamw", COMPANY),
        ("line", Incubation.STE, "sgd", SIZES),
    ],
)
def test_an_env_is_the_same_bits_whatever_runs_beside_it(topology, incubation, kind, names):
    check_neighbourhoods(
        topology, incubation, kind, 40 if names is SIZES and topology == "cnn" else 15, names
    )


@topologies
@mostly_slow()
def test_an_env_is_the_same_bits_for_300_steps(topology, incubation, kind):
    check_neighbourhoods(topology, incubation, kind, 300, NEIGHBOURHOODS)


COMPANIES = {"alone": (0,), "some": (0, 3, 6), "everyone": tuple(range(8))}


@pytest.mark.parametrize(("topology", "name"), [(t, name) for t in (*HOSTS, *LINE) for name in blueprints(t)])
def test_a_seed_is_the_same_bits_whoever_has_the_same(topology, name):
    """Where every row has a seed of one bank nothing is moved, otherwise lanes are taken out and put back: no
    difference."""
    traces = []
    for rows in COMPANIES.values():
        model = make(topology, 8)
        if (
            topology == "cnn"
        ):  # what the last slot passes on is pooled at once, which lays gradients out differently
            model = MorphogeneticModel(CNNHost(8, base=2, channels=1, size=8, pools=1), **EAGER)
        first, *_, last = model.seed_slots
        for row in rows:
            for slot_id, stage in ((first, SeedStage.TRAINING), (last, SeedStage.HOLDING)):
                bring(
                    model,
                    slot_id,
                    name,
                    stage,
                    row=row,
                    stir=0.2,
                    init_seed=row,
                    algorithm=list(AlphaAlgorithm)[row % 3],
                )
        optimizer = PopulationOptimizer(model, OptimizerConfig(host_lr=0.05, seed_lr=0.05))
        for step in range(4):
            train_step(model, optimizer, *population_batch(model, step))
        traces.append(row_tensors(model, optimizer, 0))
    assert differing(traces[0], traces[1]) == []
    assert differing(traces[0], traces[2]) == []


def test_a_run_twice_is_the_same_run():
    first, second = (
        Run("cnn", 8, {row: row for row in range(8)}, incubation=Incubation.SHADOW, steps=10)
        for _ in range(2)
    )
    for step in range(10):
        first.step(step)
        second.step(step)
    assert differing(all_tensors(first.model), all_tensors(second.model)) == []


# -- poison --------------------------------------------------------------------------------------------------

SICK = 3


def poison(run: Run, where: str, value: float) -> None:
    with torch.no_grad():
        if where == "weights":
            for p in run.model.host.parameters():
                p[SICK] = value
        elif where == "buffers":
            for b in run.model.host.buffers():
                b[SICK] = value
        elif where == "momentum":
            for tensors in run.optimizer.groups["host"]["host"].state.values():
                for t in tensors:
                    t[SICK] = value
        elif where == "seeds":
            for slot in run.model.slots():
                for name, bank in slot.banks.items():
                    if slot.live_rows(name)[SICK]:
                        for p in bank.parameters():
                            p[SICK] = value


POISONED = [("cnn", w) for w in ("weights", "seeds", "input", "buffers", "momentum")] + [
    (t, w) for t in ("transformer", "mlp") for w in ("weights", "seeds", "momentum")
]


@pytest.mark.parametrize(("topology", "where"), POISONED)
@pytest.mark.parametrize(
    ("value", "incubation"),
    [(math.nan, Incubation.SHADOW), pytest.param(math.inf, Incubation.STE, marks=pytest.mark.slow)],
)
def test_a_poisoned_row_touches_no_other(topology, where, value, incubation):
    runs = [
        Run(topology, 8, {row: row for row in range(8)}, incubation=incubation, steps=20) for _ in range(2)
    ]
    for run in runs:
        slots = list(run.model.seed_slots)
        # The sick row shares banks, slots and blends with its neighbours.
        for row in (2, SICK, 4):
            bring(
                run.model,
                slots[0],
                "norm",
                SeedStage.HOLDING,
                row=row,
                algorithm=list(AlphaAlgorithm)[row - 2],
                stir=0.2,
            )
            bring(
                run.model,
                slots[1],
                blueprints(topology)[0],
                SeedStage.TRAINING,
                row=row,
                algorithm=AlphaAlgorithm.MULTIPLY,
            )
        run.step(0)
    healthy, sick = runs
    poison(sick, where, value)
    for step in range(1, 5):
        for run in runs:
            for row, events in run.lives.items():
                live_through(run.model, row, events[step])
            batches = [network_batch(run.model, 10_000 * row + step) for row in range(8)]
            if run is sick and where == "input":
                batches[SICK] = (torch.full_like(batches[SICK][0], value), batches[SICK][1])
            run.main = train_step(run.model, run.optimizer, *fuse(run.model, batches))
    assert healthy.model.training
    for row in range(8):
        if row != SICK:
            assert differing(healthy.trace(row), sick.trace(row)) == [], row
            assert differing(healthy.table(row), sick.table(row)) == [], row
    spoilt = [
        name for name, t in snapshot_row(sick.model, SICK).tensors.items() if not torch.isfinite(t).all()
    ]
    assert spoilt, "the poison did work"
