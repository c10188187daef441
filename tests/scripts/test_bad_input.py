"""A campaign of bad input through the command line: every case must end with its exit code, in time, with a
message that names the culprit, without a traceback and without terminal escapes. A sample of it runs in
`make test`, the whole list in `make test-slow`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from esper.scripts.cli import main
from esper.scripts.config import flag_names
from esper.simic.training.config import LEAVES, choices, optional

SECONDS = 20
"""Limit for one case; all but the tampered checkpoints take a fraction of a second on a free machine."""
SAMPLE = 40
SMALL = (
    *("--preset", "none"),
    *("--task", "digits_impaired", "--envs", "2", "--episode-length", "4", "--steps-per-epoch", "1"),
    *("--val-size", "32", "--hidden", "16", "--population", "8"),
)


@dataclass(frozen=True)
class World:
    """What the cases work on: a directory of their own, and a run, a grown network and shipped files to copy
    and to spoil."""

    here: Path
    run: Path
    grown: Path

    def write(self, name: str, content: str | bytes) -> str:
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        (self.here / name).write_bytes(data)
        return name

    def copy(self, source: Path) -> Path:
        target = self.here / source.name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
        return target


@dataclass(frozen=True)
class Case:
    """`build` prepares the files and returns the arguments; `parts` must be in the message."""

    name: str
    build: Callable[[World], list[str]]
    parts: tuple[str, ...]
    code: int = 2


def arguments(*words: str) -> Callable[[World], list[str]]:
    return lambda world: list(words)


# -- settings ------------------------------------------------------------------------------------------------

BAD_TEXT: dict[Any, list[str]] = {
    int: ["many", "1.5", "9" * 25, "-10000000000", "1e3", "0x10", "²", "1,000", "nan"],
    float: ["fast", "nan", "1e300", "-1e300", "inf", "1,5", "9" * 400],
    str: ["a\0b", "\ud800", "x" * 5_000, "", "\x1b[2J"],
}
BAD_YAML = ["{a: b}", "[[[1]]]", "{a: [b, {c: d}]}"]


def kind_of(path: str) -> Any:
    kind, _ = optional(LEAVES[path])
    # One value or several: `task` takes both forms.
    return get_args(kind)[0] if get_args(kind) and not choices(kind) else kind


def flag_cases() -> Iterator[Case]:
    for n, path in enumerate(path for path in LEAVES if path != "policy"):
        flag, kind = flag_names(path)[-1], kind_of(path)
        if kind is bool:
            yield Case(f"flag {path} maybe", arguments("train", f"{flag}=maybe"), (flag,))
            continue
        texts = ["bogus", "\x1b[2J"] if choices(kind) else BAD_TEXT[kind]
        for text in dict.fromkeys((texts[n % len(texts)], texts[(n + 1) % len(texts)])):
            yield Case(f"flag {path} {text[:20]!r}", arguments("train", flag, text), (path.split(".")[-1],))


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def wrong_json(path: str) -> Any:
    kind = kind_of(path)
    if get_origin(optional(LEAVES[path])[0]) is tuple:
        return "not a list"
    if choices(kind):
        return 7
    return {int: True, float: "0.5", bool: 1, str: 3}[kind]


def config_cases() -> Iterator[Case]:
    def build(name: str, content: str, world: World) -> list[str]:
        return ["config", "show", "--config", world.write(name, content)]

    for n, path in enumerate(LEAVES):
        text = BAD_YAML[n % len(BAD_YAML)]
        yield Case(f"yaml {path} {text}", partial(build, "c.yaml", f"{path}: {text}"), ("c.yaml", path))
        content = json.dumps(nested(path, wrong_json(path)))
        yield Case(f"json {path}", partial(build, "c.json", content), ("c.json", path))


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def laughs() -> str:
    """Aliases of aliases: a few hundred bytes that stand for 387 million items."""
    levels = [f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return f"slots: [&a0 [lol], {', '.join(levels)}]"


FILES: dict[str, tuple[str, str | bytes, str]] = {
    "empty": ("c.yaml", "", "c.yaml"),
    "list": ("c.yaml", "- rounds", "settings by name"),
    "text": ("c.yaml", "rounds", "settings by name"),
    "unknown key": ("c.yaml", "ruonds: 3", "did you mean rounds?"),
    "unknown nested key": ("c.yaml", "ppo: {lrr: 3}", "did you mean ppo.lr?"),
    "twice": ("c.yaml", "rounds: 3\nrounds: 4", "given twice"),
    "twice by path": ("c.yaml", "ppo: {lr: 1}\nppo.lr: 2", "given twice"),
    "key is a list": ("c.yaml", "[1, 2]: 3", "not a name"),
    "syntax": ("c.yaml", "rounds: {a", "c.yaml"),
    "tab": ("c.yaml", "rounds:\n\t3", "c.yaml"),
    "python object": ("c.yaml", "rounds: !!python/object/apply:os.system [ls]", "c.yaml"),
    "laughs": ("c.yaml", laughs(), "slots"),
    "deep yaml": ("c.yaml", deep(5_000), "nested too deeply"),
    "deep json": ("c.json", deep(5_000), "nested too deeply"),
    "deep value": ("c.json", '{"slots": ' + deep(900) + "}", "slots"),
    "not utf-8": ("c.json", b'{"task": "\xff"}', "c.json"),
    "binary": ("c.yaml", bytes(range(256)), "c.yaml"),
    "surrogate": ("c.json", '{"task": "\\ud800"}', "task"),
    "surrogate key": ("c.json", '{"\\ud800": 1}', "unknown key"),
    "escape key": ("c.json", '{"\\u001b[2J": 1}', "unknown key"),
    "long number": ("c.json", '{"rounds": 1' + "0" * 5_000 + "}", "c.json"),
    "nan": ("c.json", '{"ppo": {"lr": NaN}}', "ppo.lr"),
    "infinity": ("c.json", '{"patience": Infinity}', "patience"),
    "null section": ("c.json", '{"ppo": null}', "ppo"),
    "number as section": ("c.json", '{"governor": 3}', "governor"),
    "json list": ("c.json", "[1]", "settings by name"),
    "json null": ("c.json", "null", "settings by name"),
    "json twice": ("c.json", '{"rounds": 3, "rounds": 4}', "given twice"),
    "suffix": ("c.toml", "rounds = 3", "allowed: .json, .yaml, .yml"),
}
COMBINATIONS: dict[str, str] = {
    "--rollout-length 9 --episode-length 8": "rollout_length 9",
    "--amp fp16 --population 8": "population 8",
    "--population 12": "multiple of 8",
    "--gpu-preload": "gpu_preload",
    "--devices": "devices",
    "--devices cuda:99": "cuda:99",
    "--devices cpu gpu": "gpu",
    "--ab-reward-modes sparse": "sparse",
    "--ab-reward-modes sparse sparse": "twice",
    "--ab-reward-modes sparse bogus": "bogus",
    "--reward-family loss --reward-mode sparse": "loss",
    "--rent-curriculum 0.5 --reward-mode basic": "rent_curriculum",
    "--twins 3": "twins 3",
    "--twins 2 --rollout-length 4": "twins 2",
    "--teacher heuristic": "teacher_rounds",
    "--teacher-rounds 3": "teacher",
    "--teacher nowhere.json --teacher-rounds 1": "nowhere.json",
    "--slots": "slot",
    "--slots r0c0 r0c0": "unique",
    "--slots r9c9": "r9c9",
    "--blind nothing": "nothing",
    "--auto-forward-gates g0": "g0",
    "--val-size 99999": "val_size 99999",
    "--envs 1000000000000": "envs",
    "--envs 65536 --episode-length 10000": "GB",
    "--batch-size 1000000 --envs 4096": "GB",
    "--hidden 100000000000": "hidden",
    "--patience 1e300": "patience",
    "--seed 99999999999999999999": "seed",
    "--resume auto": "telemetry_dir",
    "--resume nowhere.safetensors": "nowhere.safetensors",
    "--resume runs/checkpoints/nowhere.safetensors": "nowhere.safetensors",
    "--preset none --data-root nowhere --task cifar_baseline": "cifar10",
    "--task cifar_baseline": "values_rounds",
    "--preset quickstrat": "quickstart",
    "--preset": "--preset",
    "--config nowhere.yaml": "nowhere.yaml",
    "--config .": "allowed: .json",
    "--bogus 3": "--bogus",
    "--rounds": "--rounds",
    "--rounds 3 4": "'4'",
    "pp": "did you mean ppo?",
    "ppo wait": "'wait'",
}


def file_cases() -> Iterator[Case]:
    def build(name: str, content: str | bytes, world: World) -> list[str]:
        return ["train", "--config", world.write(name, content)]

    def pipe(world: World) -> list[str]:
        os.mkfifo(world.here / "pipe.yaml")
        return ["train", "--config", "pipe.yaml"]

    for name, (file, content, part) in FILES.items():
        yield Case(f"file {name}", partial(build, file, content), (part,))
    yield Case("file is a pipe", pipe, ("not a regular file",))
    for words, part in COMBINATIONS.items():
        yield Case(f"train {words}", arguments("train", "--rounds", "1", *words.split(" ")), (part,))


# -- tasks ---------------------------------------------------------------------------------------------------

BAD_TASKS = {
    "nope": "nope",
    "\x1b]0;x\x07": "\\x1b",
    "x" * 300: "xxx",
    ":": ":",
    "digits_shift:": "digits_shift:",
    "digits_shift:base": "base",
    "digits_shift:base=": "base",
    "digits_shift:base=x": "base",
    "digits_shift:base=0": "base",
    "digits_shift:base=-1": "base",
    "digits_shift:base=1.5": "base",
    "digits_shift:base=999999999999": "base",
    "digits_shift:base=" + "9" * 25: "base",
    "digits_shift:base=8,base=9": "base",
    "digits_shift:bogus=1": "bogus",
    "digits_shift:classes=5": "classes",
    "digits_shift:episode_length=0": "episode_length",
    "digits_shift:population=12": "population",
    "digits_shift:kernel=100000": "kernel",
}


def task_cases() -> Iterator[Case]:
    for task, part in BAD_TASKS.items():
        yield Case(f"train --task {task[:30]!r}", arguments("train", "--task", task), (part,))
        yield Case(f"prove --task {task[:30]!r}", arguments("prove", "--task", task, "--seeds", "2"), (part,))
        grow = arguments("grow", "--task", task, "--policy", "wait", "--out", "G")
        yield Case(f"grow --task {task[:30]!r}", grow, (part,))


# -- files of the product, spoilt ----------------------------------------------------------------------------

WRONG: list[Any] = [None, [], "x", -1, {"a": 1}, 10**20, 1.5]


def set_at(content: Any, path: str, value: Any) -> Any:
    """The JSON with another value at a dotted path; the empty path is the whole."""
    if not path:
        return value
    head, _, rest = path.partition(".")
    key: Any = int(head) if isinstance(content, list) else head
    content[key] = set_at(content[key], rest, value)
    return content


def spoil_header(path: Path, place: str, value: Any) -> None:
    """Change the JSON in the header of an archive."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    meta = json.loads(header["__metadata__"]["esper"])
    header["__metadata__"]["esper"] = json.dumps(set_at(meta, place, value))
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + length :])


