"""Action spaces: the eight heads as a MultiDiscrete, or numbered decisions as a Discrete; their masks, and
which choices are illegal now.

Both spaces decode to native indices: one integer per head, in head order, where irrelevant heads have their
fixed values and the blueprint head counts all registered blueprints.

E envs, S slots, B offered blueprints, A flat actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gymnasium.error import InvalidAction
from gymnasium.spaces import Discrete, MultiDiscrete

from esper.leyline import (
    HEAD_ENUMS,
    HEAD_NAMES,
    IRRELEVANT_VALUES,
    NUM_HEADS,
    OP_GERMINATE,
    OP_WAIT,
    RELEVANCE,
    ActionMasks,
    EsperError,
    GateLevel,
    LifecycleOp,
    allowed,
    blueprint_id,
    blueprint_index,
    head_sizes,
)
from esper.runtime.tasks import TaskSpec

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
Granularity = Literal["plans", "all"]
SLOT, BLUEPRINT, OP = (HEAD_NAMES.index(name) for name in ("slot", "blueprint", "op"))
PARAMETERS = tuple(h for h in range(NUM_HEADS) if h not in (SLOT, OP))
_RELEVANT = np.array(RELEVANCE)  # [6, 8]
_FIXED = np.array([int(value) for value in IRRELEVANT_VALUES])  # [8]
WAIT = _FIXED
"""The native indices of WAIT."""


class IllegalAction(EsperError, InvalidAction):
    """An action that the masks forbid."""


class HeadMasks:
    """Legal choices of each head as arrays; the slot's depend on the op. Every env may wait."""

    def __init__(self, masks: ActionMasks) -> None:
        self.op: Bools = masks.op.numpy().copy()  # [E, 6]
        self.slot_by_op: Bools = masks.slot_by_op.numpy().copy()  # [E, 6, S]
        self.parameters: dict[int, Bools] = {h: getattr(masks, HEAD_NAMES[h]).numpy() for h in PARAMETERS}

    def only_wait(self, envs: Sequence[int] | Indices) -> None:
        """These envs may do nothing else."""
        self.op[envs] = np.arange(self.op.shape[1]) == OP_WAIT
        self.slot_by_op[envs] = np.arange(self.op.shape[1])[:, None] == OP_WAIT

    def allow(self, native: Indices) -> Bools:
        """[E, …] whether the native actions [E, …, 8] are legal, irrelevant heads aside."""
        shape = native.shape[:-1]
        env = np.arange(len(native)).reshape(-1, *[1] * (len(shape) - 1))
        op = native[..., OP]
        legal = self.slot_by_op[env, op, native[..., SLOT]] & self.op[env, op]
        for head, mask in self.parameters.items():
            legal &= mask[env, native[..., head]] | ~_RELEVANT[op, head]
        return legal


class Vocabulary:
    """Names of a task's choices, by head and native index."""

    def __init__(self, task: TaskSpec) -> None:
        self.slots = task.slots
        self.blueprints = np.array([blueprint_index(name) for name in task.blueprints])
        sizes = head_sizes(len(task.slots))
        self.sizes = (sizes[SLOT], len(self.blueprints), *sizes[BLUEPRINT + 1 :])

    def name(self, head: int, index: int) -> str:
        """The name of a choice, as messages and `metadata` show it."""
        if head == SLOT:
            return self.slots[index]
        enum = HEAD_ENUMS[head]
        return blueprint_id(index) if enum is None else enum(index).name

    def describe(self, native: Sequence[int]) -> str:
        """An action by the names of its relevant choices, the op first."""
        op = int(native[OP])
        heads = [OP, *(h for h in range(NUM_HEADS) if RELEVANCE[op][h] and h != OP)]
        return " ".join(self.name(h, int(native[h])) for h in heads)

    def why_illegal(self, env: int, row: int, native: Indices, masks: HeadMasks) -> str:
        """Names the head and the choice of an illegal action of this env, and the choices that are legal.
        `row` is its place in the masks."""
        op = int(native[OP])
        if not masks.op[row, op]:
            return self._refusal(env, OP, op, masks.op[row], "")
        given = f" for {LifecycleOp(op).name}"
        if RELEVANCE[op][SLOT] and not masks.slot_by_op[row, op, native[SLOT]]:
            return self._refusal(env, SLOT, int(native[SLOT]), masks.slot_by_op[row, op], given)
        head = next(
            h for h, mask in masks.parameters.items() if RELEVANCE[op][h] and not mask[row, native[h]]
        )
        return self._refusal(env, head, int(native[head]), masks.parameters[head][row], given)

    def _refusal(self, env: int, head: int, index: int, legal: Bools, given: str) -> str:
        names = [self.name(head, int(i)) for i in np.flatnonzero(legal)]
        return (
            f"env {env}: {HEAD_NAMES[head]} {self.name(head, index)} is illegal{given} now; {allowed(names)}"
        )


def _integers(actions: Any, shape: tuple[int, ...], sizes: npt.ArrayLike, what: str) -> Indices:
    """Checked indices; outside of the space is always an error."""
    given = np.asarray(actions)
    if given.shape != shape or not np.issubdtype(given.dtype, np.integer):
        raise IllegalAction(
            f"actions are {given.dtype} of shape {given.shape}, must be integers of shape {shape}"
        )
    outside = (given < 0) | (given >= np.asarray(sizes))
    if outside.any():
        place = tuple(int(i) for i in np.argwhere(outside)[0])
        size = int(np.broadcast_to(sizes, shape)[place])
        head = f", head {HEAD_NAMES[place[1]]}" if len(place) > 1 else ""
        raise IllegalAction(f"env {place[0]}{head}: {what} is {int(given[place])}; allowed: 0 to {size - 1}")
    return given.astype(np.int64)


