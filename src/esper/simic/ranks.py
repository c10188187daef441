"""The processes of one run: who they are, and how they exchange what all of them must know.

A run in several processes is started by torchrun, by `--processes`, or by anything that sets the same
environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Each process is a rank. A rank trains some of the
run's populations; everything else is done by every rank alike, so that all have the same bits. Only the first
rank writes files; a piece of work that a rank does `alone` may be kept by that rank.

What is exchanged is in host memory already, so the backend is gloo on every machine. A rank that fails tells
the others why through the store. A rank that was killed or hangs cannot; the others name it after the time
limit."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import esper
from esper.leyline import EsperError, blueprint_ids
from esper.simic import wire

T = TypeVar("T")
TIME_LIMIT = "ESPER_RANK_TIMEOUT"
"""Environment variable: how long a rank waits for the others, in seconds."""
DEFAULT_TIME_LIMIT = 1800.0
GRACE = 3.0
"""Seconds that a rank waits for the others' reasons, once an exchange has failed."""


class RankError(EsperError):
    """A rank failed, does not answer, or does not fit the others."""


class Ranks:
    """A run in one process: every exchange returns what it was given."""

    rank, size = 0, 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def own(self, count: int) -> range:
        """Those of `count` populations or other pieces of work that this rank has."""
        return range(self.rank, count, self.size)

    def all_gather(self, value: T, purpose: str) -> list[T]:
        """Every rank's value, in the order of the ranks. `purpose` names the exchange in errors."""
        return [value]

    def gather(self, value: T, purpose: str) -> list[T]:
        """Every rank's value on the first rank; an empty list on the others."""
        return [value]

    def scatter(self, values: Sequence[T], purpose: str) -> T:
        """One value for each rank, from the first; the others give none."""
        return values[0]

    def from_first(self, value: T, purpose: str) -> T:
        """The first rank's value."""
        return value

    def any(self, flag: bool, purpose: str) -> bool:
        """Whether the flag of any rank is set."""
        return flag

    def check_same(self, values: Mapping[str, object], purpose: str) -> None:
        """Raise on every rank if a value differs from the first rank's."""

    def fail(self, reason: str) -> bool:
        """Tell the other ranks why this one fails. Returns whether the first rank reports it, so that this
        rank need not."""
        return False

    def reported(self) -> None:
        """The first rank has reported its failure to the user."""


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's part in its group, from the environment."""

    rank: int
    size: int
    address: str
    port: int
    hosted: bool
    """The launcher hosts the store; otherwise the first rank does."""
    attempt: str
    """Number of the launcher's restarts."""

    @classmethod
    def from_environment(cls) -> Place | None:
        """None if no launcher has started this process."""
        if "WORLD_SIZE" not in os.environ:
            return None
        numbers = {name: _number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
        rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
        if not 0 <= rank < size:
            raise RankError(f"RANK is {rank} with WORLD_SIZE {size}; allowed: 0 to {size - 1}")
        return cls(
            rank,
            size,
            os.environ.get("MASTER_ADDR", "localhost"),
            numbers["MASTER_PORT"],
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            _attempt(),
        )


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def restarted() -> bool:
    """Whether torchrun has started this process in place of one that failed."""
    return _attempt() != "0"


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise RankError(f"environment: {name} is {text!r}, must be a number; torchrun sets it")
    return int(text)


def time_limit() -> float:
    """How long a rank waits for the others, in seconds."""
    text = os.environ.get(TIME_LIMIT, str(DEFAULT_TIME_LIMIT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 1e7:
        raise RankError(f"environment: {TIME_LIMIT} is {text!r}, must be seconds from 1 to 10,000,000")
    return seconds


# -- a group of processes ------------------------------------------------------------------------------------


class Joined(Ranks):
    """One of several processes. Exchanges happen in the same order on all of them."""

    def __init__(self, place: Place) -> None:
        self.rank, self.size = place.rank, place.size
        self.limit = time_limit()
        self.failed = self._store_is_gone = False
        self.traffic: Counter[str] = Counter()
        """Bytes that this rank has sent so far, by purpose."""
        where = f"{place.address}:{place.port}"
        limit = timedelta(seconds=self.limit)
        try:
            store = dist.TCPStore(
                place.address,
                place.port,
                is_master=place.rank == 0 and not place.hosted,
                timeout=limit,
                wait_for_workers=False,
            )
        except dist.DistNetworkError as error:
            # Its first line is for users; what follows is a stack of C++ frames.
            reason = str(error).splitlines()[0]
            raise RankError(
                f"rank {place.rank} cannot open {where}: {reason}. Choose a free port with --master-port "
                "or MASTER_PORT, and an address that all machines reach"
            ) from error
        self._store = dist.PrefixStore(f"esper/{place.attempt}", store)
        self._store.set(f"here/{self.rank}", "yes")
        try:
            dist.init_process_group(
                "gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=limit
            )
        except (RuntimeError, dist.DistError) as error:
            absent = [str(rank) for rank in range(self.size) if not self._has(f"here/{rank}")]
            raise RankError(
                f"rank {self.rank} waited at {where} for {self.size} ranks; "
                f"{'rank ' + ', '.join(absent) + ' did not come' if absent else error}"
            ) from error

    # -- exchanges -------------------------------------------------------------------------------------------

    def all_gather(self, value: T, purpose: str) -> list[T]:
        with self._naming_the_lost(purpose):
            own, sizes = self._packed(value, purpose)
            whole = [own.new_empty(max(sizes)) for _ in range(self.size)]
            dist.all_gather(whole, _padded(own, max(sizes)))
        received = [_loaded(whole[rank], sizes[rank]) for rank in range(self.size) if rank != self.rank]
        return [*received[: self.rank], value, *received[self.rank :]]

    def gather(self, value: T, purpose: str) -> list[T]:
        with self._naming_the_lost(purpose):
            own, sizes = self._packed(None if self.is_first else value, purpose)
            whole = [own.new_empty(max(sizes)) for _ in range(self.size)] if self.is_first else None
            dist.gather(_padded(own, max(sizes)), whole)
        if whole is None:
            return []
        return [value, *(_loaded(whole[rank], sizes[rank]) for rank in range(1, self.size))]

    def scatter(self, values: Sequence[T], purpose: str) -> T:
        packed = [_dumped(value) for value in values]
        sizes = self.from_first([len(part) for part in packed], purpose)
        own = torch.empty(max(sizes), dtype=torch.uint8)
        with self._naming_the_lost(purpose):
            dist.scatter(own, [_padded(part, max(sizes)) for part in packed] or None)
        self.traffic[purpose] += sum(sizes) if self.is_first else 0
        value: T = _loaded(own, sizes[self.rank])
        return value

    def from_first(self, value: T, purpose: str) -> T:
        return self.all_gather(value if self.is_first else None, purpose)[0]  # type: ignore[return-value]

    def any(self, flag: bool, purpose: str) -> bool:
        flags = torch.tensor([flag], dtype=torch.uint8)
        with self._naming_the_lost(purpose):
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def check_same(self, values: Mapping[str, object], purpose: str) -> None:
        first, *others = self.all_gather(dict(values), purpose)
        for rank, theirs in enumerate(others, 1):
            for name in first | theirs:
                if theirs.get(name) != first.get(name):
                    raise RankError(
                        f"{purpose} must be the same on all ranks: {name} is {first.get(name)!r} on rank 0 "
                        f"and {theirs.get(name)!r} on rank {rank}"
                    )

    def _packed(self, value: object, purpose: str) -> tuple[Tensor, list[int]]:
        """The value as bytes, and how many bytes each rank has."""
        own = _dumped(value)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(own)]))
        self.traffic[purpose] += len(own)
        return own, torch.cat(sizes).tolist()

    # -- failures --------------------------------------------------------------------------------------------

    @contextmanager
    def _naming_the_lost(self, purpose: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            message = self._diagnosis(purpose, time.monotonic() - began)
            raise RankError(message) from error

    def _diagnosis(self, purpose: str, waited: float) -> str:
        """Why an exchange failed: the reason of the rank that gave one, or the ranks that say nothing."""
        self._tell(f"waiting/{self.rank}", purpose)
        others = [rank for rank in range(self.size) if rank != self.rank]
        end = time.monotonic() + GRACE
        while True:
            failed = {rank: text for rank in others if (text := self._told(f"failed/{rank}"))}
            silent = [rank for rank in others if rank not in failed and not self._has(f"waiting/{rank}")]
            if failed or time.monotonic() > end:
                break
            time.sleep(0.05)
        if failed:
            rank, reason = next(iter(failed.items()))
            return f"rank {rank} failed: {reason}"
        if not self._has(f"here/{self.rank}"):
            silent = [0]  # the store has gone with the rank that hosted it, so the others cannot be asked
        if not silent:
            return f"the ranks lost each other while they exchanged {purpose}"
        names = f"rank {', '.join(map(str, silent))}"
        if waited < 0.9 * self.limit:
            return f"{names} ended without a word, killed or out of memory, before it gave its {purpose}"
        return (
            f"{names} did not give its {purpose} within {self.limit:g} s: it hangs, or needs longer; "
            f"{TIME_LIMIT} sets the time limit in seconds"
        )

    def fail(self, reason: str) -> bool:
        self.failed = True
        self._tell(f"failed/{self.rank}", reason)
        if self.is_first:
            return False
        # The launcher stops all ranks when the first of them ends: let the first one speak before.
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            if self._has("reported"):
                return True
            time.sleep(0.05)
        return False

    def reported(self) -> None:
        self._tell("reported", "yes")

    def leave(self) -> None:
        """Wait until the first rank, which hosts the store, may end; then end the group."""
        with suppress(RankError):  # the work is done, whoever is lost now
            self.any(False, "goodbye")
        dist.destroy_process_group()

    def _tell(self, key: str, text: str) -> None:
        if self._store_is_gone:  # torch prints a stack of C++ frames each time that it is asked
            return
        try:
            self._store.set(key, text or "no message")
        except (RuntimeError, dist.DistError):  # the store is gone with the first rank
            self._store_is_gone = True

    def _has(self, key: str) -> bool:
        if self._store_is_gone:
            return False
        try:
            return bool(self._store.check([key]))
        except (RuntimeError, dist.DistError):
            self._store_is_gone = True
            return False

    def _told(self, key: str) -> str:
        return self._store.get(key).decode() if self._has(key) else ""


def _dumped(value: object) -> Tensor:
    return torch.frombuffer(bytearray(wire.dumps(value)), dtype=torch.uint8)


def _loaded(part: Tensor, size: int) -> Any:
    return wire.loads(part[:size].numpy().data)


def _padded(part: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(part, (0, size - len(part)))


# -- joining -------------------------------------------------------------------------------------------------

_current: list[Ranks] = [ALONE]


def current() -> Ranks:
    """The ranks of the run that this process takes part in; alone, unless it has joined others."""
    return _current[-1]


@contextmanager
def alone() -> Iterator[None]:
    """Work inside is done by this rank for itself: it exchanges nothing, so ranks may do different work."""
    _current.append(ALONE)
    try:
        yield
    finally:
        _current.pop()


@contextmanager
def joined(settings: Mapping[str, object]) -> Iterator[Ranks]:
    """Join the other processes of a run, if a launcher has started this one. All must have the same settings,
    versions and source. An error inside is told to the other ranks."""
    place = Place.from_environment()
    if place is None or place.size == 1:
        yield ALONE
        return
    ranks = Joined(place)
    _current.append(ranks)
    try:
        ranks.check_same(software(), "software")
        ranks.check_same(settings, "settings")
        yield ranks
        if not ranks.failed:
            ranks.leave()
    except BaseException as error:
        if not ranks.failed:
            reason = str(error) if isinstance(error, EsperError) else f"{type(error).__name__}: {error}"
            if ranks.fail(reason) and isinstance(error, EsperError):
                raise SystemExit(1) from error  # the first rank says it
        raise
    finally:
        _current.pop()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def telling(ranks: Ranks) -> Iterator[None]:
    """Tell the other ranks of an error inside. A rank whose error the first one reports ends in silence."""
    try:
        yield
    except EsperError as error:
        if ranks.fail(str(error)):
            raise SystemExit(1) from error
        raise


def software() -> dict[str, object]:
    """What decides the bits of a result besides the settings."""
    try:
        release = version("esper-grow")
    except PackageNotFoundError:
        release = "not installed"
    return {
        "Esper": release,
        "source of Esper": _source_digest(),
        "Python": platform.python_version(),
        "torch": str(torch.__version__),  # plain text, which can travel
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads of torch": torch.get_num_threads(),
        "blueprints": list(blueprint_ids()),
    }


@cache
def _source_digest() -> str:
    digest, folder = blake2b(digest_size=8), Path(esper.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names and bits."""
    flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    digest = blake2b(" ".join(tensors).encode(), digest_size=8)
    digest.update(flat.cpu().numpy().data)
    return digest.hexdigest()


def share_work(count: int, work: Callable[[int], T], ranks: Ranks, purpose: str) -> list[T]:
    """The results of `work(0)` … `work(count − 1)` on every rank; each rank does its own part."""
    own = {index: work(index) for index in ranks.own(count)}
    results = {index: result for part in ranks.all_gather(own, purpose) for index, result in part.items()}
    return [results[index] for index in range(count)]


def for_all(advance: Callable[[int], None], sizes: Sequence[int], ranks: Ranks) -> Callable[[int], None]:
    """Progress of all ranks from that of this one, which takes the others to be as far as itself. `sizes` are
    those of the pieces that they share."""
    own, total = sum(sizes[index] for index in ranks.own(len(sizes))), sum(sizes)
    done = told = 0

    def on_own(more: int) -> None:
        nonlocal done, told
        done += more
        now = done * total // own
        advance(now - told)
        told = now

    return on_own
