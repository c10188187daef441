"""Policies without learning, in real environments: legal, independent of the number of envs, and on
schedule."""

from __future__ import annotations

import pytest
import torch

from env_helpers import make_env, small_task
from esper.leyline import (
    HEAD_NAMES,
    IRRELEVANT_VALUES,
    OP_GERMINATE,
    RELEVANCE,
    BlueprintError,
    EsperError,
    blueprint_index,
)
from esper.tamiyo import AlwaysWait, FixedSchedule, Planting, RandomValid

SCHEDULE = [Planting(2, 0, "conv_light"), Planting(2, 1, "conv_light"), Planting(4, 2, "conv_small")]


def play(policy, envs: int, *, epochs: int = 12):
    env = make_env(small_task("digits_impaired", epochs=epochs), envs)
    env.begin_round(0)
    actions = []
    for epoch in range(1, epochs + 1):
        env.train_epoch(epoch)
        env.validate(epoch)
        seen = env.sense(epoch)
        step = policy.act(None, None, seen.masks)
        for outcome in env.act(seen, step.actions.tolist()).outcomes:
            assert outcome.executed
        actions.append(step.actions)
    return env, torch.stack(actions, 1)  # [E, T, 8]


def test_always_wait() -> None:
    env, actions = play(AlwaysWait(), 2, epochs=4)
    assert actions.eq(torch.tensor([int(v) for v in IRRELEVANT_VALUES])).all()
    assert all(o.germinated == 0 for o in env.ledger.outcomes)


def test_random_is_legal_varied_and_independent_of_the_number_of_envs() -> None:
    _, eight = play(RandomValid(3, range(8)), 8)
    _, two = play(RandomValid(3, range(2)), 2)
    assert torch.equal(eight[:2], two)
    assert len(set(eight[..., -1].flatten().tolist())) >= 4
    for action in eight.flatten(0, 1).tolist():
        for head in range(len(HEAD_NAMES)):
            if not RELEVANCE[action[-1]][head]:
                assert action[head] == int(IRRELEVANT_VALUES[head])
    with pytest.raises(EsperError, match="3 envs, this policy was made for 2"):
        play(RandomValid(3, range(2)), 3)


def test_a_schedule_is_kept_one_action_at_a_time() -> None:
    env, actions = play(FixedSchedule([SCHEDULE] * 3), 3, epochs=16)
    planted = [(t + 1, int(a[0]), int(a[1])) for t, a in enumerate(actions[1]) if a[-1] == OP_GERMINATE]
    light, small = blueprint_index("conv_light"), blueprint_index("conv_small")
    # Two are due in epoch 2: the second waits an epoch, the third keeps its own.
    assert planted == [(2, 0, light), (3, 1, light), (4, 2, small)]
    assert all(o.fossilized == 3 for o in env.ledger.outcomes)
    assert torch.equal(actions[0], actions[2])


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (Planting(1, 0, "conv_huge"), BlueprintError),
        (Planting(0, 0, "norm"), EsperError),
        (Planting(1, -1, "norm"), EsperError),
    ],
)
def test_bad_schedules(bad, error) -> None:
    with pytest.raises(error, match="schedule"):
        FixedSchedule([[bad]])
