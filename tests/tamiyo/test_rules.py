"""Periodic and plateau: when they grow, where, and that they go on where they stopped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esper.leyline import (
    OP_ADVANCE,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_WAIT,
    ActionMasks,
    EsperError,
    PolicyObservation,
    TempoAction,
    blueprint_id,
    blueprint_ids,
)
from esper.tamiyo.columns import first_columns
from esper.tamiyo.features import BASE, BASE_DIM, QUOTE_DIM, SLOT, SLOT_DIM
from esper.tamiyo.masks import SlotStates, blueprint_mask, compute_action_masks
from esper.tamiyo.rules import GrowthRule, Periodic, Plateau
from esper.tamiyo.scripted import BLUEPRINT_HEAD, OP_HEAD, SLOT_HEAD

COLUMN = first_columns(BASE)


def observed(progress: float = 0.0, plateau: int = 0, epoch: int = 1) -> PolicyObservation:
    base = torch.zeros(1, BASE_DIM)
    base[0, COLUMN["progress"]], base[0, COLUMN["plateau_so_far"]] = progress, plateau / epoch
    slots = torch.zeros(1, 3, SLOT_DIM)
    slots[0, :, first_columns(SLOT)["depth"]] = torch.tensor([0.0, 1.0, 0.5])
    quotes = torch.zeros(1, 3, len(blueprint_ids()), QUOTE_DIM)
    return PolicyObservation(base, slots, quotes, torch.full((1, 3), -1))


def masks(*legal: tuple[int, int], blueprints: tuple[str, ...] = ("norm", "depthwise")) -> ActionMasks:
    """Legal (op, slot) pairs, of three slots."""
    flags = np.zeros((1, 3, 6), bool)
    flags[..., OP_WAIT] = True
    for op, slot in legal:
        flags[0, slot, op] = True
    none = np.zeros((1, 3), bool)
    return compute_action_masks(
        SlotStates(flags, none, none),
        blueprint_mask(blueprints),
        epochs_left=100,
        epochs_needed=[1] * len(TempoAction),
    )


FREE = masks((OP_GERMINATE, 0), (OP_GERMINATE, 1), (OP_GERMINATE, 2))


def acts(policy: GrowthRule, obs: PolicyObservation, legal: ActionMasks = FREE) -> list[int]:
    return policy.act(obs, None, legal).actions[0].tolist()


def test_periodic_grows_after_each_part_but_the_last() -> None:
    policy = Periodic(1, parts=4)
    grown = [epoch for epoch in range(1, 13) if acts(policy, observed(epoch / 12))[OP_HEAD] == OP_GERMINATE]
    assert grown == [3, 6, 9]


def test_periodic_waits_where_the_horizon_is_unknown() -> None:
    policy = Periodic(1)
    assert all(acts(policy, observed(0.0))[OP_HEAD] == OP_WAIT for _ in range(20))


def test_the_last_free_slot_and_the_first_offered_blueprint_are_taken() -> None:
    action = acts(Periodic(1), observed(0.5))
    assert action[SLOT_HEAD] == 1
    assert blueprint_id(action[BLUEPRINT_HEAD]) == "depthwise"


def test_plateau_waits_for_patience_before_and_after_each_seed() -> None:
    policy = Plateau(1, patience=2, max_seeds=2)
    ops = [acts(policy, observed(plateau=epoch, epoch=epoch + 1))[OP_HEAD] for epoch in range(8)]
    assert [i for i, op in enumerate(ops) if op == OP_GERMINATE] == [2, 4]


def test_a_gain_ends_the_plateau() -> None:
    policy = Plateau(1, patience=2)
    seen = [observed(plateau=n, epoch=epoch) for epoch, n in enumerate((0, 1, 0, 1, 0, 1), 1)]
    assert {acts(policy, obs)[OP_HEAD] for obs in seen} == {OP_WAIT}


@pytest.mark.parametrize("policy", [Periodic(1), Plateau(1)])
def test_seeds_become_permanent_and_advance_as_gates_open(policy: GrowthRule) -> None:
    legal = masks((OP_FOSSILIZE, 2), (OP_ADVANCE, 0))
    action = acts(policy, observed(), legal)
    assert (action[OP_HEAD], action[SLOT_HEAD]) == (OP_FOSSILIZE, 2)
    action = acts(policy, observed(), masks((OP_ADVANCE, 0)))
    assert (action[OP_HEAD], action[SLOT_HEAD]) == (OP_ADVANCE, 0)


@pytest.mark.parametrize("make", [lambda: Periodic(1), lambda: Plateau(1, patience=2)])
def test_a_rule_goes_on_where_it_stopped(make) -> None:
    whole, stopped = make(), make()
    for epoch in range(4):
        obs = observed(epoch / 8, epoch, epoch + 1)
        assert acts(whole, obs) == acts(stopped, obs)
    resumed = make()
    resumed.load_state(stopped.state())
    for epoch in range(4, 9):
        obs = observed(epoch / 8, epoch, epoch + 1)
        assert acts(whole, obs) == acts(resumed, obs)


def test_bad_settings_and_other_numbers_of_envs_are_refused() -> None:
    for make, words in (
        (lambda: Plateau(1, patience=0), "patience is 0"),
        (lambda: Periodic(1, parts=1), "parts is 1"),
        (lambda: Plateau(1, blueprints=["noop"]), "cannot be offered"),
        (lambda: acts(Plateau(2), observed()), "1 envs, this policy was made for 2"),
    ):
        with pytest.raises(EsperError, match=words):
            make()
