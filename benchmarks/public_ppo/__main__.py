"""The project's PPO and sb3-contrib's RecurrentPPO on the same memory task: `python -m benchmarks.public_ppo
[--seeds 3]`.

Prints for each side and random seed the number of env steps until 95 % of the last 256 training episodes
were solved, and env steps per second of one processor core, including learning. The library is installed into
a virtual environment of its own beside this file, with the torch version of constraints.txt; the project
itself does not depend on it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.public_ppo.recall import BUDGET

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIBRARY = "sb3-contrib==2.9.2"


def library_python() -> str:
    """The interpreter of the other side, set up on first use."""
    home = HERE / ".venv"
    python, ready = home / "bin" / "python", home / "ready"
    if not ready.exists():
        venv.create(home, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", ROOT / "constraints.txt", LIBRARY], check=True)
        ready.touch()
    return str(python)


def measure(*command: str) -> dict[str, float]:
    """One run in a process of its own."""
    done = subprocess.run(
        [command[0], "-m", *command[1:]], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def describe(run: dict[str, float]) -> str:
    return (
        f"{run['solved_at']:,.0f}" if run["solved_at"] else f"not in {BUDGET:,} ({100 * run['share']:.0f} %)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="random seeds per side")
    parser.add_argument(
        "--theirs", nargs="+", default=["tuned"], help="settings of the other side: default, tuned"
    )
    options = parser.parse_args()
    seeds, other = options.seeds, library_python()
    sides = {
        "ours": (sys.executable, "benchmarks.public_ppo.ours"),
        **{f"RecurrentPPO, {name}": (other, "benchmarks.public_ppo.theirs", name) for name in options.theirs},
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for seed in range(seeds):  # sides take turns, so that a busy machine is busy for all of them
        for name, command in sides.items():
            runs[name].append(measure(*command, str(seed)))
            print(f"seed {seed}, {name}: {describe(runs[name][-1])}", flush=True)
    table = Table("side", *(f"seed {seed}" for seed in range(seeds)), "env steps per core second")
    for name, results in runs.items():
        table.add_row(
            name, *map(describe, results), f"{median(run['steps'] / run['seconds'] for run in results):,.0f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
