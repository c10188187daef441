"""Episodes that end at different times beside each other: each outcome once, and the one that the network
would have had among equals."""

from __future__ import annotations

import pytest
import torch

from env_helpers import RandomValid, make_env, play_on, small_task, wait
from esper.leyline import OP_WAIT

LENGTHS = (2, 6, 4, 8, 3)


def play(lengths, *, population: int = 8, envs: int = 5, task=None):
    """A round of random valid actions in which env i ends after `lengths[i]` epochs."""
    env = make_env(task or small_task("digits_impaired", final_val_size=96), envs, population=population)
    env.begin_round(0)
    for member, length in zip(env.envs, lengths, strict=True):
        member.max_epochs = length
    play_on(env, RandomValid(3))
    return env


@pytest.fixture(scope="module")
def mixed():
    return play(LENGTHS)


def test_every_outcome_is_written_once_at_its_own_end(mixed) -> None:
    assert mixed.done
    assert [(o.env_id, o.epochs) for o in mixed.ledger.outcomes] == list(enumerate(LENGTHS))


@pytest.mark.parametrize("length", sorted(set(LENGTHS)))
def test_an_outcome_is_that_of_a_round_in_which_all_end_then(length, mixed) -> None:
    equals = play([length] * 5).ledger.outcomes
    for env_id, own in enumerate(LENGTHS):
        if own == length:
            assert mixed.ledger.outcomes[env_id] == equals[env_id]


def test_populations_of_which_all_episodes_are_over_rest() -> None:
    """Sixteen envs in two populations; the second one ends first."""
    env = play([6] * 8 + [2] * 8, envs=16)
    assert [o.epochs for o in env.ledger.outcomes] == [6] * 8 + [2] * 8
    first, second = (group.optimizer.groups["host"]["host"].bias[0, 0].item() for group in env.groups)
    steps = env.task.steps_per_epoch
    beta = env.task.optimizer.momentum
    assert first == pytest.approx(1 - beta ** (6 * steps), rel=1e-4)
    assert second == pytest.approx(1 - beta ** (2 * steps), rel=1e-4)


def test_an_env_whose_episode_is_over_has_an_empty_row() -> None:
    env = make_env(small_task("digits_impaired"), 3, population=8)
    env.begin_round(0)
    env.envs[1].max_epochs = 1
    env.step(1, wait)
    env.train_epoch(2)
    env.validate(2)
    seen = env.sense(2)
    assert seen.rows == [0, 2]
    assert [signals.time.epoch for signals in seen.signals] == [2, 2]
    obs, masks = env.observe(seen)
    assert len(obs.base) == len(masks.op) == 3
    assert not obs.base[1].any()
    assert obs.exists.tolist() == [[True] * 3, [False] * 3, [True] * 3]
    assert obs.blueprints[1].tolist() == [-1] * 3
    only_wait = torch.zeros(6, dtype=torch.bool)
    only_wait[OP_WAIT] = True
    assert torch.equal(masks.op[1], only_wait)
    assert not masks.slot_by_op[1].any()
    assert torch.equal(masks.op[[0, 2]], seen.masks.op)


def test_the_last_epoch_of_each_env_is_judged_on_more_images() -> None:
    env = make_env(small_task("digits_impaired", final_val_size=96), 2, population=8)
    env.begin_round(0)
    env.envs[0].max_epochs = 1
    env.step(1, wait)
    assert [member.val_total for member in env.envs] == [96, 48]
    assert [member.done for member in env.envs] == [True, False]


def test_nothing_can_be_planted_that_does_not_end_in_time() -> None:
    env = make_env(small_task("digits_impaired", epochs=20), 3, population=8)
    env.begin_round(0)
    for member, length in zip(env.envs, (1, 2, 20), strict=True):
        member.max_epochs = length
    env.train_epoch(1)
    env.validate(1)
    masks = env.sense(1).masks
    assert masks.tempo.tolist() == [[False] * 4, [False, False, False, True], [True] * 4]
