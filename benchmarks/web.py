"""Row `web.cost_ratio`: training that a page follows against training that none follows.

`python -m benchmarks.web` measures the page under load instead: a thousand runs, a run of 100,000 events,
many clients, clients that stop reading. Waiting times hold for a quiet machine; the processor times beside
them hold for any."""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson
import torch

from benchmarks.harness import Row
from esper.simic import train_ppo_vectorized

GOAL = 1.02
PAIRS = 5
"""The median leaves out pairs in which the machine was busy with something else."""
TRAINING: dict[str, Any] = {
    "task": "digits_impaired", "envs": 16, "rounds": 2, "episode_length": 25, "seed": 0
}  # fmt: skip
TOKEN = "benchmark"
RUNS, EVENTS, WIDER, CLIENTS, STUCK = 1000, 100_000, 16, 20, 4
BEYOND_BUFFERS = 4_000_000
"""Bytes of a message that no socket buffer holds: who does not read it blocks its sender."""


# -- a server in a process of its own ------------------------------------------------------------------------


def _serve(root: str, pipe: Connection) -> None:
    """Serve until the pipe closes; answer each question on it with processor time and peak memory."""
    import resource

    from esper.karn.web.server import make_server

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = make_server(Path(root), TOKEN)
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    pipe.send(listening.getsockname()[1])
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send((time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    pipe: Connection

    def used(self) -> tuple[float, float]:
        """Seconds of processor time, and peak memory in MiB."""
        self.pipe.send(None)
        return self.pipe.recv()

    @contextmanager
    def follow(self, **parameters: str) -> Iterator[Iterator[dict[str, Any]]]:
        """The messages of a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("GET", f"/{TOKEN}/api/stream?{urlencode(parameters)}")
        answer = connection.getresponse()
        try:
            yield (json.loads(line[6:]) for line in iter(answer.readline, b"") if line.startswith(b"data: "))
        finally:
            connection.close()

    def ask(self, name: str, **parameters: Any) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("GET", f"/{TOKEN}/api/{name}?{urlencode(parameters)}")
            return connection.getresponse().read()
        finally:
            connection.close()


@contextmanager
def serving(root: Path) -> Iterator[Server]:
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(str(root), theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Server(pipe.recv(), pipe)
    finally:
        pipe.close()
        process.join(20)


# -- what the page costs a run -------------------------------------------------------------------------------


def _train(directory: Path) -> float:
    """Processor seconds of a run."""
    start = time.process_time()
    train_ppo_vectorized(**TRAINING, telemetry_dir=str(directory))
    return time.process_time() - start


def _watch(server: Server) -> float:
    """Do what an open page does: wait for the run in the list, follow it, fetch each new round. Returns its
    own processor seconds when the run has ended."""
    start = time.thread_time()
    with server.follow() as listed:
        next(message for message in listed if message["runs"])
    with server.follow(run="latest") as messages:
        for message in messages:
            for shown in message["parts"].get("recorded", {}).get("rounds", [])[-1:]:
                server.ask("round", run="latest", round=shown)
            if message["parts"].get("facts", {}).get("status") == "finished":
                break
    return time.thread_time() - start


def _train_followed(root: Path) -> float:
    """Processor seconds of a run and of the server that shows it, as if they shared one core. Those of the
    client, which has a machine of its own or a core to draw on, are taken out."""
    with serving(root) as server, ThreadPoolExecutor(1) as pool:
        before, _ = server.used()
        start = time.process_time()
        client = pool.submit(_watch, server)
        _train(root / "run")
        shown = client.result()
        own = time.process_time() - start - shown
        after, _ = server.used()
    return own + after - before


def rows() -> Iterator[Row]:
    ratios = []
    with tempfile.TemporaryDirectory() as place:
        _train(Path(place) / "warm-up")
        for pair in range(PAIRS):
            root = Path(place) / str(pair)
            root.mkdir()
            if pair % 2:
                alone, followed = _train(root.with_suffix(".alone")), _train_followed(root)
            else:
                followed, alone = _train_followed(root), _train(root.with_suffix(".alone"))
            ratios.append(followed / alone)
    yield Row("web.cost_ratio", statistics.median(ratios), GOAL)


# -- load ----------------------------------------------------------------------------------------------------


def many_runs(run: Path, root: Path) -> None:
    for index in range(RUNS):
        shutil.copytree(run, root / f"run-{index:04d}", ignore=shutil.ignore_patterns("checkpoints"))


def long_run(run: Path, target: Path) -> int:
    """A run of at least `EVENTS` events: the second round of another over and over, as if it had `WIDER`
    times its envs, tables too. Returns its rounds."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("checkpoints"))
    start, *events = map(json.loads, (run / "events.jsonl").read_bytes().splitlines())
    envs = start["data"]["envs"]
    body = []
    for event in events:
        if event.get("round_idx") == 1:
            if event.get("env_id") is None:
                body.append(event)
            else:
                body += [{**event, "env_id": event["env_id"] + envs * i} for i in range(WIDER)]
    rounds = -(-EVENTS // len(body))
    with (target / "events.jsonl").open("wb") as log:
        log.write(orjson.dumps(start) + b"\n")
        for index in range(rounds):
            for place, event in enumerate(body):
                event |= {"seq": 1 + index * len(body) + place, "round_idx": index}
                if "round_idx" in event["data"]:
                    event["data"]["round_idx"] = index
                log.write(orjson.dumps(event) + b"\n")
    for table in sorted((target / "tables").glob("*-00001.parquet")):
        for index in range(2, rounds):
            shutil.copyfile(table, table.with_name(table.name.replace("00001", f"{index:05d}")))
    return rounds


def opening(server: Server, **parameters: str) -> str:
    """How long a client waits for the first message of a stream, and the processor time of that."""
    start, (before, _) = time.perf_counter(), server.used()
    first_message(server, **parameters)
    waited = time.perf_counter() - start
    return f"{waited:.2f} s (processor {server.used()[0] - before:.2f} s)"


def first_message(server: Server, **parameters: str) -> dict[str, Any]:
    with server.follow(**parameters) as messages:
        return next(messages)


def append_round(run: Path, index: int) -> None:
    """One more finished round in a log."""
    log = run / "events.jsonl"
    last = json.loads(log.read_bytes().splitlines()[-1])
    data = {"round_idx": index, "rounds": index + 1, "avg_objective": 0.5}
    event = {
        **last,
        "seq": last["seq"] + 1,
        "event_type": "batch_completed",
        "round_idx": index,
        "data": data,
    }
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event, separators=(",", ":")) + "\n")


def delays(server: Server, path: Path, rounds: int, clients: int) -> list[float]:
    """Seconds until each of several clients that follow a run hears of a new round."""
    ready = threading.Barrier(clients + 1)

    def listen() -> float:
        with server.follow(run=path.name) as messages:
            while next(messages)["parts"].get("recorded", {}).get("rounds", [0])[-1] < rounds:
                pass  # until it has read all tables
            ready.wait()
            for message in messages:
                if message["curves"].get("rounds/avg_objective", [[0]])[0][-1] > rounds:
                    break
        return time.perf_counter()

    with ThreadPoolExecutor(clients) as pool:
        heard = [pool.submit(listen) for _ in range(clients)]
        ready.wait()
        start = time.perf_counter()
        append_round(path, rounds)
        return [one.result() - start for one in heard]


def stop_reading(server: Server, run: str) -> socket.socket:
    """A client that asks for a run and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    client.sendall(f"GET /{TOKEN}/api/stream?run={run} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return client


def load(place: Path) -> Iterator[tuple[str, str]]:
    """Each figure with its name."""
    small = {"episode_length": 6, "steps_per_epoch": 3, "val_size": 64, "permissive_gates": True}
    run = place / "one"
    train_ppo_vectorized(**TRAINING | {"envs": 4, "population": 8} | small, telemetry_dir=str(run))
    many = place / "many"
    many.mkdir()
    many_runs(run, many)
    with serving(many) as server:
        _, empty = server.used()
        yield f"list of {RUNS:,} runs, first time", opening(server)
        yield "list again", opening(server)
        spent, listed = server.used()
        with server.follow() as messages:
            next(messages)
            time.sleep(10)
        yield "looking for changes of the list", f"{(server.used()[0] - spent) * 100:.0f} ms per second"
        for index in range(30):
            first_message(server, run=f"run-{index:04d}")
        _, opened = server.used()
        for index in range(30, 130):
            first_message(server, run=f"run-{index:04d}")
        sizes = f"{empty:.0f}, {listed:.0f}, {opened:.0f}, {server.used()[1]:.0f} MiB"
        yield "peak memory: empty, list, 30 and 130 runs opened", sizes
    one = place / "long"
    rounds = long_run(run, one / "run")
    with serving(one) as server:
        name = f"run of {EVENTS:,} events and {rounds:,} rounds"
        yield f"{name} opens", opening(server, run="run")
        waits = delays(server, one / "run", rounds, CLIENTS)
        yield f"{CLIENTS} clients hear of a round", f"{min(waits):.2f} to {max(waits):.2f} s"
        yield "opens again", opening(server, run="run")
        yield "peak memory", f"{server.used()[1]:.0f} MiB"
    (run / "config.json").write_text(json.dumps({"text": "x" * BEYOND_BUFFERS}))
    held = place / "held"
    rounds = 2
    shutil.copytree(run, held / "run")
    with serving(held) as server:
        stuck = [stop_reading(server, "run") for _ in range(STUCK)]
        time.sleep(1)
        waits = delays(server, held / "run", rounds, CLIENTS)
        yield f"the same beside {STUCK} that do not read", f"{min(waits):.2f} to {max(waits):.2f} s"
        for client in stuck:
            client.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.web", description=__doc__)
    parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        for name, figure in load(Path(place)):
            print(f"{name}: {figure}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
