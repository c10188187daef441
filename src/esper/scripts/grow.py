"""`esper grow`: train one network and let a policy grow it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from esper.proof.episodes import Played
from esper.proof.grown import PLAIN, RECORD, check_empty, evaluate, network_to_grow
from esper.proof.grown import grow as grow_network
from esper.runtime.tasks import Condition, TaskSpec, parse_task
from esper.scripts.karn import console, optional
from esper.scripts.process import use_one_core
from esper.scripts.prove import bars, task_command, writable
from esper.tamiyo.shipped import default_policies

FirstCrippled = optional("INT", "the first network with a crippled block, or 0 if the task cripples none")


def grow(
    task: str,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    policy: Annotated[
        str | None,
        optional("STR", "that of the task that ships, else general on images, heuristic on the rest"),
    ] = None,
    network: Annotated[int | None, FirstCrippled] = None,
    seed: int = 0,
    sample: bool = False,
) -> None:
    """Train one network while a policy grows it, and save the result.

    With --import MODULE (repeatable), a module that registers tasks or datasets is imported first.

    Args:
        task: Name of a task, optionally with other sizes, such as digits_shift:base=8,episode_length=12.
            `esper config tasks` lists the tasks.
        policy: Who decides: heuristic, periodic, plateau, random, wait, the name of a policy that ships (such
            as digits_shift-1), a policy file, a checkpoint or a run directory. A run directory means its
            newest checkpoint; RUN/checkpoints/best.safetensors is the policy of its best round.
        out: New or empty directory for the network: structure.json, weights.safetensors, the plain module
            (plain.pt2) and a record (grown.json).
        network: Number of the network, from 0. This number and the random seed determine the network's
            initial weights, its data and its condition (crippled blocks, training images, label noise,
            learning rate).
        seed: Random seed.
        sample: Sample the policy's actions instead of taking the most likely ones.
    """
    use_one_core()
    spec = parse_task(task)
    number = network_to_grow(spec, seed) if network is None else network
    writable(check_empty(out))
    with bars() as track:
        played = grow_network(
            spec,
            _default(spec) if policy is None else policy,
            out,
            root_seed=seed,
            network=number,
            sample=sample,
            advance=track("growing", spec.episode_length),
        )
    _show(spec, played, seed)
    print(f"test accuracy {evaluate(out)[1]:.2f} %")
    print(f"saved to {out}: structure.json, weights.safetensors, {PLAIN}, {RECORD}")
    print(f"to test it again: esper eval {out}")


def _default(task: TaskSpec) -> str:
    return next(iter(default_policies(task.name, images=task.topology == "cnn")), "heuristic")


def _show(task: TaskSpec, played: Played, seed: int) -> None:
    """Decisions and result; where nothing grew, a network to try instead."""
    print(f"network {played.network} of {task.name}{_describe(played.condition)}")
    if played.decisions:
        table = Table("epoch", "decision", "slot", "blueprint", box=None)
        for decision in played.decisions:
            table.add_row(str(decision.epoch), decision.op.lower(), decision.slot, decision.blueprint or "")
        console().print(table)
    end = played.outcome
    grown = ", ".join(f"{fossil.blueprint} in {fossil.slot}" for fossil in played.fossils) or "nothing"
    print(f"grown: {grown}; {end.host_params:,} + {end.added_params:,} parameters, J {end.objective:.4f}")
    other = network_to_grow(task, seed)
    if not played.fossils and other != played.network:
        print(f"the policy made no seed permanent in this network; --network {other} has a crippled block")


def _describe(condition: Condition | None) -> str:
    if condition is None:
        return ""
    crippled = [str(block) for block, mark in enumerate(condition.crippled) if mark]
    images = "all" if condition.train_size is None else f"{condition.train_size:,}"
    return (
        f": crippled blocks {', '.join(crippled) or 'none'}, {images} training images, "
        f"{condition.label_noise:.0%} label noise, learning rate {condition.learning_rate:g}"
        + (f", budget {condition.budget_steps:,} steps" if condition.budget_steps else "")
    )


main = task_command(grow)

if __name__ == "__main__":
    sys.exit(main())
