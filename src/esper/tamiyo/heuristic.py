"""Rules of thumb as a policy: plant where the host has settled and stopped improving, keep what contributes, prune the rest.

It sees what the learned policy sees, by the names of the feature table, and acts through the same interface.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import (
    BLUEPRINT_ID_TO_INDEX,
    OP_ADVANCE,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_PRUNE,
    ActionMasks,
    BlueprintError,
    EsperError,
    GerminationStyle,
    PolicyObservation,
    PolicyStep,
    TempoAction,
    allowed,
    check_number,
)
from esper.tamiyo.features import BASE, SLOT, Feature
from esper.tamiyo.scripted import BLUEPRINT_HEAD, OP_HEAD, SLOT_HEAD, STYLE_HEAD, TEMPO_HEAD, Memoryless, as_step, waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class HeuristicConfig:
    """Every threshold of the rules."""

    blueprints: tuple[str, ...] = ("conv_light", "depthwise", "norm")
    """Planted in turn; one that was pruned is passed over for a while."""
    plateau_epochs: int = 3
    """Plant after so many epochs without a gain."""
    min_progress: float = 0.1
    """Not before this share of the episode."""
    max_progress: float = 0.7
    """Nor after this one: a seed needs time."""
    fail_age: float = 0.15
    """A seed may be given up after this share of the episode in its stage …"""
    fail_drop: float = 2.0
    """… if accuracy has dropped by so many points since."""
    min_contribution: float = 0.5
    """A holding seed that contributes so many points is made permanent; one that does not is pruned."""
    prune_penalty: float = 2.0
    """A pruned blueprint's handicap, …"""
    penalty_decay: float = 0.5
    """… by which it shrinks each epoch, …"""
    penalty_limit: float = 3.0
    """… and from which on it is passed over."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.blueprints if name not in BLUEPRINT_ID_TO_INDEX or name == "noop"]
        if unknown or not self.blueprints:
            offers = [name for name in BLUEPRINT_ID_TO_INDEX if name != "noop"]
            raise BlueprintError(f"heuristic: blueprints are {self.blueprints}; {allowed(offers)}")
        check_number("heuristic", "plateau_epochs", self.plateau_epochs, integer=True)
        for name in ("min_progress", "max_progress", "fail_age", "fail_drop", "min_contribution", "prune_penalty",
                     "penalty_decay", "penalty_limit"):
            check_number("heuristic", name, getattr(self, name))


def _columns(table: Sequence[Feature]) -> Mapping[str, int]:
    found, at = {}, 0
    for feature in table:
        found[feature.name] = at
        at += feature.width
    return found


BASE_COLUMN, SLOT_COLUMN = _columns(BASE), _columns(SLOT)


class Heuristic(Memoryless):
    """One set of rules for all envs; each env has its own turn of blueprints and its own handicaps."""

    def __init__(self, config: HeuristicConfig | None, envs: int) -> None:
        self.config = config or HeuristicConfig()
        self.begin(envs)

    def begin(self, envs: int) -> None:
        """A new episode."""
        self._turn = [0] * envs
        self._handicap: list[dict[str, float]] = [{} for _ in range(envs)]

    def act(self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False) -> PolicyStep:  # noqa: ARG002
        if len(masks.op) != len(self._turn):
            raise EsperError(f"{len(masks.op)} envs, this policy was made for {len(self._turn)}")
        actions = waiting(len(masks.op))
        base, slots, blueprints = obs.base.cpu(), obs.slots.cpu(), obs.blueprints.cpu()
        legal = masks.slot_by_op.cpu()
        for env in range(len(actions)):
            self._handicap[env] = {name: value * self.config.penalty_decay for name, value in self._handicap[env].items()}
            choice = self._tend(slots[env], legal[env])
            if choice is not None:
                slot, op = choice
                if op == OP_PRUNE:
                    self._note_prune(env, int(blueprints[env, slot]))
                actions[env, [SLOT_HEAD, OP_HEAD]] = torch.tensor([slot, op])
            elif self._may_plant(base[env], slots[env]):
                self._plant(env, actions, legal[env], masks.blueprint[env])
        return as_step(actions)

    def _tend(self, slots: Tensor, legal: Tensor) -> tuple[int, int] | None:
        """What a seed needs first: to be made permanent, to be removed, to move on."""
        contribution = slots[:, SLOT_COLUMN["contribution"]] * 10
        measured = slots[:, SLOT_COLUMN["contribution"] + 1] > 0
        holding = slots[:, SLOT_COLUMN["stage_holding"]] > 0
        dropped = slots[:, SLOT_COLUMN["improvement"]] * 10 < -self.config.fail_drop
        failing = dropped & (slots[:, SLOT_COLUMN["stage_age"]] >= self.config.fail_age) & ~holding
        useful = contribution >= self.config.min_contribution
        for op, wanted in ((OP_FOSSILIZE, holding & measured & useful), (OP_PRUNE, (holding & measured & ~useful) | failing),
                           (OP_ADVANCE, ~failing)):
            found = (legal[op] & wanted).nonzero()
            if len(found):
                return int(found[0]), op
        return None

    def _may_plant(self, base: Tensor, slots: Tensor) -> bool:
        """The host has settled and stopped improving, there is time, and no seed is under way."""
        progress = float(base[BASE_COLUMN["progress"]])
        plateau = float(base[BASE_COLUMN["plateau"]]) * 10
        busy = any(slots[:, SLOT_COLUMN[f"stage_{name}"]].any() for name in ("germinated", "training", "blending", "holding"))
        return (not busy and bool(base[BASE_COLUMN["host_settled"]] > 0) and plateau >= self.config.plateau_epochs - 0.5
                and self.config.min_progress <= progress <= self.config.max_progress)

    def _plant(self, env: int, actions: Tensor, legal: Tensor, offered: Tensor) -> None:
        free = legal[OP_GERMINATE].nonzero()
        names = [n for n in self.config.blueprints if offered[BLUEPRINT_ID_TO_INDEX[n]]]
        if not len(free) or not names:
            return
        order = names[self._turn[env] % len(names):] + names[:self._turn[env] % len(names)]
        handicap = {n: self._handicap[env].get(n, 0.0) for n in order}
        name = next((n for n in order if handicap[n] < self.config.penalty_limit), min(order, key=handicap.__getitem__))
        self._turn[env] += 1
        actions[env, [SLOT_HEAD, BLUEPRINT_HEAD, STYLE_HEAD, TEMPO_HEAD, OP_HEAD]] = torch.tensor(
            [int(free[0]), BLUEPRINT_ID_TO_INDEX[name], int(GerminationStyle.SIGMOID_ADD), int(TempoAction.FAST), OP_GERMINATE])

    def _note_prune(self, env: int, blueprint: int) -> None:
        name = next(n for n, i in BLUEPRINT_ID_TO_INDEX.items() if i == blueprint)
        self._handicap[env][name] = self._handicap[env].get(name, 0.0) + self.config.prune_penalty
