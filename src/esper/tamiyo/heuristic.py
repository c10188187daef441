"""A policy of fixed rules: estimate what each seed would gain in each slot, subtract its quoted price, and
germinate the best one that is worth its price; fossilize seeds that contribute and prune the rest.

It reads the learned policy's observation by name and acts through the same interface. Its thresholds are
shares and ratios, so one set serves many tasks.

E envs, S slots, B blueprints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.leyline import (
    OP_ADVANCE,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_PRUNE,
    ActionMasks,
    EsperError,
    PolicyObservation,
    PolicyStep,
    TempoAction,
    blueprint_id,
    blueprint_index,
    check_numbers,
)
from esper.tamiyo.columns import first_columns
from esper.tamiyo.features import BASE, QUOTE, SLOT
from esper.tamiyo.masks import blueprint_mask
from esper.tamiyo.scripted import ScriptedPolicy, as_step, germinate, operate, waiting

NORMALISERS = {feature.name: feature.normaliser for feature in (*BASE, *SLOT, *QUOTE)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeuristicConfig:
    """Thresholds of the rules. Gains are shares of the error that would be left without growth.
    `python -m benchmarks.tune_heuristic` tunes them; the tuned ones ship with the package."""

    blueprints: tuple[str, ...] = ()
    """Blueprints to germinate; none: all that are offered. After a prune, a network does not get the same one
    again."""
    min_progress: float = 0.0
    """Share of the budget before which nothing is germinated."""
    max_progress: float = 0.3
    """Share of the budget after which nothing is germinated: a seed needs time."""
    max_rank: float = 1.0
    """Largest feature rank (share of independent channels) of a network's worst slot at which it grows."""
    rank_step: float = 1.0
    """Factor on max_rank for each seed that the network already has."""
    blind_ratio: float = 1.0
    """Gradient of off-centre taps, relative to the centre's, from which a slot counts as blind: the host
    lacks spatial reach there."""
    plateau: float = 0.3
    """Share of the epochs so far without gain from which every slot of a settled network counts as blind."""
    space_gain: float = 0.3
    """Gain expected of a seed that mixes space in a blind slot. One that only multiplies its input does not
    show it anything new."""
    channel_gain: float = 0.05
    """Gain expected of a seed that mixes channels, and does not only multiply."""
    any_gain: float = 0.05
    """Gain expected of any seed."""
    size_power: float = 0.1
    """Exponent of a seed's parameters, relative to the host's, as a factor on expected gains."""
    seed_step: float = 0.7
    """Factor on expected gains for each seed that the network already has."""
    growth_weight: float = 0.0
    """Exponent of a slot's growth score, relative to the other slots, as a factor on expected gains."""
    price_weight: float = 1.0
    """Weight of the quoted price against the expected gain."""
    max_seeds: int = 3
    """Maximum number of seeds of one network, fossilized ones included."""
    max_live: int = 3
    """Maximum number of seeds that are not yet fossilized."""
    fail_age: float = 0.15
    """Share of the episode that a seed spends in its stage before it may count as failing."""
    fail_drop: float = 0.1
    """Loss of accuracy since the start of the stage, over 1 − chance, at which a seed counts as failing."""
    min_contribution: float = -0.05
    """Contribution, over 1 − chance, from which a holding seed is fossilized; below it is pruned. A graft is
    judged after one epoch, so a negative number may be right."""
    tempo: TempoAction = TempoAction.INSTANT
    """Tempo at which seeds are germinated."""

    def __post_init__(self) -> None:
        if self.blueprints:
            blueprint_mask(self.blueprints)
        check_numbers("heuristic", self, signed=["min_contribution"])
        for name, feature in (("fail_drop", "improvement"), ("min_contribution", "contribution")):
            normaliser = NORMALISERS[feature]
            high = normaliser.curved(normaliser.high)
            if abs(getattr(self, name)) > high:  # the feature is clipped there
                raise EsperError(f"heuristic: {name} is {getattr(self, name)}; allowed: at most {high:g}")


BASE_COLUMN, SLOT_COLUMN, QUOTE_COLUMN = (first_columns(table) for table in (BASE, SLOT, QUOTE))
LIVE = [SLOT_COLUMN[f"stage_{name}"] for name in ("germinated", "training", "blending", "holding")]


