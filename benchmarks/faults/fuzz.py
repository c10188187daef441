"""Made-up settings and command lines: each is carried out, or refused with a message that names the culprit
and says what is allowed."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from benchmarks.faults.children import Child, Ended
from benchmarks.faults.world import TASK, Case, Seen, check_clean, check_refused, reason, require
from esper.leyline import EsperError
from esper.scripts.cli import fail
from esper.scripts.config import flag_names
from esper.simic.training.config import LEAVES, choices, is_list, optional
from esper.simic.training.presets import resolve

SECONDS = 20.0
"""CPU time after which a made-up command line that does work, such as training, is taken as accepted."""
SIZES = {
    "rounds": "1",
    "envs": "2",
    "episode_length": "2",
    "steps_per_epoch": "1",
    "val_size": "32",
    "batch_size": "8",
    "population": "8",
    "hidden": "16",
}
"""Settings of a run that takes a second. They follow a made-up command line that does not have them."""
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 10**18, 2**63, 10**30, 0.0, -0.5, 0.3, 1e-300, 1e300),
    *(float("nan"), float("inf"), "", " ", "nope", "auto", "none", "1", "0x10", "1e3", "x" * 300),
    *("\x1b[2J", "a\0b", "🙂", "r0c0", "../..", "cpu", "cuda:99", "digits_shift", "ppo"),
    *([], [1], ["r0c0"], ["nope", 3], [[]], {}, {"a": 1}, {"lr": 0.1}),
)
WORDS = (
    *("", " ", "-", "--", "---", "=", "nope", "-1", "0", "1", "7", "9" * 25, "1e3", "nan", "0.5", "x" * 300),
    *("\x1b[2J", "a\0b", "🙂", "\udcff", "../..", "*", "'", '"', "None", "true", "--bogus", "--task", "-h"),
    *("--help", "--seed", "--out=", "--rounds=x", "select 1", "latest", "RUN", "GROWN", "digits_impaired"),
)
LINES: tuple[tuple[str, ...], ...] = (
    ("train", "ppo", "--preset", "none", "--task", "digits_impaired", "--seed", "3"),
    ("train", "wait", "--task", "digits_impaired", "--telemetry-dir", "new"),
    ("train", "heuristic", "--task", "digits_mlp", "--reward-mode", "shaped", "--lr", "0.01"),
    (
        "train",
        "ppo",
        "--preset",
        "none",
        "--task",
        "digits_impaired",
        "--telemetry-dir",
        "RUN",
        "--resume",
        "auto",
    ),
    ("config", "show", "--preset", "quickstart", "--envs", "4", "--ppo.gamma", "0.9"),
    ("config", "presets"),
    ("prove", "--task", TASK, "--policy", "none", "--seeds", "2", "--probe-seeds", "8"),
    ("grow", "--task", TASK, "--policy", "heuristic", "--out", "grown-here", "--seed", "1"),
    ("eval", "GROWN"),
    ("runs", "."),
    ("watch", "RUN", "--round", "1", "--env", "0"),
    ("report", "RUN", "--out", "page.html"),
    ("sql", "RUN", "SELECT * FROM rounds", "--output", "csv"),
    ("sql", "RUN"),
    ("compare", "RUN", "RUN", "--last", "2"),
    ("sync", "RUN", "--to", "tensorboard", "--out", "board"),
    ("data", "get", "tinystories", "--root", "data"),
    ("data", "list", "--root", "data"),
    ("baseline", "check", "base.json"),
    ("ui", ".", "--port", "99999999"),
    ("demo", "--nothing"),
    ("by_hand", "--nothing"),
)
FIXED = {"ui": ("--port", "99999999"), "demo": ("--nothing",), "by_hand": ("--nothing",)}
"""Words that follow a made-up line of commands that serve or run for minutes, so that they refuse it."""
WORK = ("train", "prove", "grow")
SAYS_WHAT = re.compile(
    r"allowed|must|needs?\b|expected|did you mean|at most|at least|--help|choose|or more|usage|too long|"
    r"too large|invalid|required|exceeds|is not|no such|cannot|not installed|lists|not valid|twice|empty|"
    r"name one|name each|set both|for example|holds no",
    re.IGNORECASE,
)
"""One of these is in every message: what is allowed, or what makes the value impossible."""


# -- settings ------------------------------------------------------------------------------------------------


def plausible(path: str, rng: random.Random) -> Any:
    """A value of the setting's own kind, which need not be a legal one."""
    kind = optional(LEAVES[path])[0]
    inner = get_args(kind)[0] if is_list(kind) else kind
    if names := choices(inner):
        value: Any = rng.choice(names)
    elif inner is bool:
        value = rng.random() < 0.5
    elif inner is int:
        value = rng.choice([0, 1, 2, 3, 8, 64])
    elif inner is float:
        value = rng.choice([0.0, 1e-3, 0.1, 0.5, 1.0, 2.0])
    else:
        value = rng.choice(["nope", "cpu", "r0c0", "digits_impaired"])
    return [value] if is_list(kind) else value


def settings(rng: random.Random) -> dict[str, Any]:
    """Some settings by path, odd or plausible, sometimes with an unknown name."""
    paths = rng.sample([path for path in LEAVES if path not in SIZES], rng.randint(1, 4))
    chosen = {path: plausible(path, rng) if rng.random() < 0.5 else rng.choice(ODD) for path in paths}
    if rng.random() < 0.15:
        name = rng.choice(list(LEAVES))
        at = rng.randrange(len(name))
        chosen[name[:at] + rng.choice("abcxyz._ ") + name[at + 1 :]] = rng.choice(ODD)
    return chosen


