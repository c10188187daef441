"""`esper`: one command, a subcommand for each job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

COMMANDS = {
    "train": ("esper.scripts.train", "train a policy, or let one decide that does not learn"),
    "prove": ("esper.scripts.prove", "policies and their rivals on the same held-out seeds"),
    "grow": ("esper.scripts.grow", "one network, grown by a policy while it trains"),
    "eval": ("esper.scripts.eval", "a grown network on the test split"),
    "demo": ("esper.scripts.demo", "train a policy and prove it, in minutes"),
    "by_hand": ("esper.scripts.by_hand", "grow sixteen small networks on a schedule, in 20 seconds"),
    "config": ("esper.scripts.config", "settings: each value with its origin, presets, tasks"),
    "baseline": ("esper.scripts.baseline", "capture what a short run does, and check that it still does it"),
    "data": ("esper.scripts.data", "datasets: list them, get one"),
    "runs": ("esper.scripts.runs", "list runs and how they stand"),
    "watch": ("esper.scripts.watch", "look at a run, live or finished"),
    "report": ("esper.scripts.report", "a run as one HTML page"),
    "sql": ("esper.scripts.sql", "ask a run in SQL"),
    "compare": ("esper.scripts.compare", "runs side by side, with intervals"),
    "sync": ("esper.scripts.sync", "a run's numbers for TensorBoard or W&B"),
}
"""Subcommand → module with `main(arguments) -> int`, and a line of help. Modules load when they are used."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print("usage: esper COMMAND …\n")
        for name, (_, help_line) in COMMANDS.items():
            print(f"  esper {name:<10} {help_line}")
        return 0 if given else 2
    if given[0] not in COMMANDS:
        print(f"esper: unknown command {given[0]!r}; allowed: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    run: Callable[[Sequence[str]], int] = import_module(COMMANDS[given[0]][0]).main
    return run(given[1:])


if __name__ == "__main__":
    sys.exit(main())