class Heuristic(ScriptedPolicy):
    """One set of rules for all envs. Each env remembers which blueprints it has pruned."""

    def __init__(self, config: HeuristicConfig | None, envs: int) -> None:
        self.config = config or HeuristicConfig()
        self.begin(envs)

    def begin(self, num_envs: int) -> None:
        self._pruned: list[set[str]] = [set() for _ in range(num_envs)]

    def state(self) -> dict[str, Any]:
        return {"pruned": [sorted(names) for names in self._pruned]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._pruned = [set(names) for names in state["pruned"]]

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        if len(masks.op) != len(self._pruned):
            raise EsperError(f"{len(masks.op)} envs, this policy was made for {len(self._pruned)}")
        actions = waiting(len(masks.op))
        base, slots, quotes = obs.base.cpu(), obs.slots.cpu(), obs.quotes.cpu()
        legal, blueprints = masks.slot_by_op.cpu(), obs.blueprints.cpu()
        net = self._net_gains(base, slots, quotes)
        in_time = masks.tempo.cpu()[:, self.config.tempo]
        free = legal[:, OP_GERMINATE] & (in_time & self._may_grow(base, slots))[:, None]
        allowed = free[:, :, None] & self._allowed(masks.blueprint.cpu())[:, None]
        best, choice = torch.where(allowed, net, -torch.inf).flatten(1).max(1)
        for env in range(len(actions)):
            if best[env] > 0:
                slot, blueprint = divmod(int(choice[env]), net.shape[2])
                germinate(actions[env], slot, blueprint, tempo=self.config.tempo)
            elif (tended := self._tend(slots[env], legal[env])) is not None:
                slot, op = tended
                if op == OP_PRUNE:
                    self._pruned[env].add(blueprint_id(int(blueprints[env, slot])))
                operate(actions[env], slot, op)
        return as_step(actions)

    def _allowed(self, offered: Tensor) -> Tensor:
        """[E, B] offered, named by the config, and not pruned before."""
        allowed = offered.clone()
        if self.config.blueprints:
            allowed &= torch.from_numpy(blueprint_mask(self.config.blueprints))
        for env, names in enumerate(self._pruned):
            for name in names:
                allowed[env, blueprint_index(name)] = False
        return allowed

    def _may_grow(self, base: Tensor, slots: Tensor) -> Tensor:
        """[E] whether it is the time, and there is room, for one more seed."""
        config = self.config
        progress = base[:, BASE_COLUMN["progress"]]
        live, seeds = _count_seeds(slots)
        rank = slots[..., SLOT_COLUMN["feature_rank"]].amin(1)
        return (
            (progress >= config.min_progress)
            & (progress <= config.max_progress)
            & (live < config.max_live)
            & (seeds < config.max_seeds)
            & (rank <= config.max_rank * config.rank_step**seeds)
        )

    def _net_gains(self, base: Tensor, slots: Tensor, quotes: Tensor) -> Tensor:
        """[E, S, B] expected gain of J from each seed in each slot, minus its price; −inf where none is
        offered."""
        config = self.config
        blind = self._blind(base, slots)
        space, channels, multiplies = (
            quotes[..., QUOTE_COLUMN[trait]] for trait in ("mixes_space", "mixes_channels", "multiplies")
        )
        mixed = config.channel_gain * channels + config.space_gain * space * blind[..., None]
        gain = config.any_gain + (1 - multiplies) * mixed
        gain = gain * (config.size_power * _raw(quotes, "params", QUOTE_COLUMN)).exp()
        growth = config.growth_weight * _raw(slots, "growth_score_relative", SLOT_COLUMN)
        gain = gain * growth.exp()[..., None] * config.seed_step ** _count_seeds(slots)[1][:, None, None]
        error, remaining = _expected_error(base)
        price = config.price_weight * _raw(quotes, "price", QUOTE_COLUMN)
        # Where the budget counts FLOPs, a larger network forgoes a part of what training would still gain.
        share = base[:, BASE_COLUMN["flops_budget"], None, None] * quotes[..., QUOTE_COLUMN["flops_share"]]
        net = error[:, None, None] * gain - price - share * remaining[:, None, None]
        return torch.where(quotes[..., QUOTE_COLUMN["offered"]] > 0, net, -torch.inf)

    def _blind(self, base: Tensor, slots: Tensor) -> Tensor:
        """[E, S] 1 where a slot lacks spatial reach, or where the whole network stands still."""
        still = (base[:, BASE_COLUMN["host_settled"]] > 0) & (
            base[:, BASE_COLUMN["plateau_so_far"]] >= self.config.plateau
        )
        measured = slots[..., SLOT_COLUMN["tap_ratio"] + 1] > 0
        reach = _raw(slots, "tap_ratio", SLOT_COLUMN) >= math.log(max(self.config.blind_ratio, 1e-9))
        return ((measured & reach) | still[:, None]).float()

    def _tend(self, slots: Tensor, legal: Tensor) -> tuple[int, int] | None:
        """The next operation on a seed, as (slot, op): fossilize first, then prune, then advance."""
        contribution = _raw(slots, "contribution", SLOT_COLUMN)
        measured = slots[:, SLOT_COLUMN["contribution"] + 1] > 0
        holding = slots[:, SLOT_COLUMN["stage_holding"]] > 0
        dropped = _raw(slots, "improvement", SLOT_COLUMN) < -self.config.fail_drop
        failing = dropped & (slots[:, SLOT_COLUMN["stage_age"]] >= self.config.fail_age) & ~holding
        useful = contribution >= self.config.min_contribution
        for op, wanted in (
            (OP_FOSSILIZE, holding & measured & useful),
            (OP_PRUNE, (holding & measured & ~useful) | failing),
            (OP_ADVANCE, ~failing),
        ):
            candidates = (legal[op] & wanted).nonzero()
            if len(candidates):
                return int(candidates[0]), op
        return None


def _count_seeds(slots: Tensor) -> tuple[Tensor, Tensor]:
    """[E] seeds that are not yet permanent, and all seeds."""
    live = slots[..., LIVE].sum((1, 2))
    return live, live + slots[..., SLOT_COLUMN["stage_fossilized"]].sum(1)


def _expected_error(base: Tensor) -> tuple[Tensor, Tensor]:
    """[E] error that would be left at the end without growth, relative to chance, and what training would
    still remove of today's. Before an end can be expected it is today's error; where the number of classes is
    unknown, all."""
    now, end = (BASE_COLUMN[name] for name in ("val_accuracy", "expected_end"))
    error = torch.where(base[:, now + 1] > 0, 1 - base[:, now], 1.0)
    left = torch.where(base[:, end + 1] > 0, 1 - base[:, end], error).clamp(0, 1)
    return left, (error - left).clamp(min=0)


def _raw(values: Tensor, name: str, column: Mapping[str, int]) -> Tensor:
    """A feature in its own unit: a share, or the logarithm of a ratio."""
    return NORMALISERS[name].curved(values[..., column[name]])
