"""Numbered decisions, heads, masks and illegal actions."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from esper.gym import GrowthVectorEnv, IllegalAction
from esper.gym.actions import FlatActions, HeadActions
from esper.leyline import HEAD_NAMES, RELEVANCE, LifecycleOp, TempoAction, blueprint_index
from esper.runtime.tasks import get_task_spec
from gym_helpers import SIZES, SMALL, RandomLegal

TASK = get_task_spec("digits_scale")  # five slots, four blueprints
WAIT = [0, 0, 2, 3, 2, 0, 0, 0]
SIMPLE = f"digits_shift:{SIZES}"


def heads(**choices: int) -> list[int]:
    """Choices of the heads; WAIT's where nothing is given."""
    return [choices.get(name, value) for name, value in zip(HEAD_NAMES, WAIT, strict=True)]


def test_plans_are_waiting_and_one_graft_for_each_slot_and_blueprint() -> None:
    flat = FlatActions(TASK, "plans")
    assert flat.space.n == 1 + 5 * 4
    decoded = flat.decode(np.arange(21), 21)
    assert decoded[0, HEAD_NAMES.index("op")] == LifecycleOp.WAIT
    for number, (slot, blueprint) in enumerate(product(range(5), TASK.blueprints), start=1):
        action = dict(zip(HEAD_NAMES, decoded[number].tolist(), strict=True))
        assert action["op"] == LifecycleOp.GERMINATE
        assert (action["slot"], action["blueprint"]) == (slot, blueprint_index(blueprint))
        assert action["tempo"] == TempoAction.INSTANT
        assert flat.names[number].startswith(f"GERMINATE {TASK.slots[slot]} {blueprint} ")


def test_all_has_every_combination_that_matters_once() -> None:
    flat = FlatActions(TASK, "all")
    assert flat.space.n == 1 + 5 * (16 * 4 + 262)
    sizes = {"slot": 5, "blueprint": 4, "style": 4, "tempo": 4}
    sizes |= {"alpha_target": 3, "alpha_speed": 4, "alpha_curve": 5, "op": 1}
    expected = {
        op: np.prod(
            [sizes[name] for name, relevant in zip(HEAD_NAMES, RELEVANCE[op], strict=True) if relevant]
        )
        for op in LifecycleOp
    }
    numbers, counts = np.unique(flat.table[:, -1], return_counts=True)
    assert dict(zip(numbers.tolist(), counts.tolist(), strict=True)) == expected
    assert len({tuple(row) for row in flat.table}) == len(flat.names) == len(set(flat.names))


@pytest.mark.parametrize("kind", ["plans", "all", "heads"])
def test_encode_is_the_inverse_of_decode(kind: str) -> None:
    space = HeadActions(TASK) if kind == "heads" else FlatActions(TASK, kind)
    space.space.seed(0)
    actions = np.stack([space.space.sample() for _ in range(200)])
    native = space.decode(actions, 200)
    assert np.array_equal(space.decode(space.encode(native), 200), native)
    if kind != "heads":
        assert np.array_equal(space.encode(native), actions)


def legal_by_hand(env: GrowthVectorEnv, row: int, native: list[int]) -> bool:
    """Legality from the native masks, head by head."""
    masks = env.populations[0]._seen.masks
    op = native[-1]
    checks = [bool(masks.op[row, op]), bool(masks.slot_by_op[row, op, native[0]])]
    for head, name in enumerate(HEAD_NAMES):
        if RELEVANCE[op][head] and name not in ("op", "slot"):
            checks.append(bool(getattr(masks, name)[row, native[head]]))
    return all(checks)


def test_masks_allow_exactly_what_the_native_masks_allow() -> None:
    env = GrowthVectorEnv(SIMPLE, 8, granularity="all")
    choose = RandomLegal(0)
    env.reset(seed=0)
    seen = set()
    for _ in range(env.task.episode_length):
        masks = env.action_masks()
        for row in range(0, 8, 3):
            expected = [legal_by_hand(env, row, native) for native in env.actions.table.tolist()]
            assert masks[row].tolist() == expected
        chosen = choose(masks)
        seen |= set(env.actions.table[chosen, -1].tolist())
        *_, info = env.step(chosen)
        assert not info["illegal"].any()
    assert len(seen) > 2, "the episode was no more than waiting"


