"""Attempts at a policy for all worlds, judged where attempts may be judged: on tuning worlds.

`python -m benchmarks.tuning_worlds --out runs/tuning --policy general-1 runs/mine` plays never growing, the
rules, the heuristic, every rung of the ladder and each policy in the first 32 tuning worlds of a family, four
networks each, and prints J minus never growing, minus the best single rung, and the regret to the best rung
of each world in hindsight. Intervals resample worlds, then networks.

Finished worlds are kept in --out, those of each policy apart, so that the next attempt plays no rival again.
Halving, controls and held-out worlds belong to `esper prove --worlds`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from esper._statistics import Estimate, nested
from esper.proof.compare import Cohorts, ProofConfig, acting
from esper.proof.ladder import CHOOSERS, hindsight, ladder, train_ladder
from esper.proof.policies import rule_makers, simple_makers
from esper.proof.worlds import (
    HINDSIGHT,
    NEVER,
    RUNG,
    WorldRecord,
    WorldsConfig,
    best_single_rung,
    gaps,
    play_worlds,
    worlds_settings,
)
from esper.runtime.tasks import TaskSpec
from esper.runtime.worlds import FAMILIES, TUNING_WORLDS
from esper.scripts.process import use_one_core
from esper.simic.ranks import fingerprint
from esper.simic.training.evaluation import HELD_OUT
from esper.tamiyo import RecurrentPolicy, load_policy

MINE = "policy"


def rivals(task: TaskSpec, config: ProofConfig) -> Cohorts:
    """Everybody who decides without having learned, and the ladder."""
    cohorts = Cohorts(task, config, lambda _name, _steps: lambda _: None)
    for name, make in {**simple_makers(task, HELD_OUT), **rule_makers(task)}.items():
        cohorts.add(name, make, static=name == NEVER)
    rungs = ladder(task)
    trained = range(config.first_network, config.first_network + max(config.networks, 1 + CHOOSERS))
    played = train_ladder(task, trained, root_seed=HELD_OUT, rungs=rungs)
    for rung, stratum in zip(rungs[1:], played[1:], strict=True):
        cohorts.played[f"{RUNG}{rung.name}"] = [stratum[: config.networks]]
    chosen = hindsight(np.array([[p.outcome.objective for p in stratum] for stratum in played]))
    best = [played[rung][network] for network, rung in enumerate(chosen[: config.networks])]
    cohorts.played[HINDSIGHT] = [best]
    return cohorts


def learned(policy: RecurrentPolicy) -> Callable[[TaskSpec, ProofConfig], Cohorts]:
    def play(task: TaskSpec, config: ProofConfig) -> Cohorts:
        cohorts = Cohorts(task, config, lambda _name, _steps: lambda _: None)
        cohorts.add(MINE, acting(task, policy, config))
        return cohorts

    return play


def played(
    config: WorldsConfig, play: Callable[[TaskSpec, ProofConfig], Cohorts], of: str, out: Path
) -> list[WorldRecord]:
    proof = ProofConfig(networks=config.networks, first_network=config.first_network)

    def progress(worlds: int) -> None:
        print("." * worlds, end="", flush=True)

    settings = worlds_settings(config) | {"of": of}
    records = play_worlds(config, lambda task: play(task, proof), settings, out, advance=progress)
    print(f" {out.name}", flush=True)
    return records


def together(records: Sequence[WorldRecord], others: dict[str, list[WorldRecord]]) -> list[WorldRecord]:
    """The episodes of all in one record for each world."""
    return [
        replace(
            record,
            episodes=record.episodes | {name: theirs[i].episodes[MINE] for name, theirs in others.items()},
        )
        for i, record in enumerate(records)
    ]


def shown(estimate: Estimate, scale: float = 1.0) -> str:
    return f"{scale * estimate.value:.1f} [{scale * estimate.low:.1f}, {scale * estimate.high:.1f}]"


def table(records: Sequence[WorldRecord], names: Sequence[str]) -> list[str]:
    """Markdown. J in points."""
    single = best_single_rung(records)
    best = f"J − best single rung ({single})"
    columns = ("who decides", "J − never", best, "regret", "seeds", "worlds behind never")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in names:
        above = gaps(records, name, NEVER)
        cells = [
            shown(nested(above.mean(0)), 100),
            shown(nested(gaps(records, name, single).mean(0)), 100),
            shown(nested(-gaps(records, name, HINDSIGHT).mean(0)), 100),
            f"{np.mean([record.mean(name, 'fossilized') for record in records]):.1f}",
            f"{(above.mean((0, 2)) < 0).sum()} of {len(records)}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuning_worlds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--family", default="worlds_small", help=f"one of {', '.join(FAMILIES)}")
    parser.add_argument("--first-world", type=int, default=TUNING_WORLDS[0])
    parser.add_argument("--num-worlds", type=int, default=32)
    parser.add_argument("--networks", type=int, default=4)
    parser.add_argument("--policy", nargs="*", default=[], help="policies that ship, files or runs")
    parser.add_argument("--out", type=Path, required=True, help="directory of the finished worlds")
    given = parser.parse_args(arguments)
    use_one_core()
    config = WorldsConfig(
        family=given.family,
        first_world=given.first_world,
        num_worlds=given.num_worlds,
        networks=given.networks,
    )
    if config.use() == "held-out":
        raise SystemExit("held-out worlds are for final figures; see esper prove --worlds")
    records = played(config, rivals, "rivals", given.out / "rivals")
    others = {}
    for name in given.policy:
        policy = load_policy(name)
        digest = fingerprint(policy.network.state_dict())
        others[name] = played(config, learned(policy), digest, given.out / f"policy-{digest[:12]}")
    records = together(records, others)
    rungs = [name for name in records[0].episodes if name.startswith(RUNG)]
    print("\n".join(table(records, [n for n in records[0].episodes if n not in (NEVER, HINDSIGHT, *rungs)])))


if __name__ == "__main__":
    main()
