"""Rounds that are played by plans, and what the policy learns from them.

Envs play in groups of twins, which share initial weights, data and condition. After the first epoch each twin
of a group gets a plan of its own: the first grows nothing, the second follows the plan with the highest mean
value, each of the others the favourite of another member of the ensemble; no plan is given twice. A plan is
carried out one seed per epoch. At the end of the round J of the twin that grew nothing is subtracted from J
of the others: what is left is what their plans were worth, without luck of the draw.

The policy is taught the best plan, not the plan that was played: at every step it learns the next seed of the
best plan that contains what has grown so far.

E envs, W worlds (groups of twins), S slots, P plans, M members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from esper.leyline import (
    OP_GERMINATE,
    ActionMasks,
    EpisodeOutcome,
    EsperError,
    GerminationStyle,
    PolicyObservation,
    TempoAction,
)
from esper.simic.agent.plan_values import PlanValueLearner, Sight
from esper.tamiyo.scripted import BLUEPRINT_HEAD, OP_HEAD, SLOT_HEAD, STYLE_HEAD, TEMPO_HEAD, waiting

MAX_PLANS = 8192
"""A task with more plans than this has a random choice of them in every round."""
NOTHING = -1
LEAST_TWINS = 3


@dataclass(frozen=True, slots=True)
class Lesson:
    """Actions [E, 8] that are executed, and those that the policy should have taken."""

    played: Tensor
    taught: Tensor


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """One round of plans, in J above the twin that grew nothing."""

    plan_gain: float
    """Mean of the plans that were best by the estimates."""
    explored_gain: float
    """Mean of the plans of single members."""
    value_error: float
    """Mean squared error of the values in their training after the round, over the variance of the gains."""


@dataclass(frozen=True, slots=True)
class PlanSpace:
    """What may be planned in the envs of one task."""

    envs: slice
    slots: int
    blueprints: tuple[int, ...]
    """Indices of the blueprints that the task offers."""
    tempo: TempoAction

    def plans(self, num_slots: int, generator: torch.Generator) -> Tensor:
        """[P, num_slots]: all plans, the empty one first; if there are too many, the empty one and a random
        choice."""
        choices = torch.tensor([NOTHING, *self.blueprints])
        total = len(choices) ** self.slots
        if total <= MAX_PLANS:
            chosen = choices[torch.tensor(list(product(range(len(choices)), repeat=self.slots)))]
        else:
            drawn = torch.randint(len(choices), (MAX_PLANS, self.slots), generator=generator)
            drawn[0] = 0
            chosen = choices[drawn].unique(dim=0)  # sorted, so the empty plan is still the first
        return torch.nn.functional.pad(chosen, (0, num_slots - self.slots), value=NOTHING)


@dataclass(slots=True)
class _Round:
    """Plans and values of the round that is being played."""

    sight: Sight
    played: Tensor  # [E, S]
    value: list[Tensor]
    """For each task: mean value [W, P] of its plans."""
    plans: list[Tensor]


class PlanLearner:
    """Decides for all envs, and learns what plans are worth."""

    def __init__(
        self,
        learner: PlanValueLearner,
        spaces: Sequence[PlanSpace],
        *,
        twins: int,
        num_slots: int,
        seen: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """`seen`: 0 for each feature of base, slots and quotes that is hidden, else 1."""
        if twins < LEAST_TWINS:
            raise EsperError(
                f"config: values_rounds with twins {twins}; action values compare twins: at least "
                f"{LEAST_TWINS} are needed, 8 are usual"
            )
        self.learner, self.spaces, self.twins, self.num_slots = learner, list(spaces), twins, num_slots
        self._seen = tuple(mask.cpu() for mask in seen)
        self._round: _Round | None = None

    def begin(self, num_envs: int) -> None:
        self._round = None

    def decide(self, obs: PolicyObservation, masks: ActionMasks) -> Lesson:
        if self._round is None:
            self._round = self._choose(obs)
        grown = obs.blueprints.cpu()
        target = torch.cat(
            [
                self._best(grown[space.envs], value, plans)
                for space, value, plans in zip(self.spaces, self._round.value, self._round.plans, strict=True)
            ]
        )
        return Lesson(self._next(self._round.played, grown, masks), self._next(target, grown, masks))

    def finish(self, outcomes: Sequence[EpisodeOutcome]) -> PlanFigures:
        """Learn from the round. Outcomes are in env order."""
        assert self._round is not None, "a round has a decision"
        objective = torch.tensor([outcome.objective for outcome in outcomes]).unflatten(0, (-1, self.twins))
        gains = objective[:, 1:] - objective[:, :1]
        plans = self._round.played.unflatten(0, (-1, self.twins))[:, 1:].flatten(0, 1)
        world = torch.arange(len(objective)).repeat_interleave(self.twins - 1)
        error = self.learner.learn(self._round.sight, world, plans, gains.flatten())
        return PlanFigures(gains[:, 0].mean().item(), gains[:, 1:].mean().item(), error)

    # -- choices ---------------------------------------------------------------------------------------------

    def _choose(self, obs: PolicyObservation) -> _Round:
        generator = self.learner.generator(0)
        sight = Sight.of(obs, torch.arange(0, len(obs.base), self.twins))
        base, slots, quotes = self._seen
        sight = sight._replace(
            base=sight.base * base, slots=sight.slots * slots, quotes=sight.quotes * quotes
        )
        played, values, plans = [], [], []
        for space in self.spaces:
            own = space.plans(self.num_slots, generator)
            first, last = space.envs.start // self.twins, space.envs.stop // self.twins
            gains = torch.zeros(self.learner.config.members, last - first, len(own))
            if self.learner.rounds:
                gains = self.learner.values.gains(sight.rows(torch.arange(first, last)), own)
            mean = gains.mean(0)
            chosen = _without_replacement(
                gains, mean, self.twins, generator, informed=self.learner.rounds > 0
            )
            played.append(own[chosen].flatten(0, 1))
            values.append(mean)
            plans.append(own)
        return _Round(sight, torch.cat(played), values, plans)

    def _best(self, grown: Tensor, value: Tensor, plans: Tensor) -> Tensor:
        """[E, S]: the best plan that contains what has grown; what has grown if no plan does."""
        contains = ((grown.unsqueeze(1) == NOTHING) | (grown.unsqueeze(1) == plans)).all(-1)  # [E, P]
        own = value.repeat_interleave(self.twins, 0).masked_fill(~contains, -torch.inf)
        return torch.where(contains.any(-1, keepdim=True), plans[own.argmax(-1)], grown)

    def _next(self, plans: Tensor, grown: Tensor, masks: ActionMasks) -> Tensor:
        """[E, 8]: germinate the first seed of each plan that is missing and may be planted now, or wait."""
        envs, actions = len(plans), waiting(len(plans))
        tempo = torch.cat([torch.full((s.envs.stop - s.envs.start,), int(s.tempo)) for s in self.spaces])
        in_time = masks.tempo.cpu().gather(1, tempo.unsqueeze(1))
        offered = masks.blueprint.cpu().gather(1, plans.clamp(min=0))
        missing = (plans != NOTHING) & (grown == NOTHING) & offered & in_time
        ready = missing & masks.slot_by_op[:, OP_GERMINATE].cpu()
        slot = ready.int().argmax(1)  # the first
        germinate = actions.clone()
        germinate[:, SLOT_HEAD] = slot
        germinate[:, BLUEPRINT_HEAD] = plans[torch.arange(envs), slot]
        germinate[:, STYLE_HEAD] = int(GerminationStyle.SIGMOID_ADD)
        germinate[:, TEMPO_HEAD] = tempo
        germinate[:, OP_HEAD] = OP_GERMINATE
        return torch.where(ready.any(1, keepdim=True), germinate, actions)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = self.learner.state()
        now = self._round
        if now is not None:
            tensors |= {f"round.{name}": part for name, part in now.sight._asdict().items()}
            tensors["round.played"] = now.played
            for i, (value, plans) in enumerate(zip(now.value, now.plans, strict=True)):
                tensors |= {f"round.value.{i}": value, f"round.plans.{i}": plans}
        return tensors, meta

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        own = {n.removeprefix("round."): t for n, t in tensors.items() if n.startswith("round.")}
        self.learner.load_state({n: t for n, t in tensors.items() if not n.startswith("round.")}, meta)
        self._round = None
        if own:
            self._round = _Round(
                Sight(*(own[name] for name in Sight._fields)),
                own["played"],
                [own[f"value.{i}"] for i in range(len(self.spaces))],
                [own[f"plans.{i}"] for i in range(len(self.spaces))],
            )


def _without_replacement(
    gains: Tensor, mean: Tensor, twins: int, generator: torch.Generator, *, informed: bool
) -> Tensor:
    """[W, twins] plans of [M, W, P] gains: nothing, the best by the mean, then the favourite of one member
    after the other, each the best that is not taken yet. Before anything is known, random plans. If there are
    fewer plans than twins, the last twins share the last plan."""
    members, worlds, plans = gains.shape
    distinct = min(twins, plans)
    if not informed:
        order = torch.rand(worlds, plans, generator=generator)
        order[:, 0] = 2.0  # nothing comes first
        chosen = [*order.topk(distinct, -1).indices.unbind(-1)]
        return torch.stack(chosen + chosen[-1:] * (twins - distinct), 1)
    taken = torch.zeros(worlds, plans, dtype=torch.bool)
    taken[:, 0] = True
    chosen = [torch.zeros(worlds, dtype=torch.int64)]
    draws = torch.rand(worlds, members, generator=generator).argsort(-1)  # members in a random order
    rows = torch.arange(worlds)
    for twin in range(1, distinct):
        score = mean if twin == 1 else gains[draws[:, (twin - 2) % members], rows]
        best = score.masked_fill(taken, -torch.inf).argmax(-1)
        taken[rows, best] = True
        chosen.append(best)
    return torch.stack(chosen + chosen[-1:] * (twins - distinct), 1)
