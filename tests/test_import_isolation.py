"""Packages load without torch, shown in fresh interpreters; dependencies point one way, shown by the syntax
trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "esper"
LIGHT = [
    "esper",
    "esper.leyline",
    "esper.simic",
    "esper.kasmina",
    "esper.tamiyo",
    "esper.tolaria",
    "esper.nissa",
    "esper.simic.training",
    "esper.grower",
    "esper.gym",
]

# What a package may import beside itself and the lazy-attribute helper.
MAY_IMPORT = {
    "leyline": set(),
    "kasmina": {"leyline"},
    "tamiyo": {"leyline"},
    "tolaria": {"leyline"},
    "nissa": {"leyline"},
    "runtime": {"leyline", "kasmina", "tamiyo", "tolaria", "nissa"},
    "simic": {"leyline", "kasmina", "tamiyo", "tolaria", "nissa", "runtime"},
    "karn": {"leyline", "nissa"},
    "proof": {"leyline", "kasmina", "tamiyo", "tolaria", "nissa", "runtime", "simic"},
    "grower": {"leyline", "kasmina", "tamiyo", "tolaria", "nissa", "runtime", "simic"},
    "gym": {"leyline", "kasmina", "tamiyo", "tolaria", "nissa", "runtime", "simic"},
    "scripts": {"leyline", "kasmina", "tamiyo", "tolaria", "nissa", "runtime", "simic", "karn", "proof"},
}
EXTRACTED = ["vectorized_trainer", "env_factory", "batch_ops", "counterfactual_eval", "action_execution"]


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Imports(ast.NodeVisitor):
    """Collects the esper modules that a module imports anywhere, functions included, type-checking blocks
    left out."""

    def __init__(self, module: str, *, is_package: bool) -> None:
        self.package = module.split(".") if is_package else module.split(".")[:-1]
        self.names: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            self.add(f"{module}.{alias.name}")

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__", "lazy_exports"):
            for child in ast.walk(node):
                if isinstance(child, ast.Constant) and isinstance(child.value, str):
                    self.add(child.value)
        self.generic_visit(node)

    def add(self, name: str) -> None:
        if name.split(".")[0] == "esper":
            self.names.add(name)


def imports_of(source: str, module: str, *, is_package: bool = False) -> set[str]:
    visitor = Imports(module, is_package=is_package)
    visitor.visit(ast.parse(source))
    return visitor.names


def imports_in(path: Path) -> set[str]:
    return imports_of(
        path.read_text(encoding="utf-8"), module_name(path), is_package=path.name == "__init__.py"
    )


def reaches(imported: set[str], module: str) -> set[str]:
    return {name for name in imported if name == module or name.startswith(module + ".")}


@pytest.mark.parametrize("module", LIGHT)
def test_import_does_not_load_torch(module: str) -> None:
    code = f"import {module}, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert module in loaded
    assert "torch" not in loaded


def modules_after(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded once it has run this code."""
    code = f"{code}; import sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stderr.split())


def test_esper_starts_with_nothing_but_itself() -> None:
    """`make bench ONLY=startup` measures it; this says why it is fast."""
    bare = modules_after("pass")
    light = {"__future__", "esper", "esper._lazy"}
    assert modules_after("import esper") - bare <= light
    asked = "from esper.scripts.cli import main; main(['--help'])"
    assert modules_after(asked) - bare <= light | {"esper.scripts", "esper.scripts.cli"}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_dependencies_point_one_way(package: str) -> None:
    forbidden = MAY_IMPORT.keys() - MAY_IMPORT[package] - {package}
    imported = {path: imports_in(path) for path in (SRC / package).rglob("*.py")}
    wrong = {
        f"{module_name(path)} imports {name}"
        for path, names in imported.items()
        for other in forbidden
        for name in reaches(names, f"esper.{other}")
    }
    assert not wrong


def test_every_package_has_a_rule() -> None:
    assert {path.parent.name for path in SRC.glob("*/__init__.py")} == MAY_IMPORT.keys()


def test_modules_beside_the_packages_import_only_contracts_and_each_other() -> None:
    beside = {f"esper.{path.stem}" for path in SRC.glob("_*.py")}
    for path in SRC.glob("*.py"):
        imported = imports_in(path)
        allowed = reaches(imported, "esper.leyline").union(*(reaches(imported, name) for name in beside))
        if path.name == "__init__.py":
            allowed.add("esper.grower.attach")  # esper.attach and esper.load, lazily
        assert imported == allowed, path.name


@pytest.mark.parametrize("name", EXTRACTED)
def test_extracted_modules_do_not_reach_up(name: str) -> None:
    path = SRC / "simic" / "training" / f"{name}.py"
    imported = imports_in(path)
    assert not reaches(imported, "esper.runtime")
    assert not reaches(imported, "esper.simic.training.vectorized")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import esper.karn.sql as sql", {"esper.karn.sql"}),
        ("import os, esper.karn", {"esper.karn"}),
        ("from esper.karn import sql, report", {"esper.karn.sql", "esper.karn.report"}),
        ("from esper import karn", {"esper.karn"}),
        ("def f():\n    from esper.karn import sql", {"esper.karn.sql"}),
        ("from .agent import ppo", {"esper.simic.agent.ppo"}),
        ("from . import agent", {"esper.simic.agent"}),
        ("from ..karn import sql", {"esper.karn.sql"}),
        ("import_module('esper.karn.sql')", {"esper.karn.sql"}),
        ("lazy_exports(__name__, {'esper.karn.sql': ('X',)})", {"esper.karn.sql"}),
        ("if TYPE_CHECKING:\n    import esper.karn", set()),
        (
            "import typing\nif typing.TYPE_CHECKING:\n    import esper.karn\nelse:\n    import esper.scripts",
            {"esper.scripts"},
        ),
        ("if DEBUG:\n    import esper.karn", {"esper.karn"}),
        ("import esperanto, os\nfrom torch import nn", set()),
    ],
)
def test_the_checker_sees_every_way_to_import(source: str, expected: set[str]) -> None:
    assert imports_of(source, "esper.simic.contracts") == expected


def test_relative_imports_of_a_package() -> None:
    assert imports_of("from . import ppo", "esper.simic.agent", is_package=True) == {"esper.simic.agent.ppo"}
    assert imports_of("from ..rewards import terms", "esper.simic.agent", is_package=True) == {
        "esper.simic.rewards.terms"
    }


def test_a_name_is_not_its_prefix() -> None:
    imported = {"esper.simic.training.vectorized_trainer.X", "esper.simic.training.vectorized.X"}
    assert reaches(imported, "esper.simic.training.vectorized") == {"esper.simic.training.vectorized.X"}
