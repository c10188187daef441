"""Registries from outside the package: the module of docs/extending.md, used by a call and by the command
line, each in a fresh interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from esper.nissa import RunDirectory

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
SOURCE = Path(__file__).parents[1] / "src"


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    """The Python blocks of the page: dataset, task, reward, sensor, training."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    return blocks


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_module_outside_the_package_is_used_by_a_call(tmp_path: Path, blocks: list[str]) -> None:
    (tmp_path / "my_module.py").write_text("\n".join(blocks[:4]))
    (tmp_path / "main.py").write_text(
        "import my_module\n" + blocks[4] + "print(sorted(agent.policy.schema()))\n"
    )
    done = run(tmp_path, "main.py")
    assert done.returncode == 0, done.stderr
    assert "mean J of the round" in done.stdout


def test_a_module_outside_the_package_is_used_by_the_command_line(tmp_path: Path, blocks: list[str]) -> None:
    (tmp_path / "my_module.py").write_text("\n".join(blocks[:4]))
    command = ["-m", "esper.scripts.cli", "train", "ppo"]
    settings = ["--task", "rings:episode_length=6,steps_per_epoch=2", "--reward.mode", "frugal", "--sensors"]
    size = ["--rounds", "1", "--envs", "2", "--hidden", "16", "--telemetry-dir", "run"]
    done = run(tmp_path, *command, "--import", "my_module", *settings, "spread", *size)
    assert done.returncode == 0, done.stderr
    recorded = RunDirectory.open(tmp_path / "run")
    assert recorded.config["reward"]["mode"] == "frugal"
    assert recorded.config["sensors"] == ["spread"]
    rewards = recorded.table("rewards").to_pylist()
    assert rewards
    for row in rewards:
        components = dict(row["components"])
        assert {"objective", "intervention", "late_germination"} <= components.keys()
        assert row["total_reward"] == pytest.approx(sum(components.values()))
    refused = run(tmp_path, *command, *settings, "spread", *size[:-1], "other")
    assert refused.returncode == 2
    assert "'rings' is unknown" in refused.stderr or "'frugal' is unknown" in refused.stderr
