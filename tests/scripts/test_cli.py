"""The `esper` command: help, subcommands, and what it says to a wrong one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import esper
from esper.scripts.cli import COMMANDS, fail, import_modules, main


def test_help_names_every_command(capsys) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"esper {name}" in shown for name in COMMANDS)


def test_version_is_that_of_the_package(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"esper {esper.__version__}\n"


def test_no_command_is_an_error_with_the_help(capsys) -> None:
    assert main([]) == 2
    assert "usage: esper" in capsys.readouterr().out


def test_an_unknown_command_names_the_known(capsys) -> None:
    assert main(["dta"]) == 2
    error = capsys.readouterr().err
    assert "'dta' (did you mean data?)" in error
    assert ", ".join(COMMANDS) in error


@pytest.mark.parametrize(("arguments", "code"), [(["train", "--help"], 141), (["data", "list"], 1)])
def test_a_reader_that_goes_early_is_no_traceback(arguments: list[str], code: int) -> None:
    """rich ends the process with 1 where it prints a table; other output ends as if by SIGPIPE."""
    command = [sys.executable, "-m", "esper.scripts.cli", *arguments]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (code, b"")


def test_escapes_in_an_error_do_not_reach_the_terminal(capsys) -> None:
    assert main(["\x1b[2J"]) == 2
    assert fail("task \x1b]0;owned\x07") == 2
    assert "\x1b" not in capsys.readouterr().err


# -- user code -----------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory that is not importable yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def test_modules_are_imported_in_order_and_removed_from_the_arguments(here) -> None:
    (here / "my_first.py").write_text("loaded = ['first']")
    (here / "my_second.py").write_text("import my_first; my_first.loaded.append('second')")
    arguments = ["ppo", "--import", "my_first", "--rounds", "3", "--import=my_second", "--seed", "1"]
    assert import_modules(arguments) == ["ppo", "--rounds", "3", "--seed", "1"]
    assert sys.modules["my_first"].loaded == ["first", "second"]


@pytest.mark.parametrize("command", ["train", "config", "data", "baseline"])
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("my_missing", "--import my_missing: ModuleNotFoundError"),
        ("my_broken", "--import my_broken: ZeroDivisionError: division by zero"),
        ("my_typo", "--import my_typo: SyntaxError"),
        ("my_module.py/x", "'my_module.py/x' is not the name of a Python module"),
        ("", "'' is not the name of a Python module"),
    ],
)
def test_a_module_that_cannot_be_imported_is_bad_input(command, name, part, here, capsys) -> None:
    (here / "my_broken.py").write_text("1 / 0")
    (here / "my_typo.py").write_text("def f(:")
    assert main([command, "--import", name]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert "Traceback" not in error
    if name == "my_broken":
        assert "my_broken.py, line 1" in error


def test_data_list_runs(capsys, tmp_path) -> None:
    assert main(["data", "list", "--root", str(tmp_path)]) == 0
    assert "cifar10" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys) -> None:
    try:
        code = main([name, "--help"])
    except SystemExit as stop:
        code = stop.code
    assert code == 0
    assert f"usage: esper {name}" in capsys.readouterr().out
