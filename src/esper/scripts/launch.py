"""`--processes N`: start a command as N ranks on this machine, as `torchrun --standalone` would."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from esper._text import shorten
from esper.leyline import EsperError
from esper.scripts.cli import DONE, FAILED

FLAG = "--processes"
MOST = 1_024
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable of torch: how long ranks may take to stop after a signal, in seconds. Then they are
killed."""
DEFAULT_SHUTDOWN = 120


def take_processes(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """The number that `--processes` gives, by default 1, and the other arguments."""
    processes, remaining, words = "1", [], iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == FLAG:
            processes = value if equals else next(words, "")
        else:
            remaining.append(word)
    if not processes.isdecimal() or not 1 <= int(processes) <= MOST:
        raise EsperError(f"{FLAG} is {shorten(processes)}, must be a whole number from 1 to {MOST:,}")
    if int(processes) > 1 and "WORLD_SIZE" in os.environ:
        raise EsperError(
            f"{FLAG} {processes} in a process that torchrun has started; give torchrun --nproc-per-node"
        )
    return int(processes), remaining


def launch(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run `python -m module arguments` as this many ranks and return the exit code. A signal is passed on to
    them. If one fails, the others are stopped."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # of torch's launcher; the ranks speak for themselves
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=int(os.environ.get(SHUTDOWN, DEFAULT_SHUTDOWN)),
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = int(failure.exitcode)
        if code >= 0:
            return code
        print(
            f"rank {rank} was ended by {signal.Signals(-code).name}; the others were stopped", file=sys.stderr
        )
        return FAILED
    return DONE
