"""Policies by name and file, and how a learned one acts in a comparison."""

from __future__ import annotations

import orjson
import pytest
import torch

from esper._archive import read_archive
from esper.leyline import EsperError
from esper.proof import play, ship_policy
from esper.proof.policies import Acting, simple_makers
from esper.runtime.tasks import parse_task
from esper.scripts.config import parse
from esper.simic.training.config import TrainingConfig
from esper.simic.training.evaluation import HELD_OUT
from esper.tamiyo import RecurrentPolicy, load_policy, shipped, shipped_policies
from esper.tamiyo.shipped import default_policies
from proof.worlds import SHIFT, policy
from run_helpers import train


def same(one: RecurrentPolicy, other: RecurrentPolicy) -> bool:
    ours, theirs = one.network.state_dict(), other.network.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "r"
    agent, _ = train(path, rounds=1)
    return path, agent


def test_a_shipped_policy_says_where_it_came_from(run, tmp_path, monkeypatch):
    path, agent = run
    weights = ship_policy(path, "small", tmp_path)
    origin = orjson.loads((tmp_path / "small.json").read_bytes())
    assert origin["seed"] == origin["config"]["seed"] == 42
    assert origin["config"]["task"] == "digits_impaired"
    assert {"command", "commit", "dirty", "versions", "checkpoint"} <= set(origin)
    assert str(path) not in (tmp_path / "small.json").read_text()
    assert origin["config"]["telemetry_dir"] == "runs/small"
    (only_round,) = origin["curve"]
    assert only_round["env_steps"] > 0
    assert 0 < only_round["J"] < 1
    assert read_archive(weights, kind="policy")[1]["kind"] == "policy"
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    assert shipped_policies() == ["small"]
    assert same(load_policy("small"), agent.policy)
    with pytest.raises(EsperError, match=r"'large'.*allowed: small"):
        load_policy("large")


def test_every_policy_that_ships_loads_and_says_where_it_came_from():
    taught = {f"digits_{task}_taught" for task in ("baseline", "impaired", "scale", "shift")}
    alone = {f"digits_{task}" for task in ("baseline", "impaired", "scale", "shift")}
    assert {name.rsplit("-", 1)[0] for name in shipped_policies()} == taught | alone | {"general"}
    for name in shipped_policies():
        load_policy(name)
        assert orjson.loads((shipped.SHIPPED / f"{name}.json").read_bytes())["commit"]


def test_a_name_without_its_number_is_the_first_policy():
    assert same(load_policy("digits_shift"), load_policy("digits_shift-1"))
    assert not same(load_policy("digits_shift"), load_policy("digits_shift-2"))
    with pytest.raises(EsperError, match="policy 'digits_shif' is neither"):
        load_policy("digits_shif")


def test_where_no_policy_is_named_those_of_the_task_decide_else_on_images_the_general_ones():
    assert default_policies("digits_scale", images=True) == [f"digits_scale-{n}" for n in (1, 2, 3)]
    assert default_policies("Digits_Scale:base=4", images=True) == default_policies(
        "digits_scale", images=True
    )
    general = [f"general-{n}" for n in (1, 2, 3)]
    assert default_policies("worlds_small:20003", images=True) == general
    assert default_policies("digits", images=True) == general
    assert default_policies("sotu", images=False) == []


def test_the_commands_that_made_them_still_mean_the_same_settings():
    for name in shipped_policies():
        origin = orjson.loads((shipped.SHIPPED / f"{name}.json").read_bytes())
        _, *arguments = origin["command"]
        assert arguments[:2] == ["train", "ppo"]
        config, _ = parse("esper train", "", arguments[1:])
        stored = TrainingConfig(**origin["config"])
        # The thresholds that ship may change; the heuristic took no part in making these policies.
        assert (stored.policy, stored.teacher) == ("ppo", "schedule" if "_taught" in name else None)
        assert config == stored.replace(heuristic=config.heuristic)


# -- acting --------------------------------------------------------------------------------------------------


def decisions(**options):
    task, root = parse_task(SHIFT), options.pop("root_seed", HELD_OUT)
    return [
        p.decisions
        for p in play(
            task,
            lambda envs: Acting(policy(), envs, 8, root_seed=root, **options),
            root_seed=HELD_OUT,
            networks=range(8),
        )
    ]


def test_sampling_depends_on_the_random_seed_and_the_mode_does_not():
    assert decisions(sample=True) == decisions(sample=True)
    assert decisions(sample=True) != decisions(sample=True, root_seed=7)
    assert decisions() == decisions(root_seed=7) != decisions(sample=True)


def test_shuffled_observations_change_what_is_done():
    assert decisions(sample=True, shuffled=True) != decisions(sample=True)
    with pytest.raises(EsperError, match="single network"):
        Acting(policy(), [0], 8, root_seed=0, shuffled=True)


def test_each_env_sees_its_neighbour():
    """Under shuffling, env i is shown the observation of env i − 1, and the policy answers as it would to
    that."""
    shown = []

    class Mirror(RecurrentPolicy):
        def act(self, obs, hidden, masks, **options):
            shown.append(obs.base)
            return super().act(obs, hidden, masks, **options)

    task = parse_task(SHIFT)
    for shuffled in (False, True):
        play(
            task,
            lambda envs, s=shuffled: Acting(
                Mirror(policy().network, feature_schema=""), envs, 8, root_seed=0, shuffled=s
            ),
            root_seed=HELD_OUT,
            networks=range(4),
        )
    assert torch.equal(shown[8], shown[0][[3, 0, 1, 2]])


def test_names_without_a_file():
    assert set(simple_makers(parse_task(SHIFT), 0)) == {"static", "random", "heuristic"}


def test_an_acting_policy_goes_on_from_its_state():
    acting = Acting(policy(), [3, 4], 8, root_seed=0, sample=True)
    acting.begin(2)
    acting.load_state({"epoch": 5})
    assert acting.state() == {"epoch": 5}
    acting.begin(2)
    assert acting.state() == {"epoch": 0}
    with pytest.raises(EsperError, match="made for 2"):
        acting.begin(3)
