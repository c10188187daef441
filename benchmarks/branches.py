"""Would it pay to learn when to prune? Branches of a network at HOLDING: one goes on as its policy says, the
other prunes its seed.

The environment repeats itself to the last bit, so a branch is the same episode played again with PRUNE at one
epoch: an exact counterfactual of that decision. `python -m benchmarks.branches` plays a policy on training
networks that no training used, prunes the first seed that may be pruned at an epoch, and prints what that did
to J: on average, with hindsight (prune only where it helped), and as far as the policy's own observation
foretells it (ridge regression, tested on networks that it was not fitted to). Only the last could be
learned."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from esper.leyline import OP_PRUNE, ActionMasks, PolicyObservation, PolicyStep
from esper.proof.episodes import play
from esper.proof.policies import Acting
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.scripts.process import use_one_core
from esper.simic.training.evaluation import TRAINING
from esper.tamiyo import RecurrentPolicy, load_policy
from esper.tamiyo.network import Hidden
from esper.tamiyo.scripted import operate, waiting

FIRST = 810_000
"""Number of the first network."""
FOLDS, REPEATS, PENALTIES = 5, 10, (10.0, 100.0, 1000.0)
Array = npt.NDArray[np.float64]


class Branching(Acting):
    """Does as the policy says, but prunes at one epoch wherever a seed may be pruned."""

    def __init__(
        self,
        policy: RecurrentPolicy,
        networks: Sequence[int],
        task: TaskSpec,
        epoch: int,
        seen: dict[int, Array],
    ) -> None:
        """`seen` gets the observation of each network that is pruned."""
        super().__init__(policy, networks, task.episode_length, root_seed=TRAINING)
        self.networks, self.at, self.seen, self.now = networks, epoch, seen, 0

    def act(
        self,
        obs: PolicyObservation,
        hidden: Hidden | None,
        masks: ActionMasks,
        *,
        deterministic: bool = False,
    ) -> PolicyStep:
        step = super().act(obs, hidden, masks, deterministic=deterministic)
        self.now += 1
        if self.now != self.at:
            return step
        actions, legal = step.actions.clone(), masks.slot_by_op[:, OP_PRUNE]
        for row in legal.any(1).nonzero().flatten().tolist():
            slot = int(legal[row].int().argmax())
            actions[row] = waiting(1)[0]
            operate(actions[row], slot, OP_PRUNE)
            self.seen[self.networks[row]] = torch.cat([obs.base[row], obs.slots[row, slot]]).double().numpy()
        return replace(step, actions=actions)


def foretold(features: Array, effect: Array, penalty: float) -> tuple[float, float]:
    """Mean effect of pruning only where it is predicted to help, and the correlation of prediction and
    effect, on networks that the regression was not fitted to."""
    varied = features[:, features.std(0) > 1e-4]
    scaled = (varied - varied.mean(0)) / varied.std(0)
    rng, gains, predicted = np.random.default_rng(0), [], np.zeros(len(effect))
    for _ in range(REPEATS):
        for fold in np.array_split(rng.permutation(len(effect)), FOLDS):
            others = np.setdiff1d(np.arange(len(effect)), fold)
            mean, own = effect[others].mean(), scaled[others]
            weights = np.linalg.solve(
                own.T @ own + penalty * np.eye(own.shape[1]), own.T @ (effect[others] - mean)
            )
            predicted[fold] = scaled[fold] @ weights + mean
        gains.append(np.where(predicted > 0, effect, 0.0).mean())
    constant = predicted.std() == 0 or effect.std() == 0
    return float(np.mean(gains)), 0.0 if constant else float(np.corrcoef(predicted, effect)[0, 1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.branches", description=__doc__)
    parser.add_argument("--task", default="digits_shift")
    parser.add_argument("--policy", default="digits_shift-1", help="a policy that ships, a file or a run")
    parser.add_argument("--networks", type=int, default=384, help="number of training networks")
    parser.add_argument("--epochs", type=int, nargs="+", default=(2, 3), help="when to prune")
    options = parser.parse_args(arguments)
    use_one_core()
    task, policy = get_task_spec(options.task), load_policy(options.policy)
    networks = range(FIRST, FIRST + options.networks)

    def objectives(epoch: int, seen: dict[int, Array]) -> Array:
        played = play(
            task,
            lambda envs: Branching(policy, envs, task, epoch, seen),
            root_seed=TRAINING,
            networks=networks,
        )
        return 100 * np.array([one.outcome.objective for one in played])

    kept = objectives(0, {})
    print(f"{options.task}, {options.policy}, {len(networks)} networks: J {kept.mean():.1f} without pruning")
    for epoch in options.epochs:
        seen: dict[int, Array] = {}
        pruned = objectives(epoch, seen)
        rows = [row for row, network in enumerate(networks) if network in seen]
        if len(rows) < 2 * FOLDS:
            print(f"epoch {epoch}: {len(rows)} seeds could be pruned, too few to say anything")
            continue
        effect = (pruned - kept)[rows]
        spread = 1.96 * effect.std(ddof=1) / len(effect) ** 0.5
        print(
            f"epoch {epoch}: {len(rows)} seeds pruned, J {effect.mean():+.2f} ± {spread:.2f}; better in "
            f"{100 * (effect > 0).mean():.0f} %, with hindsight {np.maximum(effect, 0).mean():+.2f}"
        )
        features = np.nan_to_num(np.stack([seen[networks[row]] for row in rows]))
        for penalty in PENALTIES:
            gain, correlation = foretold(features, effect, penalty)
            print(f"    foretold (ridge {penalty:g}): {gain:+.2f}, correlation {correlation:.2f}")


if __name__ == "__main__":
    main()
