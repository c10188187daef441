"""Trackers: what they get is what the run recorded, under the registry's names."""

from __future__ import annotations

import importlib.util
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from esper.karn import Views, sync_run
from esper.karn.summary import open_run
from esper.leyline import EsperError
from esper.scripts.cli import main


@pytest.fixture(scope="module")
def views(run_path: Path) -> Views:
    return open_run(run_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_numbers_back(views: Views, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator

    for _ in range(2):  # the second time replaces the first
        place, count = sync_run(views, "tensorboard", tmp_path / "board")
    assert len(list(place.iterdir())) == 1
    board = event_accumulator.EventAccumulator(str(place), size_guidance={"scalars": 0})
    board.Reload()
    scalars = {name: board.Scalars(name) for name in board.Tags()["scalars"]}
    assert sum(map(len, scalars.values())) == count
    for row in views.rows("SELECT round_idx, t_wall, avg_objective, seconds FROM rounds"):
        point = scalars["batch_completed/avg_objective"][row["round_idx"]]
        assert (point.step, point.value) == (
            row["round_idx"] + 1,
            pytest.approx(row["avg_objective"], rel=1e-6),
        )
        assert point.wall_time == row["t_wall"]
    updates = views.rows("SELECT head_entropy FROM updates ORDER BY seq")
    for head, value in updates[-1]["head_entropy"].items():
        assert scalars[f"ppo_update/head_entropy/{head}"][-1].value == pytest.approx(value, rel=1e-6)
    assert [point.step for point in scalars["episode_outcome/objective"]] == list(range(1, 9))
    assert "batch_completed/accuracy_drop" in scalars
    assert (
        len(scalars["batch_completed/accuracy_drop"]) == 1
    )  # not measured in the first round: absent, not 0


def test_wandb_gets_an_offline_run_or_says_how_to_get_it(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("wandb") is not None:
        assert main(["sync", str(run_path), "--to", "wandb", "--out", str(tmp_path / "w")]) == 0
        assert list((tmp_path / "w").rglob("*.wandb"))
    else:
        assert main(["sync", str(run_path), "--to", "wandb", "--out", str(tmp_path / "w")]) == 2
        assert "pip install wandb" in capsys.readouterr().err
        assert not (tmp_path / "w").exists()


def test_a_missing_package_is_named_with_its_extra(
    run_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "tensorboard":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    assert main(["sync", str(run_path), "--to", "tensorboard", "--out", str(tmp_path / "b")]) == 2
    assert "pip install tensorboard" in capsys.readouterr().err


def test_an_unknown_tracker_names_the_known(views: Views) -> None:
    with pytest.raises(EsperError, match="'aim'; allowed: tensorboard, wandb"):
        sync_run(views, "aim")


def test_a_place_that_cannot_be_written_is_named(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["sync", str(run_path), "--to", "tensorboard", "--out", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_a_full_disk_is_one_message(run_path: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "esper.scripts.cli", "sync", str(run_path), "--to", "tensorboard"]
    done = subprocess.run(
        [*words, "--out", str(tmp_path / "board")],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: sync: cannot write to {tmp_path / 'board'}: File too large")
    assert "Traceback" not in done.stderr