def spoil_json(path: Path, place: str, value: Any) -> None:
    path.write_text(json.dumps(set_at(json.loads(path.read_text()), place, value)))


CHECKPOINT_FIELDS = (
    *("", "kind", "agent", "agent.config", "agent.updates", "agent.schema", "agent.popart", "agent.num_envs"),
    *("config", "config.task", "normalizer", "normalizer.count", "progress", "progress.round_idx"),
    *("progress.history", "best", "recorder", "recorder.accuracies", "seq", "announced", "digests"),
)
POLICY_FIELDS = ("", "kind", "schema", "schema.hidden", "schema.features", "schema.actions", "digests")
SCHEDULE_FIELDS = (
    *("", "kind", "task", "root_seed", "candidates", "best", "best.schedule", "best.objective"),
    *("best.seeds", "by_pattern"),
)
GROWN_FIELDS = ("", "task", "policy", "root_seed", "network")


def spoilt_cases() -> Iterator[Case]:
    def resume(place: str, value: Any, world: World) -> list[str]:
        run = world.copy(world.run)
        (checkpoint,) = run.glob("checkpoints/round-*")
        spoil_header(checkpoint, place, value)
        where = ("--telemetry-dir", str(run), "--resume", str(checkpoint))
        return ["train", "ppo", *SMALL, "--rounds", "3", *where]

    def policy(place: str, value: Any, world: World) -> list[str]:
        file = world.copy(Path(str(files("esper") / "policies" / "digits_shift-1.safetensors")))
        spoil_header(file, place, value)
        return ["grow", "--task", "digits_shift", "--policy", str(file), "--out", "G"]

    def schedule(place: str, value: Any, world: World) -> list[str]:
        file = world.copy(Path(str(files("esper") / "policies" / "digits_impaired.schedule.json")))
        spoil_json(file, place, value)
        return ["train", *SMALL, "--rounds", "1", "--teacher", str(file), "--teacher-rounds", "1"]

    def grown(place: str, value: Any, world: World) -> list[str]:
        directory = world.copy(world.grown)
        spoil_json(directory / "grown.json", place, value)
        return ["eval", str(directory)]

    sources = {
        "checkpoint": (resume, CHECKPOINT_FIELDS, 3, "round-"),
        "policy": (policy, POLICY_FIELDS, 3, "digits_shift-1"),
        "schedule": (schedule, SCHEDULE_FIELDS, 3, "digits_impaired.schedule"),
        "grown": (grown, GROWN_FIELDS, 3, "grown"),
    }
    for name, (build, fields, each, part) in sources.items():
        for n, field in enumerate(fields):
            for value in (WRONG[(n + k) % len(WRONG)] for k in range(each)):
                if fits(field, value):
                    continue
                yield Case(f"{name} {field or 'whole'} {value!r}", partial(build, field, value), (part,))


