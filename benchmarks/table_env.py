"""Episodes played on a table of plans: the trainer's interface, without training a network.

The observation after the first epoch is the world's own. Then the policy plants one seed per step; waiting
ends the plan, and J of the plan is paid. What has been planted is shown by the features that describe a seed
in its slot. Everything else that would change while a network trains stays as it was, so only the first
decision of an episode sees exactly what the real environment shows.

With `dead_ends` an episode is what it was before plans: a seed is kept only if it is fossilized by an action
of its own, it can be pruned, and one of three tempos alone (as one of three alpha targets then) leads to a
seed that may be fossilized. Seeds that are not kept cost κ each.

E envs, S slots, B blueprints of the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from benchmarks.plan_table import PlanTable
from esper.leyline import (
    HEAD_ENUMS,
    HEAD_NAMES,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_PRUNE,
    OP_WAIT,
    ActionMasks,
    EsperError,
    GerminationStyle,
    LifecycleOp,
    PolicyObservation,
    TempoAction,
    stream_seed,
)
from esper.leyline.facts import TRAITS
from esper.tamiyo.columns import first_columns
from esper.tamiyo.features import BASE, QUOTE, SLOT
from esper.tamiyo.scripted import BLUEPRINT_HEAD, OP_HEAD, SLOT_HEAD, TEMPO_HEAD

DEAD_END_STEPS = 8
"""Steps of an episode with dead ends: three seeds can be planted and fossilized, with two to spare."""
DEAD_END_TEMPOS, LIVING_TEMPO = 3, 0
_SLOT, _BASE, _QUOTE = first_columns(SLOT), first_columns(BASE), first_columns(QUOTE)
_TRAITS = [(_SLOT[f"seed_{trait}"], _QUOTE[trait]) for trait in TRAITS]


class Seed(IntEnum):
    """The state of a slot."""

    NONE = 0
    HELD = 1
    """Planted, not yet permanent."""
    STUCK = 2
    """Planted, can never become permanent."""
    KEPT = 3
    PRUNED = 4


_STAGES = {
    Seed.HELD: "stage_holding",
    Seed.STUCK: "stage_blending",
    Seed.KEPT: "stage_fossilized",
    Seed.PRUNED: "stage_embargoed",
}


@dataclass(frozen=True, slots=True)
class TableStep:
    """What one step of all envs gave, [E] each."""

    reward: Tensor
    terminal: Tensor
    valid: Tensor
    """False for an env whose episode was over before."""


class TableEnv:
    """E envs that play on the table; consecutive `twins` share a world."""

    def __init__(
        self,
        table: PlanTable,
        worlds: Sequence[int],
        *,
        envs: int,
        seed: int,
        twins: int = 1,
        dead_ends: bool = False,
    ) -> None:
        """`worlds`: columns of the table that rounds draw from."""
        slots, choices = len(table.plans[0]), len(table.blueprints) + 1
        if len(table.plans) != choices**slots:
            raise EsperError(
                f"table of {table.task} has {len(table.plans)} plans, but a policy may choose any of "
                f"{choices**slots}; `python -m benchmarks.plan_table {table.task} --plans {choices**slots}` "
                "measures all"
            )
        if envs % twins or not 1 <= envs // twins <= len(worlds):
            raise EsperError(
                f"{envs} envs with {twins} twins on {len(worlds)} worlds; allowed: a multiple of twins, and "
                "no more groups than worlds"
            )
        self.table, self.worlds, self.num_envs, self.twins = table, np.asarray(worlds), envs, twins
        self.seed, self.dead_ends, self.num_slots = seed, dead_ends, slots
        self.steps = DEAD_END_STEPS if dead_ends else slots
        self.objective = torch.from_numpy(table.objective)
        self._number = torch.zeros((choices,) * slots, dtype=torch.int64)
        plans = torch.from_numpy(table.rows())
        self._number[tuple((plans + 1).T)] = torch.arange(len(plans))

    def begin_round(self, episode: int) -> None:
        """Draw a world for each group of twins, without replacement."""
        rng = np.random.default_rng(stream_seed(self.seed, "sampling", episode))
        self.begin(rng.choice(self.worlds, self.num_envs // self.twins, replace=False))

    def begin(self, worlds: Sequence[int] | np.ndarray) -> None:
        """Start an episode in these worlds, one for each group of twins."""
        self.world = torch.from_numpy(np.repeat(np.asarray(worlds), self.twins))
        shape = (len(self.world), self.num_slots)
        self.grown = torch.full(shape, -1)  # blueprint that was planted
        self.seeds = torch.full(shape, int(Seed.NONE))
        self.wasted = torch.zeros(len(self.world))
        self.done = torch.zeros(len(self.world), dtype=torch.bool)
        self._first = PolicyObservation(
            **{name: part[self.world] for name, part in self.table.sight._asdict().items()},
            blueprints=self.grown,
        )
        self.epoch = 0

    def observe(self) -> tuple[PolicyObservation, ActionMasks]:
        return self._observation(), self._masks()

    def plan_numbers(self, plans: Tensor) -> Tensor:
        """[…] rows of the table of plans […, S]."""
        return self._number[tuple((plans + 1).movedim(-1, 0))]

    def objectives(self) -> Tensor:
        """[E]: J of what has grown."""
        kept = torch.where(self.seeds == Seed.KEPT, self.grown, -1)
        paid = self.objective[self.plan_numbers(kept), self.world]
        return (paid - self.table.waste_price * self.wasted).float()

    def act(self, actions: Tensor) -> TableStep:
        """Carry out actions [E, 8]. J is paid in the last step of an episode."""
        self.epoch += 1
        valid = ~self.done
        rows, op, slot = torch.arange(len(actions)), actions[:, OP_HEAD], actions[:, SLOT_HEAD]
        state = self.seeds[rows, slot]
        planted = Seed.HELD if self.dead_ends else Seed.KEPT
        sprouts = torch.full_like(slot, int(planted))
        if self.dead_ends:
            sprouts[actions[:, TEMPO_HEAD] != LIVING_TEMPO] = int(Seed.STUCK)
        for which, after in (
            (OP_GERMINATE, sprouts),
            (OP_PRUNE, torch.full_like(slot, int(Seed.PRUNED))),
            (OP_FOSSILIZE, torch.full_like(slot, int(Seed.KEPT))),
        ):
            state = torch.where(valid & (op == which), after, state)
        self.seeds[rows, slot] = state
        germinated = valid & (op == OP_GERMINATE)
        self.grown[rows, slot] = torch.where(germinated, actions[:, BLUEPRINT_HEAD], self.grown[rows, slot])
        ends = torch.full_like(valid, self.epoch == self.steps)
        if not self.dead_ends:
            ends |= op == OP_WAIT
        self.wasted = ((self.seeds != Seed.NONE) & (self.seeds != Seed.KEPT)).sum(1).float()
        terminal = valid & ends
        self.done |= terminal
        return TableStep(torch.where(terminal, self.objectives(), 0.0), terminal, valid)

    # -- what is seen ----------------------------------------------------------------------------------------

    def _observation(self) -> PolicyObservation:
        base, slots = self._first.base.clone(), self._first.slots.clone()
        quotes = self._first.quotes
        present = self.grown >= 0
        index = self.grown.clamp(min=0)[..., None, None].expand(*self.grown.shape, 1, quotes.shape[-1])
        quoted = quotes.gather(2, index).squeeze(2)
        slots[..., _SLOT["stage_dormant"]] = (~present).float()
        for seed, name in _STAGES.items():
            slots[..., _SLOT[name]] = (self.seeds == seed).float()
        slots[..., _SLOT["can_fossilize"]] = (self.seeds == Seed.HELD).float()
        slots[..., _SLOT["alpha"]] = ((self.seeds == Seed.HELD) | (self.seeds == Seed.KEPT)).float()
        for column, trait in _TRAITS:
            slots[..., column] = torch.where(present, quoted[..., trait], 0.0)
        for name, state in (("holding", Seed.HELD), ("blending", Seed.STUCK), ("fossilized", Seed.KEPT)):
            base[:, _BASE[name]] = (self.seeds == state).float().mean(1)
        base[:, _BASE["progress"]] += self.epoch / self.table.env_steps
        return replace(self._first, base=base, slots=slots, blueprints=self.grown.clone())

    def _masks(self) -> ActionMasks:
        envs = len(self.world)
        by_op = torch.zeros(envs, len(LifecycleOp), self.num_slots, dtype=torch.bool)
        by_op[:, OP_WAIT] = True
        by_op[:, OP_GERMINATE] = (self.seeds == Seed.NONE) & ~self.done[:, None]
        if self.dead_ends:
            by_op[:, OP_PRUNE] = (self.seeds == Seed.HELD) | (self.seeds == Seed.STUCK)
            by_op[:, OP_FOSSILIZE] = self.seeds == Seed.HELD
        single = {"style": int(GerminationStyle.SIGMOID_ADD), "tempo": int(TempoAction.INSTANT)}
        heads: dict[str, Tensor] = {}
        for name, enum in zip(HEAD_NAMES, HEAD_ENUMS, strict=True):
            if enum is None or name in ("op", "blueprint"):
                continue
            heads[name] = torch.ones(envs, len(enum), dtype=torch.bool)
            if self.dead_ends and name == "tempo":
                heads[name][:, DEAD_END_TEMPOS:] = False
            elif not self.dead_ends and name in single:
                heads[name] = torch.arange(len(enum)).expand(envs, -1) == single[name]
        blueprint = torch.ones(envs, len(self.table.blueprints), dtype=torch.bool)
        return ActionMasks(op=by_op.any(2), slot_by_op=by_op, blueprint=blueprint, **heads)
