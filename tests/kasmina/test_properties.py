"""Properties over random lives: legal and illegal operations, in one network and in a population.

Sequences are drawn as plain tuples; most steps push a seed along its path, the rest do anything at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from esper.kasmina import (
    MorphogeneticModel,
    OptimizerConfig,
    PopulationOptimizer,
    all_coalitions,
    blended_slots,
    cross_entropy,
    default_coalitions,
    evaluate_coalitions,
    load_network,
    restore_row,
    save_network,
    snapshot_row,
)
from esper.kasmina.seed import GATE_BANK
from esper.leyline import (
    CLOCK,
    GRAFT,
    LIVE_STAGES,
    TRANSITIONS,
    AlphaAlgorithm,
    AlphaCurve,
    AlphaMode,
    EsperError,
    Incubation,
    LifecycleKind,
    LifecycleOp,
    OpResult,
    SeedStage,
    TransitionError,
)
from helpers import (
    HOSTS,
    all_tensors,
    blueprints,
    bring,
    differing,
    examples,
    fuse,
    generator,
    make,
    measure,
    network_batch,
    population_batch,
    row_tensors,
    same_bits,
    stage_of,
    stir_seed,
    train_step,
    wanted_coalitions,
    without,
)

SLOTS = ("r0c0", "r0c1")
ROWS = {1: (0,), 8: (0, 5, 6)}
STAGES = (
    None,
    SeedStage.GERMINATED,
    SeedStage.TRAINING,
    SeedStage.BLENDING,
    SeedStage.HOLDING,
    SeedStage.FOSSILIZED,
)
algorithms = st.sampled_from(AlphaAlgorithm)
starts = st.lists(st.sampled_from((*STAGES, SeedStage.BLENDING, SeedStage.HOLDING)), min_size=3, max_size=6)
topologies = st.sampled_from(list(HOSTS))
populations = st.sampled_from((1, 8))


@dataclass(frozen=True)
class Op:
    """One step of a random life. `name` is a lifecycle operation, or `next`, `tick`, `train`."""

    name: str
    where: int = 0  # picks slot and row
    blueprint: int = 0  # modulo the number of blueprints
    algorithm: AlphaAlgorithm = AlphaAlgorithm.ADD
    target: float = 1.0
    steps: int = 1


def ops(*extra: str) -> st.SearchStrategy[Op]:
    names = (
        ["next"] * 6
        + ["tick"] * 2
        + ["germinate", "advance", "fossilize", "prune", "schedule", "retarget", *extra]
    )
    # Few blueprints, so that rows share banks.
    return st.builds(
        Op,
        st.sampled_from(names),
        st.integers(0, 5),
        st.sampled_from((0, 0, 1, 1, 4, 7)),
        algorithms,
        st.sampled_from((0.5, 0.7, 1.0)),
        st.sampled_from((0, 1, 2, 3)),
    )


LIFECYCLE = {
    "germinate": LifecycleOp.GERMINATE,
    "advance": LifecycleOp.ADVANCE,
    "fossilize": LifecycleOp.FOSSILIZE,
    "prune": LifecycleOp.PRUNE,
    "schedule": LifecycleOp.PRUNE,
    "retarget": LifecycleOp.SET_ALPHA_TARGET,
}


@dataclass
class World:
    """A population and how random operations find their place in it."""

    model: MorphogeneticModel

    def place(self, op: Op) -> tuple[str, int]:
        rows = ROWS[self.model.population]
        return SLOTS[op.where % 2], rows[op.where // 2 % len(rows)]

    def resolve(self, op: Op) -> Op:
        """What `next` means here: the operation that leads onwards, measured first so that its gate opens."""
        if op.name != "next":
            return op
        slot_id, row = self.place(op)
        measure(self.model, row)
        seed, stage = self.model.seed_in(slot_id, row), stage_of(self.model, slot_id, row)
        moving = seed is not None and seed.alpha.mode is not AlphaMode.HOLD
        name = {
            SeedStage.DORMANT: "germinate",
            SeedStage.GERMINATED: "advance",
            SeedStage.TRAINING: "advance",
            SeedStage.BLENDING: "tick" if moving else "advance",
            SeedStage.HOLDING: "fossilize",
        }.get(stage, "tick")
        return replace(op, name=name)

    def apply(self, op: Op) -> Any:
        slot_id, row = self.place(op)
        if op.name == "tick":
            return self.model.step_epoch()
        if op.name == "germinate":
            names = [*blueprints(self.model.host.topology), "noop"]
            return self.model.germinate(
                slot_id,
                names[op.blueprint % len(names)],
                row=row,
                algorithm=op.algorithm,
                tempo_epochs=op.steps,
            )
        if op.name == "schedule":
            return self.model.schedule_prune(slot_id, row=row, steps=op.steps, curve=AlphaCurve.COSINE)
        if op.name == "retarget":
            return self.model.set_alpha_target(
                slot_id, op.target, row=row, steps=op.steps, algorithm=op.algorithm
            )
        return getattr(self.model, op.name)(slot_id, row=row)

    def attempt(self, op: Op) -> Any:
        """Apply, illegal or not."""
        try:
            return self.apply(self.resolve(op))
        except EsperError as error:
            return error

    def stages(self) -> dict[tuple[str, int], SeedStage]:
        return {
            (slot_id, row): stage_of(self.model, slot_id, row)
            for slot_id in SLOTS
            for row in range(self.model.population)
        }


def world(topology: Any, population: int, start: list[SeedStage | None], **options: Any) -> World:
    """A population whose places, as operations count them, begin in the given stages."""
    w = World(make(topology, population, slots=SLOTS, **options))
    for where, stage in enumerate(start):
        slot_id, row = w.place(Op("", where))
        if stage is not None and w.model.seed_in(slot_id, row) is None:
            algorithm = list(AlphaAlgorithm)[where % 3]
            bring(
                w.model,
                slot_id,
                blueprints(topology)[where % 2],
                stage,
                row=row,
                stir=0.2,
                algorithm=algorithm,
            )
    return w


def live(model: MorphogeneticModel) -> dict[str, set[int]]:
    """Bank → rows with weights in it, from the seeds alone."""
    rows_of: dict[str, set[int]] = {}
    for slot_id in SLOTS:
        for row in range(model.population):
            seed = model.seed_in(slot_id, row)
            if seed is not None and seed.stage in LIVE_STAGES | {SeedStage.FOSSILIZED}:
                rows_of.setdefault(f"{slot_id}.{seed.blueprint_id}", set()).add(row)
                if seed.algorithm is AlphaAlgorithm.GATE:
                    rows_of.setdefault(f"{slot_id}.{GATE_BANK}", set()).add(row)
    return rows_of


def check_structure(model: MorphogeneticModel) -> None:
    """What must hold at any time: alphas fit stages, banks fit seeds, dead rows are zero, sizes add up."""
    alive = live(model)
    for slot_id in SLOTS:
        slot = model.slot(slot_id)
        assert {f"{slot_id}.{name}" for name in slot.banks} == {
            name for name in alive if name.startswith(slot_id)
        }
        for name, bank in slot.banks.items():
            dead = [row for row in range(model.population) if row not in alive[f"{slot_id}.{name}"]]
            assert all(not p[dead].any() for p in bank.parameters())
        for row in range(model.population):
            seed = model.seed_in(slot_id, row)
            if seed is None:
                continue
            alpha = seed.alpha
            assert 0.0 <= alpha.alpha <= 1.0
            if seed.stage in (SeedStage.HOLDING, SeedStage.FOSSILIZED):
                assert (alpha.alpha, alpha.mode) == (1.0, AlphaMode.HOLD)
            elif seed.stage is not SeedStage.BLENDING:
                assert (alpha.alpha, alpha.mode) == (0.0, AlphaMode.HOLD)
    buffers = {f"host.{name}" for name, _ in model.host.named_buffers()}
    for row in range(model.population):
        size = sum(t.numel() for name, t in snapshot_row(model, row).tensors.items() if name not in buffers)
        assert (
            model.total_params(row)
            == size
            == model.host_params
            + sum(
                report.metrics.params
                for report in model.reports(row).values()
                if report.stage in LIVE_STAGES | {SeedStage.FOSSILIZED}
            )
        )


# -- the stage machine ---------------------------------------------------------------------------------------


def successors(stage: SeedStage) -> set[SeedStage]:
    """Every other stage that the tables let follow directly."""
    clock = {CLOCK[stage].to} if stage in CLOCK else set()
    return clock | {t.to for (s, _), t in TRANSITIONS.items() if s is stage} - {stage}


@pytest.mark.fuzz
@examples(40)
@given(topologies, populations, starts, st.lists(ops(), min_size=5, max_size=20))
def test_every_life_follows_the_table(topology, population, start, sequence):
    """Legal operations do what the table says, illegal ones raise and change nothing, silent seeds stay
    silent."""
    w = world(topology, population, start)
    model = w.model.eval()
    x, _ = population_batch(model, 1)
    output = model(x)
    for drawn in sequence:
        op = w.resolve(drawn)
        slot_id, row = w.place(op)
        before, tensors = w.stages(), all_tensors(model)
        reports = [model.reports(r) for r in range(population)]
        blended = [blended_slots(model, r) for r in range(population)]
        stage = before[slot_id, row]
        if op.name == "tick":
            for record in w.apply(op):
                assert record.stage_to in successors(record.stage_from)
            after = w.stages()
            assert all(after[key] is was or after[key] in successors(was) for key, was in before.items())
        else:
            transition = TRANSITIONS.get((stage, LIFECYCLE[op.name]))
            if transition is not None and op.name == "germinate" and op.steps == 0:
                transition = GRAFT
            result = w.attempt(op)
            if isinstance(result, EsperError):
                assert isinstance(result, TransitionError) is (transition is None)
                assert ("alpha is moving" if transition else f"not possible in stage {stage.name}") in str(
                    result
                )
                assert w.stages() == before
                assert differing(tensors, all_tensors(model)) == []
                assert [model.reports(r) for r in range(population)] == reports
                event("refused")
            else:
                assert transition is not None
                now = stage_of(model, slot_id, row)
                if not result.done:
                    assert result.records[0].kind is LifecycleKind.GATE_REFUSED
                    assert not result.gate.passed
                    assert w.stages() == before
                elif op.name == "schedule" and now is not SeedStage.PRUNED:
                    assert (result.records[0].kind, now) == (
                        LifecycleKind.PRUNE_SCHEDULED,
                        SeedStage.BLENDING,
                    )
                elif op.name == "retarget":
                    assert now is (stage if op.target == 1.0 else transition.to)
                else:
                    assert now is transition.to
                    event(f"{op.name} to {now.name}")
                others = {key: value for key, value in w.stages().items() if key != (slot_id, row)}
                assert others == {key: value for key, value in before.items() if key != (slot_id, row)}
        check_structure(model)
        # Germination, incubation and a ramp at its foot change no output; nor does anything in another row.
        new_output = model(x)
        for r in range(population):
            if blended_slots(model, r) == blended[r] == ():
                assert torch.equal(new_output[r], output[r])
        if op.name in ("germinate", "advance") and stage is not SeedStage.BLENDING:
            assert torch.equal(new_output, output)
        output = new_output


@pytest.mark.fuzz
@examples(25)
@given(
    topologies,
    populations,
    starts,
    st.lists(ops(*["train"] * 3), min_size=4, max_size=16),
    st.sampled_from(("sgd", "adamw")),
    st.sampled_from(Incubation),
)
def test_the_optimizer_holds_exactly_what_lives(topology, population, start, sequence, kind, incubation):
    w = world(topology, population, start, incubation=incubation)
    model = w.model
    optimizer = PopulationOptimizer(
        model, OptimizerConfig(kind=kind, host_lr=0.05, seed_lr=0.05, seed_decay=0.1)
    )
    steps = 0
    for op in sequence:
        before, alive = {row: optimizer.row_state(row) for row in range(population)}, live(model)
        owner = {(s, r): model.seed_in(s, r) for s in SLOTS for r in range(population)}
        if op.name == "train":
            steps += 1
            tensors, states = all_tensors(model), {r: optimizer.row_state(r) for r in range(population)}
            train_step(model, optimizer, *population_batch(model, steps))
            check_moved(model, optimizer, tensors, states)
        else:
            w.attempt(op)
        optimizer.sync()
        now = live(model)
        held = {name for banks in optimizer.groups.values() for name in banks}
        assert held == {"host", *now}
        for name, rows in now.items():
            slot_id = name.split(".")[0]
            bank = optimizer.groups[slot_id][name]
            for row in range(population):
                state = [bank.bias[row], *(t[row] for ts in bank.state.values() for t in ts)]
                if row not in rows:
                    assert not any(t.any() for t in state), "no live seed, no momentum"
                elif row not in alive.get(name, ()) or owner[slot_id, row] is not model.seed_in(slot_id, row):
                    assert not any(t.any() for t in state), "born just now"
                elif op.name != "train":
                    kept = {k: v for k, v in optimizer.row_state(row).items() if k.startswith(f"{name}.")}
                    assert all(torch.equal(before[row][k], v) for k, v in kept.items()), (
                        "growth elsewhere loses nothing"
                    )
        if op.name != "train":
            for row in range(population):
                host = {k: v for k, v in optimizer.row_state(row).items() if k.startswith("host.")}
                assert all(torch.equal(before[row][k], v) for k, v in host.items())


def check_moved(
    model: MorphogeneticModel,
    optimizer: PopulationOptimizer,
    tensors: dict[str, torch.Tensor],
    states: dict[int, dict[str, torch.Tensor]],
) -> None:
    """After one step: dead and frozen rows are untouched to the last bit, learning ones have moved."""
    for slot_id in SLOTS:
        for name, bank in model.slot(slot_id).banks.items():
            for row in range(model.population):
                seed = model.seed_in(slot_id, row)
                is_live = row in live(model)[f"{slot_id}.{name}"]
                learns = is_live and (
                    seed.stage is SeedStage.TRAINING
                    or (
                        seed.stage in (SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED)
                        and seed.alpha.alpha > 0
                        and seed.alpha.mode is not AlphaMode.DOWN
                    )
                )
                same = [
                    same_bits(p[row], tensors[f"seed_slots.{slot_id}.banks.{name}.{key}"][row])
                    for key, p in bank.named_parameters()
                ]
                if not learns:
                    assert all(same), f"{slot_id}.{name} row {row} moved in stage {seed and seed.stage.name}"
                    if is_live:
                        kept = {
                            k: v
                            for k, v in optimizer.row_state(row).items()
                            if k.startswith(f"{slot_id}.{name}.")
                        }
                        assert all(torch.equal(states[row][k], v) for k, v in kept.items())
                elif same and name != GATE_BANK:
                    assert not all(same), (
                        f"{slot_id}.{name} row {row} learns nothing in stage {seed.stage.name}"
                    )


# -- incubation ----------------------------------------------------------------------------------------------

planting = st.tuples(st.integers(0, 7), st.integers(0, 7), algorithms)  # row, blueprint, blend


@pytest.mark.fuzz
@examples(30)
@given(
    topologies,
    populations,
    st.sampled_from(Incubation),
    st.lists(planting, min_size=1, max_size=4),
    st.lists(planting, max_size=2),
    st.sampled_from((None, 1e20, math.inf, -math.inf, math.nan)),
    st.sampled_from(("sgd", "adamw")),
)
def test_the_host_never_feels_an_incubating_seed(
    topology, population, incubation, incubating, blended, poison, kind
):
    """Weights, buffers, momentum and outputs of everything else are the same bits, also beside a seed that is
    not finite."""
    names = blueprints(topology)
    models = [make(topology, population, incubation=incubation) for _ in range(2)]
    first, second, *_ = models[0].seed_slots
    for model in models:
        for row, blueprint, algorithm in {plant[0] % population: plant for plant in blended}.values():
            bring(
                model,
                second,
                names[blueprint % len(names)],
                SeedStage.HOLDING,
                row=row % population,
                algorithm=algorithm,
                stir=0.2,
                init_seed=row,
            )
    plain, sown = models
    seeds = {}
    for i, (row, blueprint, algorithm) in enumerate(incubating):
        slot_id = (first, *list(sown.seed_slots)[2:])[i % (len(sown.seed_slots) - 1)]
        if (slot_id, row % population) not in seeds:
            seeds[slot_id, row % population] = names[blueprint % len(names)]
            bring(
                sown,
                slot_id,
                seeds[slot_id, row % population],
                SeedStage.TRAINING,
                row=row % population,
                algorithm=algorithm,
                stir=0.2,
            )
    if poison is not None:
        with torch.no_grad():
            for (slot_id, row), name in seeds.items():
                for p in sown.slot(slot_id).banks[name].parameters():
                    p[row] = poison
    optimizers = [PopulationOptimizer(model, OptimizerConfig(kind=kind)) for model in models]
    for step in range(4):
        x, y = population_batch(plain, step)
        losses = [
            train_step(model, optimizer, x, y) for model, optimizer in zip(models, optimizers, strict=True)
        ]
        assert torch.equal(*losses)
        assert torch.equal(plain.eval()(x), sown.eval()(x))
        for model in models:
            model.train()
    for row in range(population):
        mine, theirs = (
            row_tensors(model, optimizer, row) for model, optimizer in zip(models, optimizers, strict=True)
        )
        incubators = {slot_id for slot_id, r in seeds if r == row}
        theirs = {
            k: v for k, v in theirs.items() if k.removeprefix("optimizer.").split(".")[0] not in incubators
        }
        assert differing(mine, theirs) == []
    moved = [
        not torch.equal(p[row], torch.zeros_like(p[row]))
        for (slot_id, row), name in seeds.items()
        for key, p in sown.slot(slot_id).banks[name].named_parameters()
        if key == "gamma.weight"
    ]
    assert poison is not None or all(moved), "and the seeds do learn"


# -- saving --------------------------------------------------------------------------------------------------


@pytest.mark.fuzz
@examples(12)
@given(
    topologies,
    populations,
    starts,
    st.lists(ops("train"), min_size=2, max_size=10),
    st.sampled_from(("sgd", "adamw")),
    st.sampled_from(Incubation),
)
def test_a_saved_life_goes_on_as_if_nothing_had_happened(
    topology, population, start, sequence, kind, incubation
):
    w = world(topology, population, start, incubation=incubation)
    model, optimizer = w.model, PopulationOptimizer(w.model, OptimizerConfig(kind=kind))
    for step, op in enumerate([*sequence, Op("train"), Op("train")]):
        if op.name == "train":
            train_step(model, optimizer, *population_batch(model, step))
        else:
            w.attempt(op)
    with TemporaryDirectory() as directory:
        save_network(directory, model, optimizer)
        twin, twin_optimizer = load_network(directory)
    assert [twin.reports(row) for row in range(population)] == [
        model.reports(row) for row in range(population)
    ]
    x, _ = population_batch(model, 99)
    assert torch.equal(model.eval()(x), twin.eval()(x))
    v = World(twin)
    for step, op in enumerate([Op("next", 0, 1), Op("tick"), Op("next", 3, 2)]):
        x, y = population_batch(model, 100 + step)
        assert torch.equal(train_step(model, optimizer, x, y), train_step(twin, twin_optimizer, x, y))
        ours, theirs = w.attempt(op), v.attempt(op)
        assert ours == theirs or (isinstance(ours, EsperError) and str(ours) == str(theirs))
    for row in range(population):
        assert differing(row_tensors(model, optimizer, row), row_tensors(twin, twin_optimizer, row)) == []


# -- coalitions ----------------------------------------------------------------------------------------------


@st.composite
def forests(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> MorphogeneticModel:
    """A population in which some rows have grown at random."""
    topology, population = draw(topologies), draw(populations)
    model = make(topology, population, dtype=dtype)
    names = [*blueprints(topology), "noop"]
    for row in ROWS[population]:
        for slot_id in draw(st.permutations(list(model.seed_slots)))[:4]:
            stage = draw(st.sampled_from(STAGES))
            if stage is not None:
                bring(
                    model,
                    slot_id,
                    draw(st.sampled_from(names)),
                    stage,
                    row=row,
                    algorithm=draw(algorithms),
                    stir=0.3,
                )
    return model


def alone(model: MorphogeneticModel, row: int, off: set[str], x: torch.Tensor) -> torch.Tensor:
    """One network of its own, rebuilt without some seeds, in an ordinary evaluation pass."""
    single = make(model.host.topology, dtype=next(model.host.parameters()).dtype)
    restore_row(single, without(snapshot_row(model, row), off))
    return single.eval()(fuse(single, [(x, torch.zeros(1))])[0])[0]


@pytest.mark.fuzz
@examples(30)
@given(forests(), st.booleans())
def test_the_coalition_table_equals_separate_evaluations(model, shared):
    wanted = wanted_coalitions(model)
    inputs = [network_batch(model, 7 if shared else row)[0] for row in range(model.population)]
    fused = inputs[0] if shared else fuse(model, [(x, torch.zeros(1)) for x in inputs])[0]
    before, version = all_tensors(model), model.version
    table = evaluate_coalitions(model, fused, wanted, shared_input=shared)
    assert differing(before, all_tensors(model)) == []
    assert (model.version, model.training) == (version, True)
    assert not table.outputs.requires_grad
    assert {(r, c) for r, cs in wanted.items() for c in cs} == set(
        zip(table.rows, table.coalitions, strict=True)
    )
    assert len(table.rows) == len(table.outputs) == sum(len(cs) for cs in wanted.values())
    with torch.no_grad():
        for row, coalition, output in zip(table.rows, table.coalitions, table.outputs, strict=True):
            if row not in ROWS[model.population] and row != 1:
                continue
            off = set(model.reports(row)) - coalition
            assert float((output - alone(model, row, off, inputs[row])).abs().max()) < 1e-9


@pytest.mark.fuzz
@examples(10)
@given(forests(torch.float32), st.data())
def test_any_part_of_the_table_is_the_same_table(model, data):
    """Fewer rows, fewer coalitions, in another order: the same bits for a population, the same numbers for
    one network."""
    x, _ = population_batch(model, 1)
    wanted = wanted_coalitions(model)
    whole = evaluate_coalitions(model, x, wanted)
    table = {
        key: out
        for *key, out in zip(whole.rows, whole.coalitions, whole.outputs, strict=True)
        for key in [tuple(key)]
    }
    rows = data.draw(st.lists(st.sampled_from(sorted(wanted)), min_size=1, max_size=3, unique=True))
    part = {row: data.draw(st.permutations(wanted[row]))[: data.draw(st.integers(1, 3))] for row in rows}
    some = evaluate_coalitions(model, x, part)
    assert {(r, c) for r, cs in part.items() for c in cs} == set(zip(some.rows, some.coalitions, strict=True))
    for row, coalition, output in zip(some.rows, some.coalitions, some.outputs, strict=True):
        if model.population > 1:
            assert torch.equal(output, table[row, coalition])
        assert torch.allclose(output, table[row, coalition], rtol=1e-5, atol=1e-5)


def test_the_full_coalition_is_the_network_itself():
    for topology in HOSTS:
        for population in (1, 8):
            model = make(topology, population)
            for row in {0, population - 1}:
                for slot_id, algorithm in zip(model.seed_slots, AlphaAlgorithm, strict=False):
                    bring(model, slot_id, "norm", SeedStage.HOLDING, row=row, algorithm=algorithm, stir=0.3)
            x, _ = population_batch(model, 1)
            full = {row: [frozenset(blended_slots(model, row))] for row in range(population)}
            assert torch.equal(evaluate_coalitions(model, x, full).outputs, model.eval()(x))


def shapley(players: tuple[str, ...], value: dict[frozenset[str], float]) -> dict[str, float]:
    """The mean marginal contribution over all orders of joining."""
    share = dict.fromkeys(players, 0.0)
    orders = list(permutations(players))
    for order in orders:
        for i, player in enumerate(order):
            share[player] += (value[frozenset(order[: i + 1])] - value[frozenset(order[:i])]) / len(orders)
    return share


@pytest.mark.fuzz
@examples(15)
@given(forests())
def test_shapley_values_of_the_table_sum_to_full_minus_empty(model):
    x, y = population_batch(model, 1)
    table = evaluate_coalitions(model, x, wanted_coalitions(model))
    losses = cross_entropy(table.outputs, y[torch.tensor(table.rows)])
    for row in ROWS[model.population]:
        value = {
            c: float(v) for r, c, v in zip(table.rows, table.coalitions, losses, strict=True) if r == row
        }
        players = blended_slots(model, row)
        shares = shapley(players, value)
        assert sum(shares.values()) == pytest.approx(value[frozenset(players)] - value[frozenset()], abs=1e-9)
        for slot_id in players:
            if model.seed_in(slot_id, row).blueprint_id == "noop":
                assert shares[slot_id] == pytest.approx(0.0, abs=1e-12), "who does nothing gets nothing"


@given(st.lists(st.sampled_from([f"r0c{i}" for i in range(7)]), unique=True))
def test_which_coalitions_are_wanted(slots):
    wanted, full = default_coalitions(slots, generator(3)), frozenset(slots)
    assert len(set(wanted)) == len(wanted)
    assert all(c <= full for c in wanted)
    assert {full, frozenset(), *(full - {s} for s in slots), *(frozenset({s}) for s in slots)} <= set(wanted)
    if len(slots) <= 4:
        assert len(wanted) == 2 ** len(slots)
        assert wanted == all_coalitions(slots)
    else:
        assert wanted == default_coalitions(slots, generator(3)), "the same orders for the same stream"
        chains = [c for c in wanted if 1 < len(c) < len(slots) - 1]
        assert chains, "sampled orders reach beyond ones and leave-one-outs"
        assert len(wanted) <= 2 + 2 * len(slots) + 8 * (len(slots) - 3)


# -- the tests' own tools ------------------------------------------------------------------------------------


def test_random_lives_reach_every_stage():
    """Guards the strategies above: guided steps do lead through a whole life."""
    w = world("mlp", 1, [])
    seen = []
    for _ in range(8):
        w.attempt(Op("next"))
        seen.append(stage_of(w.model, "r0c0"))
    assert set(seen) >= {
        SeedStage.GERMINATED,
        SeedStage.TRAINING,
        SeedStage.BLENDING,
        SeedStage.HOLDING,
        SeedStage.FOSSILIZED,
    }
    stir_seed(w.model, "r0c0", 0, 0.1)
    assert isinstance(w.attempt(Op("prune")), TransitionError)
    assert isinstance(w.attempt(Op("germinate", 1)), OpResult)
