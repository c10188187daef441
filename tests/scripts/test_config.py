"""`esper config`, and the flags that it shares with `esper train`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from esper.leyline import EsperError
from esper.runtime.tasks import task_names
from esper.scripts.config import display, main, make_parser, parse
from esper.simic.training.config import LEAVES, PRESETS, TrainingConfig, choices, optional

COMPANIONS = {
    "resume": ["--telemetry-dir", "d"],
    "gpu_preload": ["--devices", "cuda:0"],
    "teacher": ["--teacher-rounds", "1"],
    "teacher_rounds": ["--teacher", "heuristic"],
}
TEXTS = {
    "slots": ["r0c1", "r0c0"],
    "devices": ["cuda:1", "cpu"],
    "population": ["24"],
    "auto_forward_gates": ["g3", "g1"],
    "ab_reward_modes": ["sparse", "shaped"],
    "heuristic.blueprints": ["norm"],
    "governor.history_window": ["30"],
    "governor.min_samples": ["5"],
    "reward.progress_weight": ["1.5"],
    "blind": ["depth", "alpha"],
}


def leaf(config: TrainingConfig, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def other_text(path: str) -> tuple[list[str], Any]:
    """Words that set a path to something else than its default, and the value that they should give."""
    (kind, _), default = optional(LEAVES[path]), leaf(TrainingConfig(), path)
    flag = "--" + path.replace("_", "-")
    if kind is bool:
        return [flag.replace("--", "--no-") if default else flag], not default
    if path in TEXTS:
        inner = get_args(kind)[0] if get_origin(kind) is tuple else kind
        named = (
            [inner[word.upper()] for word in TEXTS[path]]
            if choices(inner)
            else [inner(word) for word in TEXTS[path]]
        )
        return [flag, *TEXTS[path]], tuple(named) if inner is not kind else named[0]
    if choices(kind):
        word = next(word for word in choices(kind) if word != display(default))
        return [flag, word], kind[word.upper()] if isinstance(kind, type) else word
    value = {int: lambda: (default or 0) + 1, float: lambda: (default or 1.0) / 2, str: lambda: "other"}[
        kind
    ]()
    return [flag, str(value)], value


@pytest.mark.parametrize("path", [path for path in LEAVES if path != "policy"])
def test_every_setting_has_a_flag_that_sets_it_and_nothing_else(path: str) -> None:
    words, value = other_text(path)
    companions = COMPANIONS.get(path, [])
    config, origins = parse(make_parser("esper train", ""), [*words, *companions])
    assert leaf(config, path) == value != leaf(TrainingConfig(), path)
    also = {word.removeprefix("--").replace("-", "_") for word in companions[:1]}
    assert {name for name, origin in origins.items() if origin == "flag"} == {path} | also


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--lr", "3e-4"], "ppo.lr", 3e-4),
        (["--gamma=0.9"], "ppo.gamma", 0.9),
        (["--entropy-coef", "0.1"], "ppo.entropy_coef", 0.1),
        (["--reward-mode", "sparse"], "reward.mode", "sparse"),
        (["--ppo-epochs", "2"], "ppo.epochs", 2),
        (["--telemetry-level", "debug"], "telemetry.level", 3),
        (["--target-kl", "none"], "ppo.target_kl", None),
        (["--slots", "none"], "slots", None),
        (["heuristic"], "policy", "heuristic"),
    ],
)
def test_short_names(words: list[str], path: str, value: Any) -> None:
    config, origins = parse(make_parser("esper train", ""), words)
    assert leaf(config, path) == value
    assert origins[path] == "flag"


@pytest.mark.parametrize("flag", ["--epochs", "--bf16", "--rent-weight", "--mode", "--round"])
def test_names_that_could_mean_several_things_are_unknown(flag: str) -> None:
    with pytest.raises(EsperError, match=f"unknown argument '{flag}'.*--help"):
        parse(make_parser("esper train", ""), [flag, "1"])


def test_help_has_a_sentence_for_every_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as stop:
        main(["show", "--help"])
    assert stop.value.code == 0
    text = re.sub(r"\n {10,}", "  ", capsys.readouterr().out)
    for path in LEAVES.keys() - {"policy"}:
        line = next(
            line
            for line in text.splitlines()
            if re.match(rf"  --{re.escape(path.replace('_', '-'))}[ ,]", line)
        )
        sentence, default = re.fullmatch(r".*?  +(\S.*) \(default: (.*)\)", line.strip()).groups()  # type: ignore[union-attr]
        assert len(sentence.split()) >= 3, line
        assert sentence.rstrip().endswith((".", "…")), line
        assert default == display(leaf(TrainingConfig(), path))


def shown(output: str) -> dict[str, tuple[str, str]]:
    rows = [re.split(r"  +", line.strip()) for line in output.splitlines()[1:]]
    return {row[0]: (row[1], row[2]) for row in rows}


def test_show_prints_each_value_with_its_origin(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    file = tmp_path / "run.yaml"
    file.write_text("hidden: 64\n")
    assert main(["show", "ppo", "--preset", "quickstart", "--config", str(file), "--lr", "2e-4"]) == 0
    rows = shown(capsys.readouterr().out)
    assert list(rows) == list(LEAVES)
    assert rows["task"] == ("digits_shift", "preset quickstart")
    assert rows["hidden"] == ("64", f"file {file}")
    assert rows["ppo.lr"] == ("0.0002", "flag")
    assert rows["policy"] == ("ppo", "flag")
    assert rows["seed"] == ("42", "default")


def test_lists(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["presets"]) == 0
    assert list(shown(capsys.readouterr().out)) == list(PRESETS)
    assert main(["tasks"]) == 0
    assert sorted(shown(capsys.readouterr().out)) == sorted(task_names())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "required: what"),
        (["shw"], "'shw'"),
        (["presets", "x"], "x"),
        (["show", "--rounds"], "--rounds"),
        (["show", "--rounds", "many"], "rounds is 'many'"),
        (["show", "pp"], "'pp' (did you mean ppo?)"),
    ],
)
def test_bad_arguments(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert part in output.err
    assert output.out == ""
