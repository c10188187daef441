"""The contract of Gymnasium: its checker, spaces, seeding, autoreset, masks and infos."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

import esper.gym
from esper.gym import GrowthVectorEnv
from esper.leyline import EsperError
from esper.runtime.tasks import get_task_spec
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT_DIM
from gym_helpers import LENGTH, SMALL, RandomLegal, episode


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"granularity": "all", "on_illegal": "wait"},
        {"actions": "heads", "on_illegal": "wait", "reward": "shaped"},
        {"held_out": True},
    ],
    ids=["plans", "all", "heads", "held-out"],
)
def test_the_single_view_passes_the_checker(settings) -> None:
    check_env(gymnasium.make("Esper/digits_shift-v0", task=SMALL, **settings).unwrapped)


@pytest.mark.parametrize("task", ["digits_shift", "digits_scale", "digits_mlp", "mnist1d_baseline"])
def test_spaces_of_every_kind_of_host(task: str) -> None:
    spec = get_task_spec(task)
    env = gymnasium.make_vec(esper.gym.registration.env_id(task), num_envs=16)
    slots, blueprints = len(spec.slots), len(spec.blueprints)
    columns = BASE_DIM + slots * (SLOT_DIM + blueprints * QUOTE_DIM)
    assert env.single_observation_space.shape == (columns,)
    assert env.observation_space.shape == (16, columns)
    assert env.single_action_space.n == 1 + slots * blueprints
    names = env.metadata["observation_names"]
    assert len(names) == len(set(names)) == columns
    assert {"val_accuracy", "val_accuracy.known", "r0c0.alpha"} <= set(names)
    assert f"r0c0.{spec.blueprints[-1]}.price" in names
    assert all(np.isfinite([env.single_observation_space.low, env.single_observation_space.high]).ravel())


def test_shapes_types_and_ranges() -> None:
    env = GrowthVectorEnv(SMALL, 12)
    first, *steps = episode(env, 0, RandomLegal(0))
    assert first[0] in env.observation_space
    for number, (obs, rewards, ends, cuts, _, masks) in enumerate(steps, start=1):
        assert obs in env.observation_space
        assert (rewards.dtype, rewards.shape) == (np.float64, (12,))
        assert ends.tolist() == [number == LENGTH] * 12
        assert not cuts.any()
        assert (masks.dtype, masks.shape) == (np.bool_, (12, 10))
        assert masks[:, 0].all(), "every network may wait"
    known = [obs[:, env.layout.names.index("progress")] for obs in [first[0], *(s[0] for s in steps[:-1])]]
    assert np.allclose(known, [[(i + 1) / LENGTH] * 12 for i in range(LENGTH)])


def test_what_is_returned_is_not_changed_later() -> None:
    env = GrowthVectorEnv(SMALL, 8)
    obs, _ = env.reset(seed=1)
    before = obs.copy()
    env.step(np.zeros(8, int))
    assert np.array_equal(obs, before)


def test_seeds() -> None:
    env, other = GrowthVectorEnv(SMALL, 8), GrowthVectorEnv(SMALL, 8)
    first = episode(env, 4, RandomLegal(1))
    second = episode(env, None, RandomLegal(1))
    assert data_equivalence(first, episode(env, 4, RandomLegal(1)), exact=True), "again"
    assert data_equivalence(second, episode(env, None, RandomLegal(1)), exact=True), "the episode after it"
    assert data_equivalence(first, episode(other, 4, RandomLegal(1)), exact=True), "in another environment"
    assert not np.array_equal(first[0][0], second[0][0])
    assert not np.array_equal(first[0][0], episode(env, 5, RandomLegal(1))[0][0])
    with pytest.raises(EsperError, match="one whole number for all envs"):
        env.reset(seed=[1, 2])


def test_a_network_does_not_depend_on_the_number_of_envs() -> None:
    few, many = GrowthVectorEnv(SMALL, 3), GrowthVectorEnv(SMALL, 12)
    a, b = few.reset(seed=2)[0], many.reset(seed=2)[0]
    assert np.array_equal(a, b[:3])
    plan = np.array([1, 0, 5])
    a, b = few.step(plan)[0], many.step(np.concatenate([plan, np.zeros(9, int)]))[0]
    assert np.array_equal(a, b[:3])


def test_next_step_autoreset() -> None:
    env = gymnasium.make_vec("Esper/digits_shift-v0", num_envs=8, task=SMALL)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    expected = GrowthVectorEnv(SMALL, 8)
    episode(expected, 0, RandomLegal(0))
    after = expected.reset()[0]
    *_, last = episode(env, 0, RandomLegal(0))
    assert last[2].all()
    assert "objective" in last[4]
    obs, rewards, ends, _, info = env.step(np.full(8, 9))  # ignored: this step resets
    assert np.array_equal(obs, after)
    assert not rewards.any()
    assert not ends.any()
    assert "objective" not in info


def test_same_step_autoreset() -> None:
    env = GrowthVectorEnv(SMALL, 8, autoreset_mode=AutoresetMode.SAME_STEP)
    expected = GrowthVectorEnv(SMALL, 8, autoreset_mode="Disabled")
    *_, end = episode(expected, 0, RandomLegal(0))
    after, reset_info = expected.reset()
    *_, last = episode(env, 0, RandomLegal(0))
    obs, rewards, ends, _, info, _ = last
    assert np.array_equal(obs, after)
    assert np.array_equal(rewards, end[1])
    assert ends.all()
    assert np.array_equal(np.stack(info["final_obs"]), end[0])
    final = {key: value for key, value in end[4].items() if "action_mask" not in key}
    assert data_equivalence(info["final_info"], final, exact=True)
    assert info["_final_obs"].all()
    assert np.array_equal(info["action_mask"], reset_info["action_mask"])
    assert env.step(np.zeros(8, int))[2].sum() == 0


def test_disabled_autoreset_and_reset_masks() -> None:
    env = GrowthVectorEnv(SMALL, 12, autoreset_mode="Disabled")
    whole = GrowthVectorEnv(SMALL, 12, autoreset_mode="Disabled")
    second = np.arange(12) >= 8
    with pytest.raises(ResetNeeded, match="call reset first"):
        env.step(np.zeros(12, int))
    with pytest.raises(ResetNeeded, match="first reset must cover all"):
        env.reset(options={"reset_mask": second})
    env.reset(seed=0)
    env.step(np.zeros(12, int))
    options = {"reset_mask": second}
    obs, info = env.reset(options=options)
    assert list(options) == ["reset_mask"], "wrappers read the options too"
    assert info["_action_mask"].tolist() == second.tolist()
    whole.reset(seed=0)
    first = whole.step(np.zeros(12, int))[0]
    assert np.array_equal(obs[:8], first[:8])
    assert np.array_equal(obs[8:], whole.reset()[0][8:]), "the second episode of these"
    for _ in range(LENGTH - 1):
        _, _, ends, _, _ = env.step(np.zeros(12, int))
    assert ends.tolist() == [True] * 8 + [False] * 4
    with pytest.raises(ResetNeeded, match="envs 0 to 7 have ended"):
        env.step(np.zeros(12, int))
    env.reset(options={"reset_mask": ~second})
    assert env.step(np.zeros(12, int))[2].tolist() == [False] * 8 + [True] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reset_mask": np.arange(12) >= 4}, "only 4 of envs 0 to 7; they are trained as one population"),
        ({"reset_mask": np.zeros(12, bool)}, "marks no env"),
        ({"reset_mask": np.ones(3, bool)}, r"bool array of shape \(12,\)"),
        ({"reset_mask": [True] * 12}, "bool array"),
        ({"mask": 1}, "option 'mask' is unknown; allowed: reset_mask"),
    ],
)
def test_wrong_options(options, message: str) -> None:
    env = GrowthVectorEnv(SMALL, 12)
    env.reset(seed=0)
    with pytest.raises(EsperError, match=message):
        env.reset(options=options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": 0}, "num_envs is 0"),
        ({"actions": "keys"}, "actions is 'keys'; allowed: heads, flat"),
        ({"granularity": "some"}, "granularity is 'some'; allowed: 'plans', 'all'"),
        ({"on_illegal": "ignore"}, "on_illegal is 'ignore'; allowed: error, wait"),
        ({"twins": 3}, "multiple of the number of twins"),
        ({"population": 5}, "population"),
        ({"reward": "gold"}, "'gold' is unknown"),
        ({"task": "digits_shitf"}, "did you mean digits_shift"),
        ({"task": "cifar_impaired"}, "use granularity 'all'"),
    ],
)
def test_wrong_settings(settings, message: str) -> None:
    with pytest.raises(EsperError, match=message):
        GrowthVectorEnv(**{"task": SMALL, "num_envs": 8, **settings})


def test_infos_say_what_the_objective_is_made_of() -> None:
    env = GrowthVectorEnv(SMALL, 8)
    _, *steps = episode(env, 3, RandomLegal(3))
    end = steps[-1][4]
    parts = {name: value for name, value in end["objective"].items() if not name.startswith("_")}
    total = parts.pop("J")
    assert np.allclose(sum(parts.values()), total, atol=1e-12)
    assert np.allclose(end["outcome"]["return"], total, atol=1e-12), "sparse pays J"
    events = [event for step in steps for of_env in step[4]["events"] for event in of_env]
    germinated = sum(event["kind"] == "germinated" for event in events)
    assert germinated == end["outcome"]["germinated"].sum() > 0
    assert end["outcome"]["network"].tolist() == list(range(8))
    assert end["outcome"]["length"].tolist() == [LENGTH] * 8


def test_rewards_are_the_sum_of_their_parts() -> None:
    env = GrowthVectorEnv(SMALL, 8, reward="shaped", gamma=0.9)
    _, *steps = episode(env, 3, RandomLegal(3))
    for _, rewards, _, _, info, _ in steps:
        parts = [value for name, value in info["reward_parts"].items() if not name.startswith("_")]
        assert len(parts) == 2
        assert np.allclose(sum(parts), rewards, atol=1e-12)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_wrappers_of_gymnasium(mode: AutoresetMode) -> None:
    env = RecordEpisodeStatistics(GrowthVectorEnv(SMALL, 8, autoreset_mode=mode))
    listed = DictInfoToList(GrowthVectorEnv(SMALL, 8, autoreset_mode=mode))
    plain = GrowthVectorEnv(SMALL, 8)
    env.reset(seed=0)
    listed.reset(seed=0)
    plain.reset(seed=0)
    for _ in range(LENGTH):
        info = env.step(np.zeros(8, int))[4]
        listed_info = listed.step(np.zeros(8, int))[4]
        outcome = plain.step(np.zeros(8, int))[4].get("outcome")
    assert np.allclose(info["episode"]["r"], outcome["return"])
    assert info["episode"]["l"].tolist() == [LENGTH] * 8
    last = listed_info[3].get("final_info", listed_info[3])
    assert last["outcome"]["return"] == outcome["return"][3]


def test_networks_learn_where_gradients_are_off() -> None:
    env = GrowthVectorEnv(SMALL, 8)
    expected = episode(env, 6, RandomLegal(6))
    with torch.no_grad():
        assert data_equivalence(episode(env, 6, RandomLegal(6)), expected, exact=True)
    with torch.inference_mode():
        other = GrowthVectorEnv(SMALL, 8)
        assert data_equivalence(episode(other, 6, RandomLegal(6)), expected, exact=True)


def test_the_environment_leaves_global_random_numbers_alone() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  what a user's learner may use
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    episode(GrowthVectorEnv(SMALL, 8), 0, RandomLegal(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
