"""The native environment and the wrapped one give the same episodes, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

from esper.gym import GrowthEnv, GrowthVectorEnv
from esper.leyline import EsperError, RewardConfig
from esper.nissa import TelemetryHub
from esper.proof.episodes import play
from esper.runtime.tasks import get_task_spec
from esper.simic.rewards import RewardEngine
from esper.simic.training.batch_ops import batch_signals_to_features
from esper.simic.training.config import TrainingConfig
from esper.simic.training.evaluation import HELD_OUT
from esper.simic.training.vectorized import build_env
from esper.tamiyo import AlwaysWait, RandomValid
from esper.tamiyo.features import BASE_DIM
from gym_helpers import SIZES, SMALL

SEED, ROUNDS = 5, 2


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("digits_shift", {"actions": "heads", "reward": "shaped", "gamma": 0.9}),
        ("digits_shift", {"granularity": "all", "twins": 4}),
        ("digits_mlp", {"granularity": "all", "reward": "minimal"}),
    ],
    ids=["heads", "twins", "mlp"],
)
def test_episodes_of_a_training_run(name: str, settings) -> None:
    """Two rounds of two populations as the trainer builds them, under random valid actions of all kinds."""
    task = get_task_spec(f"{name}:{SIZES}")
    env = GrowthVectorEnv(task, 16, autoreset_mode="SameStep", **settings)
    mode, gamma, twins = (
        settings.get(k, d) for k, d in (("reward", "sparse"), ("gamma", 0.99), ("twins", 1))
    )
    rewards = RewardEngine(RewardConfig(mode=mode), task.objective, gamma=gamma, num_envs=16)
    config = TrainingConfig(
        task="digits_mlp", envs=16, seed=SEED, twins=twins
    )  # build_env takes the task itself
    native = build_env(config, task, TelemetryHub(), ["cpu"], rewards)
    policy = RandomValid(0, range(16))
    obs, _ = env.reset(seed=SEED)
    for episode in range(ROUNDS):
        native.begin_round(episode)
        policy.begin(16)
        for member in native.envs:
            rewards.begin_episode(member.env_idx)
        for epoch in range(1, task.episode_length + 1):
            native.train_epoch(epoch)
            native.validate(epoch)
            seen = native.sense(epoch)
            features = batch_signals_to_features(seen.signals, seen.table, native.envs, "cpu")
            assert np.array_equal(obs[:, :BASE_DIM], features.base.numpy())
            assert np.array_equal(obs, env.layout.flatten(features))
            assert np.array_equal(env.slot_masks(), seen.masks.slot_by_op.numpy())
            actions = policy.act(features, None, seen.masks).actions
            result = native.act(seen, actions.tolist())
            obs, paid, ends, _, info = env.step(env.actions.encode(actions.numpy()))
            assert paid.tolist() == result.rewards
            assert ends.all() == (epoch == task.episode_length)
        outcomes = native.ledger.outcomes
        final = info["final_info"]
        assert final["objective"]["J"].tolist() == [o.objective for o in outcomes]
        assert final["outcome"]["return"].tolist() == [o.total_reward for o in outcomes]
        assert final["outcome"]["germinated"].tolist() == [o.germinated for o in outcomes]
        assert sum(o.germinated for o in outcomes) > 0


def test_held_out_networks_are_those_of_the_proof() -> None:
    task = get_task_spec(SMALL)
    played = play(task, lambda _: AlwaysWait(), root_seed=HELD_OUT, networks=range(8, 16))
    env = GrowthVectorEnv(SMALL, 8, held_out=True, first_network=8)
    for seed in (None, 3):
        env.reset(seed=seed)
        for _ in range(task.episode_length):
            *_, info = env.step(np.zeros(8, int))
        assert info["objective"]["J"].tolist() == [p.outcome.objective for p in played]
        assert info["outcome"]["network"].tolist() == [p.network for p in played]


def test_the_single_view_is_env_0() -> None:
    single, many = GrowthEnv(SMALL), GrowthVectorEnv(SMALL, 8)
    assert np.array_equal(single.reset(seed=1)[0], many.reset(seed=1)[0][0])
    action = np.zeros(8, int)
    action[0] = 2
    obs, reward, *_, info = single.step(2)
    their_obs, their_rewards, *_, their_infos = many.step(action)
    assert np.array_equal(obs, their_obs[0])
    assert reward == their_rewards[0]
    assert info["events"] == their_infos["events"][0]
    assert [event["kind"] for event in info["events"]] == ["germinated"]
    assert np.array_equal(single.action_masks(), many.action_masks()[0])


def test_a_rollback_is_paid_where_it_happens() -> None:
    """A network that diverged can only wait. That step pays the penalty, and the episode goes on."""
    env = GrowthVectorEnv(SMALL, 8)
    env.reset(seed=0)
    env.step(np.zeros(8, int))
    network = env.populations[0].env.envs[1].model
    with torch.no_grad():
        for parameter in network.model.host.parameters():
            parameter[network.row] = torch.nan
    env.step(np.zeros(8, int))
    assert env.action_masks()[1].tolist() == [True] + [False] * (len(env.actions.names) - 1)
    assert env.action_masks()[0].sum() > 1
    with pytest.raises(ValueError, match="env 1: op GERMINATE is illegal now; allowed: WAIT"):
        env.step(np.array([0, 1, 0, 0, 0, 0, 0, 0]))
    obs, rewards, ends, _, info = env.step(np.zeros(8, int))
    assert info["rolled_back"].tolist() == [False, True] + [False] * 6
    assert rewards.tolist() == [0.0, -env.task.objective.rollback_price] + [0.0] * 6
    assert not ends.any()
    assert obs in env.observation_space
    env.step(np.zeros(8, int))
    *_, info = env.step(np.zeros(8, int))
    assert info["objective"]["rollback"][1] == -env.task.objective.rollback_price
    assert info["outcome"]["return"] == pytest.approx(info["objective"]["J"], abs=1e-12)


FLOPS = (
    "digits_flops:steps_per_epoch=2,batch_size=16,val_size=48,final_val_size=64,population=8,budget_steps=10"
)


def test_episodes_that_end_at_different_times() -> None:
    """Two populations of a task with a budget of FLOPs; networks end when their own budget is spent."""
    task = get_task_spec(FLOPS)
    env = GrowthVectorEnv(task, 12, actions="heads", reward="shaped", gamma=0.9)
    assert env.autoreset_mode is AutoresetMode.DISABLED
    rewards = RewardEngine(RewardConfig(mode="shaped"), task.objective, gamma=0.9, num_envs=12)
    native = build_env(
        TrainingConfig(task="digits_mlp", envs=12, seed=SEED), task, TelemetryHub(), ["cpu"], rewards
    )
    policy = RandomValid(0, range(12))
    obs, _ = env.reset(seed=SEED)
    native.begin_round(0)
    policy.begin(12)
    for member in native.envs:
        rewards.begin_episode(member.env_idx)
    lengths, finals = {}, {}
    for epoch in range(1, task.episode_length + 1):
        if native.done:
            break
        native.train_epoch(epoch)
        native.validate(epoch)
        seen = native.sense(epoch)
        features, masks = native.observe(seen)
        assert np.array_equal(obs[seen.rows], env.layout.flatten(features)[seen.rows])
        assert np.array_equal(env.slot_masks()[seen.rows], seen.masks.slot_by_op.numpy())
        actions = policy.act(features, None, masks).actions
        result = native.act(seen, [actions[row].tolist() for row in seen.rows])
        before = obs
        obs, paid, ends, cuts, info = env.step(env.actions.encode(actions.numpy()))
        assert paid[seen.rows].tolist() == result.rewards
        resting = [place for place in range(12) if place not in seen.rows]
        assert not paid[resting].any()
        assert np.array_equal(obs[resting], before[resting])
        assert ends.tolist() == [member.done for member in native.envs]
        assert not cuts.any()
        assert info["_accuracy"].tolist() == [place in seen.rows for place in range(12)]
        for place in np.flatnonzero(info["_outcome"]) if "_outcome" in info else ():
            assert place not in finals
            lengths[place] = info["outcome"]["length"][place]
            finals[place] = info["objective"]["J"][place]
        assert all(env.slot_masks()[place, 1:].sum() == 0 for place in np.flatnonzero(ends))
    outcomes = native.ledger.outcomes
    assert [lengths[place] for place in range(12)] == [outcome.epochs for outcome in outcomes]
    assert [finals[place] for place in range(12)] == [outcome.objective for outcome in outcomes]
    assert len(set(lengths.values())) > 1
    with pytest.raises(ResetNeeded, match="envs 0 to 7 have ended"):
        env.step(env.actions.encode(actions.numpy()))
    env.reset(seed=SEED)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_populations_of_different_ends_are_not_reset_by_themselves(mode) -> None:
    with pytest.raises(EsperError, match=r"end at different times .* allowed: Disabled, or population=1"):
        GrowthVectorEnv(FLOPS, 8, autoreset_mode=mode)
    assert GrowthVectorEnv(FLOPS, 2, autoreset_mode=mode, population=1).autoreset_mode.value == mode
