"""Work in processes of its own, forked from this one: they need not import torch again, and they can be
killed.

The process that forks must not use threads of torch, Arrow or DuckDB before, because a fork does not copy
them. So whatever a case computes, it computes in a child."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
CRASHED = 70
"""Exit code of a child whose work ended with an exception; its traceback is in its output."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: its exit code, −9 if it was killed, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        return self.err or self.out


class Child:
    """One forked process, which leads a process group of its own. What it writes goes to two files."""

    def __init__(
        self,
        work: Callable[[], int | None],
        log: Path,
        *,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        largest_file: int | None = None,
    ) -> None:
        """`largest_file`: bytes beyond which no file of the child may grow."""
        self.out, self.err = log.with_suffix(".out"), log.with_suffix(".err")
        log.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.began = time.monotonic()
        self.code: int | None = None
        self.seconds = 0.0
        """CPU time that the child has used, once it has ended."""
        self.pid = os.fork()
        if self.pid == 0:
            self._run(work, directory, environment or {}, largest_file)

    def _run(
        self,
        work: Callable[[], int | None],
        directory: Path | None,
        environment: Mapping[str, str],
        largest_file: int | None,
    ) -> None:
        code = CRASHED
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no child outlives the campaign
            for descriptor, path in ((0, os.devnull), (1, self.out), (2, self.err)):
                flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                os.dup2(os.open(path, flags), descriptor)
            sys.stdin, sys.stdout, sys.stderr = (
                # As Python opens them; they are open until the process ends.
                open(descriptor, mode, buffering=1, closefd=False, errors=errors)  # noqa: SIM115
                for descriptor, mode, errors in ((0, "r", None), (1, "w", None), (2, "w", "backslashreplace"))
            )
            os.environ.update(environment)
            if directory is not None:
                os.chdir(directory)
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
            code = work() or 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:  # noqa: BLE001  the parent judges it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def over(self) -> bool:
        if self.code is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.seconds = usage.ru_utime + usage.ru_stime
        return self.code is not None

    def used(self) -> float:
        """CPU time that the child has used so far, in seconds. Unlike the wall clock it does not depend on
        what else the machine does."""
        if self.over():
            return self.seconds
        return time.clock_gettime((~self.pid << 3) | 2)  # how Linux numbers the CPU clocks of processes

    def kill(self) -> None:
        """SIGKILL for the child and whatever it has started."""
        if not self.over():
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, limit: float) -> Ended:
        """Wait until it ends. A child that takes longer than `limit` seconds from its start is killed, and
        that is an error."""
        while not self.over():
            if time.monotonic() - self.began > limit:
                self.kill()
                while not self.over():
                    time.sleep(0.01)
                raise TimeoutError(f"still running after {limit:g} s: {self.err.read_text()[-300:]}")
            time.sleep(0.002)
        assert self.code is not None
        return Ended(self.code, *(path.read_text(errors="replace") for path in (self.out, self.err)))


def killed_at(
    children: Sequence[Child], moment: Callable[[], bool], victims: Sequence[int], look: Callable[[], T]
) -> T | None:
    """Wait until the moment has come, and kill some of the children. Returns what `look` saw just before, or
    None if a child had ended by itself."""
    while not moment():
        if any(child.over() for child in children):
            return None
        time.sleep(0.001)
    seen = look()
    for victim in victims:
        children[victim].kill()
    ends = [children[victim].end(float("inf")).code for victim in victims]
    return seen if all(code == -signal.SIGKILL for code in ends) else None
