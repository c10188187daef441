"""GrowBench: rules that decide what a network grows, by mean J over fixed worlds.

`python -m benchmarks.growbench` plays the rules of the project in 8 worlds, `--size full` in 96 that are held
out. `--rule package.module:function` enters another rule, and may be repeated. README.md has the
protocol."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.growbench.rules import Rule, load_rule, rule_maker
from esper._files import write_atomic
from esper._statistics import Estimate, nested
from esper.leyline import EsperError
from esper.proof.compare import Cohorts, ProofConfig, add_ladder
from esper.proof.policies import last_slot_first, rule_makers, simple_makers
from esper.proof.worlds import (
    BEST_SINGLE,
    NEVER,
    WorldRecord,
    WorldsConfig,
    best_single_rung,
    figure,
    gaps,
    improvement,
    play_worlds,
    with_cohorts,
    worlds_settings,
)
from esper.runtime.tasks import TaskSpec
from esper.runtime.worlds import HELD_OUT_WORLDS, TUNING_WORLDS
from esper.simic.training.evaluation import HELD_OUT

VERSION = 1
SIZES = {
    "small": WorldsConfig(first_world=TUNING_WORLDS[0], num_worlds=8),
    "full": WorldsConfig(first_world=HELD_OUT_WORLDS[0], num_worlds=96),
}
"""A quick look in tuning worlds, and the table in held-out ones."""


def _cohorts(task: TaskSpec, config: WorldsConfig) -> Cohorts:
    proof = ProofConfig(networks=config.networks, first_network=config.first_network)
    return Cohorts(task, proof, lambda _name, _steps: lambda _: None)


def play_rivals(task: TaskSpec, config: WorldsConfig) -> Cohorts:
    """The rules of the project, the ladder of static networks, and successive halving over it."""
    cohorts = _cohorts(task, config)
    for name, make in simple_makers(task, HELD_OUT).items():
        cohorts.add(name, make, static=name == NEVER)
    for name, make in rule_makers(task).items():
        cohorts.add(name, make)
    cohorts.add("last_slot_first", last_slot_first(task))
    add_ladder(cohorts)
    return cohorts


def enter(
    records: Sequence[WorldRecord], rules: Mapping[str, Rule], config: WorldsConfig
) -> list[WorldRecord]:
    """The records with the episodes of these rules."""
    entered = []
    for record in records:
        task = config.task(record.number)
        cohorts = _cohorts(task, config)
        for name, rule in rules.items():
            cohorts.add(name, rule_maker(name, rule, task))
            print(f"{name}: world {record.number}", file=sys.stderr, flush=True)
        entered.append(replace(record, episodes=record.episodes | cohorts.played))
    return entered


def rows(records: Sequence[WorldRecord]) -> list[dict[str, Any]]:
    """A row for each rule, highest mean J first."""
    single = best_single_rung(records)
    records = [replace(r, episodes=r.episodes | {BEST_SINGLE: r.episodes[single]}) for r in records]
    names = dict.fromkeys(name for record in records for name in record.episodes)
    table = []
    for name in names:
        difference = gaps(records, name, NEVER).mean(0)
        table.append(
            {
                "rule": name,
                "worlds": len(with_cohorts(records, name)),
                "J": figure(records, name),
                "above_never": nested(difference),
                "better_than_never": improvement(difference),
                "test_accuracy": figure(records, name, "test_accuracy"),
                "flops": figure(records, name, "flops"),
            }
        )
    return sorted(table, key=lambda row: (-row["J"].value, row["rule"]))


def _text(value: Estimate, scale: float = 1.0) -> str:
    return f"{value.value * scale:.2f} [{value.low * scale:.2f}, {value.high * scale:.2f}]"


def _print(table: Sequence[Mapping[str, Any]], config: WorldsConfig, entered: Mapping[str, Rule]) -> None:
    first, last = config.numbers[0], config.numbers[-1]
    title = (
        f"{config.family}: {config.use()} worlds {first} to {last}, {config.networks} networks each; points "
        "of J, 95 % intervals that resample worlds, then networks"
    )
    heads = ("rule", "worlds", "J", "J − never", "better than never, %", "test accuracy, %", "MFLOPs")
    shown = Table(*heads, title=title, title_justify="left", box=None)
    for row in table:
        shown.add_row(
            f"{row['rule']} (entered)" if row["rule"] in entered else row["rule"],
            str(row["worlds"]),
            _text(row["J"], 100),
            _text(row["above_never"], 100),
            _text(row["better_than_never"], 100),
            _text(row["test_accuracy"]),
            _text(row["flops"], 1e-6),
        )
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=200)).print(shown)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growbench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="which worlds")
    parser.add_argument(
        "--rule", action="append", default=[], help="package.module:function; may be repeated"
    )
    parser.add_argument(
        "--out", type=Path, help="where finished worlds are kept; default runs/growbench-SIZE"
    )
    trial = parser.add_argument_group("other worlds, for trials; figures from them are no entries")
    trial.add_argument("--family", help="family of worlds, optionally with sizes")
    trial.add_argument("--first-world", type=int, help="number of the first world")
    trial.add_argument("--num-worlds", type=int, help="number of worlds")
    trial.add_argument("--networks", type=int, help="networks of each world")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    changes = {name: getattr(options, name) for name in ("family", "first_world", "num_worlds", "networks")}
    config = replace(
        SIZES[options.size], **{name: value for name, value in changes.items() if value is not None}
    )
    rules = {text: load_rule(text) for text in options.rule}
    directory = options.out or Path("runs") / f"growbench-{options.size}"
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        print(f"rivals: {done} worlds finished", file=sys.stderr, flush=True)

    records = play_worlds(
        config,
        lambda task: play_rivals(task, config),
        worlds_settings(config),
        directory / "worlds",
        advance=advance,
    )
    table = rows(enter(records, rules, config))
    _print(table, config, rules)
    content = {"version": VERSION, "settings": asdict(config), "entered": list(rules), "rows": table}
    path = directory / "growbench.json"
    write_atomic(path, orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    print(f"results: {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    torch.set_num_threads(1)
    try:
        run(_options(arguments))
    except EsperError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