def test_masks_of_heads_cover_what_is_legal_and_leave_no_head_empty() -> None:
    env = GrowthVectorEnv(SIMPLE, 8, actions="heads")
    flat = GrowthVectorEnv(SIMPLE, 8, granularity="all")
    env.reset(seed=0)
    flat.reset(seed=0)
    sizes = env.single_action_space.nvec
    assert sizes.tolist() == [3, 3, 4, 4, 3, 4, 5, 6]
    choose = RandomLegal(0)
    for _ in range(env.task.episode_length):
        legal, masks = flat.action_masks(), env.action_masks()
        assert masks.shape == (8, sizes.sum())
        parts = np.split(masks, np.cumsum(sizes)[:-1], axis=1)
        assert all(part.any(1).all() for part in parts)
        for row in range(8):
            for choices in env.actions.encode(flat.actions.table[legal[row]]):
                relevant = RELEVANCE[choices[-1]]
                assert all(part[row, i] for part, i, r in zip(parts, choices, relevant, strict=True) if r)
        chosen = choose(legal)
        flat.step(chosen)
        env.step(env.actions.encode(flat.actions.table[chosen]))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"op": 5}, "env 1: op ADVANCE is illegal now; allowed: WAIT, GERMINATE, "),
        (
            {"op": 1, "slot": 0, "blueprint": 1},
            "env 1: slot r0c0 is illegal for GERMINATE now; allowed: r0c1, r1c0",
        ),
        (
            {"op": 1, "slot": 1, "tempo": 2},
            "env 1: tempo SLOW is illegal for GERMINATE now; allowed: INSTANT",
        ),
    ],
)
def test_an_illegal_action_names_head_and_choice(choices, message: str) -> None:
    env = GrowthVectorEnv(SIMPLE, 8, actions="heads")
    lenient = GrowthVectorEnv(SIMPLE, 8, actions="heads", on_illegal="wait")
    grow = [heads(op=1, slot=0, blueprint=1)] * 8
    for each in (env, lenient):
        each.reset(seed=0)
        each.step(np.array(grow))
    actions = np.array([heads(), heads(**choices), *[heads()] * 6])
    before = env.action_masks()
    with pytest.raises(IllegalAction, match=message):
        env.step(actions)
    assert np.array_equal(env.action_masks(), before), "a refused step changes nothing"
    obs, *_ = env.step(np.array([heads()] * 8))
    waited, *_, info = lenient.step(actions)
    assert np.array_equal(waited, obs), "replaced by WAIT"
    assert info["illegal"].tolist() == [False, True] + [False] * 6


def test_a_numbered_action_is_refused_by_name() -> None:
    env = GrowthVectorEnv(SMALL, 8)
    env.reset(seed=0)
    env.step(np.ones(8, int))
    with pytest.raises(IllegalAction, match="env 0: slot r0c0 is illegal for GERMINATE now"):
        env.step(np.ones(8, int))


@pytest.mark.parametrize("on_illegal", ["error", "wait"])
@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.array([0, 0, 10, 0, 0, 0, 0, 0]), "env 2: action is 10; allowed: 0 to 9"),
        (np.array([0, 0, -1, 0, 0, 0, 0, 0]), "env 2: action is -1"),
        (np.zeros(7, int), r"shape \(7,\), must be integers of shape \(8,\)"),
        (np.zeros(8), "float64"),
    ],
)
def test_actions_outside_of_the_space_are_always_errors(on_illegal: str, actions, message: str) -> None:
    env = GrowthVectorEnv(SMALL, 8, on_illegal=on_illegal)
    env.reset(seed=0)
    with pytest.raises(IllegalAction, match=message):
        env.step(actions)


def test_a_head_outside_of_its_space() -> None:
    env = GrowthVectorEnv(SMALL, 8, actions="heads")
    env.reset(seed=0)
    with pytest.raises(IllegalAction, match="env 0, head slot: choice is 3; allowed: 0 to 2"):
        env.step(np.array([heads(slot=3)] * 8))