class HeadActions:
    """One choice per head, in the order of `HEAD_NAMES`. The blueprint head counts the offered ones."""

    def __init__(self, task: TaskSpec) -> None:
        self.vocabulary = Vocabulary(task)
        self.space = MultiDiscrete(list(self.vocabulary.sizes))
        offered = self.vocabulary.blueprints
        self.names = tuple(
            f"{HEAD_NAMES[head]} {self.vocabulary.name(head, offered[i] if head == BLUEPRINT else i)}"
            for head, size in enumerate(self.vocabulary.sizes)
            for i in range(size)
        )

    def decode(self, actions: Any, envs: int) -> Indices:
        """[E, 8] native indices; irrelevant heads get their fixed values."""
        given = _integers(actions, (envs, NUM_HEADS), self.vocabulary.sizes, "choice")
        given[:, BLUEPRINT] = self.vocabulary.blueprints[given[:, BLUEPRINT]]
        return np.where(_RELEVANT[given[:, OP]], given, _FIXED)

    def encode(self, native: npt.ArrayLike) -> Indices:
        """[E, 8] choices of native indices, the inverse of `decode`."""
        choices = np.array(native, np.int64)
        offered = choices[:, BLUEPRINT, None] == self.vocabulary.blueprints
        choices[:, BLUEPRINT] = offered.argmax(1)
        return choices

    def masks(self, masks: HeadMasks) -> Bools:
        """[E, sum of the heads' sizes]. A choice is marked if some legal action has it, or if it is the fixed
        value of a head that no legal action needs."""
        useful = masks.op[:, :, None] & _RELEVANT  # [E, 6, 8], heads that some legal op needs
        needed = useful.any(1)  # [E, 8]
        slots = (masks.slot_by_op & useful[:, :, SLOT, None]).any(1)
        slots[~needed[:, SLOT], 0] = True
        parts = [slots]
        for head in PARAMETERS:
            part = masks.parameters[head]
            if head == BLUEPRINT:
                parts.append(part[:, self.vocabulary.blueprints])
                continue
            fixed = np.arange(part.shape[1]) == _FIXED[head]
            parts.append(np.where(needed[:, head, None], part, fixed))
        return np.concatenate([*parts, masks.op], axis=1)


class FlatActions:
    """Numbered decisions. Number 0 is WAIT.

    `plans` adds GERMINATE at once (tempo INSTANT, operator ADD) for each slot and offered blueprint, slot by
    slot: 1 + S·B. `all` has every combination of the choices that are relevant for an op, op by op, the last
    head fastest: 1 + S·(16·B + 262)."""

    def __init__(self, task: TaskSpec, granularity: Granularity) -> None:
        self.vocabulary = vocabulary = Vocabulary(task)
        if granularity == "plans":
            if GateLevel.G5 not in task.pacing.auto_forward_gates:
                raise EsperError(
                    f"task {task.name!r} does not make seeds permanent by itself (gate G5 is not automatic), "
                    "so a germination is no whole plan; use granularity 'all'"
                )
            rows = [list(WAIT)]
            for slot, blueprint in product(range(len(vocabulary.slots)), vocabulary.blueprints):
                row = list(WAIT)
                row[SLOT], row[BLUEPRINT], row[OP] = slot, blueprint, OP_GERMINATE
                rows.append(row)
        elif granularity == "all":
            choices = [range(size) for size in vocabulary.sizes]
            choices[BLUEPRINT] = list(vocabulary.blueprints)  # type: ignore[call-overload]
            rows = [
                list(row)
                for op in LifecycleOp
                for row in product(
                    *(
                        [op] if head == OP else choices[head] if RELEVANCE[op][head] else [_FIXED[head]]
                        for head in range(NUM_HEADS)
                    )
                )
            ]
        else:
            raise EsperError(f"granularity is {granularity!r}; allowed: 'plans', 'all'")
        self.table: Indices = np.array(rows, np.int64)  # [A, 8], native
        self.space = Discrete(len(self.table))
        self.names = tuple(vocabulary.describe(row) for row in self.table)
        self._number = {tuple(row): number for number, row in enumerate(self.table.tolist())}

    def decode(self, actions: Any, envs: int) -> Indices:
        """[E, 8] native indices of numbered decisions [E]."""
        return self.table[_integers(actions, (envs,), len(self.table), "action")]

    def encode(self, native: npt.ArrayLike) -> Indices:
        """[E] numbers of native indices [E, 8]."""
        rows = np.asarray(native).tolist()
        for row in rows:
            if tuple(row) not in self._number:
                raise EsperError(f"{self.vocabulary.describe(row)} has no number at this granularity")
        return np.array([self._number[tuple(row)] for row in rows])

    def masks(self, masks: HeadMasks) -> Bools:
        """[E, A] legal decisions."""
        envs = len(masks.op)
        return masks.allow(np.broadcast_to(self.table, (envs, *self.table.shape)))
