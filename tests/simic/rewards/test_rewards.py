"""Terms, modes and Φ on hand-made states: every amount against a number worked out here, and the incentives
that must hold."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import (
    AlphaAlgorithm,
    AlphaMode,
    EsperError,
    FactoredAction,
    LifecycleKind,
    LifecycleOp,
    LifecycleRecord,
    LossRewardConfig,
    ObjectiveConfig,
    RentConfig,
    RewardConfig,
    RewardFamily,
    RewardMode,
    SeedMetrics,
    SeedStage,
    SeedStateReport,
    StructureError,
)
from esper.simic.contracts import ActionOutcome, ActionSpec, EnvMeasure, RewardInputs
from esper.simic.rewards import (
    RewardComponentsTelemetry,
    RewardEngine,
    compute_rent_and_shock_inputs,
    compute_scaffold_hindsight_credit,
    potential,
    register_reward,
)
from esper.simic.rewards.engine import MODES
from esper.simic.training.config import TrainingConfig

G, T, B, H, F = (
    SeedStage.GERMINATED,
    SeedStage.TRAINING,
    SeedStage.BLENDING,
    SeedStage.HOLDING,
    SeedStage.FOSSILIZED,
)
PRICES = ObjectiveConfig(size_price=0.05, waste_price=0.02, rollback_price=0.1)
HOST = 1000
GAMMA = 0.9
J_MODES = (RewardMode.SPARSE, RewardMode.SHAPED, RewardMode.ESCROW)
ALL = [*((RewardFamily.CONTRIBUTION, mode) for mode in RewardMode), (RewardFamily.LOSS, RewardMode.SHAPED)]


def report(
    stage: SeedStage,
    slot: str = "r0c0",
    *,
    number: int = 0,
    params: int = 10,
    alpha: float | None = None,
    age: int = 5,
    boost: float | None = None,
    leaving: bool = False,
) -> SeedStateReport:
    blended = stage in (B, H, F)
    alpha = float(blended) if alpha is None else alpha
    return SeedStateReport(
        slot_id=slot,
        seed_id=f"{slot}-{number}",
        blueprint_id="norm",
        blueprint_index=1,
        stage=stage,
        alpha=alpha,
        alpha_target=0.0 if leaving else float(blended),
        alpha_mode=AlphaMode.DOWN if leaving else AlphaMode.HOLD,
        alpha_steps_total=0,
        alpha_steps_done=0,
        alpha_velocity=0.0,
        alpha_algorithm=AlphaAlgorithm.ADD,
        tempo_epochs=3,
        vetoes={},
        metrics=SeedMetrics(epochs_total=age, params=params, host_params=HOST, boost_received=boost),
    )


def state(
    accuracy: float = 60.0,
    committed: float = 60.0,
    *reports: SeedStateReport,
    loss: float = 1.0,
    contributions: dict[str, float] | None = None,
    committed_loss: float | None = None,
    germinated: int | None = None,
) -> EnvMeasure:
    fossils = [r for r in reports if r.stage is F]
    cooling = [r for r in reports if r.stage is SeedStage.PRUNED]
    germinated = len(reports) if germinated is None else germinated
    return EnvMeasure(
        accuracy=accuracy,
        committed_accuracy=committed,
        loss=loss,
        committed_loss=loss if committed_loss is None else committed_loss,
        host_params=HOST,
        committed_params=sum(r.metrics.params for r in fossils),
        germinated=germinated,
        fossilized=len(fossils),
        pruned=len(cooling),
        rollbacks=0,
        reports={r.slot_id: r for r in reports},
        contributions=contributions or {},
    )


def step(
    epoch: int,
    before: EnvMeasure | None,
    after: EnvMeasure,
    op: LifecycleOp = LifecycleOp.WAIT,
    *,
    slot: str = "r0c0",
    executed: bool = True,
    max_epochs: int = 10,
    env: int = 0,
) -> RewardInputs:
    wait = FactoredAction.wait()
    spec = ActionSpec(
        env_idx=env,
        op=op,
        slot_id=slot,
        slot_index=0,
        blueprint_id="norm",
        algorithm=AlphaAlgorithm.ADD,
        ramp_curve=1,
        tempo_epochs=3,
        alpha_target=1.0,
        alpha_steps=0,
        alpha_curve=wait.alpha_curve,
        alpha_steepness=12.0,
    )
    by_action = {slot} if op is LifecycleOp.FOSSILIZE and executed else set()
    outcome = ActionOutcome(
        spec=spec,
        executed=executed,
        effective_op=op if executed else LifecycleOp.WAIT,
        records=tuple(
            LifecycleRecord(
                kind=LifecycleKind.FOSSILIZED,
                row=0,
                slot_id=now.slot_id,
                seed_id=now.seed_id,
                blueprint_id="norm",
                stage_from=H,
                stage_to=F,
                alpha=1.0,
                params=now.metrics.params,
                epochs_total=5,
            )
            for now in after.reports.values()
            if now.slot_id in by_action or is_new(now, before)
        ),
    )
    return RewardInputs(
        env_idx=env, epoch=epoch, max_epochs=max_epochs, outcome=outcome, before=before, after=after
    )


def is_new(now: SeedStateReport, before: EnvMeasure | None) -> bool:
    """A fossil that was none before: without an action, the clock made it."""
    if now.stage is not F or before is None:
        return False
    old = before.reports.get(now.slot_id)
    return old is None or old.stage is not F


def engine(
    mode: RewardMode = RewardMode.SHAPED,
    family: RewardFamily = RewardFamily.CONTRIBUTION,
    *,
    gamma: float = GAMMA,
    prices: ObjectiveConfig = PRICES,
    num_envs: int = 1,
    **fields,
) -> RewardEngine:
    return RewardEngine(
        RewardConfig(mode=mode, **fields), prices, gamma=gamma, num_envs=num_envs, family=family
    )


Story = list[tuple[EnvMeasure, LifecycleOp]]


def play(rewards: RewardEngine, story: Story) -> list[RewardComponentsTelemetry]:
    """One episode of given states after each step, and the actions that led there."""
    before, paid = None, []
    for epoch, (after, op) in enumerate(story, start=1):
        paid.append(rewards(step(epoch, before, after, op, max_epochs=len(story))))
        before = after
    return paid


def discounted(paid: Iterable[RewardComponentsTelemetry], gamma: float) -> float:
    return sum(gamma**t * reward.total for t, reward in enumerate(paid))


# -- Φ -------------------------------------------------------------------------------------------------------


def test_the_potential_of_a_bare_host_is_its_accuracy() -> None:
    assert potential(state(60.0, 60.0), PRICES, live_share=0.5) == 0.6


def test_the_potential_counts_a_blended_seed_by_its_share_and_a_fossil_in_full() -> None:
    # host alone 60 %, with the seed 70 %; it has 500 parameters on 1,000: ln 1.5
    rent = 0.05 * math.log(1.5)
    live = state(70.0, 60.0, report(H, params=500), contributions={"r0c0": 10.0})
    assert potential(live, PRICES, live_share=0.25) == pytest.approx(
        0.75 * 0.6 + 0.25 * (0.7 - rent), abs=1e-12
    )
    fossil = state(70.0, 70.0, report(F, params=500), contributions={"r0c0": 10.0})
    assert potential(fossil, PRICES, live_share=0.25) == pytest.approx(0.7 - rent, abs=1e-12)


def test_a_seed_that_is_gone_or_going_is_wasted_and_no_longer_counts() -> None:
    two = {"r0c0": 10.0, "r0c1": 4.0}
    for gone in (report(SeedStage.PRUNED), report(SeedStage.EMBARGOED), report(B, leaving=True, alpha=0.5)):
        now = state(74.0, 60.0, gone, report(H, "r0c1"), contributions=two)
        # 74 % was measured with both; without the first it is 64.
        expected = 0.5 * 0.6 + 0.5 * (0.64 - 0.05 * math.log1p(0.01)) - 0.02
        assert potential(now, PRICES, live_share=0.5) == pytest.approx(expected, abs=1e-12), gone.stage


@given(
    gain=st.floats(0.0, 40.0),
    share=st.floats(0.0, 1.0),
    price=st.floats(0.0, 0.5),
    params=st.integers(1, 2000),
)
def test_the_potential_rises_along_the_lifecycle(
    gain: float, share: float, price: float, params: int
) -> None:
    """For a seed that is worth its size: from an empty slot to a fossil it never falls, and pruning always
    costs."""
    prices = ObjectiveConfig(size_price=price, waste_price=0.02)
    worth = gain + 100.0 * price * math.log1p(params / HOST)
    if worth > 40.0:
        return
    seed = {"r0c0": worth}
    life = [
        state(60.0, 60.0),
        *(state(60.0, 60.0, report(stage, params=params)) for stage in (G, T, B)),
        *(state(60.0 + worth, 60.0, report(stage, params=params), contributions=seed) for stage in (B, H)),
        state(60.0 + worth, 60.0 + worth, report(F, params=params), contributions=seed),
    ]
    levels = [potential(now, prices, live_share=share) for now in life]
    for earlier, later in pairwise(levels):
        assert later >= earlier - 1e-12
    pruned = potential(state(60.0, 60.0, report(SeedStage.PRUNED)), prices, live_share=share)
    assert pruned == pytest.approx(0.58, abs=1e-12)
    assert all(pruned < level for level in levels)


# -- modes ---------------------------------------------------------------------------------------------------

STAGES = (None, G, T, B, H, F, SeedStage.PRUNED)
OP_INTO = {
    G: LifecycleOp.GERMINATE,
    B: LifecycleOp.ADVANCE,
    F: LifecycleOp.FOSSILIZE,
    SeedStage.PRUNED: LifecycleOp.PRUNE,
}


@st.composite
def lives(draw, length: int = 8) -> Story:
    """Seeds that come, go and come again in one slot, with measurements that go up and down."""
    stage, number, story = None, -1, []
    wasted = 0
    for _ in range(length):
        moves = {
            None: (None, G),
            G: (G, T, SeedStage.PRUNED),
            T: (T, B, SeedStage.PRUNED),
            B: (B, H, SeedStage.PRUNED),
            H: (H, F, SeedStage.PRUNED),
            F: (F,),
            SeedStage.PRUNED: (SeedStage.PRUNED, None),
        }
        old, stage = stage, draw(st.sampled_from(moves[stage]))
        number += stage is G and old is not G
        op = OP_INTO.get(stage, LifecycleOp.WAIT) if stage is not old else LifecycleOp.WAIT
        if op is LifecycleOp.FOSSILIZE and draw(st.booleans()):
            op = LifecycleOp.WAIT  # by the clock
        measured = old in (B, H, F)
        host, points = draw(st.floats(30.0, 60.0)), draw(st.floats(-20.0, 30.0))
        reports = [] if stage is None else [report(stage, number=number, params=draw(st.integers(1, 500)))]
        wasted += stage is None and old is SeedStage.PRUNED
        now = state(
            host + (points if measured else 0.0),
            host + (points if stage is F else 0.0),
            *reports,
            contributions={"r0c0": points} if measured else {},
            loss=draw(st.floats(0.0, 5.0)),
        )
        story.append((replace(now, germinated=now.germinated + wasted), op))
    return story


@pytest.mark.parametrize(("family", "mode"), ALL)
@given(story=lives(), gamma=st.floats(0.5, 1.0))
def test_components_sum_to_the_total_and_are_finite(family, mode, story: Story, gamma: float) -> None:
    paid = play(engine(mode, family, gamma=gamma), story)
    for reward in paid:
        assert list(reward) == list(paid[0])
        assert reward.total == pytest.approx(math.fsum(reward.values()), abs=1e-9)
        assert math.isfinite(reward.total)


@pytest.mark.parametrize("mode", J_MODES)
@given(story=lives(), gamma=st.floats(0.5, 1.0))
def test_three_modes_have_the_same_return_as_j(mode, story: Story, gamma: float) -> None:
    last = story[-1][0]
    j = (
        last.committed_accuracy / 100
        - 0.05 * math.log(1 + last.committed_params / HOST)
        - 0.02 * (last.germinated - last.fossilized)
    )
    paid = play(engine(mode, gamma=gamma), story)
    assert discounted(paid, gamma) == pytest.approx(gamma ** (len(story) - 1) * j, abs=1e-9)
    assert all(reward["objective"] == 0.0 for reward in paid[:-1])


def test_a_segment_starts_and_ends_without_potential() -> None:
    first, last = state(50.0, 50.0), state(80.0, 80.0)
    paid = play(
        engine(), [(first, LifecycleOp.WAIT), (state(60.0, 60.0), LifecycleOp.WAIT), (last, LifecycleOp.WAIT)]
    )
    assert [reward["potential"] for reward in paid] == pytest.approx(
        [0.9 * 0.5, 0.9 * 0.6 - 0.5, -0.6], abs=1e-12
    )
    assert paid[-1]["objective"] == 0.8


def hold(points: float, length: int) -> Story:
    now = state(60.0 + points, 60.0, report(H), contributions={"r0c0": points}, loss=1.0, committed_loss=1.1)
    return [(now, LifecycleOp.WAIT)] * length


def fossilize(points: float, length: int, when: int, op: LifecycleOp = LifecycleOp.FOSSILIZE) -> Story:
    """A seed that becomes permanent after `when` epochs: by an action, or by the clock while waiting."""
    now = state(60.0 + points, 60.0 + points, report(F), contributions={"r0c0": points}, loss=1.0)
    return [
        *hold(points, when),
        (now, op),
        *[(now, LifecycleOp.WAIT)] * (length - when - 1),
    ]


@pytest.mark.parametrize(("family", "mode"), ALL)
@given(points=st.floats(1.0, 40.0), length=st.integers(1, 60), data=st.data(), gamma=st.floats(0.9, 1.0))
def test_fossilizing_now_is_worth_at_least_as_much_as_holding(
    family, mode, points: float, length: int, data, gamma
) -> None:
    when = data.draw(st.integers(0, length - 1))
    now = discounted(play(engine(mode, family, gamma=gamma), fossilize(points, length, when)), gamma)
    never = discounted(play(engine(mode, family, gamma=gamma), hold(points, length)), gamma)
    assert now >= never - 1e-12


@pytest.mark.parametrize("mode", list(RewardMode))
@given(
    points=st.floats(-30.0, 30.0),
    cycles=st.integers(1, 3),
    blended=st.integers(0, 4),
    gamma=st.floats(0.9, 1.0),
)
def test_germinate_wait_prune_never_pays(
    mode, points: float, cycles: int, blended: int, gamma: float
) -> None:
    """Against waiting, each cycle costs, whatever its seed seemed to contribute while it lived; in J's modes
    exactly κ."""
    measured = {"r0c0": points}
    farm: Story = []
    for n in range(cycles):
        farm.append((state(60.0, 60.0, report(G, number=n), germinated=n + 1), LifecycleOp.GERMINATE))
        farm.append((state(60.0, 60.0, report(B, number=n), germinated=n + 1), LifecycleOp.ADVANCE))
        farm += [
            (
                state(60.0 + points, 60.0, report(H, number=n), contributions=measured, germinated=n + 1),
                LifecycleOp.WAIT,
            )
        ] * blended
        farm.append(
            (
                state(
                    60.0 + points,
                    60.0,
                    report(SeedStage.PRUNED, alpha=0.0, number=n),
                    germinated=n + 1,
                    contributions=measured,
                ),
                LifecycleOp.PRUNE,
            )
        )
        farm.append((state(60.0, 60.0, germinated=n + 1), LifecycleOp.WAIT))
    idle: Story = [(state(60.0, 60.0), LifecycleOp.WAIT)] * len(farm)
    gain = discounted(play(engine(mode, gamma=gamma), farm), gamma) - discounted(
        play(engine(mode, gamma=gamma), idle), gamma
    )
    assert gain <= 1e-12
    if mode in J_MODES:
        assert gain == pytest.approx(-0.02 * cycles * gamma ** (len(farm) - 1), abs=1e-9)


@pytest.mark.parametrize(("family", "mode"), ALL)
def test_a_refused_fossilize_earns_nothing(family, mode) -> None:
    held = hold(5.0, 3)[0][0]
    refused, waited = engine(mode, family), engine(mode, family)
    for rewards in (refused, waited):
        rewards(step(1, None, held))
    for epoch in (2, 3, 4):
        assert refused(step(epoch, held, held, LifecycleOp.FOSSILIZE, executed=False)) == waited(
            step(epoch, held, held)
        )


def test_escrow_counts_a_contribution_once_it_has_lasted() -> None:
    rewards = engine(RewardMode.ESCROW, gamma=1.0, live_share=1.0, prices=ObjectiveConfig(size_price=0.0))
    before, level, levels = None, 0.0, []
    for epoch, points in enumerate([2.0, 10.0, 10.0, 10.0, 4.0], start=1):
        after = state(60.0 + points, 60.0, report(H), contributions={"r0c0": points})
        level += rewards(step(epoch, before, after)).total
        levels.append(level)
        before = after
    assert levels == pytest.approx([0.62, 0.62, 0.62, 0.70, 0.64], abs=1e-12)
    # Another seed in the same slot starts with a window of its own.
    another = state(69.0, 60.0, report(H, number=1), contributions={"r0c0": 9.0}, germinated=1)
    assert level + rewards(step(6, before, another)).total == pytest.approx(0.69, abs=1e-12)


BY_ACTION_OR_CLOCK = pytest.mark.parametrize(
    "op", [LifecycleOp.FOSSILIZE, LifecycleOp.WAIT], ids=["action", "clock"]
)

# -- single terms --------------------------------------------------------------------------------------------


def test_rent_and_shock_inputs() -> None:
    config = RentConfig(slot_rent_ratio=0.01, host_params_floor=2000)
    others = report(F, "r0c1", params=100), report(T, "r1c0")
    before = state(60.0, 60.0, report(B, alpha=0.25, params=400), *others)
    after = state(60.0, 60.0, report(B, alpha=0.75, params=400), *others)
    inputs = compute_rent_and_shock_inputs(before, after, config)
    assert inputs.effective_params == pytest.approx(2 * 10.0 + 300.0 + 100.0)
    assert inputs.shock == pytest.approx(0.5**2 * 400 / 2000)
    assert compute_rent_and_shock_inputs(None, after, config).shock == 0.0
    # A jump to 0 counts for a seed that is gone; a young seed can be let off.
    assert compute_rent_and_shock_inputs(before, state(), config).shock == pytest.approx(
        (0.0625 * 400 + 100) / 2000
    )
    assert compute_rent_and_shock_inputs(before, after, config, min_age=6).effective_params == 0.0


def test_a_slow_ramp_shocks_less_than_a_jump() -> None:
    def shock(alphas: list[float]) -> float:
        states = [state(60.0, 60.0, report(B, alpha=a, params=500)) for a in alphas]
        return sum(compute_rent_and_shock_inputs(a, b, RentConfig()).shock for a, b in pairwise(states))

    assert shock([0.0, 0.5, 1.0]) == pytest.approx(shock([0.0, 1.0]) / 2)


def test_hindsight_credit() -> None:
    credit = compute_scaffold_hindsight_credit(4.0, 5.0, delay=3, weight=0.02, gamma=0.9)
    assert credit == pytest.approx(0.02 * math.tanh(2.0) * 0.729, abs=1e-15)
    for boost, improvement in ((0.0, 5.0), (-1.0, 5.0), (4.0, 0.0), (4.0, -2.0)):
        assert compute_scaffold_hindsight_credit(boost, improvement, delay=0, weight=0.02, gamma=0.9) == 0.0
    assert compute_scaffold_hindsight_credit(1e9, 1e9, delay=0, weight=0.02, gamma=0.9) <= 0.02


@BY_ACTION_OR_CLOCK
def test_a_fossil_pays_once_for_help_from_a_seed_that_is_gone(op: LifecycleOp) -> None:
    rewards, both = engine(RewardMode.BASIC), {"r0c0": 5.0, "r0c1": 1.0}
    helped = state(66.0, 60.0, report(H, boost=4.0), report(H, "r0c1"), contributions=both)
    alone = state(
        65.0, 60.0, report(H, boost=4.0), report(SeedStage.PRUNED, "r0c1"), contributions={"r0c0": 5.0}
    )
    fossil = state(
        65.0, 65.0, report(F, boost=4.0), report(SeedStage.PRUNED, "r0c1"), contributions={"r0c0": 5.0}
    )
    assert rewards(step(1, None, helped))["hindsight"] == 0.0
    assert rewards(step(2, helped, alone))["hindsight"] == 0.0
    assert rewards(step(3, alone, alone))["hindsight"] == 0.0
    paid = rewards(step(4, alone, fossil, op))["hindsight"]
    assert paid == pytest.approx(0.02 * math.tanh(2.0) * 0.9**3, abs=1e-15)
    assert rewards(step(5, fossil, fossil))["hindsight"] == 0.0


@pytest.mark.parametrize(
    "end",
    [
        state(65.0, 65.0, report(F), contributions={"r0c0": 5.0}),
        state(65.0, 60.0, report(SeedStage.PRUNED, alpha=0.0), contributions={"r0c0": 5.0}),
        state(65.0, 60.0, report(B, leaving=True, alpha=0.9), contributions={"r0c0": 5.0}),
    ],
)
def test_what_a_live_seed_was_paid_is_taken_back_when_it_is_one_no_longer(end: EnvMeasure) -> None:
    rewards = engine(RewardMode.BASIC)
    held = state(65.0, 60.0, report(H), contributions={"r0c0": 5.0})
    assert rewards(step(1, None, held))["contribution"] == pytest.approx(0.9 * 0.025, abs=1e-15)
    assert rewards(step(2, held, held))["contribution"] == pytest.approx(0.9 * 0.025 - 0.025, abs=1e-15)
    assert rewards(step(3, held, end))["contribution"] == pytest.approx(-0.025, abs=1e-15)


def test_costs_occupancy_and_outcomes() -> None:
    rewards = engine(RewardMode.BASIC)
    seeds = [report(H, f"r0c{i}") for i in range(3)]
    held = state(60.0, 60.0, *seeds, contributions={"r0c0": 2.0, "r0c1": -0.5, "r0c2": 0.0})
    first = rewards(step(1, None, held))
    assert first["occupancy"] == pytest.approx(-0.02 * 2 / 10)
    assert first["rent"] == pytest.approx(-0.1 * math.log1p((3 * 3.9 + 30) / HOST) / 10)
    assert (first["intervention"], first["fossilize"], first["prune"]) == (0.0, 0.0, 0.0)
    for epoch, (op, slot, name, amount, cost) in enumerate(
        [
            (LifecycleOp.PRUNE, "r0c0", "prune", -0.01 * math.tanh(2.0), 0.001),
            (LifecycleOp.PRUNE, "r0c1", "prune", 0.005 * math.tanh(0.5), 0.001),
            (LifecycleOp.PRUNE, "r1c0", "prune", 0.0, 0.001),  # never measured
            (LifecycleOp.FOSSILIZE, "r0c0", "fossilize", 0.02 * math.tanh(2.0), 0.0),
            (LifecycleOp.FOSSILIZE, "r0c1", "fossilize", -0.02 * math.tanh(0.5), 0.0),
            (LifecycleOp.GERMINATE, "r1c0", "fossilize", 0.0, 0.01),
            (LifecycleOp.SET_ALPHA_TARGET, "r0c0", "prune", 0.0, 0.001),
        ],
        start=2,
    ):
        terms = rewards(step(epoch, held, held, op, slot=slot))
        assert terms[name] == pytest.approx(amount, abs=1e-15)
        assert terms["intervention"] == -cost


@BY_ACTION_OR_CLOCK
@given(when=st.integers(1, 9), points=st.floats(-5.0, 5.0))
def test_a_drip_pays_in_the_end_what_basic_pays_at_once(op: LifecycleOp, when: int, points: float) -> None:
    basic, plus = (
        play(engine(mode), fossilize(points, 10, when, op))
        for mode in (RewardMode.BASIC, RewardMode.BASIC_PLUS)
    )
    at_once = sum(reward["fossilize"] for reward in basic)
    assert at_once == pytest.approx(0.02 * math.tanh(points), abs=1e-12)
    assert sum(reward["fossilize"] + reward["drip"] for reward in plus) == pytest.approx(at_once, abs=1e-12)
    if when < 9:
        shares = [reward["drip"] for reward in plus]
        assert shares[: when + 1] == [0.0] * (when + 1)
        assert shares[when + 1 :] == pytest.approx([0.7 * at_once / (9 - when)] * (9 - when), abs=1e-12)


@pytest.mark.parametrize(("family", "mode"), ALL)
@given(when=st.integers(1, 9), points=st.floats(-5.0, 5.0))
def test_the_clock_is_paid_like_an_action(family, mode, when: int, points: float) -> None:
    by_action, by_clock = (
        play(engine(mode, family), fossilize(points, 10, when, op))
        for op in (LifecycleOp.FOSSILIZE, LifecycleOp.WAIT)
    )
    assert by_action == by_clock


def test_a_drip_follows_the_contribution_and_ends_with_its_fossil() -> None:
    rewards = engine(RewardMode.BASIC_PLUS)
    *_, (fossil, _) = fossilize(5.0, 10, 0)
    share = 0.7 * 0.02 / 9
    rewards(step(1, None, fossil, LifecycleOp.FOSSILIZE))
    worse = replace(fossil, contributions={"r0c0": -1.0})
    assert rewards(step(2, fossil, worse))["drip"] == pytest.approx(share * math.tanh(-1.0), abs=1e-15)
    rewards.rollback(0)
    assert rewards(step(4, None, fossil))["drip"] == pytest.approx(share * math.tanh(5.0), abs=1e-15)
    assert rewards(step(5, fossil, state(60.0, 60.0, germinated=1)))["drip"] == 0.0
    assert rewards(step(6, state(), fossil))["drip"] == 0.0


# -- the loss family -----------------------------------------------------------------------------------------


def test_an_improvement_of_the_loss_is_rewarded_and_a_regression_charged() -> None:
    losses = [2.0, 1.5, 1.4999, 1.6, math.inf, 1.6]
    paid = play(
        engine(family=RewardFamily.LOSS),
        [(state(loss=loss, committed_loss=1.2), LifecycleOp.WAIT) for loss in losses],
    )
    changes = [reward["loss_improvement"] for reward in paid[1:]]
    assert [c > 0 for c in changes] == [True, True, False, False, True]
    assert changes == pytest.approx([math.exp(-b) - math.exp(-a) for a, b in pairwise(losses)], abs=1e-15)
    assert [reward["terminal"] for reward in paid] == pytest.approx([0.0] * 5 + [math.exp(-1.2)])


def test_the_loss_family_lets_young_seeds_off() -> None:
    prices = LossRewardConfig(rent_weight=0.05, grace_epochs=3)
    rewards = RewardEngine(
        RewardConfig(), PRICES, gamma=GAMMA, num_envs=1, family=RewardFamily.LOSS, loss=prices
    )
    young, old = (state(60.0, 60.0, report(B, age=age)) for age in (2, 3))
    assert rewards(step(1, None, young))["rent"] == 0.0
    assert rewards(step(2, young, old))["rent"] == pytest.approx(-0.05 * math.log1p((3.9 + 10) / HOST) / 10)


# -- the engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "mode"), ALL)
@given(story=lives(), cut=st.integers(1, 7), gamma=st.floats(0.5, 1.0))
def test_a_rollback_takes_back_what_levels_have_paid(
    family, mode, story: Story, cut: int, gamma: float
) -> None:
    """The segment before a rollback has, levels alone, a return of 0; the one after starts from nothing."""
    levels = {"potential", "progress", "contribution", "loss_improvement"}
    rewards = engine(mode, family, gamma=gamma)
    before, total = None, 0.0
    discount = 1.0 if family is RewardFamily.LOSS else gamma
    for epoch, (after, op) in enumerate(story[:cut], start=1):
        paid = rewards(step(epoch, before, after, op, max_epochs=99))
        total += discount ** (epoch - 1) * sum(amount for name, amount in paid.items() if name in levels)
        before = after
    paid = rewards.rollback(0)
    assert next(iter(paid.items())) == ("rollback", -0.1)
    total += discount ** (cut - 1) * (paid.total + 0.1)
    assert total == pytest.approx(0.0, abs=1e-9)
    again = rewards.rollback(0)
    assert again == {"rollback": -0.1}, "nothing is left to take back"
    fresh = engine(mode, family, gamma=gamma)
    fresh_paid = fresh(step(50, None, story[-1][0], max_epochs=99))
    paid_after = rewards(step(50, None, story[-1][0], max_epochs=99))
    assert {k: v for k, v in paid_after.items() if k != "drip"} == {
        k: v for k, v in fresh_paid.items() if k != "drip"
    }


def test_a_rollback_in_the_first_epoch_costs_its_price_only() -> None:
    assert engine().rollback(0) == {"rollback": -0.1}


@pytest.mark.parametrize(("family", "mode"), ALL)
@given(story=lives(), cut=st.integers(1, 7))
def test_a_stored_state_goes_on_exactly(family, mode, story: Story, cut: int) -> None:
    one, two = engine(mode, family, num_envs=2), engine(mode, family, num_envs=2)
    before, text = None, ""
    for epoch, (after, op) in enumerate(story, start=1):
        if epoch == cut + 1:
            text = json.dumps(one.state())
            stored = json.loads(text)
            two.load_state(stored)
        inputs = step(epoch, before, after, op, max_epochs=len(story), env=1)
        paid = one(inputs)
        if epoch > cut:
            assert two(inputs) == paid
        before = after
    assert one.state() == two.state()
    assert json.dumps(stored) == text, "what was loaded stays as it was"


def test_envs_do_not_share_memories() -> None:
    rewards, alone = engine(num_envs=3), engine()
    now = state(70.0, 70.0)
    rewards(step(1, None, state(10.0, 10.0), env=1))
    assert rewards(step(1, None, now, env=2)) == alone(step(1, None, now))
    rewards.begin_episode(2)
    alone.begin_episode(0)
    assert rewards(step(1, None, now, env=2)) == alone(step(1, None, now))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: engine(gamma=0.0), r"gamma is 0\.0, must lie in \(0, 1\]"),
        (lambda: engine(gamma=1.01), r"gamma is 1\.01"),
        (lambda: engine(gamma=float("nan")), "gamma is nan"),
        (lambda: engine(num_envs=0), "num_envs is 0"),
        (lambda: engine(family="contributions"), "family is 'contributions'; allowed: contribution, loss"),
        (lambda: RewardConfig(mode=""), "mode is '', must be the name of a reward mode"),
        (lambda: engine("shapely"), r"reward.mode 'shapely' is unknown \(did you mean shaped\?\)"),
        (lambda: RewardConfig(live_share=1.5), r"live_share is 1\.5, must lie in \[0, 1\]"),
        (lambda: RewardConfig(rent={"rent_weight": 1.0}), "rent is .* must be a RentConfig"),
        (
            lambda: RewardConfig(contribution_weight=2.0),
            r"contribution_weight is 2\.0.*at most progress_weight",
        ),
        (lambda: RewardConfig(prune_bonus=0.5), r"prune_bonus is 0\.5.*germinate_cost"),
        (lambda: engine().begin_episode(1), "env 1 is unknown; allowed: 0 to 0"),
        (lambda: engine().rollback(-1), "env -1 is unknown"),
        (lambda: engine()(step(11, None, state())), "epoch 11: expected an epoch from 1 to 10"),
        (lambda: engine()(step(2, state(), state())), "epoch 2: a segment continues here"),
        (
            lambda: [rewards(step(e, None, state())) for rewards in [engine()] for e in (1, 2)],
            "epoch 2: a segment begins here",
        ),
        (
            lambda: [rewards(step(1, None, state())) for rewards in [engine()] for _ in (1, 2)],
            "call begin_episode",
        ),
    ],
)
def test_what_cannot_be_is_an_error_that_shows_it(make, message: str) -> None:
    with pytest.raises(EsperError, match=message):
        make()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.pop("mode"), "field mode is missing; allowed: family, mode, envs"),
        (lambda s: s.update(mode="sparse"), "mode is 'sparse' in the state and 'shaped' here"),
        (lambda s: s.update(family="loss"), "family is 'loss'"),
        (lambda s: s["envs"].append(s["envs"][0]), "state of 2 envs, here are 1"),
        (lambda s: s["envs"][0].pop("levels"), r"field envs\[0\]\.levels is missing"),
        (lambda s: s["envs"][0].update(epoch=True), r"envs\[0\]\.epoch is true"),
        (lambda s: s["envs"][0]["levels"].update(potential="high"), r"levels\.potential is 'high'"),
        (lambda s: s["envs"][0]["windows"].update(a=3.0), r"windows\.a is 3\.0"),
        (lambda s: s["envs"][0]["drips"].update(a=float("inf")), r"drips\.a is inf"),
    ],
)
def test_a_damaged_state_is_refused(spoil, message: str) -> None:
    damaged = engine().state()
    spoil(damaged)
    with pytest.raises(StructureError, match=message):
        engine().load_state(damaged)


# -- registered rewards --------------------------------------------------------------------------------------


def idle_price(inputs: RewardInputs) -> float:
    """A user's term: waiting costs a little."""
    return -0.25 if inputs.outcome.effective_op is LifecycleOp.WAIT else 0.0