def fits(field: str, value: Any) -> bool:
    """Whether a wrong value happens to be a right one for this field."""
    right: dict[str, list[Any]] = {
        "policy": ["x"],
        "root_seed": [-1],
        "network": [-1],
        "progress.history": [[]],
        "best.objective": [-1, 1.5],
        "best.seeds": [-1],
        "best.schedule": [[]],
        "recorder.accuracies": [[]],
    }
    return any(value == other and type(value) is type(other) for other in right.get(field, []))


def damaged_cases() -> Iterator[Case]:
    def truncated(share: float, world: World) -> list[str]:
        run = world.copy(world.run)
        (checkpoint,) = run.glob("checkpoints/round-*")
        data = checkpoint.read_bytes()
        checkpoint.write_bytes(data[: int(len(data) * share)])
        where = ("--telemetry-dir", str(run), "--resume", str(checkpoint))
        return ["train", "ppo", *SMALL, "--rounds", "3", *where]

    def policy_bytes(content: bytes, world: World) -> list[str]:
        file = world.write("p.safetensors", content)
        return ["grow", "--task", "digits_shift", "--policy", file, "--out", "G"]

    def grown_file(name: str, content: str, world: World) -> list[str]:
        directory = world.copy(world.grown)
        (directory / name).write_text(content)
        return ["eval", str(directory)]

    for share in (0.0, 0.001, 0.5, 0.999):
        yield Case(f"checkpoint cut to {share}", partial(truncated, share), ("round-",))
    for content in (b"", b"\0" * 8, b"\xff" * 64, struct.pack("<Q", 2) + b"{}", b"[1]" * 100):
        yield Case(f"policy of bytes {content[:9]!r}", partial(policy_bytes, content), ("p.safetensors",))
    for name in ("grown.json", "structure.json"):
        for content in ("", "null", "[1]", deep(5_000), '{"task": "\\ud800"}', "{"):
            yield Case(f"{name} {content[:20]!r}", partial(grown_file, name, content), (name.split(".")[0],))


