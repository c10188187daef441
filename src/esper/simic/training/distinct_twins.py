"""Twins that have done the same so far take different actions.

Twins share initial weights, data and condition, so two of them that act alike are the same network twice and
teach nothing. Here those that see the same draw from the policy without replacement (Gumbel top-k, Kool et
al. 2019), and the first twin of each group always waits: it shows what growing nothing gives.

G groups, T twins, E = G · T envs, S slots, B blueprints, A actions of a plan: to wait, or a blueprint in a
slot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from esper.leyline import OP_GERMINATE, ActionMasks, PolicyObservation, stream_seed
from esper.tamiyo.network import Hidden
from esper.tamiyo.policy import RecurrentPolicy, map_tensors
from esper.tamiyo.scripted import germinate, waiting


def plan_actions(slots: int, blueprints: list[int]) -> Tensor:
    """[A, 8]: to wait, then every blueprint in every slot, added at once."""
    actions = waiting(1 + slots * len(blueprints))
    for action, (slot, blueprint) in zip(actions[1:], product(range(slots), blueprints), strict=True):
        germinate(action, slot, blueprint)
    return actions


def gumbel(seed: int, round_idx: int, epoch: int, numbers: Sequence[int], actions: int) -> Tensor:
    """[E, A] of noise for the envs with these numbers. It does not depend on how many envs there are."""
    rows = []
    for env in numbers:
        generator = torch.Generator().manual_seed(
            stream_seed(seed, "action", round_idx, env, counter=1_000_000 + epoch)
        )
        rows.append(torch.rand(actions, generator=generator))
    uniform = torch.stack(rows).clamp(min=1e-30, max=1 - 1e-7)
    return -torch.log(-torch.log(uniform))


def places(obs: PolicyObservation, hidden: Hidden, twins: int) -> tuple[Tensor, Tensor]:
    """[E] each: the first env of the same group that sees and remembers exactly the same, and how many such
    envs come before this one."""
    parts = (obs.base, obs.slots.flatten(1), *hidden)
    seen = torch.cat([part.detach().cpu() for part in parts], 1).unflatten(0, (-1, twins))  # [G, T, …]
    same = (seen.unsqueeze(1) == seen.unsqueeze(2)).all(-1)  # [G, T, T]
    first = same.int().argmax(-1)
    before = torch.tril(same, diagonal=-1).sum(-1)
    groups = torch.arange(len(seen)).unsqueeze(1) * twins
    return (groups + first).flatten(), before.flatten()


@torch.no_grad()
def draw_distinct(
    policy: RecurrentPolicy,
    obs: PolicyObservation,
    hidden: Hidden,
    masks: ActionMasks,
    *,
    twins: int,
    epsilon: float,
    reset: Tensor,
    seed: int,
    round_idx: int,
    epoch: int,
    numbers: Sequence[int],
) -> Tensor:
    """Actions [E, 8] of plans. Where more twins see the same than there are legal actions, the last ones
    wait. `numbers` are those of the envs within their tasks."""
    envs, slots = len(obs.base), obs.slots.shape[1]
    leader, rank = places(obs, hidden, twins)
    offered = masks.blueprint.any(0).nonzero().squeeze(1).tolist()
    actions = plan_actions(slots, offered)
    by_slot = masks.slot_by_op[:, OP_GERMINATE] & masks.op[:, OP_GERMINATE].unsqueeze(1)
    may = (by_slot.unsqueeze(2) & masks.blueprint[:, None, offered]).flatten(1).cpu()
    legal = torch.cat([torch.ones(envs, 1, dtype=torch.bool), may], 1)  # [E, A]
    leaders = leader.unique()
    rows = leaders.repeat_interleave(len(actions))
    asked = torch.where(legal[leaders].unsqueeze(-1), actions, actions[0]).flatten(0, 1)
    on = rows.to(policy.device)
    step = policy.act(
        map_tensors(obs, lambda part: part[on]),
        (hidden[0][on], hidden[1][on]),
        map_tensors(masks, lambda part: part[on.to(part.device)]),
        epsilon=epsilon,
        reset=reset[on],
        given=asked,
    )
    log_probs = torch.full((envs, len(actions)), -torch.inf)
    log_probs[leaders] = step.log_prob.cpu().unflatten(0, (-1, len(actions)))
    score = log_probs[leader] + gumbel(seed, round_idx, epoch, numbers, len(actions))[leader]
    score = score.masked_fill(~legal, -torch.inf)
    score[leader % twins == 0, 0] = torch.inf  # the first twin of a group comes first, and waits
    order = score.argsort(dim=1, descending=True, stable=True)
    enough = rank < legal.sum(1)
    chosen = order.gather(1, torch.where(enough, rank, 0).unsqueeze(1)).squeeze(1)
    return actions[torch.where(enough, chosen, 0)]
