"""`esper grow`: one network, grown by a policy while it trains."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.table import Table

from esper.proof.grown import PLAIN, RECORD, evaluate
from esper.proof.grown import grow as grow_network
from esper.runtime.tasks import parse_task
from esper.scripts.karn import console, reader
from esper.scripts.prove import bars, writable


def grow(task: str, policy: str, out: Path, seed: int = 0, sample: bool = False) -> None:
    """Train one network and let a policy grow it; keep what it became.

    Args:
        task: A task, or one with other sizes, such as digits_shift:base=8,episode_length=12.
        policy: A policy that ships (by name) or a file with one, or heuristic, random, wait.
        out: Where the network goes: structure.json, weights.safetensors, the plain module, and a record.
        seed: Root of the run's random numbers.
        sample: Sample the policy's actions instead of taking the most likely ones.
    """
    torch.set_num_threads(1)
    spec = parse_task(task)
    with bars() as track:
        played = grow_network(
            spec,
            policy,
            writable(out),
            seed=seed,
            sample=sample,
            advance=track("growing", spec.episode_length),
        )
    table = Table("epoch", "decision", "slot", "blueprint", box=None)
    for decision in played.decisions:
        table.add_row(str(decision.epoch), decision.op.lower(), decision.slot, decision.blueprint or "")
    console().print(table)
    end = played.outcome
    grown = ", ".join(f"{fossil.blueprint} in {fossil.slot}" for fossil in played.fossils) or "nothing"
    print(f"grown: {grown}; {end.host_params:,} + {end.added_params:,} parameters, J {end.objective:.4f}")
    print(f"test accuracy {evaluate(out)[1]:.2f} %")
    print(f"in {out}: structure.json, weights.safetensors, {PLAIN}, {RECORD}; again: esper eval {out}")


main = reader(grow)

if __name__ == "__main__":
    sys.exit(main())
