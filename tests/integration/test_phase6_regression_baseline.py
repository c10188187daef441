"""The stored baseline: a short run still does what it did, and the check notices when it does not."""

from __future__ import annotations

import copy
from pathlib import Path

import orjson
import pytest

from esper.scripts.baseline import FREE_OF_LIFECYCLE, RUNS, compare, main, measure
from esper.simic import train_ppo_vectorized

STORED = Path(__file__).parents[2] / "docs" / "baseline.json"


@pytest.fixture(scope="module")
def measured():
    return measure(["digits_baseline"])[0]


def test_the_short_run_does_what_it_did(measured) -> None:
    assert compare(orjson.loads(STORED.read_bytes()), measured) == []


def test_the_stored_baseline_has_every_run() -> None:
    assert set(orjson.loads(STORED.read_bytes())["runs"]) == set(RUNS)


def test_counts_follow_from_the_size_of_the_run(measured) -> None:
    fields = RUNS["digits_baseline"]
    _, history = train_ppo_vectorized(**fields)
    events = measured["runs"]["digits_baseline"]["events"]
    steps = fields["rounds"] * fields["envs"] * fields["episode_length"]
    assert {events[kind] for kind in ("last_action", "reward_summary", "throughput")} == {steps}
    assert events["batch_completed"] == len(history) == fields["rounds"]
    assert events["episode_outcome"] == fields["rounds"] * fields["envs"]


@pytest.mark.parametrize("spoil", ["events", "losses", "imports"])
def test_a_change_is_noticed(measured, spoil) -> None:
    changed = copy.deepcopy(measured)
    if spoil == "events":
        changed["runs"]["digits_baseline"]["events"]["ppo_update"] += 1
    elif spoil == "losses":
        changed["runs"]["digits_baseline"]["losses"][7] += 0.01
    else:
        changed["imports"]["leyline"] = [*changed["imports"]["leyline"], "simic"]
    (difference,) = compare(measured, changed)
    assert {"events": "ppo_update", "losses": "step 7", "imports": "leyline imports simic"}[
        spoil
    ] in difference


def test_another_torch_is_held_to_what_does_not_depend_on_rounding(measured) -> None:
    changed = copy.deepcopy(measured)
    changed["torch"] = "another"
    changed["runs"]["digits_baseline"]["events"]["seed_lifecycle"] += 3
    changed["runs"]["digits_baseline"]["losses"][3] += 5e-4
    assert compare(measured, changed) == []
    changed["runs"]["digits_baseline"]["losses"][3] += 1e-2
    assert len(compare(measured, changed)) == 1
    assert "seed_lifecycle" not in FREE_OF_LIFECYCLE


def test_what_is_no_baseline_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "file.json").write_text("[]")
    for path in (tmp_path / "file.json", tmp_path / "nowhere.json"):
        assert main(["check", str(path)]) == 2
        assert "not a baseline" in capsys.readouterr().err


def test_a_difference_is_a_failure_not_bad_input(tmp_path, capsys) -> None:
    file = tmp_path / "file.json"
    file.write_text('{"torch": "another", "runs": {}, "imports": {}}')
    assert main(["check", str(file)]) == 1
    assert "differences from" in capsys.readouterr().err
