"""Ids, imports and the message without the extra."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import pytest

import esper.gym
from esper.gym.registration import BUILTIN, env_id
from esper.runtime import tasks

SRC = Path(esper.gym.__file__).parents[1]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_every_built_in_task_has_an_id() -> None:
    done = run("from esper.runtime.tasks import task_names; print(*task_names())")
    assert tuple(done.stdout.split()) == BUILTIN
    assert {env_id(task) for task in BUILTIN} <= gymnasium.registry.keys()


def test_registration_loads_no_torch() -> None:
    done = run(
        "import esper.gym, gymnasium, sys; assert 'Esper/digits_shift-v0' in gymnasium.registry; "
        "print('torch' in sys.modules, 'esper.runtime.tasks' in sys.modules)"
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_an_id_can_name_the_module() -> None:
    assert gymnasium.make_vec("esper.gym:Esper/digits_shift-v0", num_envs=3).num_envs == 3


def test_tasks_of_users_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    tasks.register_task(replace(tasks.get_task_spec("digits_shift"), name="my_digits", blueprints=("norm",)))
    assert esper.gym.register("my_digits") == "Esper/my_digits-v0"
    env = gymnasium.make_vec("Esper/my_digits-v0", num_envs=2)
    assert env.single_action_space.n == 4
    del gymnasium.registry["Esper/my_digits-v0"]


def test_without_gymnasium_the_message_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['gymnasium'] = None; "
    done = run(hidden + "import esper.gym")
    assert done.returncode == 1
    assert "pip install 'gymnasium>=1.1'" in done.stderr.splitlines()[-1]
    assert run(hidden + "import esper, esper.grower, esper.simic.training.vectorized").returncode == 0


def test_adapters_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, adapter, message in (
        ("stable_baselines3.common.vec_env", "sb3", "pip install stable-baselines3 sb3-contrib"),
        ("torchrl.envs", "torchrl", "pip install torchrl"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"esper.gym.{adapter}", raising=False)
        with pytest.raises(ImportError, match=message):
            importlib.import_module(f"esper.gym.{adapter}")


def test_nothing_else_imports_gymnasium() -> None:
    wrong = []
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "gymnasium" for name in names) and path.parent != SRC / "gym":
                wrong.append(str(path))
    assert wrong == []
