"""What the pages point to exists: links, paths, names in the source; pictures are what their scripts draw."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "esper"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NAME = re.compile(r"`([\w/]+\.py):([\w.]+)`")
PATH = re.compile(r"`([\w/]+\.py)(?::[\w.]+)?`")


def names_in(path: Path) -> set[str]:
    """Functions, classes, methods and constants that a module defines, by qualified name."""
    return set(_names(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def _names(body: list[ast.stmt], prefix: str) -> list[str]:
    names = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(prefix + node.name)
        elif isinstance(node, ast.ClassDef):
            names += [prefix + node.name, *_names(node.body, f"{prefix}{node.name}.")]
        elif isinstance(node, ast.Assign):
            names += [prefix + target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(prefix + node.target.id)
    return names


def test_the_walk_names_only_what_exists() -> None:
    text = (DOCS / "decision.md").read_text(encoding="utf-8")
    named = NAME.findall(text)
    assert len(named) > 30
    missing = [path for path in PATH.findall(text) if not (SOURCE / path).is_file()]
    assert missing == []
    assert [f"{path}:{name}" for path, name in named if name not in names_in(SOURCE / path)] == []


def test_names_are_told_apart(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("A = 1\nB: int = 2\nclass C:\n    def d(self): ...\ndef e(): ...\n")
    assert names_in(module) == {"A", "B", "C", "C.d", "e"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_readme_shows_the_picture_and_leads_to_the_docs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {"docs/images/idea.svg", "docs/index.md", "docs/contributing.md"} <= set(
        re.findall(r"\]\(([^)#\s]+)", text)
    )


def test_the_file_map_is_complete() -> None:
    """Every path in the README's map exists, and every package and helper of the source is on it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"`((?:src|benchmarks|examples)/[\w/.]*)`", text)
    assert [path for path in listed if not (ROOT / path).exists()] == []
    packages = {f"src/esper/{path.parent.name}" for path in SOURCE.glob("*/__init__.py")}
    helpers = {f"src/esper/{path.name}" for path in SOURCE.glob("_*.py") if path.name != "__init__.py"}
    assert {path for path in packages | helpers if not any(p.startswith(path) for p in listed)} == set()


@pytest.mark.parametrize("script", sorted((DOCS / "images").glob("make_*.py")), ids=lambda path: path.stem)
def test_pictures_are_what_their_scripts_draw(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    pictures = runpy.run_path(str(script))["PICTURES"]
    for name, draw in pictures.items():
        assert (script.parent / name).read_text(encoding="utf-8") == draw(), name


def test_every_picture_of_the_docs_is_used() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = [path.name for path in (DOCS / "images").iterdir() if path.suffix in (".svg", ".png")]
    assert [name for name in pictures if f"images/{name})" not in text] == []
