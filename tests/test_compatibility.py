"""Other versions of Python and torch than the one that `make test` uses, as far as they can be had here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from esper.scripts.cli import main

ROOT = Path(__file__).parents[1]
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
OLDEST_TORCH = "torch==2.10.*"
WITHOUT_TORCH = """
import compileall, sys
assert compileall.compile_dir("SOURCE", quiet=1, force=True, legacy=True), "not valid Python here"
import esper, esper.kasmina, esper.karn, esper.leyline, esper.nissa, esper.simic, esper.tamiyo, esper.tolaria
from esper.scripts.cli import main
for words in (["sql", "RUN", "SELECT count(*) AS n FROM steps", "--output", "csv"], ["report", "RUN"],
              ["runs", "RUN"], ["compare", "RUN", "RUN"]):
    assert main(words) == 0, words
assert "torch" not in sys.modules
"""
PIECE = ("tests/kasmina/test_lifecycle.py", "tests/tamiyo/test_network.py", "tests/simic/test_vectorized.py")
"""Tests of networks, of the policy and of training."""


def interpreter(version: str) -> str:
    """A Python of this version: on the path, or under pyenv."""
    roots = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [shutil.which(f"python{version}"), *sorted(roots.glob(f"{version}.*/bin/python"))]
    for place in places:
        if place is None:
            continue
        asked = [str(place), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return str(place)
    pytest.skip(f"no Python {version} on this machine")


def run(*command: str | Path, directory: Path, **environment: str) -> str:
    words = [str(word) for word in command]
    settings = os.environ | environment
    done = subprocess.run(
        words, cwd=directory, env=settings, capture_output=True, text=True, check=False, timeout=3600
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@cache
def requirements(python: str, wanted: str) -> list[str]:
    """What a release of torch needs on this machine, from its metadata alone; skips where there is none."""
    command = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--report", "-", wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"{wanted} cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    (package,) = json.loads(done.stdout)["install"]
    return list(package["metadata"].get("requires_dist", []))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_what_needs_no_torch_works_in_other_pythons(version: str, tmp_path: Path) -> None:
    """A run that was recorded here is read there, and all of the source is valid there."""
    recorded = ["--rounds", "1", "--envs", "2", "--episode-length", "2", "--steps-per-epoch", "1"]
    words = [
        "train",
        "wait",
        "--task",
        "digits_impaired",
        *recorded,
        "--telemetry-dir",
        str(tmp_path / "run"),
    ]
    assert main(words) == 0
    run(interpreter(version), "-m", "venv", "venv", directory=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    others = [wanted for wanted in DEPENDENCIES if not wanted.startswith("torch")]
    constraints = ("-c", str(ROOT / "constraints.txt"))
    run(python, "-m", "pip", "install", "-q", *constraints, *others, directory=tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    script = WITHOUT_TORCH.replace("SOURCE", "src").replace("RUN", "run")
    run(python, "-c", script, directory=tmp_path, PYTHONPATH="src")


@pytest.mark.slow
def test_the_oldest_torch_that_is_promised(tmp_path: Path) -> None:
    needed = requirements(sys.executable, OLDEST_TORCH)
    libraries = [wanted for wanted in needed if wanted.startswith("nvidia-")]
    if libraries:
        pytest.skip(
            f"{OLDEST_TORCH} is here as a build for CUDA only: over three gigabytes with its "
            f"{len(libraries)} libraries"
        )
    run(sys.executable, "-m", "venv", "venv", directory=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        *DEPENDENCIES,
        OLDEST_TORCH,
        "pytest",
        "hypothesis",
        directory=tmp_path,
    )
    run(python, "-m", "pytest", "-q", "-m", "not slow", *PIECE, directory=ROOT, PYTHONPATH=str(ROOT / "src"))
