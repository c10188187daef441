"""Every Python block of the README and of docs/ runs as it stands, and every command in them exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from code_blocks import blocks, included, python_of
from esper.scripts import cli

ROOT = Path(__file__).parents[2]
HISTORY = "LOG.md"  # says what was true when it was written
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name != HISTORY)]
COMMAND_NAMES = "|".join(cli.COMMANDS)

BEFORE = {
    "telemetry.md": """
        from esper.simic import train_ppo_vectorized
        train_ppo_vectorized(
            task="digits_shift", rounds=1, envs=8, episode_length=3, steps_per_epoch=1, val_size=32,
            telemetry_dir="runs/digits_shift-ppo-42-1",
        )
    """,
}
"""What a page takes for granted: files that its reader has by then."""
AFTER = {
    "index.md": """
assert len(grower.history) == 8
assert any(step.op == "GERMINATE" and step.executed for step in grower.history)
assert torch.allclose(plain.eval()(x[val]), model.eval()(x[val]), atol=1e-5)
""",
    "grow.md": """
assert grower.count_fossils() == 1
from esper.leyline import SeedStage
assert model.reports()["r0c0"].stage is SeedStage.FOSSILIZED
assert accuracy("r0c0") > accuracy() + 10
""",
    "telemetry.md": "assert len(accuracy) == 1 and steps.num_rows == 24",
    "commands.md": "assert len(history) == 1",
    "gym.md": "assert info['objective']['J'].shape == (8,) and ended.all()",
}
"""What a page promises of its code."""


def run_page(source: str, name: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs in a process of its own: what a page registers stays there."""
    runner = "import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'), {'__name__': 'page'})"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ESPER_DATA": str(directory / "data")}
    return subprocess.run(
        [sys.executable, "-c", runner, name],
        input=source,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


WITH_PYTHON = [page for page in PAGES if python_of(page).strip()]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    if page.name in BEFORE:
        before = run_page(textwrap.dedent(BEFORE[page.name]), "before", tmp_path)
        assert before.returncode == 0, before.stderr
    done = run_page(f"{python_of(page)}\n{AFTER.get(page.name, '')}", page.name, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_pages_that_have_python_are_found() -> None:
    assert {"index.md", "grow.md", "commands.md", "data.md", "tasks.md", "telemetry.md"} <= {
        page.name for page in WITH_PYTHON
    }
    assert set(BEFORE) | set(AFTER) <= {page.name for page in WITH_PYTHON}


def test_code_that_is_included_is_an_example_with_a_test_of_its_own() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_examples.py"))
    tests += (ROOT / "tests" / "gym" / "test_adapters.py").read_text(encoding="utf-8")
    paths = [path for page in PAGES for path in included(page)]
    assert len(paths) == 5
    for path in paths:
        assert Path(path).parent.name == "examples"
        assert f'"{Path(path).stem}"' in tests, path


def test_python_has_one_name() -> None:
    """`py` and other names would pass without being run."""
    for page in PAGES:
        assert {language for language, _, _ in blocks(page)} <= {"python", "yaml", ""}, page.name


def test_a_block_that_fails_names_the_line_of_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\ntext\n\n```python\nx / 0\n```\n")
    done = run_page(python_of(page), "page.md", tmp_path)
    assert done.returncode == 1
    assert 'File "page.md", line 10' in done.stderr


def commands_of(text: str) -> list[str]:
    """Command lines that start with `esper`, in blocks and in code spans."""
    lines = re.findall(rf"^ *(esper (?:{COMMAND_NAMES}|[a-z_]+)\b.*)$", text, re.MULTILINE)
    spans = re.findall(r"`(esper [^`]+)`", text)
    return [line.strip() for line in [*lines, *spans]]


def words_of(command: str) -> list[str]:
    """The words of a command line, without comment, ellipses and the brackets of optional parts."""
    plain = command.replace("[", " ").replace("]", " ").replace("…", " ")
    return [word for word in shlex.split(plain, comments=True) if word.strip(" .|")]


@cache
def help_text(*words: str) -> str:
    """What `esper WORDS --help` prints; all of it, where a command has more than it shows at first."""
    printed = ""
    with pytest.MonkeyPatch.context() as patch:
        for flag in ("--help", "--help-all"):
            output = StringIO()
            patch.setattr(sys, "stdout", output)
            try:
                code = cli.main([*words, flag])
            except SystemExit as end:
                code = end.code or 0
            assert code == 0, f"esper {' '.join(words)} {flag} ends with {code}"
            printed += output.getvalue()
            if "--help-all" not in printed:
                break
    return printed


def unknown_flags(words: list[str]) -> list[str]:
    """Flags of a command line that the help of its command does not list."""
    _, command, *rest = words
    known = help_text(command)
    if rest and re.fullmatch("[a-z_]+", rest[0]):
        known += help_text(command, rest[0])
    listed = {flag.replace(".", "-") for flag in re.findall(r"--[a-z][\w.-]*", known)}
    listed |= {flag.replace("--ppo-", "--") for flag in listed}
    given = [word.split("=")[0] for word in rest if word.startswith("--")]
    return [flag for flag in given if flag.replace(".", "-").replace("_", "-") not in listed]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    problems = []
    for command in commands_of(page.read_text(encoding="utf-8")):
        words = words_of(command)
        if words[1] in ("COMMAND", "--help", "--version"):
            continue
        if words[1] not in cli.COMMANDS:
            problems.append(f"{command}: no such command")
        else:
            problems += [f"{command}: no flag {flag}" for flag in unknown_flags(words)]
    assert problems == []


def test_commands_are_found_and_wrong_ones_noticed() -> None:
    assert sum(len(commands_of(page.read_text(encoding="utf-8"))) for page in PAGES) > 40
    assert unknown_flags(words_of("esper train ppo --rounds 3 --lr 1e-3 --reward-mode x")) == []
    assert unknown_flags(words_of("esper train ppo --bogus 3")) == ["--bogus"]
    assert unknown_flags(words_of("esper data get cifar10 [--root DIR]  # a comment with --flag")) == []
    assert commands_of("text\n    esper grow --out x\nand `esper nothing`") == [
        "esper grow --out x",
        "esper nothing",
    ]


def test_make_targets_and_modules_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        used = re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
        assert set(used) <= targets, page.name
        for module in re.findall(r"python -m ((?:benchmarks|esper)[\w.]*)", text):
            base = ROOT / ("src" if module.startswith("esper") else ".") / module.replace(".", "/")
            assert base.with_suffix(".py").is_file() or (base / "__main__.py").is_file(), module