def broken(inputs: RewardInputs) -> float:
    return math.nan


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test end with it."""
    monkeypatch.setattr("esper.simic.rewards.engine.MODES", dict(MODES))


@pytest.mark.usefixtures("fresh_registry")
def test_a_registered_reward_is_the_sum_of_its_terms() -> None:
    register_reward("frugal", ["objective", "potential", "intervention", idle_price])
    mine, shaped, minimal = engine("frugal"), engine(RewardMode.SHAPED), engine(RewardMode.MINIMAL)
    before, after = state(60.0, 60.0), state(60.0, 60.0, report(G), germinated=1)
    for epoch, op in ((1, LifecycleOp.WAIT), (2, LifecycleOp.GERMINATE), (3, LifecycleOp.WAIT)):
        one = step(epoch, None if epoch == 1 else before, after, op)
        paid, by_shaped, by_minimal = mine(one), shaped(one), minimal(one)
        assert list(paid) == ["objective", "potential", "intervention", "idle_price"]
        assert paid["potential"] == by_shaped["potential"]
        assert paid["intervention"] == by_minimal["intervention"]
        assert paid["idle_price"] == (-0.25 if op is LifecycleOp.WAIT else 0.0)
        assert paid.total == sum(paid.values())
    assert mine.rollback(0) == shaped.rollback(0)
    assert mine.state()["mode"] == "frugal"
    engine("frugal").load_state(mine.state())


@pytest.mark.usefixtures("fresh_registry")
def test_a_config_accepts_a_registered_reward() -> None:
    with pytest.raises(EsperError, match=r"reward\.mode 'frugal' is unknown"):
        TrainingConfig(reward={"mode": "frugal"})
    register_reward("frugal", ["objective", idle_price])
    register_reward("no_size", ["progress", idle_price])
    config = TrainingConfig(reward={"mode": "frugal"}, rent_curriculum=0.5)
    assert TrainingConfig.from_json(config.to_json()) == config
    assert TrainingConfig(ab_reward_modes=["sparse", "frugal"]).ab_reward_modes == ("sparse", "frugal")
    with pytest.raises(EsperError, match="ab_reward_modes 'frugl'"):
        TrainingConfig(ab_reward_modes=["sparse", "frugl"])
    with pytest.raises(EsperError, match="rent_curriculum"):
        TrainingConfig(reward={"mode": "no_size"}, rent_curriculum=0.5)


@pytest.mark.parametrize(
    ("name", "terms", "words"),
    [
        ("sparse", ["objective"], "'sparse' is already registered"),
        ("Mine", ["objective"], "'Mine'; allowed: lower-case"),
        ("mine", [], "must be a list of one or more terms"),
        ("mine", "objective", "must be a list of one or more terms"),
        ("mine", ["objectiv"], r"term 'objectiv' is unknown \(did you mean objective\?\)"),
        ("mine", ["objective", "objective"], "two terms are called 'objective'"),
        ("mine", [lambda inputs: 0.0], "a function whose name"),
        ("mine", [3], "term 3 must be"),
        ("mine", [potential], "a built-in term is called 'potential'"),
    ],
)
@pytest.mark.usefixtures("fresh_registry")
def test_a_reward_that_cannot_be_registered_is_refused(name: str, terms, words: str) -> None:
    with pytest.raises(EsperError, match=words):
        register_reward(name, terms)


@pytest.mark.usefixtures("fresh_registry")
def test_a_term_must_return_a_finite_number() -> None:
    register_reward("mine", [broken])
    with pytest.raises(EsperError, match="term 'broken' returned nan for env 0 in epoch 1"):
        engine("mine")(step(1, None, state()))


# -- the documentation ---------------------------------------------------------------------------------------


def example(
    mode: RewardMode,
    before: EnvMeasure,
    after: EnvMeasure,
    op: LifecycleOp = LifecycleOp.WAIT,
    *,
    last: bool = False,
    family: RewardFamily = RewardFamily.CONTRIBUTION,
) -> RewardComponentsTelemetry:
    """The second step of a segment, in the middle of an episode of 20 epochs or at its end."""
    rewards = engine(mode, family, gamma=0.99)
    rewards(step(9, None, before, max_epochs=20))
    return rewards(step(20 if last else 10, before, after, op, max_epochs=20))


def test_the_numbers_in_the_documentation() -> None:
    """The page's network: 1,000 parameters and 60 % alone, a seed of 500 with which it has 70 %."""
    seed = {"params": 500}
    ten, points = {"r0c0": 10.0}, {"r0c0": 10.0, "r0c1": 2.0}
    bare = state(loss=1.2)
    planted = state(60.0, 60.0, report(G, **seed))
    started = state(60.0, 60.0, report(B, **seed))
    held = state(70.0, 60.0, report(H, **seed), contributions=ten, loss=1.0, committed_loss=1.2)
    half = state(70.0, 60.0, report(B, alpha=0.5, **seed), contributions=ten)
    fossil = state(70.0, 70.0, report(F, **seed), contributions=ten)
    pruned = state(70.0, 60.0, report(SeedStage.PRUNED, alpha=0.0, **seed), contributions=ten)
    helped = state(72.0, 72.0, report(F, boost=4.0, **seed), report(H, "r0c1", **seed), contributions=points)
    jump = state(75.0, 60.0, report(H, **seed), contributions={"r0c0": 15.0})
    dripping = engine(RewardMode.BASIC_PLUS, gamma=0.99)
    dripping(step(9, None, held, max_epochs=20))
    dripping(step(10, held, fossil, LifecycleOp.FOSSILIZE, max_epochs=20))
    rolled = engine(gamma=0.99)
    rolled(step(9, None, held, max_epochs=20))
    numbers = {
        "objective": example(RewardMode.SPARSE, fossil, fossil, last=True)["objective"],
        "potential": example(RewardMode.SHAPED, started, held)["potential"],
        "potential (escrow)": example(RewardMode.ESCROW, held, jump)["potential"],
        "progress": example(RewardMode.BASIC, held, fossil, LifecycleOp.FOSSILIZE)["progress"],
        "contribution": example(RewardMode.BASIC, started, held)["contribution"],
        "rent": example(RewardMode.BASIC, held, held)["rent"],
        "alpha_shock": example(RewardMode.BASIC, half, held)["alpha_shock"],
        "occupancy": example(RewardMode.BASIC, helped, helped)["occupancy"],
        "intervention": example(RewardMode.MINIMAL, bare, planted, LifecycleOp.GERMINATE)["intervention"],
        "fossilize": example(RewardMode.BASIC, held, fossil, LifecycleOp.FOSSILIZE)["fossilize"],
        "drip": dripping(step(11, fossil, fossil, max_epochs=20))["drip"],
        "prune": example(RewardMode.BASIC, held, pruned, LifecycleOp.PRUNE)["prune"],
        "hindsight": example(RewardMode.BASIC, helped, helped, LifecycleOp.FOSSILIZE)["hindsight"],
        "loss_improvement": example(RewardMode.SHAPED, bare, held, family=RewardFamily.LOSS)[
            "loss_improvement"
        ],
        "rent (loss)": example(RewardMode.SHAPED, held, held, family=RewardFamily.LOSS)["rent"],
        "terminal": example(RewardMode.SHAPED, held, held, last=True, family=RewardFamily.LOSS)["terminal"],
        "rollback": rolled.rollback(0).total,
    }
    page = Path(__file__).parents[3] / "docs" / "rewards.md"
    rows = {
        cells[1].strip().replace("`", ""): cells[-2].strip()
        for line in page.read_text(encoding="utf-8").splitlines()
        if len(cells := line.split("|")) == 6
    }
    assert {name: rows[name].split()[-1].replace("−", "-") for name in numbers} == {
        name: f"{amount:.4f}" for name, amount in numbers.items()
    }
    used = {name for terms in MODES.values() for name in terms}
    assert used <= rows.keys(), "every term of every mode is on the page"
