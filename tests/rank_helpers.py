"""Runs in several processes. Ranks are forked from the test, so that they need not import torch again."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from esper.leyline import EsperError
from esper.simic.ranks import Ranks, joined
from run_helpers import train

SEVERAL: dict[str, Any] = {
    "envs": 20,
    "population": 8,
    "episode_length": 5,
    "steps_per_epoch": 1,
    "val_size": 32,
}
"""Changes of a small run that give it three populations, the last one not full."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _rank(
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    size: int,
    port: int,
    said: Any,
    limit: float,
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "ESPER_RANK_TIMEOUT": str(limit),
    }
    try:
        with joined({}) as ranks:
            work(ranks, *arguments)
            said.put((rank, None))
    except EsperError as error:
        said.put((rank, str(error)))
        said.close()
        said.join_thread()
        os._exit(1)


def start_ranks(
    size: int, work: Callable[..., Any], *arguments: Any, limit: float = 60.0
) -> tuple[list[BaseProcess], Any]:
    """Start `work(ranks, *arguments)` on this many ranks. Returns the processes and the queue on which they
    say (rank, message): None as message if all went well."""
    context, port = multiprocessing.get_context("fork"), free_port()
    said = context.Queue()
    processes = [
        context.Process(target=_rank, args=(work, arguments, rank, size, port, said, limit))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return list(processes), said


def on_ranks(
    size: int, work: Callable[..., Any], *arguments: Any, limit: float = 60.0
) -> dict[int, str | None]:
    """What each rank said in the end; ranks that were killed say nothing."""
    processes, said = start_ranks(size, work, *arguments, limit=limit)
    return end_of(processes, said)


def end_of(processes: list[BaseProcess], said: Any) -> dict[int, str | None]:
    for process in processes:
        process.join(900)
        if process.is_alive():
            process.kill()
    messages: dict[int, str | None] = {}
    while not said.empty():
        rank, message = said.get(timeout=5)
        messages[rank] = message
    return messages


def train_here(_ranks: Ranks, directory: Path | None, changes: dict[str, Any]) -> None:
    train(directory, **changes)


def train_on(size: int, directory: Path, **changes: Any) -> None:
    """A small run on this many ranks, which must end well."""
    messages = on_ranks(size, train_here, directory, changes)
    assert messages == dict.fromkeys(range(size)), messages
