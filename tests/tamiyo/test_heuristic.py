"""Each rule of the heuristic on a made-up observation, and a real episode through the environment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from env_helpers import make_env, small_task, stacked
from esper.leyline import (
    ActionMasks,
    BlueprintError,
    EsperError,
    FactoredAction,
    LifecycleOp,
    PolicyObservation,
    TempoAction,
    blueprint_ids,
    blueprint_index,
)
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT_DIM, batch_obs_to_features
from esper.tamiyo.heuristic import (
    BASE_COLUMN,
    NORMALISERS,
    QUOTE_COLUMN,
    SLOT_COLUMN,
    Heuristic,
    HeuristicConfig,
)

CONFIG = HeuristicConfig(
    min_progress=0.1,
    max_progress=0.6,
    max_rank=0.5,
    rank_step=0.8,
    blind_ratio=1.2,
    plateau=0.3,
    space_gain=0.3,
    channel_gain=0.02,
    any_gain=0.03,
    seed_step=0.5,
    growth_weight=0.5,
    max_seeds=2,
    max_live=1,
    fail_age=0.15,
    fail_drop=0.02,
    min_contribution=0.005,
)
LIGHT, DEPTHWISE, NORM = (blueprint_index(name) for name in ("conv_light", "depthwise", "norm"))
BADLY_OFF = {"progress": 0.4}
"""A network in which seeds may be planted; all of its answers may be wrong."""
PRICES = {LIGHT: 0.15, DEPTHWISE: 0.1, NORM: 0.02}
"""What each blueprint is quoted at in every slot."""
TRAITS = {
    LIGHT: {"mixes_space": 1.0, "mixes_channels": 1.0},
    DEPTHWISE: {"mixes_space": 1.0},
    NORM: {},
}


def decide(policy: Heuristic, legal: dict[str, list[int]], **options: Any) -> tuple[str, int, int]:
    """Operation, slot and blueprint of what it does."""
    action = act(policy, legal, **options)
    return action.op.name, action.slot_idx, int(action.blueprint)


def act(
    policy: Heuristic,
    legal: dict[str, list[int]],
    *,
    base: dict[str, float] | None = None,
    slots: tuple[dict[str, float], ...] = (),
    prices: dict[int, float] | None = None,
    quoted: dict[str, float] | None = None,
    in_time: Iterable[TempoAction] = tuple(TempoAction),
) -> FactoredAction:
    """One env, three slots; `slots` describes the first ones, `legal` maps operations to the slots where they
    are allowed, `in_time` are the tempos at which a seed can still become permanent. Numbers are raw; a name
    that ends in ? is a validity bit."""
    count = len(blueprint_ids())
    obs = PolicyObservation(
        torch.zeros(1, BASE_DIM),
        torch.zeros(1, 3, SLOT_DIM),
        torch.zeros(1, 3, count, QUOTE_DIM),
        torch.tensor([[LIGHT, -1, -1]]),
    )
    obs.slots[0, :, SLOT_COLUMN["depth"]] = torch.tensor([0.0, 0.5, 1.0])
    for name, value in (base or {}).items():
        _set(obs.base[0], BASE_COLUMN, name, value)
    for slot, values in enumerate(slots):
        for name, value in values.items():
            _set(obs.slots[0, slot], SLOT_COLUMN, name, value)
    for blueprint, price in (PRICES if prices is None else prices).items():
        quote = {"offered": 1.0, "price": price} | TRAITS[blueprint] | (quoted or {})
        for slot, (name, value) in itertools.product(range(3), quote.items()):
            _set(obs.quotes[0, slot, blueprint], QUOTE_COLUMN, name, value)
    by_op = torch.zeros(1, 6, 3, dtype=torch.bool)
    by_op[:, LifecycleOp.WAIT] = True
    for op, places in legal.items():
        by_op[0, LifecycleOp[op], places] = True
    masks = ActionMasks(
        by_op.any(2),
        by_op,
        torch.ones(1, count, dtype=torch.bool),
        *(torch.ones(1, n, dtype=torch.bool) for n in (4, 4, 3, 4, 5)),
    )
    masks.tempo[0] = torch.tensor([tempo in tuple(in_time) for tempo in TempoAction])
    return FactoredAction.from_indices(*policy.act(obs, None, masks).actions[0].tolist())


def _set(row: torch.Tensor, column: dict[str, int], name: str, value: float) -> None:
    """Write a number as the feature table scales it; for a log curve its logarithm."""
    bare = name.rstrip("?")
    row[column[bare] + name.endswith("?")] = value if name.endswith("?") else value / NORMALISERS[bare].unit


def sensed(*ratios: float) -> tuple[dict[str, float], ...]:
    return tuple({"tap_ratio": math.log(ratio), "tap_ratio?": 1.0} for ratio in ratios)


FREE = {"GERMINATE": [0, 1, 2]}


def test_it_plants_where_spatial_reach_is_missing() -> None:
    blind = sensed(1.1, 2.0, 1.0)
    assert decide(Heuristic(CONFIG, 1), FREE, base=BADLY_OFF, slots=blind) == ("GERMINATE", 1, DEPTHWISE)
    for change in ({"progress": 0.05}, {"progress": 0.7}):
        assert decide(Heuristic(CONFIG, 1), FREE, base=BADLY_OFF | change, slots=blind)[0] == "WAIT", change


def test_where_reach_is_not_missing_only_what_is_cheap_is_worth_its_price() -> None:
    for seen in (sensed(1.1, 1.19, 1.0), tuple(s | {"tap_ratio?": 0.0} for s in sensed(2.0, 2.0, 2.0))):
        assert decide(Heuristic(CONFIG, 1), FREE, base=BADLY_OFF, slots=seen)[::2] == ("GERMINATE", NORM)
        dear = dict.fromkeys(PRICES, 0.1)
        assert decide(Heuristic(CONFIG, 1), FREE, base=BADLY_OFF, slots=seen, prices=dear)[0] == "WAIT"


def test_it_buys_what_is_worth_most_after_its_price() -> None:
    """Expected in a blind slot: 0.35 of the error for conv_light, 0.33 for depthwise, 0.03 for norm."""
    blind = sensed(2.0)
    for prices, wanted in (
        ({LIGHT: 0.1, DEPTHWISE: 0.1, NORM: 0.02}, LIGHT),
        ({LIGHT: 0.13, DEPTHWISE: 0.1, NORM: 0.02}, DEPTHWISE),
        ({LIGHT: 0.34, DEPTHWISE: 0.325, NORM: 0.01}, NORM),
        ({LIGHT: 0.34, DEPTHWISE: 0.4, NORM: 0.04}, LIGHT),
    ):
        chosen = decide(Heuristic(CONFIG, 1), {"GERMINATE": [0]}, base=BADLY_OFF, slots=blind, prices=prices)
        assert chosen == ("GERMINATE", 0, wanted)
    none = dict.fromkeys(PRICES, 0.36)
    free = {"GERMINATE": [0]}
    assert decide(Heuristic(CONFIG, 1), free, base=BADLY_OFF, slots=blind, prices=none)[0] == "WAIT"
    easy = replace(CONFIG, price_weight=0.5)
    assert decide(Heuristic(easy, 1), free, base=BADLY_OFF, slots=blind, prices=none)[0] == "GERMINATE"


def test_less_error_to_remove_is_worth_less() -> None:
    blind, prices = sensed(2.0), {DEPTHWISE: 0.1}
    for name in ("val_accuracy", "expected_end"):
        for accuracy, wanted in ((0.6, "GERMINATE"), (0.8, "WAIT")):
            base = BADLY_OFF | {name: accuracy, f"{name}?": 1.0}
            chosen = decide(Heuristic(CONFIG, 1), {"GERMINATE": [0]}, base=base, slots=blind, prices=prices)
            assert chosen[0] == wanted, (name, accuracy)


def test_a_budget_in_flops_charges_for_the_training_that_is_forgone() -> None:
    """Half of the error would still go; a seed that takes half of the FLOPs forgoes half of that."""
    base = {"progress": 0.4, "val_accuracy": 0.0, "val_accuracy?": 1.0, "expected_end": 0.5}
    options = {"slots": sensed(2.0), "prices": {DEPTHWISE: 0.0}, "quoted": {"flops_share": 0.5}}
    for flops, wanted in ((0.0, "GERMINATE"), (1.0, "WAIT")):
        told = base | {"expected_end?": 1.0, "flops_budget": flops}
        assert decide(Heuristic(CONFIG, 1), {"GERMINATE": [0]}, base=told, **options)[0] == wanted


def test_it_grows_only_what_it_is_told_to() -> None:
    for names, wanted in ((("norm",), NORM), (("conv_light", "norm"), LIGHT)):
        policy = Heuristic(replace(CONFIG, blueprints=names), 1)
        assert decide(policy, {"GERMINATE": [0]}, base=BADLY_OFF, slots=sensed(2.0))[2] == wanted


def test_a_network_that_can_express_enough_is_left_alone() -> None:
    for ranks, wanted in (((0.6, 0.9, 0.51), "WAIT"), ((0.6, 0.9, 0.49), "GERMINATE")):
        slots = tuple(
            slot | {"feature_rank": rank} for slot, rank in zip(sensed(1.1, 2.0, 1.0), ranks, strict=True)
        )
        assert decide(Heuristic(CONFIG, 1), FREE, base=BADLY_OFF, slots=slots)[0] == wanted


def test_a_second_seed_needs_a_lower_rank_and_gains_less() -> None:
    for rank, price, wanted in ((0.39, 0.1, "GERMINATE"), (0.41, 0.1, "WAIT"), (0.39, 0.2, "WAIT")):
        slots = (
            {"stage_fossilized": 1.0, "feature_rank": rank},
            *(s | {"feature_rank": 1.0} for s in sensed(2.0)),
            {"feature_rank": 1.0},
        )
        options = {"base": BADLY_OFF, "slots": slots, "prices": {DEPTHWISE: price}}
        assert decide(Heuristic(CONFIG, 1), {"GERMINATE": [1]}, **options)[0] == wanted


def test_growth_scores_count_in_the_choice_of_a_slot() -> None:
    slots = [dict(slot) for slot in sensed(1.5, 1.5)]
    assert decide(Heuristic(CONFIG, 1), {"GERMINATE": [0, 1]}, base=BADLY_OFF, slots=tuple(slots))[1] == 0
    slots[1]["growth_score_relative"] = math.log(1.2)
    assert decide(Heuristic(CONFIG, 1), {"GERMINATE": [0, 1]}, base=BADLY_OFF, slots=tuple(slots))[1] == 1


def test_every_slot_counts_as_blind_when_the_host_has_settled_and_stands_still() -> None:
    still = BADLY_OFF | {"host_settled": 1.0, "plateau_so_far": 0.3}
    assert decide(Heuristic(CONFIG, 1), FREE, base=still) == ("GERMINATE", 0, DEPTHWISE)
    for change in ({"host_settled": 0.0}, {"plateau_so_far": 0.2}):
        assert decide(Heuristic(CONFIG, 1), FREE, base=still | change)[2] == NORM, change


@pytest.mark.parametrize(
    ("stages", "wanted"),
    [
        ((), "GERMINATE"),
        (("fossilized",), "GERMINATE"),
        (("blending",), "WAIT"),
        (("fossilized", "fossilized"), "WAIT"),
    ],
)
def test_seeds_are_limited(stages, wanted) -> None:
    slots = [dict(slot) for slot in sensed(1.0, 1.0, 3.0)]
    for slot, stage in enumerate(stages):
        slots[slot][f"stage_{stage}"] = 1.0
    assert decide(Heuristic(CONFIG, 1), {"GERMINATE": [2]}, base=BADLY_OFF, slots=tuple(slots))[0] == wanted


def test_a_pruned_blueprint_is_not_planted_again_in_this_episode() -> None:
    policy = Heuristic(CONFIG, 1)
    holding = ({"stage_holding": 1.0, "contribution": -0.1, "contribution?": 1.0},)
    assert decide(policy, {"PRUNE": [0], "FOSSILIZE": [0]}, slots=holding)[0] == "PRUNE"
    free, blind = {"GERMINATE": [1]}, sensed(1.0, 3.0)
    cheap = dict.fromkeys(PRICES, 0.0)
    assert decide(policy, free, base=BADLY_OFF, slots=blind, prices=cheap)[2] == DEPTHWISE
    policy.begin(1)
    assert decide(policy, free, base=BADLY_OFF, slots=blind, prices=cheap)[2] == LIGHT


@pytest.mark.parametrize("tempo", TempoAction)
def test_it_germinates_at_its_tempo_and_only_while_there_is_time_for_it(tempo) -> None:
    policy, options = (
        Heuristic(replace(CONFIG, tempo=tempo), 1),
        {"base": BADLY_OFF, "slots": sensed(1.0, 3.0)},
    )
    assert act(policy, {"GERMINATE": [1]}, **options).tempo is tempo
    assert act(policy, {"GERMINATE": [1]}, in_time=[tempo], **options).op is LifecycleOp.GERMINATE
    others = set(TempoAction) - {tempo}
    assert act(policy, {"GERMINATE": [1]}, in_time=others, **options).op is LifecycleOp.WAIT


def test_grafts_are_the_default() -> None:
    assert HeuristicConfig().tempo is TempoAction.INSTANT


def test_a_little_harm_may_be_forgiven() -> None:
    policy, either = Heuristic(replace(CONFIG, min_contribution=-0.02), 1), {"PRUNE": [0], "FOSSILIZE": [0]}
    for share, wanted in ((-0.019, "FOSSILIZE"), (-0.021, "PRUNE")):
        slots = ({"stage_holding": 1.0, "contribution": share, "contribution?": 1.0},)
        assert decide(policy, either, slots=slots)[0] == wanted


@pytest.mark.parametrize(
    ("contribution", "wanted"), [(0.01, "FOSSILIZE"), (0.004, "PRUNE"), (-0.02, "PRUNE")]
)
def test_what_contributes_stays(contribution, wanted) -> None:
    slots = ({"stage_holding": 1.0, "contribution": contribution, "contribution?": 1.0},)
    assert decide(Heuristic(CONFIG, 1), {"PRUNE": [0], "FOSSILIZE": [0]}, slots=slots) == (wanted, 0, 0)


def test_an_unmeasured_contribution_decides_nothing() -> None:
    slots = ({"stage_holding": 1.0, "contribution": 0.0, "contribution?": 0.0},)
    assert decide(Heuristic(CONFIG, 1), {"PRUNE": [0], "FOSSILIZE": [0]}, slots=slots)[0] == "WAIT"


def test_seeds_move_on_unless_they_fail() -> None:
    slot = {"stage_training": 1.0, "stage_age": 0.3, "improvement": 0.01}
    legal, failing = {"ADVANCE": [0], "PRUNE": [0]}, {"improvement": -0.03}
    assert decide(Heuristic(CONFIG, 1), legal, slots=(slot,))[0] == "ADVANCE"
    assert decide(Heuristic(CONFIG, 1), legal, slots=(slot | failing,))[0] == "PRUNE"
    assert decide(Heuristic(CONFIG, 1), legal, slots=(slot | failing | {"stage_age": 0.0},))[0] == "ADVANCE"


def test_a_real_episode_is_legal_and_grows() -> None:
    task = small_task("digits_impaired", epochs=14, steps=6)
    env = make_env(task, 4)
    policy = Heuristic(HeuristicConfig(min_contribution=0.0), 4)
    env.begin_round(0)
    for epoch in range(1, 15):
        env.train_epoch(epoch)
        env.validate(epoch)
        seen = env.sense(epoch)
        obs = batch_obs_to_features(stacked(env, seen))
        result = env.act(seen, policy.act(obs, None, seen.masks).actions.tolist())
        assert all(outcome.executed for outcome in result.outcomes)
    assert all(outcome.germinated for outcome in env.ledger.outcomes)
    assert any(outcome.fossilized for outcome in env.ledger.outcomes)


def test_bad_input() -> None:
    with pytest.raises(BlueprintError, match="noop"):
        HeuristicConfig(blueprints=("noop",))
    with pytest.raises(EsperError, match="plateau"):
        HeuristicConfig(plateau=-1.0)
    with pytest.raises(EsperError, match="max_rank"):
        HeuristicConfig(max_rank=math.nan)
    with pytest.raises(EsperError, match="1 envs, this policy was made for 2"):
        decide(Heuristic(CONFIG, 2), {})


@pytest.mark.parametrize(
    "beyond",
    [
        {"fail_drop": 0.31},
        {"fail_drop": -0.01},
        {"min_contribution": 0.31},
        {"min_contribution": -0.31},
        {"min_contribution": -math.inf},
    ],
)
def test_thresholds_that_no_feature_reaches_are_refused(beyond) -> None:
    with pytest.raises(EsperError, match=f"{next(iter(beyond))} is"):
        HeuristicConfig(**beyond)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_thresholds_are_in_raw_units_whatever_the_normalisers_are(monkeypatch, factor: float) -> None:
    """With other units in the feature table, features encoded by it lead to the same decisions."""
    for name in ("contribution", "improvement", "tap_ratio", "growth_score_relative", "price"):
        unit = factor * NORMALISERS[name].unit
        monkeypatch.setitem(NORMALISERS, name, replace(NORMALISERS[name], unit=unit))
    test_what_contributes_stays(0.006, "FOSSILIZE")
    test_what_contributes_stays(0.004, "PRUNE")
    test_it_buys_what_is_worth_most_after_its_price()
    test_growth_scores_count_in_the_choice_of_a_slot()
    test_seeds_move_on_unless_they_fail()
