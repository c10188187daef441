"""The `esper` command: help, subcommands, and what it says to a wrong one."""

from __future__ import annotations

import pytest

from esper.scripts.cli import COMMANDS, main


def test_help_names_every_command(capsys) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"esper {name}" in shown for name in COMMANDS)


def test_no_command_is_an_error_with_the_help(capsys) -> None:
    assert main([]) == 2
    assert "usage: esper" in capsys.readouterr().out


def test_an_unknown_command_names_the_known(capsys) -> None:
    assert main(["dta"]) == 2
    error = capsys.readouterr().err
    assert "'dta'" in error
    assert "data" in error


def test_data_list_runs(capsys, tmp_path) -> None:
    assert main(["data", "list", "--root", str(tmp_path)]) == 0
    assert "cifar10" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert name in capsys.readouterr().out
