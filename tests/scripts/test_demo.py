"""`esper demo`, in small: a run, a proof of its policy, and what to do next."""

from __future__ import annotations

import shutil

import pytest

from esper.scripts import demo
from esper.scripts.cli import main
from esper.simic.training.presets import PRESETS, Preset

SMALL = {
    "task": "digits_shift",
    "envs": 2,
    "rounds": 2,
    "episode_length": 4,
    "steps_per_epoch": 2,
    "val_size": 48,
    "batch_size": 16,
    "hidden": 16,
    "population": 8,
    "teacher": "heuristic",
    "teacher_rounds": 1,
}


def test_the_demo_trains_proves_and_says_what_is_next(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PRESETS, "small", Preset("", SMALL))
    for name, value in {
        "PRESET": "small",
        "TASK": "digits_shift:episode_length=4,steps_per_epoch=2,val_size=48",
        "NETWORKS": 2,
        "PROBE_NETWORKS": 8,
        "PROCESSES": 1,  # other processes would not know the small preset
    }.items():
        monkeypatch.setattr(demo, name, value)
    assert main(["demo"]) == 0
    said = capsys.readouterr().out
    assert "learned − other" in said
    assert all(f"esper {command} " in said for command in ("ui", "report", "grow", "prove"))
    assert shutil.which(said.split("Next:")[1].split()[0]), "what it says can be typed as it stands"
    run = tmp_path / "runs" / "demo-1"
    assert (run / "run.json").exists()
    assert (run / "proof" / "report.html").exists()
    assert demo.fresh_directory().name == "demo-2"


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["quickly"], 2)])
def test_the_demo_takes_no_arguments(words, code, capsys) -> None:
    with pytest.raises(SystemExit, match=str(code)):
        main(["demo", *words])
    assert "usage: esper demo" in "".join(capsys.readouterr())
