"""Source archive and wheel: what they hold, and what they do in an environment that has nothing else."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import esper
from code_blocks import python_of
from esper.runtime.data.sources import RECIPES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]
ATTACH = """
import esper, torch
from torch import nn
model = nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), nn.Flatten(), nn.Linear(144, 10))
x = torch.randn(8, 1, 8, 8)
before = model(x)
grower = esper.attach(model, ["0"], x, policy=None)
optimizer = torch.optim.SGD(grower.param_groups(), lr=0.1)
grower.germinate("0", "conv_light")
assert torch.equal(model(x), before)
model(x).square().mean().backward()
optimizer.step()
assert not torch.equal(model(x), before)
"""
POLICIES = """
from esper.leyline import StructureError
from esper.tamiyo.shipped import SHIPPED, load_policy, shipped_policies
for name in shipped_policies():
    load_policy(name)
weights = SHIPPED / f"{name}.safetensors"
content = bytearray(weights.read_bytes())
content[-1] ^= 1
open("flipped.safetensors", "wb").write(content)
try:
    load_policy("flipped.safetensors")
except StructureError:
    print(*shipped_policies())
"""


def run(*command: str | Path, directory: Path, text: str | None = None) -> str:
    """What a command prints that knows nothing of this checkout."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "ESPER_DATA")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=directory,
        env=environment | {"OMP_NUM_THREADS": "1"},
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that was built from it."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("needs the dependency group package")
    place = tmp_path_factory.mktemp("package")
    source = place / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    run(sys.executable, "-m", "build", "--outdir", place / "dist", source, directory=place)
    (sdist,) = (place / "dist").glob("*.tar.gz")
    (wheel,) = (place / "dist").glob("*.whl")
    return sdist, wheel


def files_of_the_package() -> set[str]:
    paths = (path for path in (ROOT / "src" / "esper").rglob("*") if path.is_file())
    return {str(p.relative_to(ROOT / "src")) for p in paths if p.suffix != ".pyc"}


@pytest.mark.slow
def test_the_archives_hold_the_whole_package_and_nothing_else(archives: tuple[Path, Path]) -> None:
    sdist, wheel = archives
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        facts = Parser().parsestr(archive.read(metadata).decode())
    assert {name for name in names if ".dist-info/" not in name} == files_of_the_package()
    assert "esper/py.typed" in names
    with tarfile.open(sdist) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {f"src/{name}" for name in files_of_the_package()} <= held
    assert facts["Version"] == esper.__version__
    assert set(facts.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    for licence in PROJECT["license-files"]:
        assert any(name.endswith(f"licenses/{licence}") for name in names), licence
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, directory=sdist.parent)


@pytest.mark.slow
def test_a_stranger_can_install_and_use_them(archives: tuple[Path, Path], tmp_path: Path) -> None:
    """An empty environment, an empty directory: commands, growth, the first page of the docs, policies."""
    sdist, wheel = archives
    run(sys.executable, "-m", "venv", tmp_path / "env", directory=tmp_path)
    python, command = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "esper"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "-q", *CONSTRAINTS, wheel, directory=tmp_path)
    assert "--" in run(command, "demo", "--help", directory=tmp_path)
    run(python, "-", directory=tmp_path, text=ATTACH)
    run(python, "-", directory=tmp_path, text=python_of(ROOT / "docs" / "index.md"))
    assert len(run(python, "-", directory=tmp_path, text=POLICIES).split()) >= 4
    run(command, "by_hand", directory=tmp_path)
    extras = ",".join(PROJECT["optional-dependencies"])
    run(*pip, "install", "-q", "--dry-run", *CONSTRAINTS, f"{wheel}[{extras}]", directory=tmp_path)
    run(*pip, "install", "-q", "--no-deps", "--force-reinstall", sdist, directory=tmp_path)
    assert run(command, "--version", directory=tmp_path) == f"esper {esper.__version__}\n"
    run(python, "-", directory=tmp_path, text=ATTACH)


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    changelog = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == esper.__version__


def test_every_dataset_and_asset_has_its_licence_on_the_page() -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    listed = page.partition("## Licences")[2]
    shipped = {path.name for path in (ROOT / "src/esper/runtime/data/assets").glob("*.npz")}
    assert [name for name in sorted({*shipped, *RECIPES}) if f"`{name}`" not in listed] == []
