"""`esper data`, through its command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from esper.runtime.data import datasets, load_dataset
from esper.scripts.data import main


def test_get_prints_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tinystories.txt").write_text("Once upon a time. " * 10)
    assert main(["get", "tinystories", "--root", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert output.out.strip() == str(tmp_path / "tinystories.safetensors")
    assert "wrote" in output.err
    assert load_dataset("tinystories", tmp_path).num_classes == len(set("Once upon a time. "))


def test_errors_are_one_message_and_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "emnist", "--root", str(tmp_path)]) == 2
    assert "error: dataset 'emnist' cannot be downloaded; allowed: cifar10" in capsys.readouterr().err
    assert main(["get", "tinystories", "--root", str(tmp_path)]) == 1
    assert "by hand: put tinystories.txt" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["list"], ["get", "tinystories"]])
@pytest.mark.parametrize("root", ["file", "x" * 300, "a\0b"], ids=["file", "long", "nul"])
def test_a_root_that_cannot_be_a_directory_is_bad_input(
    command: list[str], root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*command, "--root", str(tmp_path / root)]) == 2
    assert "data directory" in capsys.readouterr().err


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "tinystories.txt").write_text("Once upon a time. " * 10)
    main(["get", "tinystories", "--root", str(tmp_path)])
    capsys.readouterr()
    assert main(["list", "--root", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "in the package" in lines["digits"]
    assert "in the package" in lines["mnist1d"]
    assert "not downloaded" in lines["cifar10"]
    assert "ready" in lines["tinystories"]
    assert str(tmp_path) in lines["data"]


def test_list_shows_registered_datasets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(datasets, "_REGISTERED", {})
    (tmp_path / "my_dataset.py").write_text(
        "from esper.runtime import register_dataset\nregister_dataset('rings', lambda: {}, classes=4)\n"
    )
    assert main(["list", "--root", str(tmp_path)]) == 0
    assert "rings" not in capsys.readouterr().out
    assert main(["list", "--import", "my_dataset", "--root", str(tmp_path)]) == 0
    assert "rings" in capsys.readouterr().out


def test_runs_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "esper.scripts.data", "get", "tinystories", "--root", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "by hand" in done.stderr
    assert "Traceback" not in done.stderr
