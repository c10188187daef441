"""`esper prove`, `esper grow` and `esper eval` through the command line: results, and what they say to bad
input."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import orjson
import pytest

from esper.runtime.tasks import TASKS
from esper.scripts.cli import main
from esper.tamiyo import shipped_schedules
from frozen import assert_sealed, data_of
from proof.worlds import policy, policy_file

SIZES = "episode_length=3,steps_per_epoch=1,val_size=24,batch_size=8"
SHIFT, SCALE = f"digits_shift:{SIZES}", f"digits_scale:{SIZES}"
COHORTS = [
    "static",
    "random",
    "heuristic",
    "periodic",
    "plateau",
    "fixed_schedule",
    "schedule_final",
    "oracle",
    "probe",
    "learned",
    "learned_sampled",
    "static_final",
    "static_equal",
    "static_flops",
    "learned_shuffled",
]


@pytest.fixture(scope="module")
def proof(tmp_path_factory) -> tuple[Path, list[str]]:
    """A whole comparison, with a search for schedules and a transfer; and the command that repeats it without
    the search."""
    root = tmp_path_factory.mktemp("proof")
    command = [
        "prove",
        "--task",
        SHIFT,
        "--policy",
        policy_file(root / "a.safetensors"),
        policy_file(root / "b.safetensors", 1),
        "--networks",
        "2",
        "--probe-networks",
        "8",
        "--schedule",
        str(root / "s.json"),
        "--transfer",
        SCALE,
    ]
    assert main([*command, "--search", "792", "--candidates", "4", "--out", str(root / "one")]) == 0
    return root, command


def test_everything_is_written(proof):
    root, _ = proof
    assert sorted(path.name for path in (root / "one").iterdir()) == ["proof.json", "report.html"]
    found = orjson.loads((root / "one" / "proof.json").read_bytes())
    assert sorted(found["cohorts"]) == sorted(COHORTS)
    assert found["version"] == 1
    assert found["task"] == SHIFT
    assert [other["task"] for other in found["transfer"]] == [SCALE]
    assert list(found["transfer"][0]["cohorts"]) == ["static", "random", "heuristic", "learned"]
    assert set(found["learned_minus"]["static"]["J"]["mean"]) == {"value", "low", "high"}
    schedule = orjson.loads((root / "s.json").read_bytes())
    assert schedule["command"] == f"esper prove --task {SHIFT} --search 792 --candidates 4"


def test_the_page_is_whole_and_needs_no_network(proof):
    text = (proof[0] / "one" / "report.html").read_text(encoding="utf-8")
    assert_sealed(text)
    shown = data_of(text)["proof"]
    assert shown == orjson.loads((proof[0] / "one" / "proof.json").read_bytes())["page"]
    assert [section["title"] for section in shown] == [SHIFT, SCALE]
    blocks = [block for section in shown for block in section["blocks"]]
    assert sum(block["type"] == "table" for block in blocks) == 5
    charts = [block for block in blocks if block["type"] == "intervals"]
    assert len(charts) >= 8
    assert set(charts[0]["rows"]) == set(COHORTS)


def test_again_gives_the_same_bytes(proof, capsys):
    root, command = proof
    assert main([*command, "--out", str(root / "two")]) == 0
    assert (root / "one" / "proof.json").read_bytes() == (root / "two" / "proof.json").read_bytes()
    shown = capsys.readouterr().out
    assert "learned − other" in shown
    assert re.search(r"static_final +-?\d", shown)


def test_growing_and_evaluating_print_the_same(tmp_path, capsys):
    out = tmp_path / "g"
    assert (
        main(
            [
                "grow",
                "--task",
                "digits_impaired:episode_length=10,steps_per_epoch=4,val_size=48",
                "--policy",
                "heuristic",
                "--out",
                str(out),
                "--seed",
                "3",
            ]
        )
        == 0
    )
    grown = capsys.readouterr().out
    assert re.search(r"\d +germinate +r0c\d +\w+", grown)
    assert main(["eval", str(out)]) == 0
    line = re.compile(r"test accuracy \d+\.\d\d %")
    assert line.search(grown)[0] == line.search(capsys.readouterr().out)[0]


@pytest.fixture
def files(tmp_path) -> Path:
    other = policy()
    other.feature_schema = "other"
    other.save(tmp_path / "other.safetensors")
    shutil.copy(shipped_schedules("digits_scale"), tmp_path / "s.json")
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    (tmp_path / "broken_module.py").write_text("1 / 0")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("prove --task digits_none --out O", "task 'digits_none' is unknown.*; allowed: .*digits_shift"),
        ("prove --task digits_shift:size=tall --out O", "'size=tall'.*allowed: .*base"),
        ("prove --task digits_shift --networks 1 --out O", "networks is 1, must be a whole number from 2"),
        ("prove --task digits_shift --policy nobody --out O", "policy 'nobody' is neither"),
        ("prove --task digits_shift --policy other.safetensors --out O", "features is 'other' in the file"),
        ("prove --task digits_shift --policy s.json --out O", "not a readable safetensors file"),
        (
            "prove --task digits_shift --schedule s.json --out O",
            "for task 'digits_scale', not for 'digits_shift'",
        ),
        ("prove --task digits_shift --schedule none.json --out O", "cannot read .*none.json: No such file"),
        ("prove --task digits_shift --search -1 --out O", "budget_env_steps is -1"),
        (
            "prove --task digits_shift --search 100 --out O",
            "100 env-steps are too few .* allowed: 33696 or more",
        ),
        (
            "prove --task digits_shift --policy none --transfer digits_scale --out O",
            "--transfer digits_scale needs at least one --policy",
        ),
        ("prove --task digits_shift --out file/O", "cannot write to file/O: Not a directory"),
        ("prove --task digits_shift --search 60000 --schedule file/s.json --out O", "cannot write to file"),
        (
            "prove --task digits_shift --first-seed -1 --out O",
            "first_network is -1, must be a whole number from 0",
        ),
        ("grow --task digits_shift --policy nobody --out O", "policy 'nobody' is neither"),
        ("grow --task digits_shift --policy wait --out file/O", "cannot write to file/O"),
        ("grow --task digits_shift --policy wait --seed -3 --out O", "seed is -3"),
        ("grow --task digits_shift --policy wait --network -1 --out O", "network is -1"),
        (
            "grow --task digits_shift --policy wait --out .",
            "not empty, it holds broken_module.py; choose a directory",
        ),
        ("grow --task digits_shift --policy wait --out run", "not empty, it holds a run"),
        ("grow --task digits_shift:base=0 --policy wait --out O", "channels is 0, must be at least 1"),
        ("eval O", "O holds no grown network"),
        ("prove --import nowhere_to_be --task digits_shift --out O", "--import nowhere_to_be"),
        (
            "grow --task digits_shift --policy wait --out O --import broken_module",
            "broken_module.*ZeroDivision",
        ),
        ("eval --import 3 O", "--import '3' is not the name"),
    ],
)
def test_bad_input_is_refused_with_reason(command, told, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    assert main(command.split()) == 2
    assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize("command", ["prove", "grow", "eval"])
def test_help_has_each_argument_once(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = capsys.readouterr().out
    wanted = {
        "prove": ["--task", "--policy", "--networks", "--first-network", "--first-seed", "--transfer"],
        "grow": ["--task", "--policy", "--out", "--network", "--seed", "--sample"],
        "eval": ["DIR"],
    }[command]
    described = text.split("options", 1)[1] if command != "eval" else text
    for flag in wanted:
        assert len(re.findall(rf"(?<![\w-]){flag}(?![\w-])", described)) >= 1, flag
    assert "Args:" not in text
    assert text.count("optionally with other sizes") == (command != "eval")
    assert "--import MODULE" in text


README_GROW = ["grow", "--task", "digits_shift", "--policy", "digits_shift-1", "--out", "grown"]


def test_readme_grow_command_grows(tmp_path, monkeypatch, capsys):
    """As it stands in the README: the default network is one that the policy grows."""
    monkeypatch.chdir(tmp_path)
    assert main(README_GROW) == 0
    said = capsys.readouterr().out
    assert re.search(r"network 1 of digits_shift: crippled blocks 1, 200 training images", said)
    assert re.search(r"grown: \w+ in r\dc\d", said)
    assert main(README_GROW) == 2
    assert "not empty, it holds a grown network" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "decides"),
    [(SHIFT, "digits_shift-1"), ("worlds_small:3", "general-1"), (f"digits_mlp:{SIZES}", "heuristic")],
)
def test_who_grows_where_no_policy_is_named(task, decides, tmp_path):
    assert main(["grow", "--task", task, "--network", "0", "--out", str(tmp_path / "g")]) == 0
    assert orjson.loads((tmp_path / "g" / "grown.json").read_bytes())["policy"] == decides


def test_the_rivals_alone(tmp_path):
    command = ["prove", "--task", SHIFT, "--networks", "2", "--probe-networks", "8", "--out", str(tmp_path)]
    for named, there in ((["--policy", "none"], False), ([], True)):
        assert main([*command, *named]) == 0
        found = orjson.loads((tmp_path / "proof.json").read_bytes())
        assert ("learned" in found["cohorts"]) == there
    assert found["policies"] == [f"digits_shift-{n}" for n in (1, 2, 3)]


def test_a_healthy_network_says_which_one_to_try(tmp_path, capsys):
    command = f"grow --task {SHIFT} --policy wait --network 0 --out {tmp_path / 'g'}"
    assert main(command.split()) == 0
    said = capsys.readouterr().out
    assert "crippled blocks none" in said
    assert "grown: nothing" in said
    assert "--network 1 has a crippled block" in said


def test_a_task_of_a_users_module(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_tasks.py").write_text(
        "from dataclasses import replace\n"
        "from esper.runtime.tasks import get_task_spec, register_task\n"
        "register_task(replace(get_task_spec('digits_shift'), name='users_digits'))\n"
    )
    monkeypatch.chdir(tmp_path)
    sizes = f"users_digits:{SIZES}"
    assert main(f"grow --import my_tasks --task {sizes} --policy wait --out g".split()) == 0
    assert main(["eval", "g", "--import", "my_tasks"]) == 0
    assert f"{sizes}, network" in capsys.readouterr().out
    TASKS.pop("users_digits")
    assert main(["eval", "g"]) == 2
    assert "task 'users_digits' is unknown" in capsys.readouterr().err
