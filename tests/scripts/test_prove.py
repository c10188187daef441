"""`esper prove`, `esper grow` and `esper eval` through the command line: results, and what they say to bad
input."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import orjson
import pytest

from esper.scripts.cli import main
from proof.worlds import policy, policy_file

SIZES = "episode_length=3,steps_per_epoch=1,val_size=24,batch_size=8"
SHIFT, SCALE = f"digits_shift:{SIZES}", f"digits_scale:{SIZES}"
COHORTS = [
    "static",
    "random",
    "heuristic",
    "fixed_schedule",
    "oracle",
    "probe",
    "learned",
    "static_final",
    "static_equal",
    "static_flops",
    "learned_shuffled",
]


class Page(HTMLParser):
    """Counts elements, and makes sure that each is closed where it should be."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.found[tag] = self.found.get(tag, 0) + 1
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


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
        "--seeds",
        "2",
        "--probe-seeds",
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
    assert found["task"] == SHIFT
    assert [other["task"] for other in found["transfer"]] == [SCALE]
    assert list(found["transfer"][0]["cohorts"]) == ["static", "random", "heuristic", "learned"]
    assert set(found["learned_minus"]["static"]["J"]["mean"]) == {"value", "low", "high"}
    schedule = orjson.loads((root / "s.json").read_bytes())
    assert schedule["command"] == f"esper prove --task {SHIFT} --search 792 --candidates 4"


def test_the_page_is_whole_and_needs_no_network(proof):
    text = (proof[0] / "one" / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert not page.open
    assert page.found["svg"] >= 10
    assert page.found["table"] == 5
    assert "http" not in re.sub(r'"http://www\.w3\.org[^"]*"', "", text)
    assert all(name in text for name in COHORTS)


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
    assert re.search(r"1 +germinate +r0c\d +conv_light", grown)
    assert main(["eval", str(out)]) == 0
    line = re.compile(r"test accuracy \d+\.\d\d %")
    assert line.search(grown)[0] == line.search(capsys.readouterr().out)[0]


@pytest.fixture
def files(tmp_path) -> Path:
    other = policy()
    other.feature_schema = "other"
    other.save(tmp_path / "other.safetensors")
    (tmp_path / "s.json").write_bytes(orjson.dumps({"kind": "esper-schedule-2", "task": "digits_scale"}))
    (tmp_path / "file").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("prove --task digits_none --out O", "task 'digits_none' is unknown; allowed: .*digits_shift"),
        ("prove --task digits_shift:size=tall --out O", "'size=tall'.*allowed: .*base"),
        ("prove --task digits_shift --seeds 1 --out O", "seeds is 1, must be a whole number from 2"),
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
            "prove --task digits_shift --transfer digits_scale --out O",
            "--transfer digits_scale needs a policy",
        ),
        ("prove --task digits_shift --out file/O", "cannot write to file/O: Not a directory"),
        ("prove --task digits_shift --search 60000 --schedule file/s.json --out O", "cannot write to file"),
        (
            "prove --task digits_shift --first-seed -1 --out O",
            "first_seed is -1, must be a whole number from 0",
        ),
        ("grow --task digits_shift --policy nobody --out O", "policy 'nobody' is neither"),
        ("grow --task digits_shift --policy wait --out file/O", "cannot write to file/O"),
        ("grow --task digits_shift --policy wait --seed -3 --out O", "seed is -3"),
        ("eval O", "O holds no grown network"),
    ],
)
def test_bad_input_is_refused_with_reason(command, told, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    assert main(command.split()) == 2
    assert re.search(told, capsys.readouterr().err)
