"""What the cases share: the commands at their smallest, the results of commands that nothing disturbed, and
what must hold for a message."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from importlib import import_module
from pathlib import Path

from benchmarks.faults import own_loop
from benchmarks.faults.children import Child, Ended
from esper.scripts.cli import COMMANDS
from esper.scripts.cli import main as esper

LIMIT = 600.0
"""Seconds after which a command counts as hanging. The longest takes 5 on a free machine."""
TRAIN = (
    *("train", "ppo", "--preset", "none", "--task", "digits_impaired", "--envs", "3", "--population", "8"),
    *("--episode-length", "4", "--steps-per-epoch", "1", "--val-size", "32", "--batch-size", "16"),
    *("--hidden", "16", "--rounds", "3", "--checkpoint-every", "1", "--ppo.epochs", "1"),
)
SEVERAL = (*TRAIN, "--envs", "20")
"""The same with three populations, which two processes can share."""
TASK = "digits_impaired:episode_length=3,steps_per_epoch=1,population=8"
PROVE = ("prove", "--task", TASK, "--policy", "none", "--seeds", "2", "--probe-seeds", "8")
PROVE += ("--search", "64", "--candidates", "2")
ESCAPE = "\x1b"
MESSAGE = "error: "
"""How a message begins."""
LONGEST = 5_000
"""Characters of a message that a user would still read."""


def preload() -> None:
    """Import what the commands import when they are used, so that children need not."""
    names = [module for module, _ in COMMANDS.values()]
    names += ["esper.simic.training.vectorized", "esper.karn.web.feed", "torch.export", "typeguard"]
    names += [f"tensorboard.{name}" for name in ("summary.writer.record_writer", "compat.proto.event_pb2")]
    for name in names:
        with suppress(ImportError):  # an extra that is not installed
            import_module(name)


class Broken(Exception):
    """Something that must hold does not."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise Broken(what)


def files_in(directory: Path) -> dict[str, str]:
    """Digests of all files below a directory."""
    return {
        str(path.relative_to(directory)): blake2b(path.read_bytes(), digest_size=8).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def check_clean(ended: Ended) -> None:
    """Whatever a command did, it may not show a traceback or send escape sequences to a terminal."""
    require("Traceback" not in ended.out + ended.err, f"traceback: {ended.err[-600:]}")
    require(ESCAPE not in ended.out + ended.err, f"terminal escape in {ended.message[-300:]!r}")


def check_refused(ended: Ended, *, codes: Sequence[int] = (2,)) -> str:
    """A command that could not do its work says so in a message of readable size. Returns the message."""
    check_clean(ended)
    require(ended.code in codes, f"exit code {ended.code}: {ended.message[-300:]}")
    require(0 < len(ended.message) < LONGEST, f"a message of {len(ended.message)} characters")
    return ended.message


def reason(message: str) -> str:
    """The line of a command's output that says what was wrong, without the directories of the case."""
    lines = [line.strip(" │╭╮╰╯─") for line in message.splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.startswith(MESSAGE)]
    return MESSAGE + re.sub(r"\S*/", "", (errors or lines or [""])[0]).removeprefix(MESSAGE)[:160]


@dataclass(frozen=True)
class World:
    """A directory, and in it what commands make if nothing disturbs them: made when a case first asks."""

    place: Path

    def start(self, name: str, *words: str, **options: object) -> Child:
        """Start `esper` with these words; `name` tells it from the case's other commands."""
        return Child(partial(esper, list(words)), self.place / "output" / name, **options)  # type: ignore[arg-type]

    def esper(self, name: str, *words: str, limit: float = LIMIT, **options: object) -> Ended:
        return self.start(name, *words, **options).end(limit)

    def start_loop(self, name: str, directory: Path, **options: object) -> Child:
        """Start the user's own loop in a directory."""
        work = partial(_loop, directory)
        return Child(work, self.place / "output" / name, **options)  # type: ignore[arg-type]

    def in_child(self, name: str, check: Callable[[], object], *, limit: float = LIMIT) -> str:
        """What a function printed that ran in a child, so that its threads do not stay here."""
        ended = Child(lambda: _checked(check), self.place / "output" / name).end(limit)
        require(ended.code == 0, f"{name}: {ended.err[-600:]}")
        return ended.out

    @cached_property
    def train(self) -> tuple[Path, float]:
        """A run, and the CPU time that it took."""
        return self._made("train", *TRAIN, "--telemetry-dir")

    @cached_property
    def several(self) -> tuple[Path, float]:
        """A run of several populations, in one process."""
        return self._made("several", *SEVERAL, "--telemetry-dir")

    @cached_property
    def prove(self) -> tuple[Path, float]:
        """The directory of a comparison with a search."""
        return self._made("prove", *PROVE, "--out")

    @cached_property
    def sync(self) -> tuple[Path, float]:
        """A run's numbers for TensorBoard."""
        return self._made("sync", "sync", str(self.train[0]), "--to", "tensorboard", "--out")

    @cached_property
    def grown(self) -> tuple[Path, float]:
        """A network that `esper grow` kept."""
        return self._made("grow", "grow", "--task", TASK, "--policy", "wait", "--out")

    @cached_property
    def loop(self) -> tuple[Path, float]:
        """The directory of the user's own loop."""
        directory = self._new("loop")
        child = self.start_loop("reference-loop", directory)
        ended = child.end(LIMIT)
        require(ended.code == 0, f"the loop failed: {ended.err[-600:]}")
        (directory / "digests.txt").write_text(ended.out)
        return directory, child.seconds

    def _made(self, name: str, *words: str) -> tuple[Path, float]:
        directory = self._new(name)
        child = self.start(f"reference-{name}", *words, str(directory))
        ended = child.end(LIMIT)
        require(ended.code == 0, f"esper {' '.join(words)} failed: {ended.err[-600:]}")
        return directory, child.seconds

    def _new(self, name: str) -> Path:
        directory = self.place / "reference" / name
        directory.parent.mkdir(parents=True, exist_ok=True)
        return directory


def _loop(directory: Path) -> None:
    own_loop.loop(directory)


def _checked(check: Callable[[], object]) -> int:
    shown = check()
    if shown is not None:
        print(shown)
    return 0


@dataclass(frozen=True)
class Case:
    """One fault. `number` decides all that is random about it."""

    kind: str
    number: int
    directory: Path
    """Its own, empty at the start."""
    world: World

    @cached_property
    def random(self) -> random.Random:
        return random.Random(f"{self.kind} {self.number}")

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"


Seen = Mapping[str, str]
"""What a case reports: `what` it did, and what the user `saw`."""
