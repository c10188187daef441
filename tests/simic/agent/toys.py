"""Small tasks with known answers, and the loop that trains an agent on them through its public surface.

E envs, S slots. Every task yields observations and masks for its step `t` and pays for the actions taken
there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from esper.leyline import (
    HEAD_NAMES,
    OP_FOSSILIZE,
    OP_WAIT,
    RELEVANCE,
    ActionMasks,
    PolicyObservation,
    head_sizes,
)
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy import RecurrentPolicy, action_uniforms

OP = HEAD_NAMES.index("op")
QUOTE_DIM = 2


def seen(base: Tensor, slots: Tensor, marked: Tensor | None = None) -> PolicyObservation:
    """Every blueprint is offered in every slot; `marked` [E] is the index of one whose quote differs."""
    envs, blueprints = len(base), head_sizes(1)[1]
    quotes = torch.ones(envs, slots.shape[1], blueprints, QUOTE_DIM)
    quotes[..., 1] = 0.0
    if marked is not None:
        quotes[torch.arange(envs), :, marked, 1] = 1.0
    return PolicyObservation(base, slots, quotes, torch.full(slots.shape[:2], -1))


def open_masks(envs: int, slots: int) -> ActionMasks:
    """Everything is legal."""
    _, *parameters, ops = head_sizes(slots)
    return ActionMasks(
        torch.ones(envs, ops, dtype=torch.bool),
        torch.ones(envs, ops, slots, dtype=torch.bool),
        *(torch.ones(envs, n, dtype=torch.bool) for n in parameters),
    )


@dataclass
class MaskedBandit:
    """One-step episodes: a context, slots of visible quality and random masks; an op pays by context, a slot
    by quality."""

    envs: int
    seed: int
    t: int = 0
    slots: int = 3
    steps: int = 8
    base_dim: int = 4
    slot_dim: int = 1
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        # Each op is worth something else in each context, the best one 1.
        self.table = torch.stack(
            [torch.randperm(6, generator=self.generator) / 5.0 for _ in range(self.base_dim)]
        )

    def observe(self) -> tuple[PolicyObservation, ActionMasks]:
        self.context = torch.randint(self.base_dim, (self.envs,), generator=self.generator)
        self.quality = torch.rand(self.envs, self.slots, generator=self.generator)
        masks = open_masks(self.envs, self.slots)
        masks.op.copy_(torch.rand(masks.op.shape, generator=self.generator) < 0.5)
        masks.op[:, OP_WAIT] = True
        masks.slot_by_op.copy_(torch.rand(masks.slot_by_op.shape, generator=self.generator) < 0.5)
        masks.slot_by_op[..., 0] |= ~masks.slot_by_op.any(-1)
        self.masks = masks
        base = torch.nn.functional.one_hot(self.context, self.base_dim).float()
        return seen(base, self.quality.unsqueeze(-1)), masks

    def reward(self, actions: Tensor) -> Tensor:
        pays = self.table[self.context]
        quality = self.quality.gather(1, actions[:, :1]).squeeze(1)
        slot_factor = torch.where(actions[:, OP] == OP_WAIT, 1.0, 0.5 + 0.5 * quality)
        return pays.gather(1, actions[:, OP:]).squeeze(1) * slot_factor

    def best(self) -> Tensor:
        best_quality = torch.where(self.masks.slot_by_op, self.quality.unsqueeze(1), -1.0).amax(-1)
        factor = 0.5 + 0.5 * best_quality
        factor[:, OP_WAIT] = 1.0
        return torch.where(self.masks.op, self.table[self.context] * factor, 0.0).amax(-1)

    def terminal(self) -> bool:
        return True


@dataclass
class Recall:
    """A cue at step 0, nothing after it, and at the last step the answer that the cue asked for; nothing else
    pays.

    `free`: the answer's op is legal all along, so that most decisions mean nothing and credit has to find the
    last one."""

    envs: int
    seed: int
    t: int = 0
    slots: int = 1
    delay: int = 30
    free: bool = False
    base_dim: int = 8
    slot_dim: int = 1

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.steps = self.delay + 1

    def observe(self) -> tuple[PolicyObservation, ActionMasks]:
        base = torch.zeros(self.envs, self.base_dim)
        base[:, 0] = self.t == self.delay
        if self.t == 0:
            self.cue = torch.randint(2, (self.envs,), generator=self.generator)
            base[:, 1:] = 2.0 * self.cue[:, None] - 1.0
        masks = open_masks(self.envs, self.slots)
        masks.op[:] = False
        masks.op[:, OP_WAIT] = True
        masks.op[:, OP_FOSSILIZE] = self.free or self.t == self.delay
        return seen(base, torch.zeros(self.envs, self.slots, 1)), masks

    def reward(self, actions: Tensor) -> Tensor:
        right = (actions[:, OP] == OP_FOSSILIZE) == self.cue.bool()
        return right.float() if self.t == self.delay else torch.zeros(self.envs)

    def best(self) -> Tensor:
        return torch.full((self.envs,), float(self.t == self.delay))

    def terminal(self) -> bool:
        return self.t == self.delay


@dataclass
class Identity:
    """The observation names the op and its parameters and marks slot and blueprint; each relevant head that
    agrees pays its share."""

    envs: int
    seed: int
    t: int = 0
    slots: int = 3
    steps: int = 8
    slot_dim: int = 1

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.sizes = head_sizes(self.slots)
        self.base_dim = sum(self.sizes[2:])
        self.relevance = torch.tensor(RELEVANCE)

    def observe(self) -> tuple[PolicyObservation, ActionMasks]:
        self.asked = torch.stack(
            [torch.randint(n, (self.envs,), generator=self.generator) for n in self.sizes], dim=1
        )
        told = [torch.nn.functional.one_hot(self.asked[:, h], n).float() for h, n in enumerate(self.sizes)]
        obs = seen(torch.cat(told[2:], dim=1), told[0].unsqueeze(-1), self.asked[:, 1])
        return obs, open_masks(self.envs, self.slots)

    def reward(self, actions: Tensor) -> Tensor:
        right = actions == self.asked
        relevant = self.relevance[self.asked[:, OP]]
        share = (right & relevant).sum(1) / relevant.sum(1)
        return torch.where(right[:, OP], share, 0.0)

    def best(self) -> Tensor:
        return torch.ones(self.envs)

    def terminal(self) -> bool:
        return True


Toy = MaskedBandit | Recall | Identity


def make_agent(toy: Toy, config: PPOConfig, *, seed: int, hidden: int = 64) -> PPOAgent:
    torch.manual_seed(seed)
    network = TamiyoNetwork(toy.base_dim, toy.slot_dim, QUOTE_DIM, hidden=hidden, slot_hidden=32)
    return PPOAgent(
        RecurrentPolicy(network),
        config,
        num_envs=toy.envs,
        num_steps=toy.steps,
        num_slots=toy.slots,
        num_blueprints=head_sizes(1)[1],
        seed=seed,
    )


def rollout(toy: Toy, agent: PPOAgent, episode: int, *, learn: bool = True, forget: bool = False) -> float:
    """Play one rollout and return the share of the best possible reward; `learn` records it, `forget` blanks
    the memory."""
    hidden = agent.initial_hidden()
    agent.begin_rollout(hidden)
    uniforms = action_uniforms(agent.seed, episode, range(toy.envs), toy.steps)
    earned = possible = 0.0
    for t in range(toy.steps):
        toy.t = t
        obs, masks = toy.observe()
        reset = torch.full((toy.envs,), t == 0 or forget)
        step = agent.act(obs, hidden, masks, uniforms=uniforms[:, t], deterministic=not learn, reset=reset)
        reward = toy.reward(step.actions)
        earned, possible = earned + reward.sum().item(), possible + toy.best().sum().item()
        if learn:
            agent.record(
                obs, masks, step, reward=reward, terminal=torch.full((toy.envs,), toy.terminal()), reset=reset
            )
        hidden = step.hidden
    return earned / possible


def score(toy: Toy, agent: PPOAgent, *, rollouts: int = 8, forget: bool = False) -> float:
    """Mean share of the best possible reward when the agent takes its most likely actions."""
    return sum(rollout(toy, agent, episode=0, learn=False, forget=forget) for _ in range(rollouts)) / rollouts


def train(toy: Toy, agent: PPOAgent, updates: int, *, goal: float | None = None) -> int:
    """Roll out and learn; stop early once the score reaches `goal`. Returns the number of updates made."""
    for episode in range(updates):
        rollout(toy, agent, episode)
        agent.update()
        if goal is not None and episode % 3 == 2 and score(toy, agent, rollouts=4) >= goal:
            break
    return agent.updates
