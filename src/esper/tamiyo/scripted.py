"""Policies without learning: wait, act at random, follow a schedule. They act through the same interface as
the learned one and see no more than it does, so that comparisons mean something.

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
    BLUEPRINT_ID_TO_INDEX,
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
    stream_seed,
)

SLOT_HEAD, BLUEPRINT_HEAD, STYLE_HEAD, TEMPO_HEAD, OP_HEAD = (
    HEAD_NAMES.index(name) for name in ("slot", "blueprint", "style", "tempo", "op")
)


def waiting(envs: int) -> Tensor:
    """[E, 8] of WAIT."""
    return torch.tensor([[int(v) for v in IRRELEVANT_VALUES]]).repeat(envs, 1)


def as_step(actions: Tensor) -> PolicyStep:
    """Certain actions as a decision: probability 1, no value, no memory."""
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


class Memoryless:
    """No hidden state. What a policy remembers within an episode, if anything, is plain values."""

    def initial_hidden(self, num_envs: int) -> None:
        return None

    def begin(self, envs: int) -> None:
        """A new episode."""

    def state(self) -> dict[str, Any]:
        """What `load_state` needs to go on in the middle of an episode."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if state:
            raise EsperError(
                f"{type(self).__name__} remembers nothing, yet its state has fields {sorted(state)}"
            )


class AlwaysWait(Memoryless):
    """Never grows."""

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        return as_step(waiting(len(masks.op)))


class RandomValid(Memoryless):
    """Uniform over legal operations, then over the operation's slots and parameters. Env i draws from its own
    stream."""

    def __init__(self, seed: int, envs: Sequence[int]) -> None:
        self._streams = [np.random.default_rng(stream_seed(seed, "action", 0, env)) for env in envs]

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        if len(masks.op) != len(self._streams):
            raise EsperError(f"{len(masks.op)} envs, this policy was made for {len(self._streams)}")
        actions = waiting(len(masks.op)).numpy()
        legal = {
            name: getattr(masks, name).cpu().numpy() for name in HEAD_NAMES if name not in ("slot", "op")
        }
        ops, slots = masks.op.cpu().numpy(), masks.slot_by_op.cpu().numpy()
        for env, rng in enumerate(self._streams):
            op = rng.choice(np.flatnonzero(ops[env]))
            for head, name in enumerate(HEAD_NAMES):
                if name == "op":
                    actions[env, head] = op
                elif RELEVANCE[op][head]:
                    actions[env, head] = rng.choice(
                        np.flatnonzero(slots[env, op] if name == "slot" else legal[name][env])
                    )
        return as_step(torch.from_numpy(actions))


@dataclass(frozen=True, slots=True)
class Planting:
    """One entry of a schedule: this blueprint, in this slot (index), at this epoch (1 is the first), blended
    in like this."""

    epoch: int
    slot: int
    blueprint: str
    style: GerminationStyle = GerminationStyle.SIGMOID_ADD


class FixedSchedule(Memoryless):
    """Plants on schedule at the fastest tempo, then advances and fossilizes as soon as the gates open. One
    action per epoch: what is due and cannot be done now is done in the next epoch in which it can."""

    def __init__(self, schedules: Sequence[Sequence[Planting]]) -> None:
        """One schedule for each env."""
        for planting in (p for schedule in schedules for p in schedule):
            if planting.blueprint not in BLUEPRINT_ID_TO_INDEX:
                raise BlueprintError(
                    f"schedule: blueprint {planting.blueprint!r} is unknown; {allowed(BLUEPRINT_ID_TO_INDEX)}"
                )
            if planting.epoch < 1 or planting.slot < 0:
                raise EsperError(f"schedule: {planting} has an epoch below 1 or a slot below 0")
        self.schedules = tuple(
            tuple(sorted(schedule, key=lambda p: (p.epoch, p.slot))) for schedule in schedules
        )
        self.begin(len(self.schedules))

    def begin(self, envs: int) -> None:
        """A new episode."""
        if envs != len(self.schedules):
            raise EsperError(f"{envs} envs, this policy was made for {len(self.schedules)}")
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
        legal = masks.slot_by_op.cpu().numpy()
        for env, pending in enumerate(self._open):
            due = next(
                (p for p in pending if p.epoch <= self._epoch and legal[env, OP_GERMINATE, p.slot]), None
            )
            if due is not None:
                pending.remove(due)
                actions[env, [SLOT_HEAD, BLUEPRINT_HEAD, STYLE_HEAD, TEMPO_HEAD, OP_HEAD]] = torch.tensor(
                    [
                        due.slot,
                        BLUEPRINT_ID_TO_INDEX[due.blueprint],
                        int(due.style),
                        int(TempoAction.FAST),
                        OP_GERMINATE,
                    ]
                )
                continue
            for op in (OP_FOSSILIZE, OP_ADVANCE):
                if legal[env, op].any():
                    actions[env, [SLOT_HEAD, OP_HEAD]] = torch.tensor([int(legal[env, op].argmax()), op])
                    break
        return as_step(actions)
