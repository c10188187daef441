"""A policy of fixed rules: germinate in networks whose features have low rank, where a seed would use its
spatial reach, or after a plateau; fossilize seeds that contribute and prune the rest.

It reads the learned policy's features by name and acts through the same interface.

E envs, S slots.
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
    GerminationStyle,
    PolicyObservation,
    PolicyStep,
    TempoAction,
    blueprint_id,
    blueprint_index,
    check_numbers,
)
from esper.tamiyo.features import BASE, SLOT, first_columns
from esper.tamiyo.masks import blueprint_mask
from esper.tamiyo.scripted import (
    BLUEPRINT_HEAD,
    OP_HEAD,
    SLOT_HEAD,
    STYLE_HEAD,
    TEMPO_HEAD,
    ScriptedPolicy,
    as_step,
    waiting,
)

NORMALISERS = {feature.name: feature.normaliser for feature in (*BASE, *SLOT)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeuristicConfig:
    """Thresholds of the rules. `python -m benchmarks.tune_heuristic` tunes them for a task; the tuned ones
    ship with the package."""

    blueprints: tuple[str, ...] = ("conv_light", "depthwise", "mlp_small", "lora", "norm")
    """Blueprints to germinate, strongest first. After a prune, a network does not get the same one again."""
    min_progress: float = 0.0
    """Fraction of the episode before which nothing is germinated."""
    max_progress: float = 0.3
    """Fraction of the episode after which nothing is germinated: a seed needs time."""
    max_rank: float = 0.55
    """Largest feature rank (fraction of independent channels) of a network's worst slot at which it grows."""
    rank_step: float = 0.6
    """Factor on max_rank for each seed that the network already has."""
    min_tap_ratio: float = 1.0
    """Smallest gradient of off-centre taps, relative to the centre's, at which a slot is a candidate."""
    plateau_epochs: int = 3
    """Number of epochs without gain after which every slot of a settled network is a candidate."""
    strong_tap_ratio: float = 1.0
    """Tap ratio from which a slot gets the strongest blueprint; below it gets the second."""
    growth_weight: float = 2.0
    """Weight of ln(growth score) beside ln(tap ratio) when candidates are ranked."""
    depth_price: float = 1.0
    """Subtracted from a candidate's rank, times its depth (0 first slot, 1 last): later layers cost more."""
    max_seeds: int = 3
    """Maximum number of seeds of one network, fossilized ones included."""
    max_live: int = 3
    """Maximum number of seeds that are not yet fossilized."""
    fail_age: float = 0.15
    """Fraction of the episode that a seed spends in its stage before it may count as failing."""
    fail_drop: float = 10.0
    """Loss of accuracy since the start of the stage, in points, at which a seed counts as failing."""
    min_contribution: float = -5.0
    """Contribution, in points, from which a holding seed is fossilized; below it is pruned. A graft is judged
    after one epoch, so a negative number may be right."""
    tempo: TempoAction = TempoAction.INSTANT
    """Tempo at which seeds are germinated."""

    def __post_init__(self) -> None:
        blueprint_mask(self.blueprints)
        check_numbers("heuristic", self, signed=["min_contribution"])
        for name, feature in (
            ("plateau_epochs", "plateau"),
            ("fail_drop", "improvement"),
            ("min_contribution", "contribution"),
        ):
            normaliser = NORMALISERS[feature]
            high = normaliser.curved(normaliser.high)
            if abs(getattr(self, name)) > high:  # the feature is clipped there
                raise EsperError(f"heuristic: {name} is {getattr(self, name)}; allowed: at most {high:g}")


BASE_COLUMN, SLOT_COLUMN = first_columns(BASE), first_columns(SLOT)
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
        base, slots, blueprints = obs.base.cpu(), obs.slots.cpu(), obs.blueprints.cpu()
        legal, offered = masks.slot_by_op.cpu(), masks.blueprint.cpu()
        in_time = masks.tempo.cpu()[:, self.config.tempo]
        wanted = self._wanted_slots(base, slots, legal[:, OP_GERMINATE] & in_time[:, None])
        for env, slot in enumerate(wanted.tolist()):
            names = [
                n
                for n in self.config.blueprints
                if offered[env, blueprint_index(n)] and n not in self._pruned[env]
            ]
            if slot >= 0 and names:
                tap_ratio = math.exp(float(_raw(slots[env, slot], "tap_ratio")))
                strong = tap_ratio >= self.config.strong_tap_ratio
                name = names[0] if strong else names[min(1, len(names) - 1)]
                heads = {
                    STYLE_HEAD: int(GerminationStyle.SIGMOID_ADD),
                    TEMPO_HEAD: int(self.config.tempo),
                    SLOT_HEAD: slot,
                    BLUEPRINT_HEAD: blueprint_index(name),
                    OP_HEAD: OP_GERMINATE,
                }
                actions[env, list(heads)] = torch.tensor(list(heads.values()))
            elif (choice := self._tend(slots[env], legal[env])) is not None:
                slot, op = choice
                if op == OP_PRUNE:
                    self._pruned[env].add(blueprint_id(int(blueprints[env, slot])))
                actions[env, [SLOT_HEAD, OP_HEAD]] = torch.tensor([slot, op])
        return as_step(actions)

    def _wanted_slots(self, base: Tensor, slots: Tensor, free: Tensor) -> Tensor:
        """[E] index of the slot to germinate in, or −1."""
        config = self.config
        progress = base[:, BASE_COLUMN["progress"]]
        plateau = NORMALISERS["plateau"].curved(base[:, BASE_COLUMN["plateau"]])
        live = slots[..., LIVE].sum((1, 2))
        seeds = live + slots[..., SLOT_COLUMN["stage_fossilized"]].sum(1)
        may = (
            (progress >= config.min_progress)
            & (progress <= config.max_progress)
            & (live < config.max_live)
            & (seeds < config.max_seeds)
            & (slots[..., SLOT_COLUMN["feature_rank"]].amin(1) <= config.max_rank * config.rank_step**seeds)
        )
        still = (base[:, BASE_COLUMN["host_settled"]] > 0) & (plateau >= config.plateau_epochs - 0.5)
        taps, measured = _raw(slots, "tap_ratio"), slots[..., SLOT_COLUMN["tap_ratio"] + 1] > 0
        blind = measured & (taps >= math.log(max(config.min_tap_ratio, 1e-9)))
        growth = _raw(slots, "growth_score")
        score = taps + config.growth_weight * growth - config.depth_price * slots[..., SLOT_COLUMN["depth"]]
        score = torch.where(free & may[:, None] & (blind | still[:, None]), score, -torch.inf)
        best, slot = score.max(1)
        return torch.where(best.isneginf(), -1, slot)

    def _tend(self, slots: Tensor, legal: Tensor) -> tuple[int, int] | None:
        """The next operation on a seed, as (slot, op): fossilize first, then prune, then advance."""
        contribution = _raw(slots, "contribution")
        measured = slots[:, SLOT_COLUMN["contribution"] + 1] > 0
        holding = slots[:, SLOT_COLUMN["stage_holding"]] > 0
        dropped = _raw(slots, "improvement") < -self.config.fail_drop
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


def _raw(slots: Tensor, name: str) -> Tensor:
    """A slot feature in its own unit: percentage points, or the logarithm of a ratio."""
    return NORMALISERS[name].curved(slots[..., SLOT_COLUMN[name]])
