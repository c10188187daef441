"""Policies that do not learn: wait, act at random, follow a schedule. They act through the same interface as
the learned policy and see no more than it does, so that comparisons are fair.

E envs, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline import (
    HEAD_NAMES,
    IRRELEVANT_VALUES,
    NUM_HEADS,
    OP_ADVANCE,
    OP_FOSSILIZE,
    OP_GERMINATE,
    RELEVANCE,
    ActionMasks,
    BlueprintError,
    EsperError,
    GerminationStyle,
    LifecycleOp,
    PolicyObservation,
    PolicyStep,
    TempoAction,
    allowed,
    blueprint_ids,
    blueprint_index,
    stream_seed,
)

SLOT_HEAD, BLUEPRINT_HEAD, STYLE_HEAD, TEMPO_HEAD, OP_HEAD = (
    HEAD_NAMES.index(name) for name in ("slot", "blueprint", "style", "tempo", "op")
)


def waiting(envs: int) -> Tensor:
    """[E, 8] of WAIT."""
    return torch.tensor([[int(v) for v in IRRELEVANT_VALUES]]).repeat(envs, 1)


def germinate(
    action: Tensor,
    slot: int,
    blueprint: int,
    *,
    style: GerminationStyle = GerminationStyle.SIGMOID_ADD,
    tempo: TempoAction = TempoAction.INSTANT,
) -> None:
    """Let an action [8] plant a seed."""
    action[[SLOT_HEAD, BLUEPRINT_HEAD, STYLE_HEAD, TEMPO_HEAD, OP_HEAD]] = torch.tensor(
        [slot, blueprint, int(style), int(tempo), OP_GERMINATE]
    )


def operate(action: Tensor, slot: int, op: int) -> None:
    """Let an action [8] do something to a slot that has no further parameters."""
    action[[SLOT_HEAD, OP_HEAD]] = torch.tensor([slot, op])


def keep_ripe(action: Tensor, legal: np.ndarray[Any, Any]) -> None:
    """Let an action [8] fossilize or advance the first seed whose gate is open, if there is one. `legal` is
    [6, S]."""
    for op in (OP_FOSSILIZE, OP_ADVANCE):
        if legal[op].any():
            operate(action, int(legal[op].argmax()), op)
            return


def as_step(actions: Tensor) -> PolicyStep:
    """Fixed actions as a decision: probability 1, no value, no recurrent state."""
    envs = len(actions)
    op_probs = torch.nn.functional.one_hot(actions[:, OP_HEAD], len(LifecycleOp)).float()
    return PolicyStep(
        actions=actions,
        log_prob=torch.zeros(envs),
        head_log_probs=torch.zeros(envs, NUM_HEADS),
        value=torch.zeros(envs),
        op_probs=op_probs,
        hidden=None,
    )


class ScriptedPolicy:
    """Base of policies that do not learn: no recurrent state and, unless a subclass has some, no memory."""

    def initial_hidden(self, num_envs: int) -> None:
        return None

    def begin(self, num_envs: int) -> None:
        """Start a new episode."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if state:
            raise EsperError(f"{type(self).__name__} has no memory, but its state has fields {sorted(state)}")


class AlwaysWait(ScriptedPolicy):
    """Never grows."""

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        return as_step(waiting(len(masks.op)))


class RandomValid(ScriptedPolicy):
    """Uniform over legal operations, then over the operation's slots and parameters. Each decision draws from
    a stream of its own, by episode, env and epoch, so that a resumed run draws the same."""

    def __init__(self, seed: int, envs: Sequence[int]) -> None:
        """`seed` is a random seed; `envs` are the numbers of the envs."""
        self._seed, self._envs = seed, tuple(envs)
        self._episode = self._epoch = 0

    def begin(self, num_envs: int) -> None:
        self._episode, self._epoch = self._episode + 1, 0

    def state(self) -> dict[str, Any]:
        return {"episode": self._episode, "epoch": self._epoch}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._episode, self._epoch = state["episode"], state["epoch"]

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        if len(masks.op) != len(self._envs):
            raise EsperError(f"{len(masks.op)} envs, this policy was made for {len(self._envs)}")
        self._epoch += 1
        actions = waiting(len(masks.op)).numpy()
        legal = {
            name: getattr(masks, name).cpu().numpy() for name in HEAD_NAMES if name not in ("slot", "op")
        }
        ops, slots = masks.op.cpu().numpy(), masks.slot_by_op.cpu().numpy()
        for row, env in enumerate(self._envs):
            rng = np.random.default_rng(stream_seed(self._seed, "action", self._episode, env, self._epoch))
            op = rng.choice(np.flatnonzero(ops[row]))
            actions[row, OP_HEAD] = op
            for head, name in enumerate(HEAD_NAMES):
                if name != "op" and RELEVANCE[op][head]:
                    options = slots[row, op] if name == "slot" else legal[name][row]
                    actions[row, head] = rng.choice(np.flatnonzero(options))
        return as_step(torch.from_numpy(actions))


@dataclass(frozen=True, slots=True)
class Planting:
    """One entry of a schedule: a blueprint, the index of its slot, the epoch (from 1), the blending style and
    the tempo."""

    epoch: int
    slot: int
    blueprint: str
    style: GerminationStyle = GerminationStyle.SIGMOID_ADD
    tempo: TempoAction = TempoAction.INSTANT


class FixedSchedule(ScriptedPolicy):
    """Germinates on schedule, and advances and fossilizes as soon as the gates open. One action per epoch: an
    entry that is due but not possible now waits until it is."""

    def __init__(self, schedules: Sequence[Sequence[Planting]]) -> None:
        """One schedule for each env."""
        for planting in (p for schedule in schedules for p in schedule):
            if planting.blueprint not in blueprint_ids():
                raise BlueprintError(
                    f"schedule: blueprint {planting.blueprint!r} is unknown; {allowed(blueprint_ids())}"
                )
            if planting.epoch < 1 or planting.slot < 0:
                raise EsperError(f"schedule: {planting} has an epoch below 1 or a slot below 0")
        self.schedules = tuple(
            tuple(sorted(schedule, key=lambda p: (p.epoch, p.slot))) for schedule in schedules
        )
        self.begin(len(self.schedules))

    def begin(self, num_envs: int) -> None:
        if num_envs != len(self.schedules):
            raise EsperError(f"{num_envs} envs, this policy was made for {len(self.schedules)}")
        self._epoch = 0
        self._open = [list(schedule) for schedule in self.schedules]

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "open": [
                [schedule.index(p) for p in pending]
                for schedule, pending in zip(self.schedules, self._open, strict=True)
            ],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._open = [
            [schedule[i] for i in pending]
            for schedule, pending in zip(self.schedules, state["open"], strict=True)
        ]

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        self._epoch += 1
        actions = waiting(len(masks.op))
        legal, in_time = masks.slot_by_op.cpu().numpy(), masks.tempo.cpu().numpy()
        for env, pending in enumerate(self._open):
            due = next(
                (
                    p
                    for p in pending
                    if p.epoch <= self._epoch and legal[env, OP_GERMINATE, p.slot] and in_time[env, p.tempo]
                ),
                None,
            )
            if due is not None:
                pending.remove(due)
                seed = blueprint_index(due.blueprint)
                germinate(actions[env], due.slot, seed, style=due.style, tempo=due.tempo)
            else:
                keep_ripe(actions[env], legal[env])
        return as_step(actions)
