"""The learned policy: one factored, masked, autoregressive distribution, used alike to act and to evaluate.

π(a | s) = π(op) · π(slot | op) · Π π(parameter | op, slot),    each factor (1 − ε)·softmax + ε·uniform over
what is legal

The blueprint is one of the parameters; it has as many choices as blueprints are registered at run time.

Shapes: E envs, T steps, S slots, B blueprints, H hidden size; actions are [..., 8] in head order.
Probabilities are float32 whatever precision the network ran in. Nothing here draws random numbers: the caller
passes one uniform number per env and head, so that an env's actions depend neither on other envs nor on how
many there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import orjson
import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import one_hot

from esper._archive import check_tensors, load_tensors, read_archive, require_equal, write_archive
from esper._files import check_version, decode
from esper.leyline import (
    ALPHA_CURVE_STEEPNESS,
    ALPHA_CURVE_VALUES,
    ALPHA_SPEED_EPOCHS,
    ALPHA_TARGET_VALUES,
    HEAD_ENUMS,
    HEAD_NAMES,
    IRRELEVANT_VALUES,
    NUM_HEADS,
    OP_GERMINATE,
    OP_NAMES,
    RELEVANCE,
    STYLE_ALPHA_ALGORITHMS,
    STYLE_CURVES,
    TEMPO_EPOCHS,
    ActionMasks,
    EsperError,
    PolicyObservation,
    PolicyStep,
    ShapeError,
    StructureError,
    stream_seed,
)
from esper.leyline.facts import TRAITS
from esper.tamiyo.network import ARCHITECTURE, NUM_OPS, PARAMETER_BLOCKS, Features, Hidden, TamiyoNetwork

VERSION = 2
"""Of the policy file. Version 1 knows one family of tasks, without its name."""
UNNAMED = "unnamed"
"""Name of the family of a policy that was made without one."""
SLOT, BLUEPRINT, OP = (HEAD_NAMES.index(name) for name in ("slot", "blueprint", "op"))
BLUEPRINT_OP = OP_GERMINATE
"""The one op that chooses a blueprint."""
EXACT_ENTROPY_SLOTS = 10
"""Up to this many slots the entropy of the parameters is an exact expectation; above, its value at the
sampled slot."""
ROW_MULTIPLE = 16
"""`act` pads its batch to a multiple of this many envs. Matrix kernels choose their summation order by the
number of rows; padded so, every row comes out bit-identical however many envs run (measured for 1 to 256
envs; multiples of 8 suffice)."""

_Batch = TypeVar("_Batch", PolicyObservation, ActionMasks)
_RELEVANCE = torch.tensor(RELEVANCE)
_PARAMETERS = HEAD_NAMES[BLUEPRINT + 1 : OP]
"""Heads whose choices are fixed: neither slots nor blueprints."""
_BLOCK_SIZES = [block.choices for block in PARAMETER_BLOCKS]


class _Layout(NamedTuple):
    """Where the entries of the parameter heads are, blueprints aside. An entry is one logit of one block: one
    choice of one head under one op."""

    mask_index: Tensor  # [entries], into the parameter masks laid end to end
    block_index: Tensor  # [entries]
    in_block: (
        Tensor  # [entries, blocks], 1 where the entry belongs to the block: a matrix product sums over blocks
    )
    block_op: Tensor  # [blocks]
    block_head: Tensor  # [blocks, heads], 1 where the block belongs to the head
    start: Tensor  # [6 ops, heads], first entry; 0 where the op does not use the head
    beyond: Tensor  # [heads, widest], True where a head has fewer choices than that

    @classmethod
    def build(cls) -> _Layout:
        sizes = [len(enum) for enum in HEAD_ENUMS[BLUEPRINT + 1 : OP] if enum is not None]
        mask_start = [sum(sizes[:h]) for h in range(len(sizes))]
        start = torch.zeros(NUM_OPS, len(sizes), dtype=torch.int64)
        mask_index: list[int] = []
        for block in PARAMETER_BLOCKS:
            head = block.head - BLUEPRINT - 1
            start[block.op, head] = len(mask_index)
            mask_index += range(mask_start[head], mask_start[head] + block.choices)
        block_index = torch.arange(len(PARAMETER_BLOCKS)).repeat_interleave(torch.tensor(_BLOCK_SIZES))
        heads = torch.tensor([block.head - BLUEPRINT - 1 for block in PARAMETER_BLOCKS])
        return cls(
            torch.tensor(mask_index),
            block_index,
            one_hot(block_index).float(),
            torch.tensor([block.op for block in PARAMETER_BLOCKS]),
            one_hot(heads).float(),
            start,
            torch.arange(max(sizes)) >= torch.tensor(sizes)[:, None],
        )

    def to(self, device: torch.device) -> _Layout:
        return _Layout(*(t.to(device) for t in self))


_LAYOUT = _Layout.build()


class EmptyMaskError(EsperError):
    """An env whose masks leave no complete legal action, or allow an op that cannot be completed."""


def map_tensors(batch: _Batch, function: Callable[[Tensor], Tensor]) -> _Batch:
    """The same record with `function` applied to each of its tensors."""
    return replace(batch, **{f.name: function(getattr(batch, f.name)) for f in fields(batch)})


def action_uniforms(root: int, episode: int, envs: Sequence[int], steps: int) -> Tensor:
    """[E, steps, 8] uniform numbers in [0, 1) from each env's own counter-based stream, for one episode of
    acting."""
    streams = [
        np.random.Generator(np.random.Philox(stream_seed(root, "action", episode, env))) for env in envs
    ]
    return torch.from_numpy(np.stack([stream.random((steps, NUM_HEADS)) for stream in streams]))


def option_counts(masks: ActionMasks) -> Tensor:
    """[..., 6, 8]: how many values of each head are legal under each op; the op head itself counts 1."""
    by_head = [masks.slot_by_op.sum(-1)]
    for head in range(1, OP):
        by_head.append(getattr(masks, HEAD_NAMES[head]).sum(-1, keepdim=True).expand_as(by_head[0]))
    return torch.stack([*by_head, torch.ones_like(by_head[0])], dim=-1)


def has_choice(masks: ActionMasks) -> Tensor:
    """[...]: True where more than one complete action is legal."""
    completions = torch.where(_RELEVANCE.to(masks.op.device), option_counts(masks), 1).prod(-1)
    return (completions * masks.op).sum(-1) > 1


def check_masks(masks: ActionMasks) -> None:
    """Raise unless every env has a legal op and every legal op can be completed."""
    missing = (
        masks.op.unsqueeze(-1) & _RELEVANCE.to(masks.op.device) & (option_counts(masks) == 0)
    )  # [E, 6, 8]
    stuck = ~masks.op.any(-1)
    if stuck.any():
        raise EmptyMaskError(f"env {stuck.nonzero()[0, 0].item()}: no op is allowed; WAIT must always be")
    if missing.any():
        env, op, head = missing.nonzero()[0].tolist()
        raise EmptyMaskError(
            f"env {env}: op {OP_NAMES[op]} is allowed, but no value of its head {HEAD_NAMES[head]!r} is"
        )


def _mix(log_softmax: Tensor, count: Tensor, mask: Tensor, epsilon: Tensor) -> Tensor:
    # Fill before mixing: the gradient of logaddexp(−inf, −inf) is NaN, and a fill lets none through.
    softmax = log_softmax.masked_fill(~mask, 0.0) + torch.log1p(-epsilon)
    mixed = torch.logaddexp(softmax, (epsilon / count).log())
    return mixed.masked_fill(count == 1, 0.0).masked_fill(
        ~mask, -torch.inf
    )  # a forced choice is certain to the last bit


def mixture_log_probs(logits: Tensor, mask: Tensor, epsilon: Tensor) -> Tensor:
    """log((1 − ε)·softmax + ε·uniform) over the legal entries, exactly −inf elsewhere; `epsilon` [..., 1].

    A row without a legal entry is treated as all legal: it belongs to an op that is not legal, whose weight
    is 0."""
    mask = mask | ~mask.any(-1, keepdim=True)
    log_softmax = logits.masked_fill(~mask, -torch.inf).log_softmax(-1)
    return _mix(log_softmax, mask.sum(-1, keepdim=True), mask, epsilon)


def _summand(log_probs: Tensor) -> Tensor:
    """−p·log p, with 0 and gradient 0 where p is 0."""
    finite = log_probs.masked_fill(log_probs.isneginf(), 0.0)
    return -finite.exp() * finite


def categorical_entropy(log_probs: Tensor) -> Tensor:
    return _summand(log_probs).sum(-1)


def _choose(log_probs: Tensor, uniform: Tensor | None) -> Tensor:
    """Index by inverse CDF, or the mode if `uniform` is None. An entry of probability 0 is never chosen."""
    if uniform is None:
        return log_probs.argmax(-1)
    cdf = log_probs.double().exp().cumsum(-1)
    # Below 1 by more than rounding, so that u·total < total and the first entry above it has positive
    # probability.
    threshold = uniform.double().clamp(max=1 - 2.0**-24).unsqueeze(-1) * cdf[..., -1:]
    return (cdf <= threshold).sum(-1)


class ActionDistribution:
    """π(· | s) for a batch of states with any leading shape."""

    def __init__(
        self,
        network: TamiyoNetwork,
        features: Features,
        masks: ActionMasks,
        epsilon: Tensor,
        *,
        explore_parameters: bool = True,
    ) -> None:
        """`explore_parameters`: whether ε also holds for blueprints and other parameters."""
        self._network, self._features, self._layout = network, features, _LAYOUT.to(epsilon.device)
        epsilon = epsilon.unsqueeze(-1)
        self.op_log_probs = mixture_log_probs(network.op_logits(features), masks.op, epsilon)  # [..., 6]
        self.slot_log_probs = mixture_log_probs(
            network.slot_logits(features), masks.slot_by_op, epsilon.unsqueeze(-1)
        )  # [..., 6, S]
        self._epsilon = epsilon if explore_parameters else torch.zeros_like(epsilon)
        """Of the parameters."""
        self._blueprint_mask = masks.blueprint
        mask = torch.cat([getattr(masks, name) for name in _PARAMETERS], dim=-1)[..., self._layout.mask_index]
        self._count = (mask.float() @ self._layout.in_block)[
            ..., self._layout.block_index
        ]  # legal entries of the same block
        self._mask = mask | (self._count == 0)  # as in mixture_log_probs

    def _parameters(
        self, context: Tensor, slot: Tensor, mask: Tensor, count: Tensor, epsilon: Tensor
    ) -> Tensor:
        """[..., entries]: log-probs of every parameter under every op that uses it, at the slot with this
        encoding."""
        logits = self._network.parameter_logits(context, slot).masked_fill(~mask, -torch.inf)
        log_softmax = torch.cat(
            [block.log_softmax(-1) for block in logits.split(_BLOCK_SIZES, dim=-1)], dim=-1
        )
        return _mix(log_softmax, count.clamp(min=1), mask, epsilon)

    def _at(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of the blueprints [..., B] and entries of the other parameters at one slot."""
        context, slots, quotes = self._features[:3]
        index = slot[..., None, None].expand(*slot.shape, 1, slots.shape[-1])
        encoding = slots.gather(-2, index).squeeze(-2)
        index = slot[..., None, None, None].expand(*slot.shape, 1, *quotes.shape[-2:])
        quoted = quotes.gather(-3, index).squeeze(-3)
        blueprints = mixture_log_probs(
            self._network.blueprint_logits(context, encoding, quoted), self._blueprint_mask, self._epsilon
        )
        return blueprints, self._parameters(context, encoding, self._mask, self._count, self._epsilon)

    def _slots_given(self, op: Tensor) -> Tensor:
        """[..., S]"""
        index = op[..., None, None].expand(*op.shape, 1, self.slot_log_probs.shape[-1])
        return self.slot_log_probs.gather(-2, index).squeeze(-2)

    def sample(self, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        """Actions and their log-probs, each [..., 8], from uniform numbers [..., 8] in head order; None gives
        the modes."""
        u_slot = u_blueprint = u_parameters = u_op = None
        if uniforms is not None:
            u_slot, u_blueprint, u_op = (uniforms[..., head] for head in (SLOT, BLUEPRINT, OP))
            u_parameters = uniforms[..., BLUEPRINT + 1 : OP]
        op = _choose(self.op_log_probs, u_op)
        slot = _choose(self._slots_given(op), u_slot)
        blueprints, entries = self._at(slot)
        blueprint = _choose(blueprints, u_blueprint)
        heads, widest = self._layout.beyond.shape
        index = self._layout.start[op].unsqueeze(-1) + torch.arange(widest, device=op.device)
        by_head = entries.gather(-1, index.clamp(max=entries.shape[-1] - 1).flatten(-2)).unflatten(
            -1, (heads, widest)
        )
        parameters = _choose(by_head.masked_fill(self._layout.beyond, -torch.inf), u_parameters)
        actions = torch.cat(
            [slot.unsqueeze(-1), blueprint.unsqueeze(-1), parameters, op.unsqueeze(-1)], dim=-1
        )
        actions = torch.where(
            self._network.relevance[op], actions, torch.tensor(IRRELEVANT_VALUES, device=op.device)
        )
        return actions, self._log_probs(actions, blueprints, entries)

    def log_probs(self, actions: Tensor) -> Tensor:
        """[..., 8]: log-prob of each head's choice, exactly 0 where the head is irrelevant; the joint is the
        sum."""
        return self._log_probs(actions, *self._at(actions[..., SLOT]))

    def _log_probs(self, actions: Tensor, blueprints: Tensor, entries: Tensor) -> Tensor:
        op = actions[..., OP]
        by_head = torch.cat(
            [
                self._slots_given(op).gather(-1, actions[..., SLOT : SLOT + 1]),
                blueprints.gather(-1, actions[..., BLUEPRINT : BLUEPRINT + 1]),
                entries.gather(-1, self._layout.start[op] + actions[..., BLUEPRINT + 1 : OP]),
                self.op_log_probs.gather(-1, op.unsqueeze(-1)),
            ],
            dim=-1,
        )
        return torch.where(self._network.relevance[op], by_head, 0.0)

    def entropies(self, actions: Tensor) -> Tensor:
        """[..., 8]: each head's share of the joint entropy by the chain rule; the sum is H(π).

        Σ_op π(op) Σ_slot π(slot | op) H(parameter | op, slot) is exact up to EXACT_ENTROPY_SLOTS slots;
        above, each parameter's share is its entropy at the op and slot of `actions`. Gradients reach each
        factor through its own entropy alone: that an op has many parameters to be unsure of is no reason to
        choose it."""
        op_probs = self.op_log_probs.exp().detach()
        has_slot = self._network.relevance[:, SLOT]
        slot = (op_probs * has_slot * categorical_entropy(self.slot_log_probs)).sum(-1)
        if self.slot_log_probs.shape[-1] > EXACT_ENTROPY_SLOTS:
            blueprints, entries = self._at(actions[..., SLOT])
            blueprint = categorical_entropy(blueprints) * (actions[..., OP] == BLUEPRINT_OP)
            of_block = _summand(entries) @ self._layout.in_block  # [..., blocks]
            parameters = (of_block * (self._layout.block_op == actions[..., OP:])) @ self._layout.block_head
        else:
            context, slots, quotes = self._features[:3]
            context, epsilon = context.unsqueeze(-2), self._epsilon.unsqueeze(-2)
            blueprints = mixture_log_probs(
                self._network.blueprint_logits(context, slots, quotes),
                self._blueprint_mask.unsqueeze(-2),
                epsilon,
            )  # [..., S, B]
            entries = self._parameters(
                context, slots, self._mask.unsqueeze(-2), self._count.unsqueeze(-2), epsilon
            )  # [..., S, entries]
            reach = op_probs.unsqueeze(-1) * self.slot_log_probs.exp().detach()  # [..., 6, S]
            of_block = (_summand(entries) @ self._layout.in_block).transpose(-1, -2)  # [..., blocks, S]
            parameters = (reach[..., self._layout.block_op, :] * of_block).sum(-1) @ self._layout.block_head
            blueprint = (reach[..., BLUEPRINT_OP, :] * categorical_entropy(blueprints)).sum(-1)
        op = categorical_entropy(self.op_log_probs)
        return torch.cat([slot.unsqueeze(-1), blueprint.unsqueeze(-1), parameters, op.unsqueeze(-1)], dim=-1)


@dataclass(frozen=True, slots=True)
class PolicyEvaluation:
    """Stored sequences seen with the current weights."""

    head_log_probs: Tensor  # [E, T, 8], 0 where irrelevant
    head_entropies: Tensor  # [E, T, 8], shares of the joint entropy
    normalized_value: Tensor  # [E, T], in units of PopArt's statistics

    @property
    def log_prob(self) -> Tensor:
        return self.head_log_probs.sum(-1)

    @property
    def entropy(self) -> Tensor:
        return self.head_entropies.sum(-1)


Size = Annotated[int, Meta(ge=1, le=2**20)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Schema:
    """What weights must agree with."""

    features: str
    actions: str
    base_dim: Size
    slot_dim: Size
    quote_dim: Size
    hidden: Size
    slot_hidden: Size
    memory_horizon: Size
    families: tuple[str, ...] = ()
    """Families of tasks that the value head knows, in the order of its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """The JSON part of a policy file."""

    kind: str
    schema: _Schema
    version: Annotated[int, Meta(ge=1)] = 1


class RecurrentPolicy:
    """Acts for a batch of envs and evaluates stored sequences, with one network and one distribution."""

    def __init__(
        self, network: TamiyoNetwork, *, feature_schema: str = "", families: Sequence[str] = (UNNAMED,)
    ) -> None:
        """`feature_schema` names the observation's layout; files are bound to it. `families` are the families
        of tasks that the value head is for: those beyond its rows are added to it."""
        self.network = network
        self.feature_schema = feature_schema
        self.explore_parameters = True
        """Whether exploration also covers blueprints and other parameters."""
        self.families: tuple[str, ...] = ()
        known = len(network.value_mean)
        if not families or len(set(families)) < len(families) or known > len(families):
            raise EsperError(
                f"policy: families are {', '.join(families) or 'none'}; allowed: one or more, each once, and "
                f"no fewer than the {known} rows of the value head"
            )
        self.families = tuple(families[:known])
        self.meet(families)

    def meet(self, families: Iterable[str]) -> None:
        """Add the families that the value head does not know. The value of a new one begins as the mean of
        those that it knows. Optimizers of the network must be made anew afterwards."""
        for family in families:
            if family not in self.families:
                self.network.add_family()
                self.families += (family,)

    @property
    def device(self) -> torch.device:
        return self.network.value_mean.device

    def initial_hidden(self, num_envs: int) -> Hidden:
        return self.network.initial_hidden(num_envs)

    def begin(self, num_envs: int) -> None:
        """Nothing to do: the memory of an episode is the hidden state, which the caller keeps."""

    def state(self) -> dict[str, Any]:
        """Empty: weights are saved with `save`."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if state:
            raise EsperError(f"a recurrent policy has no state of its own, but got fields {sorted(state)}")

    def distribution(
        self, obs: PolicyObservation, hidden: Hidden, masks: ActionMasks, *, reset: Tensor, epsilon: Tensor
    ) -> tuple[ActionDistribution, Tensor, Hidden]:
        """π(· | s), normalised value and new hidden state for sequences [E, T, …]. Acting and evaluating
        both use it."""
        features, hidden = self.network(obs, hidden, reset)
        return (
            ActionDistribution(
                self.network, features, masks, epsilon, explore_parameters=self.explore_parameters
            ),
            self.network.normalized_value(features),
            hidden,
        )

    @torch.no_grad()
    def act(
        self,
        obs: PolicyObservation,
        hidden: Hidden | None,
        masks: ActionMasks,
        *,
        deterministic: bool = False,
        uniforms: Tensor | None = None,
        epsilon: float = 0.0,
        reset: Tensor | None = None,
        given: Tensor | None = None,
    ) -> PolicyStep:
        """One decision for each env: sampled with `uniforms` [E, 8], or each factor's mode if
        `deterministic`.

        `reset` [E] zeroes an env's hidden state first; hidden None means fresh memories. `given` [E, 8] are
        actions that another policy has chosen: the step then has this policy's log-probs and values."""
        envs = obs.base.shape[0]
        if deterministic or given is not None:
            uniforms = None
        elif uniforms is None or uniforms.shape != (envs, NUM_HEADS):
            got = "none" if uniforms is None else tuple(uniforms.shape)
            raise ShapeError(
                f"sampling needs uniforms of shape ({envs}, {NUM_HEADS}), got {got}; "
                "use action_uniforms to draw them"
            )
        check_masks(masks)
        rows, hidden, reset = self._padded(envs, hidden, reset)
        distribution, value, (h, c) = self.distribution(
            map_tensors(obs, lambda o: o[rows].unsqueeze(1)),
            hidden,
            map_tensors(masks, lambda m: m[rows].unsqueeze(1)),
            reset=reset,
            epsilon=torch.full(reset.shape, epsilon, device=self.device),
        )
        if given is None:
            drawn = None if uniforms is None else uniforms.to(self.device)[rows].unsqueeze(1)
            actions, head_log_probs = distribution.sample(drawn)
        else:
            actions = given.to(self.device)[rows].unsqueeze(1)
            head_log_probs = distribution.log_probs(actions)
        head_log_probs = head_log_probs[:envs, 0]
        value = self.network.denormalize(value[:envs, 0], obs.family)
        log_prob = head_log_probs.sum(-1)
        if not (finite := log_prob.isfinite() & value.isfinite()).all():
            raise EsperError(
                f"env {(~finite).nonzero()[0, 0].item()}: the policy's output is not finite; "
                "check the observation and the weights for NaN or infinity"
            )
        return PolicyStep(
            actions=actions[:envs, 0],
            log_prob=log_prob,
            head_log_probs=head_log_probs,
            value=value,
            op_probs=distribution.op_log_probs[:envs, 0].exp(),
            hidden=(h[:envs], c[:envs]),
            slot_probs=distribution.slot_log_probs[:envs, 0].exp(),
        )

    @torch.no_grad()
    def value(self, obs: PolicyObservation, hidden: Hidden | None, *, reset: Tensor | None = None) -> Tensor:
        """V(s) [E] on the scale of rewards: what a cut segment is bootstrapped with."""
        envs = obs.base.shape[0]
        rows, hidden, reset = self._padded(envs, hidden, reset)
        features, _ = self.network(map_tensors(obs, lambda o: o[rows].unsqueeze(1)), hidden, reset)
        return self.network.denormalize(self.network.normalized_value(features)[:envs, 0], obs.family)

    def evaluate(
        self,
        obs: PolicyObservation,
        hidden: Hidden,
        masks: ActionMasks,
        actions: Tensor,
        *,
        reset: Tensor,
        epsilon: Tensor,
        entropy_gradient: bool = True,
    ) -> PolicyEvaluation:
        """Log-probs, entropies and values of stored sequences [E, T, …] from the hidden state before their
        first step. Without `entropy_gradient`, entropies are only measured, which costs much less."""
        obs, masks, actions = _used_blueprints(obs, masks, actions)
        distribution, value, _ = self.distribution(obs, hidden, masks, reset=reset, epsilon=epsilon)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            entropies = distribution.entropies(actions)
        return PolicyEvaluation(distribution.log_probs(actions), entropies, value)

    def _padded(
        self, envs: int, hidden: Hidden | None, reset: Tensor | None
    ) -> tuple[Tensor, Hidden, Tensor]:
        """Row indices that repeat the last env up to ROW_MULTIPLE, and hidden state and reset flags [E, 1]
        laid out so."""
        h, c = self.initial_hidden(envs) if hidden is None else hidden
        reset = torch.zeros(envs, dtype=torch.bool, device=self.device) if reset is None else reset
        rows = torch.arange(-(-envs // ROW_MULTIPLE) * ROW_MULTIPLE, device=self.device).clamp(max=envs - 1)
        return rows, (h[rows], c[rows]), reset[rows].unsqueeze(1)

    def schema(self) -> dict[str, Any]:
        """What a weight file must agree with: the observation's layout, the sizes of the network, the action
        contract."""
        return {
            "features": self.feature_schema,
            **self.network.architecture,
            "actions": action_contract(),
            "families": list(self.families),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        header = {"kind": "policy", "version": VERSION, "schema": self.schema()}
        write_archive(path, self.network.state_dict(), header)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, feature_schema: str) -> RecurrentPolicy:
        """Rebuild a saved policy; a file made for other features or another action contract is refused by
        name."""
        tensors, header = read_archive(path, kind="policy")
        return cls.from_archive(tensors, header, origin=path, feature_schema=feature_schema)

    @classmethod
    def from_archive(
        cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any], *, origin: object, feature_schema: str
    ) -> RecurrentPolicy:
        """A policy from the content of its own file."""
        check_version(header, VERSION, origin)
        version = header.get("version", 1)
        if isinstance(version, int) and version < VERSION:
            raise StructureError(
                f"{origin}: version is {version}, written by an older Esper, whose policies see other "
                "observations; train the policy anew"
            )
        schema = decode(_Header, header, origin).schema
        return cls.rebuild(tensors, schema, origin=origin, feature_schema=feature_schema)

    @classmethod
    def rebuild(
        cls,
        tensors: Mapping[str, Tensor],
        schema: object,
        *,
        origin: object,
        feature_schema: str,
        device: str = "cpu",
    ) -> RecurrentPolicy:
        """A policy from its weights and schema, whichever file they are from."""
        if not isinstance(schema, _Schema):
            schema = decode(_Schema, schema, f"{origin}, field schema")
        require_equal(origin, "features", schema.features, feature_schema)
        require_equal(origin, "actions", schema.actions, action_contract())
        sizes = {name: getattr(schema, name) for name in ARCHITECTURE}
        families = schema.families
        if not families:
            families, tensors = (UNNAMED,), _as_one_family(tensors)
        with torch.device("meta"):  # sizes that do not match the tensors must not allocate memory
            outline = cls(TamiyoNetwork(**sizes), families=families)
            check_tensors(origin, outline.network.state_dict(), tensors)
        policy = cls(TamiyoNetwork(**sizes), feature_schema=feature_schema, families=families)
        load_tensors(origin, policy.network.state_dict(), tensors)
        policy.network.to(device)
        return policy


def _used_blueprints(
    obs: PolicyObservation, masks: ActionMasks, actions: Tensor
) -> tuple[PolicyObservation, ActionMasks, Tensor]:
    """The same sequences without the blueprints that nothing in them offers, allows or chooses. A catalogue
    holds blueprints for every kind of host; reading the others would be most of the work of an update."""
    quotes, legal, chosen = obs.quotes, masks.blueprint, actions[..., BLUEPRINT]
    used = quotes.any(-1).flatten(0, -2).any(0) | legal.flatten(0, -2).any(0)
    used[chosen.flatten()] = True
    columns = used.nonzero().squeeze(-1)
    actions = actions.clone()
    actions[..., BLUEPRINT] = (used.cumsum(0) - 1)[chosen]
    return (
        replace(obs, quotes=quotes.index_select(-2, columns)),
        replace(masks, blueprint=legal.index_select(-1, columns)),
        actions,
    )


def _as_one_family(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a version 1 file as those of version 2."""
    statistics = ("value_mean", "value_scale")
    return {name: t.reshape(-1) if name in statistics else t for name, t in tensors.items()}


def schema_hash(schema: Mapping[str, Any]) -> str:
    return blake2b(orjson.dumps(schema, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()


def action_contract() -> str:
    """A hash of the heads, their members, what the members stand for and the relevance table: equal hashes
    mean that stored actions mean the same. Blueprints are no part of it: a policy sees each by its quote, so
    one that was registered later can be used too."""
    members = [[m.name for m in enum] if enum else [] for enum in HEAD_ENUMS]
    meanings = {
        "tempo_epochs": TEMPO_EPOCHS,
        "alpha_targets": ALPHA_TARGET_VALUES,
        "alpha_speed_epochs": ALPHA_SPEED_EPOCHS,
        "alpha_curves": [curve.name for curve in ALPHA_CURVE_VALUES],
        "alpha_curve_steepness": ALPHA_CURVE_STEEPNESS,
        "style_algorithms": [algorithm.name for algorithm in STYLE_ALPHA_ALGORITHMS],
        "style_curves": [curve.name for curve in STYLE_CURVES],
    }
    return schema_hash(
        {
            "heads": HEAD_NAMES,
            "members": members,
            "meanings": meanings,
            "relevance": RELEVANCE,
            "irrelevant": IRRELEVANT_VALUES,
            "traits": TRAITS,
        }
    )
