"""One network grown and kept: what was printed, what is stored, what runs without Esper."""

from __future__ import annotations

import shutil
import zipfile

import orjson
import pytest
import torch

from esper.kasmina import load_network
from esper.leyline import EsperError, StructureError
from esper.proof import play
from esper.proof.grown import PLAIN, RECORD, evaluate, grow
from esper.proof.policies import simple_makers
from esper.runtime.data import load_dataset
from esper.runtime.tasks import draw_condition, parse_task
from proof.worlds import SHIFT, policy_file

TASK = "digits_impaired:episode_length=12,steps_per_epoch=6,val_size=64"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    directory = tmp_path_factory.mktemp("grown")
    return directory, grow(parse_task(TASK), "heuristic", directory, root_seed=3)


def test_it_grew_and_was_kept(kept):
    directory, played = kept
    assert played.fossils
    assert {path.name for path in directory.iterdir()} == {
        "structure.json",
        "weights.safetensors",
        PLAIN,
        RECORD,
    }
    model, _ = load_network(directory)
    assert model.population == 1
    assert model.total_params() == played.outcome.host_params + played.outcome.added_params
    record = orjson.loads((directory / RECORD).read_bytes())
    assert (record["task"], record["policy"], record["root_seed"]) == (TASK, "heuristic", 3)
    assert (record["network"], record["version"]) == (0, 2)
    assert record["test_accuracy"] == played.test_accuracy


def test_evaluation_equals_the_episodes_own(kept):
    directory, played = kept
    record, accuracy = evaluate(directory)
    assert accuracy == played.test_accuracy == record.test_accuracy
    assert accuracy > 15.0


def test_the_plain_module_is_the_same_network(kept):
    directory, played = kept
    module = torch.export.load(directory / PLAIN).module()
    data = load_dataset("digits")
    images = (data.test_x.float() / data.scale - data.mean[0]) / data.std[0]
    with torch.no_grad():
        hits = module(images).argmax(-1) == data.test_y
    assert 100 * hits.double().mean().item() == pytest.approx(played.test_accuracy, abs=1e-9)
    with zipfile.ZipFile(directory / PLAIN) as archive:
        weights = [
            entry for entry in archive.namelist() if "/weights/" in entry and not entry.endswith("json")
        ]
        sizes = sorted(len(archive.read(entry)) for entry in weights)
    assert sizes == sorted(t.nbytes for t in module.state_dict().values()), "raw bytes, not pickles"


def test_it_is_the_episode_that_the_policy_plays(kept):
    _, played = kept
    task = parse_task(TASK)
    assert [played] == play(
        task, simple_makers(task, 3)["heuristic"], root_seed=3, networks=[0], population=1
    )


def test_policies_of_every_kind(tmp_path):
    task = parse_task("digits_shift:episode_length=2,steps_per_epoch=1,val_size=24,batch_size=8")
    names = ["wait", "random", policy_file(tmp_path / "p.safetensors")]
    for i, name in enumerate(names):
        played = grow(task, name, tmp_path / str(i))
        assert evaluate(tmp_path / str(i))[1] == played.test_accuracy
        assert name != "wait" or not played.decisions
    with pytest.raises(EsperError, match="'nobody' is neither a file"):
        grow(parse_task(SHIFT), "nobody", tmp_path / "none")


def test_the_first_crippled_network_is_grown(tmp_path):
    task = parse_task("digits_shift:episode_length=2,steps_per_epoch=1,val_size=24,batch_size=8")
    crippled = [any(draw_condition(task, 0, 0, network).crippled) for network in range(4)]
    assert not crippled[0]
    played = grow(task, "wait", tmp_path / "default")
    assert played.network == crippled.index(True)
    assert any(played.condition.crippled)
    assert grow(task, "wait", tmp_path / "zero", network=0).network == 0
    assert evaluate(tmp_path / "zero")[0].network == 0
    assert grow(parse_task(TASK), "wait", tmp_path / "whole").network == 0, "this task cripples none"


def test_only_a_new_or_empty_directory_is_written(kept, tmp_path):
    task = parse_task(TASK)
    before = {path.name: path.read_bytes() for path in kept[0].iterdir()}
    with pytest.raises(EsperError, match="not empty, it holds a grown network"):
        grow(task, "wait", kept[0])
    assert {path.name: path.read_bytes() for path in kept[0].iterdir()} == before
    (tmp_path / "run.json").touch()
    with pytest.raises(EsperError, match="not empty, it holds a run"):
        grow(task, "wait", tmp_path)
    (tmp_path / "run.json").rename(tmp_path / "notes.txt")
    with pytest.raises(EsperError, match=r"not empty, it holds notes\.txt; choose"):
        grow(task, "wait", tmp_path)
    with pytest.raises(EsperError, match="cannot write to"):
        grow(task, "wait", tmp_path / "notes.txt")


def test_directories_that_hold_no_network(kept, tmp_path):
    with pytest.raises(EsperError, match="holds no grown network"):
        evaluate(tmp_path)
    with pytest.raises(EsperError, match="holds no grown network"):
        evaluate(tmp_path / "a\0b")
    shutil.copytree(kept[0], tmp_path / "copy")
    (tmp_path / "copy" / "weights.safetensors").write_bytes(b"")
    with pytest.raises(StructureError, match="damaged"):
        evaluate(tmp_path / "copy")


def without_version(record):
    """As version 1 wrote it."""
    old = {name: value for name, value in record.items() if name not in ("version", "network")}
    return old | {"seed": record["network"]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without_version, None),
        (lambda record: {}, "field .* is missing"),
        (lambda record: [1], r"the content is \[1\]"),
        (lambda record: None, "the content is null"),
        (lambda record: record | {"task": None}, "task is null"),
        (lambda record: record | {"task": "digits_none"}, "task 'digits_none' is unknown"),
        (lambda record: record | {"root_seed": []}, r"root_seed is \[\]"),
        (lambda record: record | {"network": "0"}, "network is '0'"),
        (lambda record: record | {"version": 3}, "version is 3, written by a newer Esper"),
        (lambda record: record | {"outcome": {}}, "field outcome.env_id is missing"),
        (lambda record: record | {"decisions": [{"epoch": 1}]}, r"field decisions\[0\].op is missing"),
        (lambda record: record | {"more": 1}, "field more is unknown"),
    ],
)
def test_records_are_read_strictly(change, told, kept, tmp_path):
    shutil.copytree(kept[0], tmp_path / "copy")
    path = tmp_path / "copy" / RECORD
    path.write_bytes(orjson.dumps(change(orjson.loads(path.read_bytes()))))
    if told is None:
        assert evaluate(tmp_path / "copy") == evaluate(kept[0])
    else:
        with pytest.raises(EsperError, match=told):
            evaluate(tmp_path / "copy")
