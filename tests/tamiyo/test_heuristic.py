"""Each rule of the heuristic on a made-up observation, and a real episode through the environment."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from env_helpers import make_env, small_task
from esper.leyline import (
    ActionMasks,
    BlueprintError,
    EsperError,
    FactoredAction,
    LifecycleOp,
    PolicyObservation,
    TempoAction,
    blueprint_index,
)
from esper.tamiyo.features import BASE_DIM, SLOT_DIM, batch_obs_to_features, stack_inputs
from esper.tamiyo.heuristic import BASE_COLUMN, NORMALISERS, SLOT_COLUMN, Heuristic, HeuristicConfig

CONFIG = HeuristicConfig(
    blueprints=("conv_light", "depthwise"),
    min_progress=0.1,
    max_progress=0.6,
    max_rank=0.5,
    rank_step=0.8,
    min_tap_ratio=1.2,
    strong_tap_ratio=1.25,
    plateau_epochs=3,
    growth_weight=0.5,
    depth_price=1.0,
    max_seeds=2,
    max_live=1,
    fail_age=0.15,
    fail_drop=2.0,
    min_contribution=0.5,
)
LIGHT, DEPTHWISE = (blueprint_index(name) for name in CONFIG.blueprints)
BADLY_OFF = {"progress": 0.4}
"""A network in which seeds may be planted."""


def taps(ratio: float) -> float:
    """A tap ratio as the feature table scales it."""
    return math.log(ratio) / 4


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
    in_time: Iterable[TempoAction] = tuple(TempoAction),
) -> FactoredAction:
    """One env, three slots; `slots` describes the first ones, `legal` maps operations to the slots where they
    are allowed, `in_time` are the tempos at which a seed can still become permanent."""
    obs = PolicyObservation(
        torch.zeros(1, BASE_DIM), torch.zeros(1, 3, SLOT_DIM), torch.tensor([[LIGHT, -1, -1]])
    )
    obs.slots[0, :, SLOT_COLUMN["depth"]] = torch.tensor([0.0, 0.5, 1.0])
    for name, value in (base or {}).items():
        obs.base[0, BASE_COLUMN[name]] = value
    for slot, values in enumerate(slots):
        for name, value in values.items():
            obs.slots[0, slot, SLOT_COLUMN[name.rstrip("?")] + name.endswith("?")] = value
    by_op = torch.zeros(1, 6, 3, dtype=torch.bool)
    by_op[:, LifecycleOp.WAIT] = True
    for op, places in legal.items():
        by_op[0, LifecycleOp[op], places] = True
    masks = ActionMasks(
        by_op.any(2),
        by_op,
        torch.ones(1, 15, dtype=torch.bool),
        *(torch.ones(1, n, dtype=torch.bool) for n in (4, 4, 3, 4, 5)),
    )
    masks.tempo[0] = torch.tensor([tempo in tuple(in_time) for tempo in TempoAction])
    return FactoredAction.from_indices(*policy.act(obs, None, masks).actions[0].tolist())


def sensed(*ratios: float) -> tuple[dict[str, float], ...]:
    return tuple({"tap_ratio": taps(ratio), "tap_ratio?": 1.0} for ratio in ratios)


def test_it_plants_where_spatial_reach_is_missing() -> None:
    free = {"GERMINATE": [0, 1, 2]}
    blind = sensed(1.1, 2.0, 1.0)
    assert decide(Heuristic(CONFIG, 1), free, base=BADLY_OFF, slots=blind) == ("GERMINATE", 1, LIGHT)
    for change in ({"progress": 0.05}, {"progress": 0.7}):
        assert decide(Heuristic(CONFIG, 1), free, base=BADLY_OFF | change, slots=blind)[0] == "WAIT", change
    assert decide(Heuristic(CONFIG, 1), {"GERMINATE": [0, 2]}, base=BADLY_OFF, slots=blind)[0] == "WAIT"
    assert decide(Heuristic(CONFIG, 1), free, base=BADLY_OFF, slots=sensed(1.1, 1.19, 1.0))[0] == "WAIT"
    unmeasured = tuple(slot | {"tap_ratio?": 0.0} for slot in blind)
    assert decide(Heuristic(CONFIG, 1), free, base=BADLY_OFF, slots=unmeasured)[0] == "WAIT"


def test_a_network_that_can_express_enough_is_left_alone() -> None:
    free = {"GERMINATE": [0, 1, 2]}
    for ranks, wanted in (((0.6, 0.9, 0.51), "WAIT"), ((0.6, 0.9, 0.49), "GERMINATE")):
        slots = tuple(
            slot | {"feature_rank": rank} for slot, rank in zip(sensed(1.1, 2.0, 1.0), ranks, strict=True)
        )
        assert decide(Heuristic(CONFIG, 1), free, base=BADLY_OFF, slots=slots)[0] == wanted


def test_a_second_seed_needs_a_lower_rank() -> None:
    for rank, wanted in ((0.39, "GERMINATE"), (0.41, "WAIT")):
        slots = (
            {"stage_fossilized": 1.0, "feature_rank": rank},
            *(s | {"feature_rank": 1.0} for s in sensed(2.0)),
        )
        slots = (*slots, {"feature_rank": 1.0})
        assert decide(Heuristic(CONFIG, 1), {"GERMINATE": [1]}, base=BADLY_OFF, slots=slots)[0] == wanted


def test_growth_scores_count_in_the_choice_of_a_slot() -> None:
    free = {"GERMINATE": [0, 1]}
    slots = [dict(slot) for slot in sensed(1.3, 1.5)]
    assert decide(Heuristic(CONFIG, 1), free, base=BADLY_OFF, slots=tuple(slots))[1] == 0
    slots[1]["growth_score"] = math.log(2.1) / 4  # ln 1.5 + ½ ln 2.1 − ½ > ln 1.3
    assert decide(Heuristic(CONFIG, 1), free, base=BADLY_OFF, slots=tuple(slots))[1] == 1


def test_a_slot_in_need_gets_the_strongest_blueprint() -> None:
    free = {"GERMINATE": [1]}
    for ratio, wanted in ((1.26, LIGHT), (1.22, DEPTHWISE)):
        assert decide(Heuristic(CONFIG, 1), free, base=BADLY_OFF, slots=sensed(1.0, ratio, 1.0))[2] == wanted


def test_a_later_slot_must_be_worse_off_to_be_chosen() -> None:
    free = {"GERMINATE": [0, 1, 2]}
    assert decide(Heuristic(CONFIG, 1), free, base=BADLY_OFF, slots=sensed(1.3, 1.5, 1.0))[1] == 0
    assert decide(Heuristic(CONFIG, 1), free, base=BADLY_OFF, slots=sensed(1.3, 2.2, 1.0))[1] == 1


def test_it_plants_anywhere_when_the_host_has_settled_and_stands_still() -> None:
    free, still = {"GERMINATE": [0, 1, 2]}, BADLY_OFF | {"host_settled": 1.0, "plateau": 0.3}
    assert decide(Heuristic(CONFIG, 1), free, base=still) == ("GERMINATE", 0, DEPTHWISE)
    for change in ({"host_settled": 0.0}, {"plateau": 0.2}):
        assert decide(Heuristic(CONFIG, 1), free, base=still | change)[0] == "WAIT", change


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
    assert decide(policy, free, base=BADLY_OFF, slots=blind)[2] == DEPTHWISE
    policy.begin(1)
    assert decide(policy, free, base=BADLY_OFF, slots=blind)[2] == LIGHT


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
    policy, either = Heuristic(replace(CONFIG, min_contribution=-2.0), 1), {"PRUNE": [0], "FOSSILIZE": [0]}
    for points, wanted in ((-1.9, "FOSSILIZE"), (-2.1, "PRUNE")):
        encoded = points / NORMALISERS["contribution"].unit
        slots = ({"stage_holding": 1.0, "contribution": encoded, "contribution?": 1.0},)
        assert decide(policy, either, slots=slots)[0] == wanted


@pytest.mark.parametrize(("contribution", "wanted"), [(0.1, "FOSSILIZE"), (0.04, "PRUNE"), (-0.2, "PRUNE")])
def test_what_contributes_stays(contribution, wanted) -> None:
    slots = ({"stage_holding": 1.0, "contribution": contribution, "contribution?": 1.0},)
    assert decide(Heuristic(CONFIG, 1), {"PRUNE": [0], "FOSSILIZE": [0]}, slots=slots) == (wanted, 0, 0)


def test_an_unmeasured_contribution_decides_nothing() -> None:
    slots = ({"stage_holding": 1.0, "contribution": 0.0, "contribution?": 0.0},)
    assert decide(Heuristic(CONFIG, 1), {"PRUNE": [0], "FOSSILIZE": [0]}, slots=slots)[0] == "WAIT"


def test_seeds_move_on_unless_they_fail() -> None:
    slot = {"stage_training": 1.0, "stage_age": 0.3, "improvement": 0.1}
    legal, failing = {"ADVANCE": [0], "PRUNE": [0]}, {"improvement": -0.3}
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
        inputs = stack_inputs(
            seen.signals,
            seen.table,
            seen.sensors,
            depths=env.envs[0].model.model.slot_depths,
            last_op=[e.last_op for e in env.envs],
            last_success=[e.last_success for e in env.envs],
        )
        result = env.act(seen, policy.act(batch_obs_to_features(inputs), None, seen.masks).actions.tolist())
        assert all(outcome.executed for outcome in result.outcomes)
    assert all(outcome.germinated for outcome in env.ledger.outcomes)
    assert any(outcome.fossilized for outcome in env.ledger.outcomes)


def test_bad_input() -> None:
    with pytest.raises(BlueprintError, match="noop"):
        HeuristicConfig(blueprints=("noop",))
    with pytest.raises(EsperError, match="plateau_epochs"):
        HeuristicConfig(plateau_epochs=-1)
    with pytest.raises(EsperError, match="max_rank"):
        HeuristicConfig(max_rank=math.nan)
    with pytest.raises(EsperError, match="1 envs, this policy was made for 2"):
        decide(Heuristic(CONFIG, 2), {})


@pytest.mark.parametrize(
    "beyond",
    [
        {"plateau_epochs": 11},
        {"fail_drop": 31.0},
        {"fail_drop": -1.0},
        {"min_contribution": 31.0},
        {"min_contribution": -31.0},
        {"min_contribution": -math.inf},
    ],
)
def test_thresholds_that_no_feature_reaches_are_refused(beyond) -> None:
    with pytest.raises(EsperError, match=f"{next(iter(beyond))} is"):
        HeuristicConfig(**beyond)


def test_thresholds_are_in_raw_units_whatever_the_normalisers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other units in the feature table, features encoded by it lead to the same decisions."""
    kept = {"stage_holding": 1.0, "contribution": 1.1, "contribution?": 1.0}
    pruned = kept | {"contribution": 0.9}
    reach = {"tap_ratio": math.log(2.0), "tap_ratio?": 1.0, "growth_score": math.log(1.5)}
    for factor in (1.0, 3.0):
        table = {
            name: replace(normaliser, unit=factor * normaliser.unit)
            for name, normaliser in NORMALISERS.items()
        }
        monkeypatch.setattr("esper.tamiyo.heuristic.NORMALISERS", table)

        def encoded(values: dict[str, float], table=table) -> dict[str, float]:
            return {name: v / table[name].unit if name in table else v for name, v in values.items()}

        policy = Heuristic(replace(CONFIG, min_contribution=1.0), 1)
        either = {"FOSSILIZE": [0], "PRUNE": [0]}
        stage = {"stage_holding": 1.0}
        assert decide(policy, either, slots=(encoded(kept) | stage,))[0] == "FOSSILIZE"
        assert decide(policy, either, slots=(encoded(pruned) | stage,))[0] == "PRUNE"
        slots = ({}, encoded(reach) | {"tap_ratio?": 1.0})
        assert decide(policy, {"GERMINATE": [1]}, base=BADLY_OFF, slots=slots)[0] == "GERMINATE"
