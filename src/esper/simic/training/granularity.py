"""How much of the action space a learning policy has: plans first, then their parameters, then everything.

A policy that begins with every operation and parameter sees the one choice that matters, what grows where,
too rarely to learn it. The masks of the training keep the rest away, and biases of the policy's last layers
keep it away wherever the policy acts later; opening takes the biases back.

E envs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import torch
from torch import nn

from esper.leyline import (
    HEAD_NAMES,
    OP_GERMINATE,
    OP_WAIT,
    ActionMasks,
    EsperError,
    GateLevel,
    GerminationStyle,
    TempoAction,
)
from esper.simic.training.config import Granularity
from esper.tamiyo.network import PARAMETER_BLOCKS, TamiyoNetwork

if TYPE_CHECKING:
    from esper.runtime.tasks import TaskSpec

LEVELS: tuple[Granularity, ...] = get_args(Granularity)
CLOSED_BIAS = 20.0
"""Taken from the logit of what is closed: beside open choices its probability is below 1e-8."""
_PLAN_OPS = (OP_WAIT, OP_GERMINATE)
_PLAN_PARAMETERS = {"style": int(GerminationStyle.SIGMOID_ADD), "tempo": int(TempoAction.INSTANT)}
"""The one value of these heads in a plan: a seed that is added at once."""


def check_tasks(granularity: Granularity, values_rounds: int, tasks: Sequence[TaskSpec]) -> None:
    """With less than all operations, seeds must become permanent by themselves; plans add them at once."""
    for task in tasks:
        if values_rounds and GateLevel.G5 not in task.pacing.auto_forward_gates:
            raise EsperError(
                f"config: values_rounds {values_rounds} with task {task.name!r}, which does not make seeds "
                "permanent by itself (gate G5 is not automatic), so no plan could gain anything; allowed: "
                "values_rounds 0, for example with --preset none"
            )
        if granularity == "plans" and task.tempo is not TempoAction.INSTANT:
            raise EsperError(
                f"config: granularity plans with task {task.name!r}, whose tempo is "
                f"{task.tempo.name.lower()}; allowed: tempo instant, or granularity parameters"
            )
        if granularity != "all" and GateLevel.G5 not in task.pacing.auto_forward_gates:
            raise EsperError(
                f"config: granularity {granularity} with task {task.name!r}, which does not make seeds "
                "permanent by itself (gate G5 is not automatic); allowed: granularity all"
            )


def limit_masks(masks: ActionMasks, granularity: Granularity) -> ActionMasks:
    """Masks [E, …] without what is closed."""
    if granularity == "all":
        return masks
    kept = torch.zeros(masks.op.shape[-1], dtype=torch.bool)
    kept[list(_PLAN_OPS)] = True
    limited = replace(masks, op=masks.op & kept, slot_by_op=masks.slot_by_op & kept[:, None])
    if granularity == "plans":
        for name, value in _PLAN_PARAMETERS.items():
            mask = getattr(masks, name)
            only = torch.arange(mask.shape[-1]) == value
            limited = replace(limited, **{name: mask & only})
    return limited


@torch.no_grad()
def close(network: TamiyoNetwork, granularity: Granularity) -> None:
    """Make the closed choices of a new policy improbable."""
    _shift(network, granularity, -CLOSED_BIAS)


@torch.no_grad()
def reopen(network: TamiyoNetwork, before: Granularity, now: Granularity) -> None:
    """Take back what `close` did, as far as the new granularity has it open."""
    _shift(network, before, CLOSED_BIAS)
    _shift(network, now, -CLOSED_BIAS)


def _shift(network: TamiyoNetwork, granularity: Granularity, amount: float) -> None:
    if granularity == "all":
        return
    last = network.op_head[-1]
    assert isinstance(last, nn.Linear)
    for op in range(len(last.bias)):
        if op not in _PLAN_OPS:
            last.bias[op] += amount
    if granularity == "plans":
        start = 0
        for block in PARAMETER_BLOCKS:
            value = _PLAN_PARAMETERS.get(HEAD_NAMES[block.head])
            if block.op == OP_GERMINATE and value is not None:
                for choice in range(block.choices):
                    if choice != value:
                        network.parameter_out.bias[start + choice] += amount
            start += block.choices


def level_after(objectives: Sequence[float], start: Granularity, unlock_after: int) -> Granularity:
    """The granularity of the next round, after rounds with these means of J: one level more whenever J has
    not risen above its best of this level for `unlock_after` rounds; 0 keeps the first level. It depends on
    nothing else, so a resumed run has the same."""
    level = LEVELS.index(start)
    best, stalled = -float("inf"), 0
    for objective in objectives:
        stalled = 0 if objective > best else stalled + 1
        best = max(best, objective)
        if unlock_after and stalled >= unlock_after and level + 1 < len(LEVELS):
            level, best, stalled = level + 1, -float("inf"), 0
    return LEVELS[level]
