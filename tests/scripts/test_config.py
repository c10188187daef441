"""`esper config`, and the flags that it shares with `esper train`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from esper.leyline import EsperError
from esper.runtime.tasks import task_names
from esper.scripts.config import DEFAULT_IN_WORDS, SHORT_HELP, display, main, parse
from esper.simic.training.config import LEAVES, TrainingConfig, choices, is_list, optional
from esper.simic.training.presets import PRESETS

COMPANIONS = {
    "resume": ["--telemetry-dir", "d"],
    "gpu_preload": ["--devices", "cuda:0"],
    "teacher": ["--teacher-rounds", "1"],
    "teacher_rounds": ["--teacher", "heuristic"],
    "unlock_after": ["--granularity", "plans"],
    "distinct_twins": ["--granularity", "plans", "--twins", "2"],
}
TEXTS = {
    "task": ["digits_mlp", "digits_scale"],
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
    "reward.mode": ["shaped"],
    "sensors": ["mine", "other"],
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
        inner = get_args(kind)[0] if is_list(kind) else kind
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
    config, origins = parse("esper train", "", ["--preset", "none", *words, *companions])
    assert leaf(config, path) == value != leaf(TrainingConfig(), path)
    flags = [word for word in companions if word.startswith("--")]
    also = {word.removeprefix("--").replace("-", "_") for word in flags}
    assert {name for name, origin in origins.items() if origin == "flag"} == {path} | also


@pytest.mark.parametrize(
    ("words", "origin"),
    [
        ([], "preset alone"),
        (["ppo", "--task", "mnist1d_baseline"], "preset alone"),
        (["--preset", "quickstart"], "preset quickstart"),
        (["--preset", "none"], "default"),
        (["heuristic"], "default"),
        (["--config", "empty.json"], "default"),
    ],
)
def test_a_policy_is_trained_from_j_alone_unless_something_else_is_named(
    words: list[str], origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text("{}")
    config, origins = parse("esper train", "", words)
    assert origins["values_rounds"] == origin
    assert (config.values_rounds > 0) == (origin != "default")


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--task", "digits_mlp"], "task", "digits_mlp"),
        (["--task", "digits_mlp", "wait"], "policy", "wait"),
        (["--task", "digits_mlp", "digits_scale", "wait"], "task", ("digits_mlp", "digits_scale")),
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
    config, origins = parse("esper train", "", words)
    assert leaf(config, path) == value
    assert origins[path] == "flag"


@pytest.mark.parametrize("flag", ["--epochs", "--bf16", "--rent-weight", "--mode", "--round"])
def test_names_that_could_mean_several_things_are_unknown(flag: str) -> None:
    with pytest.raises(EsperError, match=f"unknown argument '{flag}'.*--help"):
        parse("esper train", "", [flag, "1"])


def help_text(flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The help in one line, without frames."""
    monkeypatch.setenv("COLUMNS", "100")  # tyro sets wide help in columns
    with pytest.raises(SystemExit) as stop:
        main(["show", flag])
    assert stop.value.code == 0
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())


def test_help_has_a_sentence_and_the_default_for_every_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = help_text("--help-all", capsys, monkeypatch)
    for path in LEAVES.keys() - {"policy"}:
        flag = re.escape("--" + path.replace("_", "-"))
        pattern = rf" {flag}(?:,| \S+) ((?:(?!\(default).)*)\(default: (\(empty\)|[^)]*)\)"
        match = re.search(pattern, text)
        assert match is not None, path
        assert match[2] == DEFAULT_IN_WORDS.get(path, display(leaf(TrainingConfig(), path)))
        assert len(match[1].split()) >= 4, path


def test_the_short_help_has_the_flags_that_people_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = help_text("--help", capsys, monkeypatch)
    shown = {path for path in LEAVES if re.search(rf"--{path.replace('_', '-')}[ ,]", text)}
    assert shown | {"policy"} == SHORT_HELP
    for flag in ("--preset", "--config", "--import", "--help-all"):
        assert flag in text


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


@pytest.mark.parametrize(
    "words", [["--rounds"], ["--ppo.lr", "--rounds", "3"], ["--gae_lambda"], ["--preset"]]
)
def test_a_flag_without_its_value_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *words]) == 2
    assert capsys.readouterr().err == f"error: {words[0]} needs a value\n"


@pytest.mark.parametrize("flag", ["--bogus", "--xyz", "--frobnicate"])
def test_a_flag_that_is_like_no_other_gets_no_suggestion(flag: str) -> None:
    with pytest.raises(EsperError, match=f"unknown argument '{flag}'; --help-all lists all flags"):
        parse("esper train", "", [flag, "3"])


def test_a_flag_repairs_a_file_that_alone_would_be_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("resume: auto\n")
    config, _ = parse("esper train", "", ["--config", str(file), "--telemetry-dir", "D"])
    assert (config.resume, config.telemetry_dir) == ("auto", "D")


def test_lists(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["presets"]) == 0
    assert list(shown(capsys.readouterr().out)) == list(PRESETS)
    assert main(["tasks"]) == 0
    worlds = ("worlds_dense:NUMBER", "worlds_mixed:NUMBER", "worlds_small:NUMBER")
    assert sorted(shown(capsys.readouterr().out)) == sorted([*task_names(), *worlds])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "the topic is missing"),
        (["shw"], "'shw' (did you mean show?)"),
        (["presets", "x"], "'x'"),
        (["show", "ppo", "x"], "unknown argument 'x'"),
        (["show", "--import", "no_such_module"], "--import no_such_module: ModuleNotFoundError"),
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
