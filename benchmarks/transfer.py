"""How well do action values that learned in some worlds choose plans in others?

`python -m benchmarks.transfer worlds_small` fits the ensemble once to a table of plans: some plans in each of
some worlds, drawn at random. In worlds that it has not seen it then chooses the plan with the highest mean
value. Figures are points of J above never growing, means over random seeds, each of which draws the worlds
and the plans, with their standard error. No network is trained: a row takes about ten seconds per random
seed.

`--worlds 24 48 96` and `--plans 7 31` give a row for each combination; `--hide base slots quotes` hides parts
of what is seen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from benchmarks.plan_table import PlanTable, load_table
from benchmarks.table_compare import mean_error
from benchmarks.table_learners import Split, best_single, chosen_objective, oracle
from esper.leyline import EsperError
from esper.scripts.process import use_one_core
from esper.simic.agent.plan_values import PlanValueLearner, Sight, ValuesConfig
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT_DIM

STEPS = 2000
"""Training steps of the ensemble."""
PARTS = ("base", "slots", "quotes")


@dataclass(frozen=True, slots=True)
class Result:
    """One random seed, in points of J above never growing."""

    chosen: float
    in_training: float
    """In the worlds that were learned in."""
    single: float
    """The plan that is best in all worlds to learn in."""
    hindsight: float
    """The best plan of each world, luck included."""
    grows: float
    """Percentage of the worlds in which anything is planted."""


def hidden(sight: Sight, parts: Sequence[str]) -> Sight:
    return sight._replace(**{part: torch.zeros_like(getattr(sight, part)) for part in parts})


def transfer(
    table: PlanTable, seed: int, worlds: int, plans: int, config: ValuesConfig, hide: Sequence[str] = ()
) -> Result:
    split, rng = Split.drawn(table, seed), np.random.default_rng(seed)
    if worlds > len(split.train):
        raise EsperError(f"--worlds {worlds}: the table has {len(split.train)} worlds to learn in")
    train = split.train[:worlds]
    learner = PlanValueLearner(config, BASE_DIM, SLOT_DIM, QUOTE_DIM, seed=seed)
    drawn = np.concatenate([1 + rng.choice(len(table.plans) - 1, plans, replace=False) for _ in train])
    index = torch.arange(len(train)).repeat_interleave(plans)
    own = train[index.numpy()]
    gain = torch.from_numpy(table.objective[drawn, own] - table.objective[0, own]).float()
    rows = torch.from_numpy(table.rows())
    sight = hidden(table.sight, hide)
    learner.learn(sight.rows(torch.from_numpy(train)), index, rows[drawn], gain)
    judged, trained = (
        learner.values.gains(sight.rows(torch.from_numpy(some)), rows).mean(0).argmax(-1).numpy()
        for some in (split.test, train)
    )
    never = chosen_objective(table, split.test, 0)
    return Result(
        chosen=100 * (chosen_objective(table, split.test, judged) - never),
        in_training=100 * (chosen_objective(table, train, trained) - chosen_objective(table, train, 0)),
        single=100 * (best_single(table, split) - never),
        hindsight=100 * (oracle(table, split) - never),
        grows=100 * float((judged > 0).mean()),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task")
    parser.add_argument("--worlds", type=int, nargs="+", default=[24, 48, 96], help="worlds to learn in")
    parser.add_argument("--plans", type=int, nargs="+", default=[7], help="plans in each of them")
    parser.add_argument("--seeds", type=int, default=8, help="number of random seeds")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of the ensemble")
    parser.add_argument("--hide", nargs="+", choices=PARTS, default=[], help="parts that are not seen")
    given = parser.parse_args(arguments)
    use_one_core()
    table, config = load_table(given.task), ValuesConfig(steps=given.steps)
    print("| worlds | plans | chosen | where it learned | best single | hindsight | grows, % |")
    print("|---|---|---|---|---|---|---|")
    for worlds, plans in product(given.worlds, given.plans):
        results = [transfer(table, s, worlds, plans, config, given.hide) for s in range(given.seeds)]
        columns = [mean_error(np.array([getattr(one, name) for one in results])) for name in Result.__slots__]
        print(f"| {worlds} | {plans} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