# -- readers, directories, the rest --------------------------------------------------------------------------

QUERIES = {
    "": "query",
    " ": "query",
    ";": "query",
    "selec 1": "selec",
    "select * from nope": "nope",
    "select nope from rounds": "nope",
    "drop table rounds": "",
    "copy rounds to 'x.csv'": "",
    "attach 'x.db'": "",
    "install httpfs": "",
    "select * from read_csv('/etc/passwd')": "",
    "\0": "",
    "\ud800": "",
    "select '" + "x" * 100: "",
}
READERS = {
    "watch": ["watch", "DIR"],
    "report": ["report", "DIR"],
    "sql": ["sql", "DIR", "select 1"],
    "compare": ["compare", "DIR", "DIR"],
    "sync": ["sync", "DIR", "--to", "tensorboard"],
    "runs": ["runs", "DIR"],
    "eval": ["eval", "DIR"],
}
DIRECTORIES = {"missing": "nowhere", "file": "file", "empty": "empty", "long": "x" * 300, "nul": "a\0b"}
OTHERS: dict[str, tuple[list[str], str]] = {
    "no command": ([], ""),
    "unknown command": (["trian"], "did you mean train?"),
    "escape as command": (["\x1b[2J"], "\\x1b"),
    **{
        f"escape for {words[0]}": ([*words, "\x1b[2J"], "\\x1b[2J")
        for words in (
            ["report", "RUN"],
            ["sync", "RUN"],
            ["data", "list"],
            ["baseline", "check"],
            ["ui"],
            ["demo"],
        )
    },
    "data get": (["data", "get", "nope"], "nope"),
    "data root file": (["data", "list", "--root", "file"], "not a directory"),
    "data root long": (["data", "get", "cifar10", "--root", "x" * 300], "too long"),
    "data root nul": (["data", "list", "--root", "a\0b"], "data directory"),
    "data without name": (["data", "get"], "get"),
    "data nothing": (["data"], "data"),
    "baseline missing": (["baseline", "check", "nowhere"], "nowhere"),
    "baseline directory": (["baseline", "check", "empty"], "empty"),
    "baseline file": (["baseline", "check", "file"], "file"),
    "baseline nul": (["baseline", "check", "a\0b"], "baseline"),
    "baseline long": (["baseline", "capture", "x" * 300], "too long"),
    "baseline nowhere": (["baseline", "capture", "nowhere/x.json"], "nowhere"),
    "import nothing": (["train", "--import"], "--import"),
    "import missing": (["train", "--import", "no_such_module"], "no_such_module"),
    "import path": (["train", "--import", "../x.py"], "my_module"),
    "import broken": (["config", "tasks", "--import", "broken"], "ZeroDivisionError"),
    "config topic": (["config", "shw"], "did you mean show?"),
    "config nothing": (["config"], "topic"),
    "telemetry dir long": (["train", *SMALL, "--telemetry-dir", "x" * 300], "too long"),
    "telemetry dir file": (["train", *SMALL, "--telemetry-dir", "file/D"], "file"),
    "telemetry dir full": (["train", *SMALL, "--telemetry-dir", "full"], "not empty"),
    "grow policy": (["grow", "--task", "digits_shift", "--policy", "nope", "--out", "G"], "nope"),
    "grow out long": (["grow", "--task", "digits_shift", "--policy", "wait", "--out", "x" * 300], "too long"),
    "grow out nul": (["grow", "--task", "digits_shift", "--policy", "wait", "--out", "a\0b"], "null"),
    "grow seed": (
        ["grow", "--task", "digits_shift", "--policy", "wait", "--out", "G", "--seed", "9" * 25],
        "seed",
    ),
    "prove policy": (["prove", "--task", "digits_shift", "--policy", "nope"], "nope"),
    "prove networks": (["prove", "--task", "digits_shift", "--networks", "0"], "networks"),
    "prove many networks": (["prove", "--task", "digits_shift", "--networks", "9" * 25], "networks"),
    "prove schedule": (["prove", "--task", "digits_shift", "--schedule", "nowhere"], "nowhere"),
    "watch env": (["watch", "RUN", "--env", "99"], "99"),
    "watch round": (["watch", "RUN", "--round", "99"], "99"),
    "watch negative": (["watch", "RUN", "--round", "-5"], "-5"),
    "report rounds": (["report", "RUN", "--growth-rounds", "-1"], "growth"),
    "compare one": (["compare", "RUN"], ""),
    "compare last": (["compare", "RUN", "RUN", "--last", "0"], "last"),
    "sql output": (["sql", "RUN", "select 1", "--output", "xml"], "xml"),
    "sync tracker": (["sync", "RUN", "--to", "excel"], "excel"),
}


