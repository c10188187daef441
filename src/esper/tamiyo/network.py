"""The policy's network: shared slot encoder, pooled trunk, LSTM, autoregressive heads and a value tower.

Blueprints are seen by their quotes alone: what each would cost and do in each slot. One more blueprint is one
more row of quotes, and changes the shape of no weight.

Shapes: E envs, T steps, S slots, B blueprints, H hidden size, G slot encoding size, F task families. No
weight depends on E, T, S or B. The network turns observations into logits and values; masks, probabilities
and sampling belong to the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline import (
    HEAD_ENUMS,
    HEAD_NAMES,
    RELEVANCE,
    LifecycleOp,
    PolicyObservation,
    ShapeError,
)

Hidden = tuple[Tensor, Tensor]
"""LSTM state before a step: h and c, each [E, H]."""

NUM_OPS = len(LifecycleOp)
ARCHITECTURE = ("base_dim", "slot_dim", "quote_dim", "hidden", "slot_hidden", "memory_horizon")
"""The sizes that make a network; weight files carry them."""


PATIENCE = {
    LifecycleOp.WAIT: 1.5,
    LifecycleOp.GERMINATE: 0.0,
    LifecycleOp.SET_ALPHA_TARGET: -2.0,
    LifecycleOp.PRUNE: -2.0,
    LifecycleOp.FOSSILIZE: 2.5,
    LifecycleOp.ADVANCE: 2.5,
}
"""Initial log-odds under which most germinated seeds are also fossilized. Under uniform odds nine of ten are
pruned before that, so that a policy sees hardly any finished growth to learn from."""


class ParameterBlock(NamedTuple):
    """The run of logits in the last layer that chooses one parameter head for one op."""

    op: int
    head: int
    choices: int


PARAMETER_BLOCKS = tuple(
    ParameterBlock(op, head, len(enum))
    for head, enum in enumerate(HEAD_ENUMS)
    for op in range(NUM_OPS)
    if enum is not None and HEAD_NAMES[head] != "op" and RELEVANCE[op][head]
)
"""In the order of their logits: every op has its own logits for every parameter that it uses. The blueprint
is scored apart from these."""


class Features(NamedTuple):
    """What the heads read."""

    context: Tensor  # [E, T, H]
    slots: Tensor  # [E, T, S, G]
    quotes: Tensor  # [E, T, S, B, G]
    family: Tensor  # [E, T]


def _linear(inputs: int, outputs: int, gain: float = math.sqrt(2.0), *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.orthogonal_(layer.weight, gain)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class TamiyoNetwork(nn.Module):
    """Observation and memory in, logits and value out; about 0.3M parameters at the default sizes."""

    relevance: Tensor  # [6, 8]
    value_mean: Tensor  # [F]
    value_scale: Tensor  # [F]
    base_sight: Tensor  # [base_dim], 0 where the network is blind
    slot_sight: Tensor  # [slot_dim]
    quote_sight: Tensor  # [quote_dim]
    recall: Tensor  # 0 where it forgets

    def __init__(
        self,
        base_dim: int,
        slot_dim: int,
        quote_dim: int,
        *,
        hidden: int = 128,
        slot_hidden: int = 64,
        memory_horizon: int = 64,
    ) -> None:
        """`memory_horizon`: the longest time, in steps, that the LSTM's forget gates span at birth."""
        super().__init__()
        self.bf16 = False
        """Run in bfloat16 under autocast. Logits and values leave as float32 either way."""
        sizes = (base_dim, slot_dim, quote_dim, hidden, slot_hidden, memory_horizon)
        self.architecture: dict[str, int] = dict(zip(ARCHITECTURE, sizes, strict=True))
        small = 0.01  # near-uniform policy at birth
        self.quote_encoder = nn.Sequential(_linear(quote_dim, slot_hidden), nn.ReLU())
        self.slot_encoder = nn.Sequential(
            _linear(slot_dim + 2 * slot_hidden, slot_hidden),
            nn.LayerNorm(slot_hidden),
            nn.ReLU(),
            _linear(slot_hidden, slot_hidden),
            nn.ReLU(),
        )
        self.trunk = nn.Sequential(
            _linear(base_dim + 2 * slot_hidden, hidden),
            nn.LayerNorm(hidden),
            nn.ReLU(),
            _linear(hidden, hidden),
            nn.LayerNorm(hidden),
        )
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.memory_norm = nn.LayerNorm(hidden)
        self.op_head = nn.Sequential(_linear(hidden, hidden), nn.ReLU(), _linear(hidden, NUM_OPS, small))
        self.slot_key = _linear(slot_hidden, slot_hidden)
        self.slot_query = _linear(hidden, slot_hidden, bias=False)
        self.slot_score = _linear(slot_hidden, NUM_OPS, small)
        self.blueprint_key = _linear(slot_hidden, slot_hidden)
        self.blueprint_quote = _linear(slot_hidden, slot_hidden, bias=False)
        self.blueprint_query = _linear(hidden, slot_hidden, bias=False)
        self.blueprint_score = _linear(slot_hidden, 1, small)
        self.parameter_key = _linear(slot_hidden, hidden)
        self.parameter_query = _linear(hidden, hidden, bias=False)
        self.parameter_out = _linear(hidden, sum(block.choices for block in PARAMETER_BLOCKS), small)
        self.value_tower = nn.Sequential(
            _linear(hidden, hidden), nn.ReLU(), _linear(hidden, hidden // 2), nn.ReLU()
        )
        self.value_out = _linear(hidden // 2, 1, 0.1)
        self.register_buffer("relevance", torch.tensor(RELEVANCE), persistent=False)
        self.register_buffer("value_mean", torch.zeros(1))
        self.register_buffer("value_scale", torch.ones(1))
        self.register_buffer("base_sight", torch.ones(base_dim))
        self.register_buffer("slot_sight", torch.ones(slot_dim))
        self.register_buffer("quote_sight", torch.ones(quote_dim))
        self.register_buffer("recall", torch.ones(()))
        self._init_memory(hidden, memory_horizon)

    def _init_memory(self, hidden: int, horizon: int) -> None:
        """Orthogonal gates; forget biases spread so that cell k remembers for 1 … horizon steps (chrono
        initialisation)."""
        forget = torch.linspace(1.0, max(horizon - 1.0, 1.0), hidden).log()
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("weight"):
                for gate in parameter.data.chunk(4):
                    nn.init.orthogonal_(gate)
            elif name.startswith("bias_ih"):
                parameter.data.copy_(torch.cat([-forget, forget, torch.zeros(2 * hidden)]))
            else:
                nn.init.zeros_(parameter)

    @torch.no_grad()
    def prefer(self, strength: float) -> None:
        """Bias the initial op logits by `strength` times PATIENCE."""
        last = self.op_head[-1]
        assert isinstance(last, nn.Linear)
        last.bias.add_(torch.tensor([PATIENCE[op] for op in LifecycleOp]), alpha=strength)

    @torch.no_grad()
    def add_family(self) -> None:
        """Append a row to the value head, for a family of tasks that it has not met: its value is the mean of
        the values of the others."""
        scale, out = self.value_scale, self.value_out
        mean_scale = scale.mean()
        weight = (scale.unsqueeze(1) * out.weight).mean(0) / mean_scale
        bias = (scale * out.bias).mean(0) / mean_scale
        out.weight = nn.Parameter(torch.cat([out.weight, weight.unsqueeze(0)]))
        out.bias = nn.Parameter(torch.cat([out.bias, bias.unsqueeze(0)]))
        out.out_features += 1
        self.value_mean = torch.cat([self.value_mean, self.value_mean.mean().unsqueeze(0)])
        self.value_scale = torch.cat([scale, mean_scale.unsqueeze(0)])

    @torch.no_grad()
    def mask_inputs(
        self, base: Sequence[int], slot: Sequence[int], quote: Sequence[int], *, memory: bool
    ) -> None:
        """Set these features to 0 for the network, and its memory too unless `memory`. Weight files store the
        masks."""
        self.base_sight[list(base)] = 0.0
        self.slot_sight[list(slot)] = 0.0
        self.quote_sight[list(quote)] = 0.0
        self.recall.fill_(float(memory))

    def initial_hidden(self, num_envs: int) -> Hidden:
        zeros = self.value_mean.new_zeros(num_envs, self.architecture["hidden"])
        return zeros, zeros.clone()

    def forward(self, obs: PolicyObservation, hidden: Hidden, reset: Tensor) -> tuple[Features, Hidden]:
        """Read whole sequences: obs parts [E, T, …], hidden before the first step, reset flags [E, T]."""
        for name, size in (("base", "base_dim"), ("slots", "slot_dim"), ("quotes", "quote_dim")):
            features = getattr(obs, name).shape[-1]
            if features != self.architecture[size]:
                raise ShapeError(
                    f"observation.{name} has {features} features; the network reads {self.architecture[size]}"
                )
        with self._precision():
            offered = obs.quotes.any(-1, keepdim=True).to(obs.quotes.dtype)  # all zeros: not offered
            quotes = self.quote_encoder(obs.quotes * self.quote_sight) * offered
            offers = torch.cat([quotes.sum(-2) / offered.sum(-2).clamp(min=1), quotes.amax(-2)], dim=-1)
            slots = self.slot_encoder(torch.cat([obs.slots * self.slot_sight, offers], dim=-1))
            x = self.trunk(torch.cat([obs.base * self.base_sight, *pool_slots(slots, obs.exists)], dim=-1))
            memory, hidden = self.unroll(x, hidden, reset)
            return Features(x + self.recall * self.memory_norm(memory), slots, quotes, obs.family), hidden

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.value_mean.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def unroll(self, x: Tensor, hidden: Hidden, reset: Tensor) -> tuple[Tensor, Hidden]:
        """LSTM over [E, T, H]; an env's state is zeroed before each step whose flag is set. One call per
        reset-free stretch."""
        steps = x.shape[1]
        cuts = [0, *(t + 1 for t, cut in enumerate(reset[:, 1:].any(dim=0).tolist()) if cut), steps]
        h, c = hidden
        outputs = []
        for start, stop in pairwise(cuts):
            fresh = reset[:, start, None]
            # where, not a product: a state that went to NaN must not survive its reset
            state = tuple(torch.where(fresh, 0.0, s).unsqueeze(0) for s in (h, c))
            output, (h, c) = self.lstm(x[:, start:stop], state)
            h, c = h.squeeze(0).float(), c.squeeze(0).float()
            outputs.append(output)
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0], (h, c)

    def op_logits(self, features: Features) -> Tensor:
        """[E, T, 6]"""
        with self._precision():
            return self.op_head(features.context).float()

    def slot_logits(self, features: Features) -> Tensor:
        """[E, T, 6, S]: each op's weights of the last layer are its embedding, matched against every slot in
        context."""
        with self._precision():
            joint = torch.relu(
                self.slot_key(features.slots) + self.slot_query(features.context).unsqueeze(-2)
            )
            return self.slot_score(joint).float().transpose(-1, -2)

    def blueprint_logits(self, context: Tensor, slot: Tensor, quotes: Tensor) -> Tensor:
        """[…, B] for the encoded quotes […, B, G] of a slot with encoding […, G] in its context […, H]."""
        with self._precision():
            place = self.blueprint_key(slot) + self.blueprint_query(context)
            joint = torch.relu(self.blueprint_quote(quotes) + place.unsqueeze(-2))
            return self.blueprint_score(joint).squeeze(-1).float()

    def parameter_logits(self, context: Tensor, slot: Tensor) -> Tensor:
        """[…, logits] for a slot's encoding […, G] in its context […, H]; PARAMETER_BLOCKS says whose logit
        is where."""
        with self._precision():
            return self.parameter_out(
                torch.relu(self.parameter_key(slot) + self.parameter_query(context))
            ).float()

    def normalized_value(self, features: Features) -> Tensor:
        """[E, T], in units of PopArt's statistics of the env's family."""
        with self._precision():
            values = self.value_out(self.value_tower(features.context)).float()
        return values.gather(-1, features.family.unsqueeze(-1)).squeeze(-1)

    def denormalize(self, value: Tensor, family: Tensor) -> Tensor:
        return value * self.value_scale[family] + self.value_mean[family]


def pool_slots(slots: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and maximum over the slots that exist, […, G] each, of encodings […, S, G]; 0 where none does.
    Both are the same bits however many slots that do not exist follow."""
    there = exists.unsqueeze(-1)
    total = torch.where(there, slots, 0.0).float().sum(-2)
    mean = (total / there.sum(-2).clamp(min=1)).to(slots.dtype)
    largest = slots.masked_fill(~there, -torch.inf).amax(-2)
    return mean, torch.where(there.any(-2), largest, 0.0)
