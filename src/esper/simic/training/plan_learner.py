"""Rounds that are played by plans, and what the policy learns from them.

Envs play in groups of twins, which share initial weights, data and condition. After the first epoch each twin
of a group gets a plan of its own: the first grows nothing, the second follows the plan with the highest mean
value, each of the others the favourite of another member of the ensemble; no plan is given twice. A plan is
carried out one seed per epoch. At the end of the round J of the twin that grew nothing is subtracted from J
of the others: what is left is what their plans were worth, without luck of the draw.

After each round the policy is taught from the newest episodes. What the values know by then decides what it
should have done in every step: the next seed of the best plan that contains what has grown so far, or to wait
where stopping is better. Once an env has waited although it could grow, its plan is over and waiting is all
that is taught: nothing is known of seeds that are planted later.

E envs, W worlds (groups of twins), S slots, B blueprints of the task, P plans, M members.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esper.leyline import (
    OP_GERMINATE,
    ActionMasks,
    EsperError,
    GerminationStyle,
    PolicyObservation,
    TempoAction,
    blueprint_index,
)
from esper.simic.agent.plan_values import PlanValueLearner, Sight
from esper.simic.agent.ppo import LESSON_SEQUENCES
from esper.simic.agent.rollout_buffer import RolloutBatch
from esper.tamiyo.policy import map_tensors
from esper.tamiyo.scripted import BLUEPRINT_HEAD, OP_HEAD, SLOT_HEAD, STYLE_HEAD, TEMPO_HEAD, waiting

if TYPE_CHECKING:
    from esper.runtime.tasks import TaskSpec

MAX_PLANS = 8192
"""A task with more plans than this has a random choice of them in every round."""
NOTHING = -1
LEAST_TWINS = 3
LESSON_BLOCK = 250
"""Minibatches of the final lessons that are drawn at once."""
FIRST_FINAL = 3
"""Random stream of the first of them."""


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

    @classmethod
    def of(cls, task: TaskSpec, envs: slice) -> PlanSpace:
        offered = tuple(sorted(blueprint_index(name) for name in task.blueprints))
        return cls(envs, len(task.slots), offered, task.tempo)

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
    """What is seen and played in the round."""

    sight: Sight
    played: Tensor  # [E, S]


class KeptEpisodes:
    """The newest episodes: tensors [N, T, …] of a rollout, and world and task of each episode."""

    def __init__(self, limit: int, blueprints: Sequence[int]) -> None:
        """`blueprints`: those that the tasks offer; only their quotes are kept, and the others are zeros."""
        self.limit, self._offered = limit, torch.tensor(blueprints)
        self.tensors: dict[str, Tensor] = {}

    def add(self, batch: RolloutBatch, world: Tensor, task: Tensor, steps: int) -> None:
        """Episodes that have fewer than `steps` are filled up with rows that hold no decision."""
        missing = steps - batch.reward.shape[1]
        new = {"world": world, "task": task}
        for name, part in batch.tensors().items():
            part = part.cpu()
            if not name.startswith("hidden."):
                part = torch.cat([part, part.new_zeros(len(part), missing, *part.shape[2:])], 1)
            new[name] = part
        new["quotes"] = new["quotes"].index_select(-2, self._offered)
        old = self.tensors or {name: part[:0] for name, part in new.items()}
        self.tensors = {name: torch.cat([old[name], new[name]])[-self.limit :] for name in new}

    def draw(self, count: int, generator: torch.Generator) -> tuple[RolloutBatch, Tensor, Tensor]:
        """Some episodes, each as likely as the others, with their worlds and tasks."""
        rows = torch.randint(len(self.tensors["world"]), (count,), generator=generator)
        drawn = {name: part[rows] for name, part in self.tensors.items()}
        quotes, blueprints = drawn["quotes"], drawn["mask.blueprint"].shape[-1]
        every = quotes.new_zeros(*quotes.shape[:-2], blueprints, quotes.shape[-1])
        drawn["quotes"] = every.index_copy_(-2, self._offered, quotes)
        return RolloutBatch.of(drawn), drawn["world"], drawn["task"]


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
        offered = sorted({blueprint for space in self.spaces for blueprint in space.blueprints})
        self._kept = KeptEpisodes(learner.config.keep, offered)

    def begin(self, num_envs: int) -> None:
        self._round = None

    def decide(self, obs: PolicyObservation, masks: ActionMasks) -> Tensor:
        """Actions [E, 8]: the next seed of each env's plan."""
        if self._round is None:
            self._round = self._choose(obs)
        tempo = torch.cat([torch.full((s.envs.stop - s.envs.start,), int(s.tempo)) for s in self.spaces])
        return next_seeds(self._round.played, obs.blueprints.cpu(), masks, tempo)

    def finish(self, objectives: Sequence[float]) -> PlanFigures:
        """Learn from J of every env in the round."""
        assert self._round is not None, "a round has a decision"
        objective = torch.tensor(objectives).unflatten(0, (-1, self.twins))
        gains = objective[:, 1:] - objective[:, :1]
        plans = self._round.played.unflatten(0, (-1, self.twins))[:, 1:].flatten(0, 1)
        world = torch.arange(len(objective)).repeat_interleave(self.twins - 1)
        error = self.learner.learn(self._round.sight, world, plans, gains.flatten())
        return PlanFigures(gains[:, 0].mean().item(), gains[:, 1:].mean().item(), error)

    def lesson(self, batch: RolloutBatch, steps: int) -> tuple[RolloutBatch, Tensor]:
        """Keep the episodes of the round that was finished. Returns some of all that are kept, with what
        should have been done in each step, and how much each step counts [N, T]."""
        worlds = self.learner.replay.num_worlds
        first = worlds - len(batch.reward) // self.twins
        task = torch.cat([torch.full((s.envs.stop - s.envs.start,), i) for i, s in enumerate(self.spaces)])
        self._kept.add(batch, torch.arange(first, worlds).repeat_interleave(self.twins), task, steps)
        return self._draw_lesson(self.learner.config.lessons, self.learner.generator(2))

    def final_lessons(self) -> Iterator[tuple[RolloutBatch, Tensor, float]]:
        """Lessons after the last round, each with its share of the learning rate, which falls to 0."""
        total = self.learner.config.final_lessons
        for number, done in enumerate(range(0, total, LESSON_BLOCK)):
            generator = self.learner.generator(FIRST_FINAL + number)
            yield *self._draw_lesson(min(LESSON_BLOCK, total - done), generator), 1 - done / total

    def _draw_lesson(self, minibatches: int, generator: torch.Generator) -> tuple[RolloutBatch, Tensor]:
        drawn, world, task = self._kept.draw(minibatches * LESSON_SEQUENCES, generator)
        actions, weights = drawn.actions.clone(), torch.zeros_like(drawn.reward)
        for index, space in enumerate(self.spaces):
            rows = (task == index).nonzero().squeeze(-1)
            if len(rows):
                actions[rows], weights[rows] = self._judge(space, drawn.rows(rows), world[rows], generator)
        return replace(drawn, actions=actions, epsilon=torch.zeros_like(drawn.epsilon)), weights

    def _judge(
        self, space: PlanSpace, batch: RolloutBatch, world: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """What should have been done in each step [N, T, 8] of episodes of one task, and the weights."""
        shape, grown = batch.reward.shape, batch.obs.blueprints.flatten(0, 1)
        plans = space.plans(self.num_slots, generator)
        sight = self.learner.replay.sight()
        worlds, world = world.unique(return_inverse=True)
        values = self.learner.values.gains(sight.rows(worlds), plans).mean(0)  # [W, P]
        # Few different networks grow in a world: each is judged once.
        states, index = torch.cat([world.repeat_interleave(shape[1]).unsqueeze(1), grown], 1).unique(
            dim=0, return_inverse=True
        )
        world, own = states[:, 0], states[:, 1:]
        with torch.no_grad():
            stop = self.learner.values(sight.rows(worlds[world]), own).mean(0)
        further = worth_of_seeds(own, values[world], plans, space.blueprints)
        worth = torch.cat([stop.unsqueeze(1), further.flatten(1)], 1)[index]  # [N · T, 1 + S · B]
        # With noise from a Gumbel distribution the largest sum is each one with a probability in proportion
        # to exp(worth / temperature).
        uniform = torch.rand(worth.shape, generator=generator).clamp(min=1e-30)
        noise = -torch.log(-torch.log(uniform))
        chosen = (worth + self.learner.config.temperature * noise).argmax(1)
        over = plan_is_over(batch).flatten()
        rows = ((chosen > 0) & ~over).nonzero().squeeze(1)
        seed, target = chosen[rows] - 1, grown.clone()
        target[rows, seed // len(space.blueprints)] = torch.tensor(space.blueprints)[
            seed % len(space.blueprints)
        ]
        masks = map_tensors(batch.masks, lambda mask: mask.flatten(0, 1))
        taught = next_seeds(target, grown, masks, torch.full((len(grown),), int(space.tempo)))
        # A random choice of plans may hold none that contains what has grown: nothing is known then.
        is_full = (grown[:, : space.slots] != NOTHING).all(1)
        known = over | is_full | worth[:, 1:].isfinite().any(1)
        return taught.unflatten(0, shape), known.to(batch.reward.dtype).unflatten(0, shape)

    def forget(self) -> None:
        """Drop the kept episodes: no more lessons follow."""
        self._kept.tensors = {}

    # -- choices ---------------------------------------------------------------------------------------------

    def _choose(self, obs: PolicyObservation) -> _Round:
        generator = self.learner.generator(0)
        sight = Sight.of(obs, torch.arange(0, len(obs.base), self.twins))
        base, slots, quotes = self._seen
        sight = sight._replace(
            base=sight.base * base, slots=sight.slots * slots, quotes=sight.quotes * quotes
        )
        played = []
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
        return _Round(sight, torch.cat(played))

    # -- checkpoints -----------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = self.learner.state()
        now = self._round
        if now is not None:
            tensors |= {f"round.{name}": part for name, part in now.sight._asdict().items()}
            tensors["round.played"] = now.played
        return tensors | {f"kept.{name}": part for name, part in self._kept.tensors.items()}, meta

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        own: dict[str, dict[str, Tensor]] = {"round": {}, "kept": {}}
        learner: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            own.get(part, learner)[rest if part in own else name] = tensor
        self.learner.load_state(learner, meta)
        self._kept.tensors = own["kept"]
        seen = own["round"]
        self._round = _Round(Sight(*(seen[name] for name in Sight._fields)), seen["played"]) if seen else None


def worth_of_seeds(grown: Tensor, values: Tensor, plans: Tensor, blueprints: Sequence[int]) -> Tensor:
    """[N, S, B]: value of the best plan that contains what has grown [N, S] and whose next seed, in the order
    of the slots, is that blueprint in that slot, by the values [N, P] of plans [P, S]; minus infinity where
    no plan does."""
    there, (num_plans, slots) = grown.unsqueeze(1), plans.shape
    missing = (there == NOTHING) & (plans != NOTHING)  # [N, P, S]
    goes_on = ((there == NOTHING) | (there == plans)).all(-1) & missing.any(-1)
    slot = missing.int().argmax(-1)  # the first
    number = torch.zeros(max(blueprints) + 1, dtype=torch.int64)
    number[list(blueprints)] = torch.arange(len(blueprints))
    seed = number[plans[torch.arange(num_plans), slot].clamp(min=0)]
    best = values.new_full((len(grown), slots * len(blueprints)), -torch.inf)
    known = values.masked_fill(~goes_on, -torch.inf)
    best.scatter_reduce_(1, slot * len(blueprints) + seed, known, "amax")
    return best.unflatten(1, (slots, len(blueprints)))


def plan_is_over(batch: RolloutBatch) -> Tensor:
    """[N, T]: whether the env has waited before, in a step in which it could have germinated a seed."""
    could = batch.masks.slot_by_op[:, :, OP_GERMINATE].any(-1) & batch.valid
    waited = could & (batch.actions[:, :, OP_HEAD] != OP_GERMINATE)
    return waited.cumsum(1) > waited


def next_seeds(plans: Tensor, grown: Tensor, masks: ActionMasks, tempo: Tensor) -> Tensor:
    """[E, 8]: germinate the first seed of each plan that is missing and may be planted now, or wait."""
    envs, actions = len(plans), waiting(len(plans))
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