def other_cases() -> Iterator[Case]:
    def prepared(words: list[str], world: World) -> list[str]:
        (world.here / "file").write_text("not json")
        (world.here / "empty").mkdir()
        (world.here / "full").mkdir()
        (world.here / "full" / "notes.txt").touch()
        world.write("broken.py", "1 / 0")
        return [str(world.run) if word == "RUN" else word for word in words]

    for query, part in QUERIES.items():
        yield Case(f"sql {query[:30]!r}", partial(prepared, ["sql", "RUN", query]), (part,))
    for reader, words in READERS.items():
        for name, directory in DIRECTORIES.items():
            given = [directory if word == "DIR" else word for word in words]
            yield Case(f"{reader} {name}", partial(prepared, given), ())
    for name, (words, part) in OTHERS.items():
        yield Case(name, partial(prepared, words), (part,))


# -- the campaign --------------------------------------------------------------------------------------------

CASES = [
    *flag_cases(),
    *config_cases(),
    *file_cases(),
    *task_cases(),
    *spoilt_cases(),
    *damaged_cases(),
    *other_cases(),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], World]:
    """Makes the run and the grown network once."""

    @cache
    def made() -> tuple[Path, Path]:
        place = tmp_path_factory.mktemp("campaign")
        run, grown = place / "run", place / "grown"
        assert main(["train", "ppo", *SMALL, "--rounds", "2", "--telemetry-dir", str(run)]) == 0
        assert main(["grow", "--task", "digits_impaired", "--policy", "wait", "--out", str(grown)]) == 0
        return run, grown

    return lambda here: World(here, *made())


