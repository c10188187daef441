"""A seed's life: the legal path and its records, cooldown, ramps, retargeting, gates that open by themselves,
and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from esper.kasmina import (
    CNNHost,
    GPTHost,
    MorphogeneticModel,
    NetworkRow,
    PopulationOptimizer,
    evaluate_coalitions,
)
from esper.kasmina.seed import GATE_BANK
from esper.leyline import (
    ALPHA_SPEED_EPOCHS,
    AlphaAlgorithm,
    AlphaCurve,
    AlphaMode,
    BlueprintError,
    EsperError,
    GateConfig,
    GateLevel,
    GateReason,
    LifecycleKind,
    LifecycleRecord,
    Pacing,
    PopulationError,
    PruneCause,
    SeedMetrics,
    SeedStage,
    ShapeError,
    SlotIdError,
    TransitionError,
)
from helpers import (
    EAGER,
    HOSTS,
    all_tensors,
    bring,
    differing,
    make,
    measure,
    network_batch,
    passed,
    population_batch,
    stage_of,
    stir_seed,
    train_step,
)

K, S = LifecycleKind, SeedStage
SLOT = "r0c1"


def moves(
    records: tuple[LifecycleRecord, ...] | list[LifecycleRecord],
) -> list[tuple[LifecycleKind, SeedStage, SeedStage]]:
    return [(r.kind, r.stage_from, r.stage_to) for r in records]


def alpha_of(model: MorphogeneticModel, row: int = 0) -> float:
    return model.reports(row)[SLOT].alpha


# -- the whole path ------------------------------------------------------------------------------------------


def test_the_whole_path_with_strict_gates():
    model = MorphogeneticModel(HOSTS["cnn"](8), pacing=Pacing(min_training_epochs=2, min_blending_epochs=4))
    row, view = 5, NetworkRow(model, 5)
    [record] = passed(
        view.germinate(SLOT, "conv_light", tempo_epochs=3, ramp_curve=AlphaCurve.LINEAR, seed_id="mine")
    ).records
    assert record == LifecycleRecord(
        kind=K.GERMINATED,
        row=row,
        slot_id=SLOT,
        seed_id="mine",
        blueprint_id="conv_light",
        stage_from=S.DORMANT,
        stage_to=S.GERMINATED,
        alpha=0.0,
        params=9 * 16 + 12,
        epochs_total=0,
    )
    assert moves(passed(view.advance(SLOT)).records) == [(K.STAGE_CHANGED, S.GERMINATED, S.TRAINING)]

    refused = view.advance(SLOT)
    assert not refused.done
    assert moves(refused.records) == [(K.GATE_REFUSED, S.TRAINING, S.TRAINING)]
    assert refused.records[0].gate == refused.gate
    assert [f.reason for f in refused.gate.failures] == [
        GateReason.TOO_YOUNG,
        GateReason.GRADIENT_UNMEASURED,
        GateReason.IMPROVEMENT_LOW,
    ]
    model.record_epoch(row, 40.0)
    assert view.step_epoch() == []
    model.record_epoch(row, 40.5)
    assert view.step_epoch() == []
    seed = model.seed_in(SLOT, row)
    seed.update_metrics(gradient_ratio=0.5, gradient_health=1.0)
    assert view.reports()[SLOT].can_advance

    assert moves(passed(view.advance(SLOT)).records) == [(K.STAGE_CHANGED, S.TRAINING, S.BLENDING)]
    assert alpha_of(model, row) == 0.0, "the ramp begins with the next tick"
    assert view.reports()[SLOT].alpha_mode is AlphaMode.UP
    alphas = []
    for _ in range(3):
        assert view.advance(SLOT).gate.failures[0].reason is GateReason.ALPHA_NOT_AT_TARGET
        view.step_epoch()
        alphas.append(alpha_of(model, row))
    assert alphas == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]
    assert [f.reason for f in view.advance(SLOT).gate.failures] == [GateReason.TOO_YOUNG]
    view.step_epoch()

    assert moves(passed(view.advance(SLOT)).records) == [(K.STAGE_CHANGED, S.BLENDING, S.HOLDING)]
    assert [f.reason for f in view.fossilize(SLOT).gate.failures] == [GateReason.CONTRIBUTION_UNMEASURED]
    model.record_epoch(row, 41.0, contributions={SLOT: 1.5})
    [record] = passed(view.fossilize(SLOT)).records
    assert (record.kind, record.stage_from, record.stage_to) == (K.FOSSILIZED, S.HOLDING, S.FOSSILIZED)
    assert (record.alpha, record.epochs_total, record.contribution) == (1.0, 6, 1.5)

    for _ in range(20):
        assert view.step_epoch() == [], "a fossil is for ever"
    assert alpha_of(model, row) == 1.0
    assert all(not model.reports(other) for other in range(8) if other != row)


def test_each_stage_starts_its_own_clock():
    model = make("mlp")
    bring(model, SLOT, "norm", S.TRAINING)
    for _ in range(3):
        model.step_epoch()
    measure(model)
    model.advance(SLOT)
    report = model.reports()[SLOT]
    assert report.stage is S.BLENDING
    assert (report.metrics.epochs_in_stage, report.metrics.epochs_total) == (0, 3)
    model.step_epoch()
    assert (model.reports()[SLOT].metrics.epochs_in_stage, model.reports()[SLOT].metrics.epochs_total) == (
        1,
        4,
    )


def test_the_clock_alone_counts_epochs():
    model = make("mlp")
    model.germinate(SLOT, "norm", tempo_epochs=5)
    model.advance(SLOT)
    for accuracy in (50.0, 52.0, 51.0):
        model.record_epoch(0, accuracy, contributions={SLOT: accuracy - 50})
    metrics = model.reports()[SLOT].metrics
    assert (metrics.epochs_total, metrics.epochs_in_stage) == (0, 0)
    assert (metrics.initial_accuracy, metrics.current_accuracy) == (50.0, 51.0)
    assert (metrics.contribution, metrics.contribution_age) == (1.0, 0)
    assert metrics.contribution_velocity == pytest.approx(0.7 * 2.0 + 0.3 * -1.0)
    model.step_epoch()
    model.step_epoch()
    assert model.reports()[SLOT].metrics.contribution_age == 2


def test_a_report_stays_as_it_was():
    model = make("mlp")
    bring(model, SLOT, "norm", S.TRAINING)
    before = model.reports()[SLOT]
    model.step_epoch()
    assert (before.metrics.epochs_total, model.reports()[SLOT].metrics.epochs_total) == (0, 1)


def test_each_stage_starts_its_own_accuracy_baseline():
    model = make("mlp")
    model.germinate(SLOT, "norm", tempo_epochs=5)
    model.record_epoch(0, 50.0)
    model.advance(SLOT)
    model.record_epoch(0, 53.0)
    assert model.reports()[SLOT].metrics.improvement_since_stage_start() == 3.0
    measure(model)
    model.record_epoch(0, 54.0)
    model.advance(SLOT)
    metrics = model.reports()[SLOT].metrics
    assert (metrics.stage_start_accuracy, metrics.improvement_since_stage_start()) == (54.0, 0.0)


@pytest.mark.parametrize("stage", [S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING])
def test_nothing_advances_by_itself(stage):
    model = make("mlp")
    bring(model, SLOT, "norm", stage)
    measure(model)
    for _ in range(30):
        assert model.step_epoch() == []
    assert stage_of(model, SLOT) is stage


# -- pruning and cooldown ------------------------------------------------------------------------------------


@pytest.mark.parametrize("embargo", [1, 2, 5])
@pytest.mark.parametrize("stage", [S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING])
def test_a_pruned_slot_rests_and_is_free_again(embargo, stage):
    model = make("cnn", 8, pacing=Pacing(min_training_epochs=0, embargo_epochs=embargo))
    plain = make("cnn", 8)
    bring(model, SLOT, "conv_light", stage, row=3, stir=0.3)
    x, _ = population_batch(model, 1)
    [record] = passed(model.prune(SLOT, row=3)).records
    assert (record.kind, record.stage_from, record.stage_to, record.cause) == (
        K.PRUNED,
        stage,
        S.PRUNED,
        PruneCause.POLICY,
    )
    assert record.params == 9 * 16 + 12, "what was freed"
    assert not model.slot(SLOT).banks, "the weights go at once"
    assert model.total_params(3) == model.host_params
    seen = []
    for tick in range(1, embargo + 3):
        assert torch.equal(model.eval()(x), plain.eval()(x))
        now = stage_of(model, SLOT, 3).name
        with pytest.raises(
            TransitionError, match=f"GERMINATE is not possible in stage {now}; allowed: WAIT$"
        ):
            model.germinate(SLOT, "norm", row=3, tempo_epochs=5)
        seen += [(tick, *move) for move in moves(model.step_epoch())]
    assert seen == [
        (1, K.STAGE_CHANGED, S.PRUNED, S.EMBARGOED),
        (embargo + 1, K.STAGE_CHANGED, S.EMBARGOED, S.RESETTING),
        (embargo + 2, K.STAGE_CHANGED, S.RESETTING, S.DORMANT),
    ]
    assert model.seed_in(SLOT, 3) is None
    bring(model, SLOT, "norm", S.TRAINING, row=3)
    assert model.reports(3)[SLOT].metrics.epochs_total == 0, "a new seed has its own measurements"
    assert model.reports(3)[SLOT].seed_id == f"{SLOT}-norm-1"


def test_other_slots_and_rows_do_not_feel_a_prune():
    model = make("cnn", 8)
    for row in (2, 3):
        bring(model, SLOT, "conv_light", S.HOLDING, row=row, stir=0.3)
    bring(model, "r0c0", "norm", S.HOLDING, row=3, stir=0.3)
    kept = model.slot(SLOT).banks["conv_light"]
    before = {name: p[2].clone() for name, p in kept.named_parameters()}
    other = {name: p.clone() for name, p in model.slot("r0c0").banks.named_parameters()}
    model.prune(SLOT, row=3)
    assert model.slot(SLOT).banks["conv_light"] is kept
    assert all(torch.equal(p[2], before[name]) for name, p in kept.named_parameters())
    assert all(not p[3].any() for p in kept.parameters())
    assert all(torch.equal(p, other[name]) for name, p in model.slot("r0c0").banks.named_parameters())
    assert stage_of(model, "r0c0", 3) is S.HOLDING


@pytest.mark.parametrize("steps", [n for n in ALPHA_SPEED_EPOCHS if n])
@pytest.mark.parametrize("stage", [S.BLENDING, S.HOLDING])
def test_a_scheduled_prune_ramps_down_first(steps, stage):
    model = make("mlp", 8)
    target = 0.8 if stage is S.BLENDING else 1.0
    bring(model, SLOT, "lora", stage, row=4, tempo_epochs=1, stir=0.3)
    passed(model.set_alpha_target(SLOT, target, row=4, steps=0))
    [record] = passed(model.schedule_prune(SLOT, row=4, steps=steps)).records
    assert (record.kind, record.stage_from, record.stage_to) == (K.PRUNE_SCHEDULED, stage, S.BLENDING)
    assert stage_of(model, SLOT, 4) is S.BLENDING
    for tick in range(1, steps):
        assert model.step_epoch() == []
        assert alpha_of(model, 4) == pytest.approx(target * (1 - tick / steps))
        assert model.reports(4)[SLOT].alpha_mode is AlphaMode.DOWN
    [record] = model.step_epoch()
    assert (record.kind, record.stage_from, record.stage_to, record.cause, record.alpha) == (
        K.PRUNED,
        S.BLENDING,
        S.PRUNED,
        PruneCause.POLICY,
        0.0,
    )


def test_what_a_scheduled_prune_still_allows():
    model = make("mlp")
    bring(model, SLOT, "lora", S.HOLDING, stir=0.3)
    model.schedule_prune(SLOT, steps=5)
    model.step_epoch()
    assert {f.reason for f in model.advance(SLOT).gate.failures} == {
        GateReason.TARGET_NOT_FULL,
        GateReason.ALPHA_NOT_AT_TARGET,
    }
    for op in (
        lambda: model.set_alpha_target(SLOT, 1.0, steps=3),
        lambda: model.schedule_prune(SLOT, steps=3),
    ):
        with pytest.raises(EsperError, match=r"alpha is moving \(DOWN to 0\.0\)"):
            op()
    with pytest.raises(TransitionError, match="FOSSILIZE is not possible in stage BLENDING"):
        model.fossilize(SLOT)
    report = model.reports()[SLOT]
    assert not report.can_retarget
    assert not report.can_prune
    assert report.time_to_target == 4
    passed(model.prune(SLOT))


@pytest.mark.parametrize(
    ("stage", "steps"), [(S.GERMINATED, 5), (S.TRAINING, 5), (S.BLENDING, 0), (S.HOLDING, 0)]
)
def test_a_prune_with_nothing_to_ramp_is_immediate(stage, steps):
    model = make("mlp")
    bring(model, SLOT, "lora", stage)
    assert moves(passed(model.schedule_prune(SLOT, steps=steps)).records) == [(K.PRUNED, stage, S.PRUNED)]


def test_a_blending_seed_that_was_never_mixed_in_is_pruned_at_once():
    model = make("mlp")
    bring(model, SLOT, "lora", S.TRAINING)
    measure(model)
    model.advance(SLOT)
    assert moves(model.schedule_prune(SLOT, steps=5).records) == [(K.PRUNED, S.BLENDING, S.PRUNED)]


def test_a_prune_names_its_cause():
    model = make("mlp")
    bring(model, SLOT, "lora", S.TRAINING)
    assert model.prune(SLOT, cause=PruneCause.ROLLBACK).records[0].cause is PruneCause.ROLLBACK
    assert model.step_epoch()[0].cause is PruneCause.ROLLBACK


def test_pruning_waits_for_the_age_that_the_task_sets():
    model = make("mlp", pacing=Pacing(min_prune_age=2))
    bring(model, SLOT, "lora", S.GERMINATED)
    allowed = []
    for _ in range(3):
        allowed.append(model.reports()[SLOT].can_prune)
        model.step_epoch()
    assert allowed == [False, False, True]


# -- another alpha -------------------------------------------------------------------------------------------


def test_a_holding_seed_with_a_full_target_keeps_holding():
    model = make("mlp")
    bring(model, SLOT, "lora", S.HOLDING)
    [record] = passed(model.set_alpha_target(SLOT, 1.0, steps=5)).records
    assert (record.kind, record.stage_from, record.stage_to) == (K.RETARGETED, S.HOLDING, S.HOLDING)
    assert model.reports()[SLOT].time_to_target == 0
    assert alpha_of(model) == 1.0


def test_a_holding_seed_with_a_partial_target_blends_again():
    model = make("mlp")
    bring(model, SLOT, "lora", S.HOLDING)
    [record] = passed(model.set_alpha_target(SLOT, 0.5, steps=2, curve=AlphaCurve.COSINE)).records
    assert (record.kind, record.stage_from, record.stage_to) == (K.RETARGETED, S.HOLDING, S.BLENDING)
    model.step_epoch()
    assert alpha_of(model) == pytest.approx(0.75)
    model.step_epoch()
    assert (alpha_of(model), stage_of(model, SLOT)) == (0.5, S.BLENDING)
    assert model.advance(SLOT).gate.failures[0].reason is GateReason.TARGET_NOT_FULL
    model.set_alpha_target(SLOT, 1.0, steps=3)
    for _ in range(3):
        model.step_epoch()
    assert moves(passed(model.advance(SLOT)).records) == [(K.STAGE_CHANGED, S.BLENDING, S.HOLDING)]


def test_a_target_without_steps_is_there_at_once():
    model, x = make("mlp"), None
    bring(model, SLOT, "lora", S.HOLDING, stir=0.3)
    x, _ = population_batch(model, 1)
    full = model.eval()(x)
    model.set_alpha_target(SLOT, 0.5, steps=0)
    assert (alpha_of(model), stage_of(model, SLOT), model.reports()[SLOT].alpha_mode) == (
        0.5,
        S.BLENDING,
        AlphaMode.HOLD,
    )
    assert not torch.equal(model(x), full), "the very next pass sees it"


@pytest.mark.parametrize("topology", HOSTS)
def test_switching_blends_brings_and_takes_a_gate_that_learns(topology):
    model = make(topology, 8)
    for row in (1, 6):
        bring(model, SLOT, "norm", S.HOLDING, row=row, stir=0.3, algorithm=AlphaAlgorithm.ADD)
    bring(model, SLOT, "norm", S.HOLDING, row=2, stir=0.3, algorithm=AlphaAlgorithm.GATE)
    slot, optimizer = model.slot(SLOT), PopulationOptimizer(model)
    without_gate = model.seed_params(1)

    passed(model.set_alpha_target(SLOT, 0.7, steps=0, row=1, algorithm=AlphaAlgorithm.GATE))
    gate = slot.banks[GATE_BANK]
    size = sum(p[0].numel() for p in gate.parameters())
    assert model.seed_params(1) == without_gate + size == model.reports(1)[SLOT].metrics.params
    assert model.seed_params(6) == without_gate
    assert slot.live_rows(GATE_BANK) == [row in (1, 2) for row in range(8)]
    assert all(p[1].any() for name, p in gate.named_parameters() if name.endswith("weight"))
    before = {name: p.clone() for name, p in gate.named_parameters()}
    for step in range(3):
        train_step(model, optimizer, *population_batch(model, step))
    assert f"{SLOT}.{GATE_BANK}" in optimizer.groups[SLOT]
    for name, p in gate.named_parameters():
        assert [row for row in range(8) if not torch.equal(p[row], before[name][row])] == [1, 2], name

    passed(model.set_alpha_target(SLOT, 0.9, steps=0, row=1, algorithm=AlphaAlgorithm.MULTIPLY))
    assert model.seed_params(1) == without_gate
    assert all(not p[1].any() for p in gate.parameters())
    assert all(p[2].any() for name, p in gate.named_parameters() if name.endswith("weight"))
    passed(model.set_alpha_target(SLOT, 0.9, steps=0, row=2, algorithm=AlphaAlgorithm.ADD))
    assert GATE_BANK not in slot.banks
    optimizer.sync()
    assert list(optimizer.groups[SLOT]) == [f"{SLOT}.norm"]
    train_step(model, optimizer, *population_batch(model, 9))


def test_a_gate_does_not_depend_on_what_other_rows_did():
    busy, quiet = make("mlp", 8), make("mlp", 8)
    for model in (busy, quiet):
        bring(model, SLOT, "norm", S.HOLDING, row=2, init_seed=5)
    bring(busy, SLOT, "lora", S.TRAINING, row=0)
    busy.step_epoch([0])
    for model in (busy, quiet):
        model.set_alpha_target(SLOT, 0.5, steps=0, row=2, algorithm=AlphaAlgorithm.GATE)
    for p, q in zip(
        *(model.slot(SLOT).banks[GATE_BANK].parameters() for model in (busy, quiet)), strict=True
    ):
        assert torch.equal(p, q)


def test_the_same_blend_again_changes_no_weights():
    model = make("mlp")
    bring(model, SLOT, "norm", S.HOLDING, algorithm=AlphaAlgorithm.GATE, stir=0.2)
    before = all_tensors(model)
    model.set_alpha_target(SLOT, 0.5, steps=3, algorithm=AlphaAlgorithm.GATE)
    assert differing(before, all_tensors(model)) == []


def test_numbers_stand_for_blends_and_curves():
    model = make("mlp")
    bring(model, SLOT, "norm", S.HOLDING, algorithm=3, ramp_curve=1)
    seed = model.seed_in(SLOT)
    assert seed.algorithm is AlphaAlgorithm.GATE
    assert seed.ramp_curve is AlphaCurve.LINEAR
    assert GATE_BANK in model.slot(SLOT).banks


# -- gates that open by themselves ---------------------------------------------------------------------------


def auto(*gates: GateLevel, **pacing: Any) -> MorphogeneticModel:
    options = {
        "min_training_epochs": 2,
        "min_blending_epochs": 0,
        "auto_forward_gates": frozenset(gates),
    } | pacing
    return make("mlp", pacing=Pacing(**options))


def test_all_gates_open_by_themselves_in_time():
    model = auto(GateLevel.G1, GateLevel.G2, GateLevel.G3)
    model.germinate(SLOT, "lora", tempo_epochs=2)
    seen = []
    for tick in range(1, 9):
        measure(model)
        seen += [(tick, r.stage_to) for r in model.step_epoch()]
    # Tick 1 starts training and counts for it, ticks 2 and 3 train until two epochs are full, tick 3 starts
    # the ramp ...
    assert seen == [(1, S.TRAINING), (3, S.BLENDING), (5, S.HOLDING)]


def test_only_the_named_gate_opens_by_itself():
    model = auto(GateLevel.G1)
    model.germinate(SLOT, "lora", tempo_epochs=5)
    measure(model)
    assert [r.stage_to for r in model.step_epoch()] == [S.TRAINING]
    for _ in range(10):
        assert model.step_epoch() == []


def test_a_gate_that_is_shut_does_not_open_by_itself():
    model = auto(GateLevel.G2)
    model.germinate(SLOT, "lora", tempo_epochs=5)
    model.advance(SLOT)
    for _ in range(10):
        assert model.step_epoch() == [], "no gradient was measured"


def test_a_partial_target_never_holds_by_itself():
    model = auto(GateLevel.G3, GateLevel.G5)
    passed(model.germinate(SLOT, "lora"))
    passed(model.set_alpha_target(SLOT, 0.7, steps=2))
    for _ in range(10):
        measure(model)
        assert model.step_epoch() == []
    assert (stage_of(model, SLOT), alpha_of(model)) == (S.BLENDING, 0.7)


# -- refusals leave everything as it was ---------------------------------------------------------------------

BAD_GERMINATIONS: list[tuple[dict[str, Any], type[EsperError], str]] = [
    (
        {"blueprint_id": "conv_giant"},
        BlueprintError,
        "blueprint 'conv_giant' is unknown for topology cnn; allowed: attention",
    ),
    ({"blueprint_id": "lora"}, BlueprintError, "blueprint 'lora' is unknown for topology cnn"),
    ({"tempo_epochs": -1}, EsperError, r"tempo of -1 epochs, must be 0 \(a graft\) or more"),
    (
        {"algorithm": 7},
        EsperError,
        r"AlphaAlgorithm 7 is unknown; allowed: ADD \(1\), MULTIPLY \(2\), GATE \(3\)",
    ),
    ({"ramp_curve": 0}, EsperError, r"AlphaCurve 0 is unknown; allowed: LINEAR \(1\)"),
    ({"init_seed": -1}, EsperError, "initial seed is -1"),
    ({"init_seed": 2**64}, EsperError, "initial seed is 18446744073709551616"),
    ({"slot_id": "r9c9"}, SlotIdError, "slot 'r9c9' is unknown; allowed: r0c0, r0c1, r0c2, r1c0, r1c1, r1c2"),
    ({"row": 8}, PopulationError, "row 8 is out of range; allowed: 0 to 7"),
    ({"row": -1}, PopulationError, "row -1 is out of range"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_GERMINATIONS)
def test_a_failed_germination_leaves_the_slot_empty_and_usable(options, error, message):
    model = make("cnn", 8)
    optimizer = PopulationOptimizer(model)
    before = all_tensors(model)
    arguments = {"slot_id": SLOT, "blueprint_id": "conv_light", "row": 3} | options
    with pytest.raises(error, match=message):
        model.germinate(arguments.pop("slot_id"), arguments.pop("blueprint_id"), **arguments)
    assert differing(before, all_tensors(model)) == []
    assert not model.slot(SLOT).banks
    assert not any(model.reports(row) for row in range(8))
    assert model.germinations == [0] * 8
    optimizer.sync()
    assert list(optimizer.groups) == ["host"]
    bring(model, SLOT, "conv_light", S.HOLDING, row=3)
    train_step(model, optimizer, *population_batch(model, 1))


def test_attention_needs_its_channels():
    model = MorphogeneticModel(
        GPTHost(1, vocabulary=7, features=6, heads=2, layers=2, context=8, segments=2), **EAGER
    )
    for name in ("attention", "flex_attention", "transformer_block"):
        with pytest.raises(BlueprintError, match="attention needs channels divisible by 4, the slot has 6"):
            model.germinate("r0c0", name, algorithm=AlphaAlgorithm.GATE)
    assert not model.slot("r0c0").banks
    bring(model, "r0c0", "mlp", S.HOLDING)


def test_a_seed_without_a_name_stops_at_the_first_gate():
    model = make("cnn")
    result = model.germinate(SLOT, "norm", seed_id="")
    assert not result.done
    assert [f.reason for f in result.gate.failures] == [GateReason.MISSING_ID]
    assert model.seed_in(SLOT) is None
    assert not model.slot(SLOT).banks


@pytest.mark.parametrize("stage", [S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING, S.FOSSILIZED])
def test_an_occupied_slot_takes_no_second_seed(stage):
    model = make("cnn")
    bring(model, SLOT, "norm", stage, stir=0.2)
    before, report = all_tensors(model), model.reports()
    with pytest.raises(
        TransitionError, match=f"slot r0c1, row 0: GERMINATE is not possible in stage {stage.name}; allowed"
    ):
        model.germinate(SLOT, "conv_light")
    assert differing(before, all_tensors(model)) == []
    assert model.reports() == report


OPERATIONS: dict[str, Callable[[MorphogeneticModel], Any]] = {
    "ADVANCE": lambda m: m.advance(SLOT),
    "FOSSILIZE": lambda m: m.fossilize(SLOT),
    "PRUNE": lambda m: m.prune(SLOT),
    "PRUNE ": lambda m: m.schedule_prune(SLOT, steps=3),
    "SET_ALPHA_TARGET": lambda m: m.set_alpha_target(SLOT, 0.5, steps=3),
}
ILLEGAL = [
    (S.DORMANT, ("ADVANCE", "FOSSILIZE", "PRUNE", "PRUNE ", "SET_ALPHA_TARGET"), "GERMINATE"),
    (S.GERMINATED, ("FOSSILIZE", "SET_ALPHA_TARGET"), "ADVANCE, PRUNE"),
    (S.TRAINING, ("FOSSILIZE", "SET_ALPHA_TARGET"), "ADVANCE, PRUNE"),
    (S.BLENDING, ("FOSSILIZE",), "ADVANCE, SET_ALPHA_TARGET, PRUNE"),
    (S.HOLDING, ("ADVANCE",), "FOSSILIZE, SET_ALPHA_TARGET, PRUNE"),
    (S.FOSSILIZED, ("ADVANCE", "FOSSILIZE", "PRUNE", "PRUNE ", "SET_ALPHA_TARGET"), ""),
]


@pytest.mark.parametrize(
    ("stage", "op", "legal"), [(stage, op, legal) for stage, ops, legal in ILLEGAL for op in ops]
)
def test_illegal_operations_name_the_legal_ones(stage, op, legal):
    model = make("mlp")
    if stage is not S.DORMANT:
        bring(model, SLOT, "norm", stage)
    before, report = all_tensors(model), model.reports()
    with pytest.raises(
        TransitionError,
        match=f"slot r0c1, row 0: {op.strip()} is not possible in stage {stage.name}; "
        f"allowed: WAIT{', ' if legal else ''}{legal}$",
    ):
        OPERATIONS[op](model)
    assert differing(before, all_tensors(model)) == []
    assert model.reports() == report


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda m: m.set_alpha_target(SLOT, 0.0, steps=3),
            EsperError,
            r"alpha target is 0\.0, must lie in \(0, 1\]; .* prune it",
        ),
        (lambda m: m.set_alpha_target(SLOT, 1.1, steps=3), EsperError, r"alpha target is 1\.1"),
        (lambda m: m.set_alpha_target(SLOT, 0.5, steps=-1), EsperError, "ramp of -1 epochs"),
        (lambda m: m.set_alpha_target(SLOT, 0.5, steps=3, steepness=0.0), EsperError, r"steepness is 0\.0"),
        (
            lambda m: m.set_alpha_target(SLOT, 0.5, steps=3, algorithm=4),
            EsperError,
            "AlphaAlgorithm 4 is unknown",
        ),
        (lambda m: m.set_alpha_target(SLOT, 0.5, steps=3, curve=9), EsperError, "AlphaCurve 9 is unknown"),
        (lambda m: m.schedule_prune(SLOT, steps=-1), EsperError, "-1 epochs"),
        (lambda m: m.schedule_prune(SLOT, steps=3, curve=9), EsperError, "AlphaCurve 9 is unknown"),
        (lambda m: m.advance("r5c5"), SlotIdError, "slot 'r5c5' is unknown; allowed: r0c0, r0c1"),
        (lambda m: m.prune("nonsense"), SlotIdError, "slot 'nonsense' is unknown; allowed: r0c0, r0c1"),
        (lambda m: m.advance(SLOT, row=1), PopulationError, "row 1 is out of range; allowed: 0 to 0"),
        (lambda m: m.reports(3), PopulationError, "row 3 is out of range"),
        (lambda m: m.reset_row(5, 0), PopulationError, "row 5 is out of range"),
        (lambda m: m.step_epoch([2]), PopulationError, "row 2 is out of range"),
        (lambda m: m.seed_params(-1), PopulationError, "row -1 is out of range"),
        (lambda m: NetworkRow(m, 4), PopulationError, "row 4 is out of range"),
        (
            lambda m: NetworkRow(m)(torch.zeros(2, 15)),
            ShapeError,
            r"shape \(1, 2, 15\), wanted \[1, batch, 16\]",
        ),
        (lambda m: evaluate_coalitions(m, torch.zeros(1, 2, 16), {}), EsperError, "no coalition is wanted"),
        (
            lambda m: evaluate_coalitions(m, torch.zeros(1, 2, 16), {0: []}),
            EsperError,
            "no coalition is wanted",
        ),
        (
            lambda m: evaluate_coalitions(m, torch.zeros(1, 2, 16), {0: [frozenset({"r0c0"})]}),
            SlotIdError,
            r"coalition \['r0c0'\] names slots without a blended seed in row 0; allowed: r0c1",
        ),
        (
            lambda m: evaluate_coalitions(m, torch.zeros(1, 2, 16), {2: [frozenset()]}),
            PopulationError,
            "row 2 is out of range",
        ),
    ],
)
def test_bad_input_gets_a_typed_error_and_changes_nothing(call, error, message):
    model = make("mlp")
    bring(model, SLOT, "norm", S.HOLDING, stir=0.3)
    before, report = all_tensors(model), model.reports()
    with pytest.raises(error, match=message):
        call(model)
    assert differing(before, all_tensors(model)) == []
    assert model.reports() == report
    passed(model.set_alpha_target(SLOT, 0.5, steps=1))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: CNNHost(5), PopulationError, "population is 5; allowed: 1 or a multiple of 8"),
        (
            lambda: MorphogeneticModel(CNNHost(1, base=2), ["r0c0", "r0c9"]),
            SlotIdError,
            "slot 'r0c9' is unknown to this host; allowed: r0c0",
        ),
        (lambda: MorphogeneticModel(CNNHost(1, base=2), ["r0c0", "r0c0"]), SlotIdError, "not unique"),
        (lambda: MorphogeneticModel(CNNHost(1, base=2), []), SlotIdError, "at least one slot"),
        (
            lambda: MorphogeneticModel(CNNHost(8, base=2), random_seeds=[1, 2]),
            PopulationError,
            "2 random seeds for a population of 8; allowed: one per row",
        ),
        (lambda: Pacing(embargo_epochs=-1), EsperError, "embargo_epochs is -1"),
        (lambda: Pacing(auto_forward_gates=frozenset({GateLevel.G0})), EsperError, "allowed: G1, G2, G3, G5"),
        (lambda: GateConfig(min_contribution=math.nan), EsperError, "min_contribution is nan"),
    ],
)
def test_bad_construction(build, error, message):
    with pytest.raises(error, match=message):
        build()


# -- passes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", HOSTS)
@pytest.mark.parametrize("population", [1, 8])
def test_a_probe_sees_features_before_and_after_the_seeds(topology, population):
    model = make(topology, population)
    row = population - 1
    bring(model, SLOT, "norm", S.HOLDING, row=row, stir=0.3)
    bring(model, "r0c0", "norm", S.TRAINING, row=row, stir=0.3)
    x, y = population_batch(model, 1)
    seen = {}

    def probe(slot_id: str, h: torch.Tensor, grown: torch.Tensor) -> torch.Tensor:
        seen[slot_id] = not torch.equal(h, grown)
        return grown

    outputs = model.losses(x, y, probe=probe).outputs
    assert seen == {slot_id: slot_id == SLOT for slot_id in model.seed_slots}
    assert torch.equal(outputs, model.losses(x, y).outputs)
    silenced = model.losses(x, y, probe=lambda _, h, __: h).outputs
    assert [r for r in range(population) if not torch.equal(silenced[r], outputs[r])] == [row]


def test_a_model_follows_its_dtype_after_a_pass():
    """The plan of a pass holds tensors; changing the dtype must not leave it behind."""
    model = make("mlp")
    bring(model, "r0c0", "lora", SeedStage.BLENDING, stir=0.5)
    x, _ = population_batch(model, 1)
    before = model.eval()(x)
    after = model.double()(x.double())
    assert after.dtype is torch.float64
    assert torch.allclose(after, before.double(), atol=1e-5)
    model.changed()
    assert torch.equal(model(x.double()), after), "alpha was not left in float32"


# -- rows ----------------------------------------------------------------------------------------------------


def test_a_view_acts_on_its_row_only():
    model = make("mlp", 8)
    view = NetworkRow(model, 2)
    view.germinate(SLOT, "lora", tempo_epochs=1)
    view.advance(SLOT)
    measure(model, 2)
    view.advance(SLOT)
    view.step_epoch()
    passed(view.advance(SLOT))
    stir_seed(model, SLOT, 2, 0.4)
    assert [stage_of(model, SLOT, row) for row in range(8)] == [
        S.HOLDING if row == 2 else S.DORMANT for row in range(8)
    ]
    assert view.total_params() == model.total_params(2) > model.host_params
    x, _ = network_batch(model, 3)
    batch = torch.stack([x] * 8)
    assert torch.allclose(view(x), model.eval()(batch)[2], atol=1e-6)
    assert not torch.allclose(view(x), NetworkRow(model, 1)(x))
    view.set_alpha_target(SLOT, 0.5, steps=0)
    assert alpha_of(model, 2) == 0.5
    view.schedule_prune(SLOT, steps=1)
    assert view.step_epoch()[0].kind is K.PRUNED
    assert list(view.reports()) == [SLOT]


def test_a_reset_row_is_empty_and_the_others_are_not():
    model = make("cnn", 8)
    for row in (2, 3):
        bring(model, SLOT, "norm", S.FOSSILIZED, row=row, stir=0.3)
        bring(model, "r0c0", "conv_light", S.TRAINING, row=row)
    model.prune("r0c0", row=2)
    kept = {name: t[3].clone() for name, t in all_tensors(model).items() if t.dim() and len(t) == 8}
    model.reset_row(2, 44)
    assert not model.reports(2), "fossils and cooldowns go too"
    assert model.germinations[2] == 0
    assert model.total_params(2) == model.host_params
    assert len(model.reports(3)) == 2
    now = all_tensors(model)
    assert all(torch.equal(now[name][3], tensor) for name, tensor in kept.items())


def test_a_fresh_row_starts_without_momentum():
    model = make("mlp", 8)
    optimizer = PopulationOptimizer(model)
    train_step(model, optimizer, *population_batch(model, 1))
    before = optimizer.row_state(3)
    model.reset_row(2, 44)
    state = optimizer.row_state(2)
    assert all(not tensor.any() for name, tensor in state.items() if not name.startswith("rates."))
    assert differing(before, optimizer.row_state(3)) == []
    assert any(tensor.any() for name, tensor in before.items() if name.endswith("momentum"))


def test_an_unmeasured_seed_says_so():
    model = make("mlp")
    model.germinate(SLOT, "lora", tempo_epochs=5)
    metrics = model.reports()[SLOT].metrics
    assert metrics == SeedMetrics(params=metrics.params, host_params=model.host_params)
    assert metrics.contribution is metrics.gradient_health is metrics.current_accuracy is None
