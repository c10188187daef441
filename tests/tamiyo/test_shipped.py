"""Policies, schedules and thresholds by name or file, and what damaged files are told."""

from __future__ import annotations

import json
import shutil

import orjson
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from esper._archive import read_archive
from esper.leyline import EsperError, StructureError
from esper.runtime.tasks import get_task_spec, task_names
from esper.tamiyo import (
    RecurrentPolicy,
    load_policy,
    load_schedules,
    shipped,
    shipped_policies,
    shipped_schedules,
    tuned_thresholds,
)
from esper.tamiyo.heuristic import HeuristicConfig
from proof.worlds import policy, policy_file
from run_helpers import train


def same(one: RecurrentPolicy, other: RecurrentPolicy) -> bool:
    ours, theirs = one.network.state_dict(), other.network.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_file_gives_back_its_policy(tmp_path):
    assert same(load_policy(policy_file(tmp_path / "p.safetensors")), policy())
    assert not same(load_policy(policy_file(tmp_path / "q.safetensors", seed=1)), policy())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "r"
    agent, _ = train(path, rounds=1)
    return path, agent


def test_a_checkpoint_gives_its_policy(run):
    path, agent = run
    assert same(load_policy(shipped.newest_checkpoint(path)), agent.policy)


def test_the_kind_of_a_file_decides_not_its_directory(run, tmp_path):
    path, agent = run
    (tmp_path / "checkpoints").mkdir()
    named_alike = policy_file(tmp_path / "checkpoints" / "p.safetensors")
    assert same(load_policy(named_alike), policy())
    elsewhere = shutil.copy(shipped.newest_checkpoint(path), tmp_path / "copied.safetensors")
    assert same(load_policy(elsewhere), agent.policy)


def test_a_run_directory_gives_the_policy_of_its_newest_checkpoint(run, tmp_path):
    path, agent = run
    assert same(load_policy(path), agent.policy)
    with pytest.raises(EsperError, match="holds no checkpoint"):
        load_policy(tmp_path)


def test_a_policy_for_other_features_is_refused_by_name(tmp_path):
    other = policy()
    other.feature_schema = "0123"
    other.save(tmp_path / "p.safetensors")
    with pytest.raises(StructureError, match=r"p\.safetensors: features is '0123'"):
        load_policy(tmp_path / "p.safetensors")


def test_a_run_that_did_not_learn_has_no_policy(tmp_path):
    train(tmp_path / "r", rounds=1, policy="wait")
    with pytest.raises(EsperError, match="does not learn"):
        load_policy(tmp_path / "r")


# -- headers -------------------------------------------------------------------------------------------------


def rewrite(path, change):
    """The same policy with another header; the digests of its tensors are kept, that of the header is left
    out, as in older files."""
    tensors, meta = read_archive(policy_file(path), kind="policy")
    with safe_open(path, framework="pt") as file:
        digests = orjson.loads(file.metadata()["esper"])["digests"]
    del digests[""]
    meta = change(meta)
    if isinstance(meta, dict):
        meta = {"digests": digests} | meta
    save_file(tensors, path, metadata={"esper": json.dumps(meta)})
    return path


def with_schema(**changes):
    return lambda meta: meta | {"schema": meta["schema"] | changes}


@pytest.mark.parametrize("version", [1, None])
def test_a_policy_that_saw_other_observations_is_refused(version, tmp_path):
    """A file without a version is of version 1."""
    assert read_archive(policy_file(tmp_path / "p.safetensors"), kind="policy")[1]["version"] == 2
    stored = {} if version is None else {"version": version}
    path = rewrite(
        tmp_path / "p.safetensors", lambda meta: {k: v for k, v in meta.items() if k != "version"} | stored
    )
    with pytest.raises(
        StructureError, match=r"version is 1, written by an older Esper.*train the policy anew"
    ):
        load_policy(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda meta: [1], r"the content is \[1\]"),
        (lambda meta: None, "the content is null"),
        (lambda meta: "policy", "the content is 'policy'"),
        (lambda meta: {}, "kind is None in the file"),
        (lambda meta: meta | {"kind": []}, r"kind is \[\] in the file"),
        (lambda meta: meta | {"kind": "agent"}, "kind is 'agent' in the file and 'policy' or 'run' here"),
        (lambda meta: meta | {"version": 3}, "version is 3, written by a newer Esper"),
        (lambda meta: meta | {"version": None}, "version is null"),
        (lambda meta: meta | {"more": 1}, "field more is unknown"),
        (lambda meta: meta | {"digests": [1]}, r"field digests: the content is \[1\]"),
        (lambda meta: meta | {"digests": {"recall": 1}}, "field digests: recall is 1"),
        (lambda meta: meta | {"schema": None}, "schema is null"),
        (lambda meta: meta | {"schema": {}}, "field schema.features is missing"),
        (with_schema(features=3), "schema.features is 3"),
        (with_schema(hidden="16"), "schema.hidden is '16'"),
        (with_schema(hidden=0), "schema.hidden is 0"),
        (with_schema(hidden=10**11), "schema.hidden is 100000000000"),
        (with_schema(hidden=2**20), r"has shape \(.*\), wanted \(.*\)"),
        (with_schema(more=1), "field schema.more is unknown"),
        (lambda meta: {"kind": "run"}, "field agent is missing"),
        (lambda meta: {"kind": "run", "agent": [1]}, r"field agent: the content is \[1\]"),
        (lambda meta: {"kind": "run", "agent": {}}, "field schema: the content is null"),
        (lambda meta: {"kind": "run", "agent": {"schema": 4}}, "field schema: the content is 4"),
    ],
)
def test_headers_that_do_not_fit_are_refused_by_field(change, told, tmp_path):
    path = rewrite(tmp_path / "p.safetensors", change)
    with pytest.raises(StructureError, match=told) as refused:
        load_policy(path)
    assert "p.safetensors" in str(refused.value)


# -- what ships ----------------------------------------------------------------------------------------------


def test_everything_that_ships_loads():
    assert shipped_policies()
    for name in shipped_policies():
        load_policy(name)
    with_schedules = [name for name in task_names() if shipped_schedules(name).is_file()]
    assert with_schedules
    for name in with_schedules:
        task = get_task_spec(name)
        load_schedules(shipped_schedules(name), name, slots=task.slots, blueprints=task.blueprints)


def test_tasks_have_thresholds_of_their_own_or_the_general_ones():
    general = tuned_thresholds()
    assert general != HeuristicConfig()
    tuned = [name for name in task_names() if tuned_thresholds(name) != general]
    assert "digits_shift" in tuned
    assert tuned_thresholds("cifar_baseline") == tuned_thresholds("my own model") == general


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"version": 3}, "version is 3, written by a newer Esper"),
        ({"config": None}, "config is null"),
        ({"config": {"max_seeds": "3"}}, "config.max_seeds is '3'"),
        ({"config": {"max_seeds": -1}}, "max_seeds is -1"),
        ({"config": {"patience": 1}}, "field config.patience is unknown"),
        ({"config": {"blueprints": ["tree"]}}, "tree"),
    ],
)
def test_thresholds_are_read_strictly(change, told, tmp_path, monkeypatch):
    content = orjson.loads((shipped.SHIPPED / f"digits_shift{shipped.THRESHOLDS}").read_bytes())
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    (tmp_path / f"digits_shift{shipped.THRESHOLDS}").write_bytes(orjson.dumps(content | change))
    if told is None:
        assert tuned_thresholds("digits_shift") != HeuristicConfig()
    else:
        with pytest.raises(EsperError, match=told):
            tuned_thresholds("digits_shift")
