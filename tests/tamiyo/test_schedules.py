"""Schedule files: what they hold, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from esper.leyline import EsperError
from esper.tamiyo import Planting, load_schedules, save_schedules
from esper.tamiyo.schedules import ScheduleResult, Schedules

SLOTS, BLUEPRINTS = ("r0c0", "r0c1", "r1c0"), ("conv_light", "norm")
PLAN = (Planting(2, 1, "norm"), Planting(3, 0, "conv_light"))
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
    }


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"task": "digits_impaired"}, "for task 'digits_impaired', not for"),
        ({"kind": "other"}, "kind is 'other'"),
        ({"best": {"schedule": []}}, "does not hold schedules"),
        ({"best": None}, "does not hold schedules"),
    ],
)
def test_files_that_do_not_fit_are_refused(change, told, path):
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | change))
    with pytest.raises(EsperError, match=told):
        load(path)


def test_a_slot_of_another_host_is_refused(path):
    path.write_bytes(path.read_bytes().replace(b'"r0c0"', b'"r0c7"'))
    with pytest.raises(EsperError, match=r"r0c7.*allowed: r0c0"):
        load(path)


def test_no_file_and_no_json(tmp_path):
    with pytest.raises(EsperError, match="cannot read"):
        load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(EsperError, match="does not hold schedules"):
        load(tmp_path / "bad.json")
