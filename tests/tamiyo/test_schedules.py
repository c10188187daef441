"""Schedule files: what they hold, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace

import orjson
import pytest

from esper.leyline import EsperError, StructureError, TempoAction
from esper.tamiyo import Planting, load_schedules, save_schedules
from esper.tamiyo.schedules import ScheduleResult, Schedules

SLOTS, BLUEPRINTS = ("r0c0", "r0c1", "r1c0"), ("conv_light", "norm")
PLAN = (Planting(2, 1, "norm"), Planting(3, 0, "conv_light", tempo=TempoAction.SLOW))
BEST = ScheduleResult(schedule=PLAN, objective=0.5, gain=0.25, networks=3, env_steps=90)
NOTHING = replace(BEST, schedule=(), gain=0.0)
SCHEDULES = Schedules(
    task="digits_shift",
    root_seed=0,
    candidates=9,
    best=BEST,
    by_pattern={(False, False): NOTHING, (True, False): BEST},
)


def load(path, task="digits_shift"):
    return load_schedules(path, task, slots=SLOTS, blueprints=BLUEPRINTS)


@pytest.fixture
def path(tmp_path):
    save_schedules(tmp_path / "s.json", SCHEDULES, SLOTS, "esper prove …")
    return tmp_path / "s.json"


def test_a_file_gives_back_its_schedules(path):
    assert load(path) == SCHEDULES
    content = orjson.loads(path.read_bytes())
    assert content["command"] == "esper prove …"
    assert content["best"]["schedule"][0] == {
        "epoch": 2,
        "slot": "r0c1",
        "blueprint": "norm",
        "style": "SIGMOID_ADD",
        "tempo": "INSTANT",
    }
    assert content["version"] == 2


@pytest.mark.parametrize("named", [True, False])
def test_plantings_of_version_1_were_made_at_the_fastest_ramp(named, path):
    """The version is missing from the oldest files."""
    content = orjson.loads(path.read_bytes())
    content |= {"version": 1}
    if not named:
        del content["version"]
    for one in (content["best"], *content["by_pattern"].values()):
        for entry in one["schedule"]:
            del entry["tempo"]
    path.write_bytes(orjson.dumps(content))
    fast = replace(BEST, schedule=tuple(replace(p, tempo=TempoAction.FAST) for p in PLAN))
    loaded = load(path)
    assert loaded.best == fast
    assert loaded.by_pattern == {(False, False): NOTHING, (True, False): fast}


def result(**changes):
    return {"schedule": [], "objective": 0.0, "gain": 0.0, "seeds": 1, "env_steps": 1} | changes


def planting(**changes):
    return {"epoch": 1, "slot": "r0c0", "blueprint": "norm", "style": "SIGMOID_ADD"} | changes


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"task": "digits_impaired"}, "for task 'digits_impaired', not for"),
        ({"task": None}, "task is null"),
        ({"kind": "other"}, "kind is 'other'"),
        ({"version": 3}, "version is 3, written by a newer Esper; this one reads up to version 2"),
        ({"version": 0}, "version is 0"),
        ({"version": "1"}, "version is '1'"),
        ({"root_seed": []}, r"root_seed is \[\]"),
        ({"root_seed": 10**20}, "64 bits"),
        ({"best": {"schedule": []}}, "field best.objective is missing"),
        ({"best": None}, "best is null"),
        ({"best": result(seeds=-1)}, "best.seeds is -1"),
        ({"best": result(schedule=[planting(epoch=0)])}, r"best.schedule\[0\].epoch is 0"),
        ({"best": result(schedule=[planting(slot="r9c9")])}, r"schedule\[0\].slot is 'r9c9'.*allowed: r0c0"),
        ({"best": result(schedule=[planting(blueprint="x")])}, "blueprint is 'x'.*allowed: conv_light"),
        ({"best": result(schedule=[planting(style=0)])}, r"best.schedule\[0\].style is 0"),
        ({"best": result(schedule=[planting(style="x")])}, "style is 'x'.*allowed: .*SIGMOID_ADD"),
        ({"best": result(schedule=[planting(tempo=3)])}, r"best.schedule\[0\].tempo is 3"),
        ({"best": result(schedule=[planting(tempo="x")])}, "tempo is 'x'.*allowed: FAST, .*INSTANT"),
        ({"by_pattern": []}, r"by_pattern is \[\]"),
        ({"by_pattern": {"0x": result()}}, "a key of by_pattern is '0x'"),
        ({"by_pattern": {"00": result(gain="1")}}, "by_pattern.00.gain is '1'"),
        ({"by_pattern": {"00": result(schedule=[planting(slot="x")])}}, r"by_pattern.00.schedule\[0\].slot"),
        ({"more": 1}, "field more is unknown"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_field(change, told, path):
    path.write_bytes(json.dumps(orjson.loads(path.read_bytes()) | change).encode())
    with pytest.raises(EsperError, match=told) as refused:
        load(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 5000, b'{"task": "\\ud800"}']
)
def test_what_is_no_schedule_file_is_refused(content, tmp_path):
    (tmp_path / "s.json").write_bytes(content)
    with pytest.raises(StructureError, match=r"s\.json"):
        load(tmp_path / "s.json")


@pytest.mark.parametrize("name", ["none.json", "", "a\0b", "x" * 300])
def test_no_file(name, tmp_path):
    with pytest.raises(StructureError, match="cannot read"):
        load(tmp_path / name)
