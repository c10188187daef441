"""The governor: tables of losses and verdicts, snapshots on a cadence, and rollback of a real network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina import GovernedRow, MorphogeneticModel, NetworkRow, PopulationOptimizer, snapshot_row
from esper.leyline import (
    NOOP,
    AlphaMode,
    EsperError,
    FactoredAction,
    LifecycleKind,
    LifecycleOp,
    LifecycleRecord,
    PanicReason,
    PruneCause,
    SeedStage,
    SlotConfig,
    StructureError,
    TempoAction,
    blueprint_ids,
    blueprint_index,
)
from esper.tolaria import GovernorConfig, TolariaGovernor, Veto, preflight
from helpers import bring, differing, make, measure, population_batch, row_tensors, stage_of, train_step

CHANCE = math.log(10)


@dataclass
class Journal:
    """A network that only writes down what is asked of it."""

    calls: list[Any] = field(default_factory=list)
    state: int = 0

    def snapshot_committed(self) -> int:
        self.calls.append("snapshot")
        return self.state

    def restore_committed(self, snapshot: int) -> None:
        self.calls.append("restore")
        self.state = snapshot

    def prune_live(self, cause: PruneCause) -> Sequence[LifecycleRecord]:
        self.calls.append(cause)
        return ()

    def forget_optimizer(self) -> None:
        self.calls.append("forget")


def governor(history: Sequence[float] = (), **config: Any) -> TolariaGovernor:
    watch = TolariaGovernor(Journal(), GovernorConfig(**config), CHANCE)
    for loss in history:
        assert watch.check_vital_signs(loss) is None
    return watch


# -- vital signs ---------------------------------------------------------------------------------------------

GOOD = [0.5] * 10  # mean 0.5, deviation 0: the absolute limit, 5 · chance = 11.51, is the highest
NOISY = [0.0, 4.4] * 5  # mean 2.2, deviation 2.2: mean + 6 · deviation = 15.4 is the highest
HIGH = [4.0] * 10  # 3 · mean = 12 is the highest


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("history", [[], GOOD])
def test_a_non_finite_loss_is_a_panic_at_once(history: list[float], loss: float) -> None:
    report = governor(history).check_vital_signs(loss)
    assert report is not None
    assert (report.reason, report.limit, report.consecutive) == (PanicReason.NON_FINITE, math.inf, 1)
    assert report.loss is loss


@pytest.mark.parametrize(("history", "limit"), [(GOOD, 5 * CHANCE), (NOISY, 15.4), (HIGH, 12.0)])
def test_divergence_needs_all_three_tests_three_times_in_a_row(history: list[float], limit: float) -> None:
    watch = governor(history)
    for _ in range(2):
        assert watch.check_vital_signs(limit * 1.001) is None
    report = watch.check_vital_signs(limit * 1.001)
    assert report is not None
    assert (report.reason, report.consecutive) == (PanicReason.DIVERGENCE, 3)
    assert report.limit == pytest.approx(limit)
    watch = governor(history)
    for _ in range(5):
        assert watch.check_vital_signs(limit * 0.999) is None
        assert watch.consecutive == 0


def test_a_healthy_check_between_starts_the_count_again() -> None:
    watch = governor(GOOD)
    for loss in (20.0, 20.0, 0.5, 20.0, 20.0, 0.5):
        assert watch.check_vital_signs(loss) is None
    assert watch.consecutive == 0


def test_suspicious_losses_are_not_learned() -> None:
    watch = governor(GOOD)
    watch.check_vital_signs(20.0)
    watch.check_vital_signs(20.0)
    assert watch.state()["history"] == GOOD


@pytest.mark.parametrize(
    ("history", "loss", "panics"),
    [
        (GOOD, CHANCE, True),
        (GOOD, 1.064 * CHANCE, True),
        (GOOD, 0.936 * CHANCE, True),
        (GOOD, 1.066 * CHANCE, False),
        (GOOD, 0.934 * CHANCE, False),
        ([0.61 * CHANCE] * 10, CHANCE, False),  # was never clearly better
        ([0.5] * 9 + [0.61 * CHANCE], CHANCE, False),  # drifts up: overfits
        ([3.0] + [0.2] * 9, CHANCE, True),
        (GOOD[:9], CHANCE, False),  # too little known
    ],
)
def test_collapse_to_chance(history: list[float], loss: float, panics: bool) -> None:
    report = governor(history).check_vital_signs(loss)
    assert (report is not None) is panics
    if report is not None:
        assert (report.reason, report.consecutive) == (PanicReason.COLLAPSE, 1)
        assert report.limit == pytest.approx(0.935 * CHANCE)


def test_nothing_but_nan_is_judged_before_there_are_samples() -> None:
    watch = governor()
    for loss in [0.1] * 9 + [1e6]:
        assert watch.check_vital_signs(loss) is None


@given(st.lists(st.floats(0, 100), min_size=10, max_size=60), st.floats(0.05, 10))
def test_verdicts_scale_with_the_chance_loss(losses: list[float], scale: float) -> None:
    """A task whose losses are all larger by one factor gets the same verdicts."""
    a = TolariaGovernor(Journal(), GovernorConfig(), 1.0)
    b = TolariaGovernor(Journal(), GovernorConfig(), scale)
    for loss in losses:
        mine, limit = a.state()["history"], None
        if len(mine) >= 10:
            limit = max(5.0, fmean(mine) + 6 * pstdev(mine), 3 * fmean(mine))
        near = limit is not None and abs(loss - limit) < 1e-6 * limit  # rounding decides
        if near or min(abs(loss - edge) for edge in (0.6, 0.935, 1.065)) < 1e-6:
            return
        first, second = a.check_vital_signs(loss), b.check_vital_signs(scale * loss)
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert first.reason is second.reason
            return


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"panics": 0}, "panics is 0"),
        ({"absolute": math.nan}, "absolute is nan"),
        ({"sensitivity": -1.0}, "sensitivity is -1.0"),
        ({"min_samples": 21}, "min_samples is 21, must not exceed history_window 20"),
        ({"history_window": 2.5}, "history_window is 2.5"),
        ({"snapshot_every": 0}, "snapshot_every is 0"),
        ({"healthy_share": 0.95}, "overlap"),
    ],
)
def test_bad_configs(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EsperError, match=message):
        GovernorConfig(**config)


@pytest.mark.parametrize("chance", [0.0, math.inf, math.nan])
def test_bad_chance_loss(chance: float) -> None:
    with pytest.raises(EsperError, match="chance_loss"):
        TolariaGovernor(Journal(), GovernorConfig(), chance)


# -- cadence, rollback, state --------------------------------------------------------------------------------


def test_a_copy_is_made_at_once_and_at_every_reset() -> None:
    network = Journal(state=1)
    watch = TolariaGovernor(network, GovernorConfig(), CHANCE)
    assert network.calls == ["snapshot"]
    network.state = 2
    watch.reset()
    network.state = 3
    watch.rollback()
    assert network.state == 2


def test_cadence() -> None:
    watch = governor(snapshot_every=5)
    assert [epoch for epoch in range(1, 13) if watch.due(epoch)] == [5, 10]
    watch.request_snapshot()
    assert watch.due(7)
    assert watch.due(8)
    watch.snapshot()
    assert not watch.due(8)


def test_a_suspicious_network_is_never_kept() -> None:
    watch = governor(GOOD)
    watch.request_snapshot()
    watch.check_vital_signs(20.0)
    assert not watch.due(5)
    watch.check_vital_signs(0.5)
    assert watch.due(6)


def test_rollback_prunes_restores_and_forgets_in_this_order() -> None:
    network = Journal(state=7)
    watch = TolariaGovernor(network, GovernorConfig(), CHANCE)
    for loss in GOOD:
        watch.check_vital_signs(loss)
    network.state, network.calls = 8, []
    watch.request_snapshot()
    assert watch.check_vital_signs(math.nan) is not None
    watch.rollback()
    assert network.calls == [PruneCause.ROLLBACK, "restore", "forget"]
    assert network.state == 7
    assert watch.state() == {"history": [], "consecutive": 0, "requested": False}


def test_a_bare_host_does_not_panic_again_because_its_seeds_are_gone() -> None:
    watch = governor(GOOD)
    assert watch.check_vital_signs(CHANCE) is not None
    watch.rollback()
    assert all(watch.check_vital_signs(CHANCE) is None for _ in range(30))


def test_state_goes_through_json_and_continues_exactly() -> None:
    watch = governor([0.5, 0.7] * 8)
    watch.check_vital_signs(20.0)
    watch.request_snapshot()
    other = TolariaGovernor(Journal(), watch.config, CHANCE)
    other.load_state(orjson.loads(orjson.dumps(watch.state())), watch.last_good)
    assert other.state() == watch.state()
    for loss in (20.0, 20.0):
        assert watch.check_vital_signs(loss) == other.check_vital_signs(loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "field extra is unknown; allowed: history, consecutive, requested"),
        ({"history": [math.nan]}, "history is"),
        ({"history": [0.1] * 21}, "at most 20"),
        ({"history": "text"}, "history is"),
        ({"consecutive": -1}, "consecutive is -1"),
        ({"requested": 1}, "requested is 1"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], message: str) -> None:
    watch = governor(GOOD)
    before = watch.state()
    with pytest.raises(StructureError, match=message):
        watch.load_state(before | change, None)
    assert watch.state() == before


# -- a real network ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", range(4))
def test_a_real_network_survives_nan_at_any_epoch(epoch: int) -> None:
    model = make("cnn", 8)
    bring(model, "r0c0", "conv_light", SeedStage.FOSSILIZED, row=1, stir=0.1)
    bring(model, "r0c1", "norm", SeedStage.BLENDING, row=1, stir=0.1, tempo_epochs=8)
    optimizer = PopulationOptimizer(model)
    watch = TolariaGovernor(
        GovernedRow(NetworkRow(model, 1), optimizer), GovernorConfig(snapshot_every=2), CHANCE
    )
    for now in range(epoch + 1):
        x, y = population_batch(model, now)
        if now == epoch:
            x[:, 1] = math.nan
        losses = train_step(model, optimizer, x, y)
        train_step(model, optimizer, x, y)
        report = watch.check_vital_signs(float(losses[1]))
        assert (report is not None) is (now == epoch)
        if report is None and watch.due(now):
            watch.snapshot()
    kept = watch.last_good
    records = watch.rollback()
    assert [(r.kind, r.slot_id, r.cause) for r in records] == [
        (LifecycleKind.PRUNED, "r0c1", PruneCause.ROLLBACK)
    ]
    assert not differing(snapshot_row(model, 1).tensors, kept.tensors)
    assert stage_of(model, "r0c1", 1) is SeedStage.PRUNED
    state = row_tensors(model, optimizer, 1)
    assert not any(
        t.any() for name, t in state.items() if name.endswith((".momentum", ".steps")) and "rates" not in name
    )
    assert train_step(model, optimizer, *population_batch(model, 9)).isfinite().all()


# -- preflight -----------------------------------------------------------------------------------------------

SLOTS = SlotConfig(("r0c0", "r0c1", "r0c2"))
OFFERED = (blueprint_index("norm"), blueprint_index("conv_light"))


def act(op: LifecycleOp, slot: int = 0, blueprint: int = blueprint_index("norm")) -> FactoredAction:
    return dataclasses.replace(FactoredAction.wait(), op=op, slot_idx=slot, blueprint=blueprint)


def judge(model: MorphogeneticModel, action: FactoredAction, **options: Any) -> Veto | None:
    known: dict[str, Any] = {
        "slots": SLOTS,
        "blueprints": OFFERED,
        "val_loss": 1.0,
        "val_accuracy": 50.0,
        "epochs_left": 20,
        "epochs_needed": (5, 7, 10, 1),
    }
    return preflight(action, model.reports(), **(known | options))


def network(*seeds: tuple[str, SeedStage]) -> MorphogeneticModel:
    model = make("cnn", slots=SLOTS.slot_ids)
    for slot_id, stage in seeds:
        bring(model, slot_id, "norm", stage)
    return model


def test_measurements_that_are_not_finite_veto_all_but_waiting() -> None:
    model = network()
    assert judge(model, act(LifecycleOp.GERMINATE), val_loss=math.nan) is Veto.LOSS_NON_FINITE
    assert judge(model, act(LifecycleOp.GERMINATE), val_accuracy=math.inf) is Veto.ACCURACY_NON_FINITE
    assert judge(model, act(LifecycleOp.WAIT), val_loss=math.nan, val_accuracy=math.nan) is None


def test_germination() -> None:
    model = network(("r0c0", SeedStage.FOSSILIZED), ("r0c1", SeedStage.TRAINING))
    germinate = act(LifecycleOp.GERMINATE, 2)
    assert judge(model, germinate) is judge(model, germinate, max_seeds=3) is None
    assert judge(model, germinate, max_seeds=2) is Veto.TOO_MANY_SEEDS
    assert (
        judge(model, act(LifecycleOp.GERMINATE, 0))
        is judge(model, act(LifecycleOp.GERMINATE, 1))
        is Veto.SLOT_OCCUPIED
    )
    assert judge(model, act(LifecycleOp.GERMINATE, 3)) is Veto.SLOT_UNKNOWN
    assert judge(model, act(LifecycleOp.GERMINATE, 2, blueprint_index("lora"))) is Veto.BLUEPRINT_UNKNOWN
    assert (
        judge(model, act(LifecycleOp.GERMINATE, 2, NOOP), blueprints=range(len(blueprint_ids())))
        is Veto.BLUEPRINT_UNKNOWN
    )
    model.prune("r0c1")
    assert judge(model, germinate, max_seeds=2) is None  # a cooling slot holds no seed …
    assert judge(model, act(LifecycleOp.GERMINATE, 1)) is Veto.SLOT_OCCUPIED  # … and is not free


@pytest.mark.parametrize("tempo", TempoAction)
def test_a_germination_needs_time_to_become_permanent(tempo: TempoAction) -> None:
    germinate = dataclasses.replace(act(LifecycleOp.GERMINATE, 2), tempo=tempo)
    needed = (5, 7, 10, 1)[tempo]
    assert judge(network(), germinate, epochs_left=needed) is None
    assert judge(network(), germinate, epochs_left=needed - 1) is Veto.TOO_LATE


def test_live_seeds_take_an_epoch_each() -> None:
    germinate = dataclasses.replace(act(LifecycleOp.GERMINATE, 2), tempo=TempoAction.INSTANT)
    model = network(("r0c0", SeedStage.HOLDING), ("r0c1", SeedStage.GERMINATED))
    assert judge(model, germinate, epochs_left=3) is None
    assert judge(model, germinate, epochs_left=2) is Veto.TOO_LATE
    model.prune("r0c1")
    measure(model)
    model.fossilize("r0c0")
    assert judge(model, germinate, epochs_left=1) is None, "what is permanent or gone takes none"


def test_only_germinations_can_be_too_late() -> None:
    model = network(("r0c0", SeedStage.HOLDING), ("r0c1", SeedStage.TRAINING))
    measure(model)
    for op, slot in ((LifecycleOp.FOSSILIZE, 0), (LifecycleOp.PRUNE, 0), (LifecycleOp.ADVANCE, 1)):
        assert judge(model, act(op, slot), epochs_left=0) is None
    assert judge(model, act(LifecycleOp.WAIT), epochs_left=0) is None


@pytest.mark.parametrize(
    "op", [LifecycleOp.ADVANCE, LifecycleOp.FOSSILIZE, LifecycleOp.PRUNE, LifecycleOp.SET_ALPHA_TARGET]
)
def test_an_empty_slot_has_nothing_to_act_on(op: LifecycleOp) -> None:
    assert judge(network(), act(op)) is Veto.SLOT_EMPTY


def test_stage_gate_alpha_and_age() -> None:
    model = network(("r0c0", SeedStage.FOSSILIZED), ("r0c1", SeedStage.BLENDING))
    assert judge(model, act(LifecycleOp.PRUNE, 0)) is Veto.STAGE_FORBIDS
    assert judge(model, act(LifecycleOp.FOSSILIZE, 1)) is Veto.STAGE_FORBIDS
    assert judge(model, act(LifecycleOp.ADVANCE, 1)) is Veto.GATE_SHUT
    assert model.reports()["r0c1"].alpha_mode is AlphaMode.UP
    for op in (LifecycleOp.PRUNE, LifecycleOp.SET_ALPHA_TARGET):
        assert judge(model, act(op, 1)) is Veto.ALPHA_MOVING
    young = make("cnn", slots=SLOTS.slot_ids, pacing=dataclasses.replace(model.pacing, min_prune_age=3))
    bring(young, "r0c0", "norm", SeedStage.TRAINING)
    assert judge(young, act(LifecycleOp.PRUNE, 0)) is Veto.TOO_YOUNG


STAGES = [
    None,
    SeedStage.GERMINATED,
    SeedStage.TRAINING,
    SeedStage.BLENDING,
    SeedStage.HOLDING,
    SeedStage.FOSSILIZED,
]


@pytest.mark.parametrize("op", LifecycleOp)
@pytest.mark.parametrize("stage", STAGES)
def test_what_passes_is_what_the_report_offers(stage: SeedStage | None, op: LifecycleOp) -> None:
    """No veto exactly where the report that the action mask reads allows the operation."""
    model = network(*([] if stage is None else [("r0c0", stage)]))
    report = model.reports().get("r0c0")
    offered = {
        LifecycleOp.WAIT: True,
        LifecycleOp.GERMINATE: report is None,
        LifecycleOp.ADVANCE: report is not None and report.can_advance,
        LifecycleOp.FOSSILIZE: report is not None and report.can_fossilize,
        LifecycleOp.PRUNE: report is not None and report.can_prune,
        LifecycleOp.SET_ALPHA_TARGET: report is not None and report.can_retarget,
    }
    assert (judge(model, act(op)) is None) is offered[op]
