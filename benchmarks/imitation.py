"""Can the policy network represent the heuristic? It is trained to imitate it, and evaluated on other
episodes.

`python -m benchmarks.imitation` records episodes of the heuristic, fits the recurrent policy to them by
maximum likelihood, with the same total weight for every operation, and measures on held-out episodes how
often it takes the same action."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.play import EMBEDDED, make_env, play
from esper.leyline import HEAD_NAMES, ActionMasks, LifecycleOp, PolicyObservation, stream_seed
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.tamiyo import RecurrentPolicy, TamiyoNetwork
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT_DIM
from esper.tamiyo.heuristic import Heuristic, HeuristicConfig

ENVS, BATCH = 64, 64
THRESHOLDS = HeuristicConfig(min_contribution=0.0)
"""Seeds that harm are pruned, the others fossilized. With the defaults hardly any seed is pruned, and the
recall of so few prunes says nothing."""
SLOT, OP = HEAD_NAMES.index("slot"), HEAD_NAMES.index("op")


class Recording(NamedTuple):
    """Whole episodes [E, T, …]."""

    obs: PolicyObservation
    masks: ActionMasks
    actions: Tensor

    def rows(self, index: Tensor) -> Recording:
        return Recording(
            _map([self.obs], lambda t: t[0][index]),
            _map([self.masks], lambda t: t[0][index]),
            self.actions[index],
        )


def _map(parts, function):  # type: ignore[no-untyped-def]
    return type(parts[0])(
        **{f.name: function([getattr(part, f.name) for part in parts]) for f in fields(parts[0])}
    )


def record(task: TaskSpec, episodes: Sequence[int]) -> Recording:
    """Observations, masks and actions of the heuristic in these episodes of ENVS networks."""
    env, policy = make_env(task, range(ENVS)), Heuristic(THRESHOLDS, ENVS)
    kept: list[Recording] = []
    for episode in episodes:
        steps: list[Recording] = []
        policy.begin(ENVS)
        play(
            env,
            policy,
            episode=episode,
            watch=lambda seen, obs, step, steps=steps: steps.append(Recording(obs, seen.masks, step.actions)),
        )  # type: ignore[misc]
        kept.append(_join(steps, 1))
    return _join(kept, 0)


def _join(parts: Sequence[Recording], dim: int) -> Recording:
    join = torch.stack if dim else torch.cat
    return Recording(
        _map([p.obs for p in parts], lambda t: join(t, dim)),
        _map([p.masks for p in parts], lambda t: join(t, dim)),
        join([p.actions for p in parts], dim),
    )


def fit(data: Recording, updates: int, *, seed: int = 0) -> RecurrentPolicy:
    """Maximum likelihood of the recorded actions; each operation is weighted by its inverse frequency."""
    torch.manual_seed(stream_seed(seed, "policy"))
    policy = RecurrentPolicy(
        TamiyoNetwork(BASE_DIM, SLOT_DIM, QUOTE_DIM, memory_horizon=data.actions.shape[1])
    )
    optimizer = torch.optim.Adam(policy.network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=updates)
    weight = 1 / torch.bincount(data.actions[..., OP].flatten(), minlength=len(LifecycleOp)).clamp(min=1)
    for _ in range(updates):
        batch = data.rows(torch.randint(len(data.actions), (BATCH,)))
        nothing = torch.zeros(batch.actions.shape[:2])
        evaluated = policy.evaluate(
            batch.obs,
            policy.initial_hidden(BATCH),
            batch.masks,
            batch.actions,
            reset=nothing.bool(),
            epsilon=nothing,
        )
        each = weight[batch.actions[..., OP]]
        loss = -(each * evaluated.log_prob).sum() / each.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return policy


@torch.no_grad()
def agreement(policy: RecurrentPolicy, data: Recording) -> tuple[dict[str, tuple[float, int]], float]:
    """Recall and count of every recorded operation; and how often both operation and slot are the same, where
    the heuristic does not wait."""
    hidden, chosen = policy.initial_hidden(len(data.actions)), []
    for t in range(data.actions.shape[1]):
        step = policy.act(
            _map([data.obs], lambda x, t=t: x[0][:, t]),
            hidden,
            _map([data.masks], lambda x, t=t: x[0][:, t]),
            deterministic=True,
        )
        assert step.hidden is not None
        hidden = step.hidden
        chosen.append(step.actions)
    mine, theirs = torch.stack(chosen, 1), data.actions
    same = mine[..., OP] == theirs[..., OP]
    recall = {}
    for op in LifecycleOp:
        at = theirs[..., OP] == op
        if at.any():
            recall[op.name] = (float(same[at].double().mean()), int(at.sum()))
    acting = theirs[..., OP] != LifecycleOp.WAIT
    return recall, float((same & (mine[..., SLOT] == theirs[..., SLOT]))[acting].double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=EMBEDDED)
    parser.add_argument(
        "--episodes",
        type=int,
        default=24,
        help=f"recorded episodes of {ENVS} networks; a quarter as many are used for evaluation",
    )
    parser.add_argument("--updates", type=int, default=1500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| task | recall of each operation (count) | operation and slot where it acts | CPU s |")
    print("|---|---|---|---|")
    for task in map(get_task_spec, options.tasks):
        start, more = time.process_time(), options.episodes + options.episodes // 4
        policy = fit(record(task, range(options.episodes)), options.updates)
        recall, slots = agreement(policy, record(task, range(options.episodes, more)))
        cells = ", ".join(f"{op} {100 * share:.1f} % ({count})" for op, (share, count) in recall.items())
        print(
            f"| {task.name} | {cells} | {100 * slots:.1f} % | {time.process_time() - start:.0f} |", flush=True
        )


if __name__ == "__main__":
    main()
