"""Adapters for other libraries, where these are installed: their contracts, and that their learners run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from esper.gym import GrowthVectorEnv
from esper.leyline import EsperError
from gym_helpers import LENGTH, SMALL

# Other people's packages warn about their own future.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def sb3():
    pytest.importorskip("sb3_contrib")
    from esper.gym import SB3VecEnv

    return SB3VecEnv


@pytest.fixture
def torchrl():
    pytest.importorskip("torchrl")
    from esper.gym import make_torchrl_env

    return make_torchrl_env


def test_sb3_contract(sb3) -> None:
    env, plain = sb3(SMALL, 8), GrowthVectorEnv(SMALL, 8, autoreset_mode="SameStep")
    env.seed(3)
    assert np.array_equal(env.reset(), plain.reset(seed=3)[0])
    assert env.has_attr("action_masks")
    masks = env.env_method("action_masks")
    assert np.array_equal(np.stack(masks), plain.action_masks())
    assert len(env.env_method("action_masks", indices=[2, 5])) == 2
    plan = np.arange(8)
    for step in range(1, LENGTH + 1):
        obs, rewards, ends, infos = env.step(plan)
        expected = plain.step(plan)
        assert np.array_equal(obs, expected[0])
        assert rewards.dtype == np.float32
        assert ends.tolist() == [step == LENGTH] * 8
        assert not any(info["TimeLimit.truncated"] for info in infos)
        plan = np.zeros(8, int)
    final = expected[4]
    for i, info in enumerate(infos):
        assert np.array_equal(info["terminal_observation"], final["final_obs"][i])
        assert info["episode"] == {"r": final["final_info"]["outcome"]["return"][i], "l": LENGTH}
        assert info["objective"]["J"] == final["final_info"]["objective"]["J"][i]
    assert env.env_is_wrapped(object) == [False] * 8
    with pytest.raises(EsperError, match="cannot be set"):
        env.set_attr("task", 1)
    with pytest.raises(EsperError, match="allowed: action_masks, slot_masks"):
        env.env_method("render")


@pytest.mark.parametrize("actions", ["flat", "heads"])
def test_sb3_learners_run_and_repeat(sb3, actions: str) -> None:
    from sb3_contrib import MaskablePPO

    def train() -> list[np.ndarray]:
        env = sb3(SMALL, 8, actions=actions, on_illegal="error" if actions == "flat" else "wait")
        model = MaskablePPO("MlpPolicy", env, n_steps=LENGTH, batch_size=20, n_epochs=1, seed=1, device="cpu")
        model.learn(2 * 8 * LENGTH)
        assert model.ep_info_buffer[0]["l"] == LENGTH
        return [p.detach().numpy() for p in model.policy.parameters()]

    assert all(np.array_equal(a, b) for a, b in zip(train(), train(), strict=True))


def test_recurrent_ppo_runs_without_masks(sb3) -> None:
    from sb3_contrib import RecurrentPPO

    env = sb3(SMALL, 8, on_illegal="wait")
    model = RecurrentPPO(
        "MlpLstmPolicy", env, n_steps=LENGTH, batch_size=20, n_epochs=1, seed=1, device="cpu"
    )
    model.learn(8 * LENGTH)
    assert model.num_timesteps == 8 * LENGTH


def test_torchrl_contract(torchrl) -> None:
    import torch

    env, plain = torchrl(SMALL, 8), GrowthVectorEnv(SMALL, 8)
    env.set_seed(3)
    first = env.reset()
    assert first["action_mask"].dtype == torch.bool
    plain.reset(seed=3)  # TorchRL resets once to seed, and once more
    assert np.array_equal(first["observation"].numpy(), plain.reset()[0])
    assert np.array_equal(first["action_mask"].numpy(), plain.action_masks())
    played = env.rollout(2 * LENGTH + 1, break_when_any_done=False, policy=waiting)
    ends = played["next", "terminated"].squeeze(-1)[0].tolist()
    assert ends == [i in (LENGTH - 1, 2 * LENGTH - 1) for i in range(2 * LENGTH + 1)]
    assert not played["next", "truncated"].any()
    observed = played["observation"]
    assert not torch.equal(observed[:, 0], observed[:, LENGTH]), "the second episode has other networks"
    with pytest.raises(EsperError, match="allowed: flat"):
        torchrl(SMALL, 8, actions="heads")


def waiting(tensordict):
    import torch

    return tensordict.set("action", torch.zeros(tensordict.batch_size, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "package", "arguments"),
    [
        ("rl_loop", "gymnasium", {"episodes": 2}),
        ("rl_sb3", "sb3_contrib", {"steps": 80, "n_steps": LENGTH}),
        ("rl_torchrl", "torchrl", {"episodes": 2}),
    ],
)
def test_examples_run(name: str, package: str, arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    result = __import__(name).main(task=SMALL, num_envs=8, **arguments)
    sys.modules.pop(name)
    assert np.isfinite(result).all()
