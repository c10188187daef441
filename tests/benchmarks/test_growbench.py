"""GrowBench: the example of its README enters the table, and wrong answers are named."""

from __future__ import annotations

import re
from pathlib import Path

import orjson
import pytest
from benchmarks.growbench import example
from benchmarks.growbench.__main__ import main
from benchmarks.growbench.rules import load_rule

from esper.leyline import EsperError
from proof.worlds import FIRST, TINY

RULE = "benchmarks.growbench.example:strongest_gradient"
README = Path(example.__file__).with_name("README.md")


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("growbench")


def bench(out: Path, *rules: str) -> int:
    words = ["--family", TINY, "--first-world", str(FIRST), "--num-worlds", "2", "--out", str(out)]
    return main([*words, *(word for rule in rules for word in ("--rule", rule))])


def test_the_example_enters_the_table(out, capsys) -> None:
    assert bench(out, RULE) == 0
    shown = capsys.readouterr().out
    assert f"{RULE} (entered)" in shown
    rows = orjson.loads((out / "growbench.json").read_bytes())["rows"]
    names = [row["rule"] for row in rows]
    assert {RULE, "static", "random", "heuristic", "periodic", "plateau", "best_single_rung"} <= set(names)
    means = [row["J"]["value"] for row in rows]
    assert means == sorted(means, reverse=True)
    assert all(row["J"]["low"] <= row["J"]["value"] <= row["J"]["high"] for row in rows)
    (never,) = (row for row in rows if row["rule"] == "static")
    assert (never["above_never"]["value"], never["better_than_never"]["value"]) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return ('r9c9', 'norm')", r"answered \('r9c9', 'norm'\); allowed: None or one of \[\('r0c"),
        ("return 7", r"answered 7; allowed: None or one of"),
        ("return 1 / 0", "raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_answer_names_rule_world_network_and_epoch(
    body, told, out, tmp_path, monkeypatch, capsys
) -> None:
    name = f"rule_{abs(hash(body))}"
    rule = f"def wrong(observation, legal):\n    if observation['epoch'] == 2:\n        {body}\n"
    (tmp_path / f"{name}.py").write_text(rule)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert bench(out, f"{name}:wrong") == 1
    error = capsys.readouterr().err
    assert re.search(
        rf"rule '{name}:wrong' in world worlds_small:{FIRST}\S*, network 0, epoch 2 {told}", error
    )


def test_the_readme_shows_the_example_as_it_is() -> None:
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    source = Path(example.__file__).read_text(encoding="utf-8")
    assert source.endswith(code)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nothing", "not of the form package.module:function"),
        ("no_such_module:rule", "cannot import no_such_module"),
        ("benchmarks.growbench.example:other", "has no function other"),
    ],
)
def test_a_rule_that_is_not_there(text, told) -> None:
    with pytest.raises(EsperError, match=told):
        load_rule(text)