def check(
    case: Case,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(world.here)
    monkeypatch.setenv("COLUMNS", "200")
    words = case.build(world)
    log = world.here / world.run.name / "events.jsonl"
    before = log.read_bytes() if log.exists() else b""
    capsys.readouterr()

    def too_slow(number: int, frame: object) -> None:
        raise TimeoutError(f"{case.name} took more than {SECONDS} s")

    usual = signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(SECONDS)
    try:
        code: Any = main(words)
    except SystemExit as stop:
        code = stop.code
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, usual)
    output = capsys.readouterr()
    message = output.err or output.out
    assert code == case.code, f"exit code {code}: {message[-500:]}"
    assert "Traceback" not in message
    assert "\x1b" not in output.out + output.err
    assert 0 < len(message) < 5_000
    for part in case.parts:
        assert part in message
    if before:
        assert log.read_bytes() == before, "a refused resume must leave the log alone"


def identifier(case: Case) -> str:
    return case.name.encode("unicode_escape").decode()[:60]


@pytest.mark.parametrize("case", CASES[:: len(CASES) // SAMPLE], ids=identifier)
def test_a_sample_of_bad_input(
    case: Case,
    prepared: Callable[[Path], World],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check(case, prepared(tmp_path), monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=identifier)
def test_bad_input(
    case: Case,
    prepared: Callable[[Path], World],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check(case, prepared(tmp_path), monkeypatch, capsys)


def test_the_campaign_is_as_large_as_the_one_that_it_replaces() -> None:
    assert len(CASES) >= 428
