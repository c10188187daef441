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
    """The Python blocks of the page: dataset, blueprint, task, reward, sensor, training."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 6
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
    (tmp_path / "my_module.py").write_text("\n".join(blocks[:5]))
    (tmp_path / "main.py").write_text(
        "import my_module\n" + blocks[5] + "print(sorted(agent.policy.schema()))\n"
    )
    done = run(tmp_path, "main.py")
    assert done.returncode == 0, done.stderr
    assert "mean J of the round" in done.stdout


def test_a_module_outside_the_package_is_used_by_the_command_line(tmp_path: Path, blocks: list[str]) -> None:
    (tmp_path / "my_module.py").write_text("\n".join(blocks[:5]))
    command = ["-m", "esper.scripts.cli", "train", "ppo", "--preset", "none"]
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


def test_a_users_blueprint_is_grown_recorded_by_name_and_resumed(tmp_path: Path, blocks: list[str]) -> None:
    only = "replace(get_task_spec('rings'), name='products', blueprints=('quadratic',))"
    (tmp_path / "my_module.py").write_text("\n".join([*blocks[:3], f"register_task({only})"]))
    other = "from torch import nn\nfrom esper.kasmina import register_blueprint\n"
    (tmp_path / "other.py").write_text(
        other + "register_blueprint('other', 'mlp', lambda c: nn.Linear(c, c))\n"
    )
    command = [
        "-m",
        "esper.scripts.cli",
        "train",
        "ppo",
        "--preset",
        "none",
        "--task",
        "products:episode_length=6,steps_per_epoch=2",
    ]
    command += ["--envs", "4", "--hidden", "16", "--telemetry-dir", "run", "--checkpoint-every", "1"]
    done = run(tmp_path, *command, "--import", "my_module", "--rounds", "3")
    assert done.returncode == 0, done.stderr
    recorded = RunDirectory.open(tmp_path / "run")
    planted = {row["blueprint"] for row in recorded.table("steps").to_pylist() if row["blueprint"]}
    assert planted == {"quadratic"}
    lifecycle = [event["data"] for event in recorded.events() if event["event_type"] == "seed_lifecycle"]
    assert {data["blueprint_id"] for data in lifecycle} == {"quadratic"}
    resume = [*command, "--rounds", "4", "--resume", "auto"]
    for modules in (["other", "my_module"], ["my_module", "other"]):
        imports = [word for module in modules for word in ("--import", module)]
        refused = run(tmp_path, *resume, *imports)
        assert refused.returncode == 2
        assert re.search(
            "index 1[67] stands for .* in the checkpoint, in this run it is 'other'", refused.stderr
        )
    resumed = run(tmp_path, *resume, "--import", "my_module")
    assert resumed.returncode == 0, resumed.stderr
