"""The value of each part of the learner: the same training with one thing changed, evaluated on networks that
no variant was trained on.

`python -m benchmarks.ablations [--task digits_impaired] [--only "no memory" …]` trains a policy for each
variant with the same random seed and evaluates all on the same networks, without exploration. Neither
training nor `esper prove` uses these networks, so what is chosen here can be proved there. Prints Markdown;
differences are paired, intervals are 95 %. `--set ppo.lr=1e-3 values_rounds=0` changes all
variants, including the unchanged one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.play import show
from esper.leyline import RewardConfig
from esper.nissa import TelemetryHub
from esper.proof.episodes import play
from esper.proof.policies import Acting
from esper.runtime.tasks import get_task_spec
from esper.simic.training import vectorized
from esper.simic.training.evaluation import TRAINING
from esper.simic.training.presets import PRESETS, resolve

FIRST = 700_000
"""Number of the first network for evaluation."""
ATTRIBUTION = ["contribution", "contribution_velocity", "contribution_age", "interaction", "boost"]
SENSORS = [
    "boundary_norm",
    "boundary_norm_relative",
    "growth_score",
    "growth_score_relative",
    "feature_rank",
    "tap_ratio",
]
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    **{f"reward {mode}": {"reward.mode": mode} for mode in ("shaped", "escrow", "sparse")},
    **{
        f"reward {mode}": {"reward.mode": mode, "rent_curriculum": "0"}
        for mode in ("simplified", "basic", "basic_plus")
    },
    "reward of losses": {"reward_family": "loss", "reward.mode": RewardConfig().mode, "rent_curriculum": "0"},
    "incubation straight through": {"incubation": "ste"},
    "no memory": {"memory": "false"},
    "no exploration": {"ppo.entropy_coef": "0", "ppo.epsilon": "0"},
    "attribution not shown": {"blind": ATTRIBUTION},
    "growth sensors not shown": {"blind": SENSORS},
    "rent that rises over half the run": {"rent_curriculum": "0.5"},
    "no action values": {"values_rounds": "0"},
    "no patient prior": {"patience": "0"},
}


def setting(text: str) -> tuple[str, str]:
    name, is_one, value = text.partition("=")
    if not is_one:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def judge(options: argparse.Namespace, change: Mapping[str, Any]) -> tuple[list[float], float, float]:
    """J of each evaluated network, fossilized seeds per network, and seconds of training."""
    given = {name: getattr(options, name) for name in ("task", "rounds", "seed", "envs")}
    settings = {name: str(value) for name, value in given.items() if value is not None} | dict(options.set)
    config, _ = resolve(options.preset or options.task, None, {**settings, **change})
    spec, seeds = vectorized.resolve_task(config, get_task_spec(options.task)), options.seeds
    start = time.process_time()
    with vectorized.open_trainer(config, spec, TelemetryHub()) as trainer:
        agent, _ = trainer.run()
    assert agent is not None
    spent = time.process_time() - start
    played = play(
        spec,
        lambda envs: Acting(agent.policy, envs, spec.episode_length, root_seed=TRAINING),
        root_seed=TRAINING,
        networks=range(FIRST, FIRST + seeds),
    )
    return [p.outcome.objective for p in played], sum(len(p.fossils) for p in played) / seeds, spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="digits_impaired")
    parser.add_argument(
        "--preset", choices=PRESETS, help="settings of all variants; by default the task's own"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--envs", type=int, help="networks that train side by side; by default the preset's")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the training")
    parser.add_argument("--seeds", type=int, default=64, help="networks for evaluation")
    parser.add_argument(
        "--set", nargs="+", type=setting, default=[], metavar="NAME=VALUE", help="settings for all variants"
    )
    parser.add_argument(
        "--only", nargs="+", choices=VARIANTS, help="only these variants, and the unchanged one"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| variant | J | − as it is | fossils | CPU s |\n|---|---|---|---|---|")
    base: list[float] = []
    for name in [*VARIANTS][:1] + [name for name in options.only or VARIANTS if VARIANTS[name]]:
        values, fossils, spent = judge(options, VARIANTS[name])
        base = base or values
        gap = show([a - b for a, b in zip(values, base, strict=True)]) if values is not base else ""
        print(f"| {name} | {show(values)} | {gap} | {fossils:.1f} | {spent:.0f} |", flush=True)


if __name__ == "__main__":
    main()