def config(case: Case) -> Seen:
    """A file of settings, read as `--config` reads it; every fifth one by `esper train`."""
    rng = case.random
    chosen = settings(rng)
    form = rng.choice(["json", "yaml"])
    text = json.dumps(chosen) if form == "json" else yaml.safe_dump(chosen, allow_unicode=True)
    torn = rng.random() < 0.2
    if torn:  # a slip of the keyboard
        at = rng.randrange(len(text))
        text = (
            text[:at]
            + rng.choice(["", text[at] * 2, "{", '"', ":", "\n", "\t", "- ", "&", "\x00"])
            + text[at + 1 :]
        )
    file = case.directory / f"settings.{form}"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    if case.number % 5 == 0:
        ended = _run(case, ["train", "--config", file.name, *_sizes([])])
    else:
        ended = Child(lambda: _read_settings(file), case.world.place / "output" / case.name).end(600)
    if ended.code == 0:
        check_clean(ended)
        return {"what": repr(chosen)[:200], "saw": "accepted"}
    message = check_refused(ended)
    names = [path.split(".")[-1].strip() for path in chosen] + [file.name]
    names += [
        str(item) for value in chosen.values() for item in (value if isinstance(value, list) else [value])
    ]
    require(any(name in message for name in names), f"{text[:300]!r}: names no setting: {message[-300:]}")
    require(SAYS_WHAT.search(message), f"{text[:300]!r}: does not say what is allowed: {message[-300:]}")
    return {"what": repr(chosen)[:200], "saw": reason(message)}


def _read_settings(file: Path) -> int:
    try:
        resolve(None, str(file), {})
    except EsperError as error:
        return fail(error)
    return 0


# -- command lines -------------------------------------------------------------------------------------------


def mutate(line: Sequence[str], rng: random.Random) -> list[str]:
    """Replace, insert, drop, double or swap some words after the command's name."""
    words = list(line)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(1, len(words)) if len(words) > 1 else 1
        change = rng.choice(["replace", "insert", "drop", "double", "swap", "flag"])
        if change == "insert" or len(words) <= at:
            words.insert(at, rng.choice(WORDS))
        elif change == "replace":
            words[at] = rng.choice(WORDS)
        elif change == "drop":
            del words[at]
        elif change == "double":
            words.insert(at, words[at])
        elif change == "swap":
            words[at], words[-1] = words[-1], words[at]
        else:
            path = rng.choice([path for path in LEAVES if path != "policy"])
            words[at:at] = [flag_names(path)[0], str(rng.choice(ODD))]
    return words


def _sizes(words: Sequence[str]) -> list[str]:
    """Flags of a small run, without those that the words hold."""
    given = {word.split("=")[0].replace("_", "-") for word in words}
    missing = [path for path in SIZES if f"--{path.replace('_', '-')}" not in given]
    return [word for path in missing for word in (f"--{path.replace('_', '-')}", SIZES[path])]


def command(case: Case) -> Seen:
    rng = case.random
    line = rng.choice(LINES)
    words = mutate(line, rng)
    name = line[0]
    words += _sizes(words) if name == "train" else FIXED.get(name, ())
    if rng.random() < 0.04:
        words[0] = rng.choice(WORDS)
    given = [_placed(case, word) for word in words]
    ended = _run(case, given)
    shown = " ".join(words).encode("unicode_escape").decode()[:200]
    if ended.code == 0:
        check_clean(ended)
        return {"what": shown, "saw": "accepted"}
    codes = (1, 2) if name == "data" else (2,)
    message = check_refused(ended, codes=codes)
    require(_names(message, words), f"{shown}: names none of the words: {message[-400:]}")
    require(SAYS_WHAT.search(message), f"{shown}: does not say what is allowed: {message[-400:]}")
    return {"what": shown, "saw": reason(message)}


def _names(message: str, words: Sequence[str]) -> bool:
    """Whether a message shows one of the words that follow the command, or the name of a flag in them."""
    plain = re.sub(r"[^\w.]", "", message.lower())
    parts = [re.sub(r"[^\w.]", "", word.lower())[:12] for word in words]
    shown = any(part in plain for part in parts if part) or any(
        form in message for word in words for form in (word, repr(word)[1:-1]) if word
    )
    return shown or not any(parts[1:]) or (words[0] == "ui" and "runs" in message)  # by default


def _placed(case: Case, word: str) -> str:
    """A word with the directories of this case instead of RUN and GROWN."""
    for name, reference in (("RUN", case.world.train[0]), ("GROWN", case.world.grown[0])):
        if word == name:
            place = case.directory / name.lower()
            if not place.exists():
                shutil.copytree(reference, place)
            return place.name
    return word


def _run(case: Case, words: Sequence[str]) -> Ended:
    """A command in the directory of the case. One that trains for long is stopped, and counts as accepted."""
    (case.directory / "data").mkdir(exist_ok=True)
    child = case.world.start(case.name, *words, directory=case.directory, environment={"COLUMNS": "200"})
    while words and words[0] in WORK and not child.over():
        if child.used() > SECONDS:
            child.kill()
            child.end(60)
            return Ended(0, "", "")
        time.sleep(0.002)
    return child.end(600)
