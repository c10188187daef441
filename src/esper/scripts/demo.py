"""`esper demo`, also `make run`: train a policy, compare it with its rivals, print the next commands."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from esper.leyline import EsperError
from esper.scripts import prove, train
from esper.scripts.cli import fail
from esper.scripts.karn import without_escapes

PRESET, TASK, NETWORKS, PROBE_NETWORKS = "quickstart", "digits_shift", 24, 128
PROCESSES = min(2, os.cpu_count() or 1)
DESCRIPTION = (
    "Train a policy on handwritten digits, compare it with its rivals, and print commands to try next. This "
    "takes about 5 minutes on two cores. Results are written to a new directory runs/demo-N."
)


def fresh_directory() -> Path:
    """The first of runs/demo-1, runs/demo-2, … that does not exist yet."""
    return next(path for n in count(1) if not (path := Path("runs") / f"demo-{n}").exists())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="esper demo", description=DESCRIPTION)
    try:
        parser.parse_args(without_escapes(arguments))
    except EsperError as error:
        return fail(error)
    start, run = time.perf_counter(), fresh_directory()
    print(f"1. train a policy on {TASK} (preset {PRESET}), recorded in {run}", flush=True)
    processes = ["--processes", str(PROCESSES)]
    if failed := train.main(["ppo", "--preset", PRESET, "--telemetry-dir", str(run), *processes]):
        return failed
    print(f"\n2. prove it on {NETWORKS} networks that it was not trained on", flush=True)
    proof = run / "proof"
    if failed := prove.main(
        [
            "--task",
            TASK,
            "--policy",
            str(run),
            "--networks",
            str(NETWORKS),
            "--probe-networks",
            str(PROBE_NETWORKS),
            "--out",
            str(proof),
        ]
    ):
        return failed
    esper = "esper" if shutil.which("esper") else os.path.relpath(Path(sys.executable).with_name("esper"))
    print(
        f"\n{time.perf_counter() - start:,.0f} s. Next:\n"
        f"  {esper} ui --open    # runs in the browser: networks, decisions, reasons; live while one trains\n"
        f"  {esper} report {run}    # the training as one page\n"
        f"  {esper} grow --task {TASK} --policy {run} --out grown\n"
        f"  {esper} prove --task {TASK} --policy {TASK}-1    # the policy that ships, 96 networks"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
