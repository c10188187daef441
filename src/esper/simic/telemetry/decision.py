"""What a policy saw and considered at each decision: the part of `last_action` that explains it.

Everything here is read from tensors and reports that the decision has used already. Pairs of an operation and
a slot are named `OP slot`, features of a slot `slot feature`, quotes `slot blueprint feature`.

E envs, S slots, D observed numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from esper.leyline import (
    OP_GERMINATE,
    OP_NAMES,
    OP_WAIT,
    PRESENT_STAGES,
    EsperError,
    SeedStateReport,
    Veto,
    blueprint_index,
)
from esper.tamiyo.columns import Feature
from esper.tamiyo.features import BASE, QUOTE, SLOT

if TYPE_CHECKING:
    from esper.leyline import ActionMasks, PolicyObservation, PolicyStep

KNOWN = " known"
"""Ends the name of a validity bit, which is 0 where its feature was not measured."""


def observed_names(
    slots: Sequence[str], blueprints: Sequence[str], extra: Sequence[Feature] = ()
) -> list[str]:
    """A name for each number of the recorded observation: quotes of the offered `blueprints` only; `extra`
    are features of registered sensors."""
    of_slot, of_quote = _column_names((*SLOT, *extra)), _column_names(QUOTE)
    return [
        *_column_names(BASE),
        *(f"{slot} {name}" for slot in slots for name in of_slot),
        *(f"{slot} {offer} {name}" for slot in slots for offer in blueprints for name in of_quote),
    ]


def _column_names(table: Sequence[Feature]) -> list[str]:
    return [name for f in table for name in (f.name, f.name + KNOWN)[: f.width]]


class Considered:
    """The explanations of one step of all envs, in the form of payload fields."""

    def __init__(
        self,
        step: PolicyStep,
        obs: PolicyObservation,
        masks: ActionMasks,
        sensors: Mapping[str, npt.NDArray[np.float64]],
        reports: Sequence[Mapping[str, SeedStateReport]],
        slots: Sequence[str],
        *,
        blueprints: Sequence[str],
        max_seeds: int = 0,
    ) -> None:
        """Takes one transfer from the device: probabilities and observation together. `blueprints` are those
        that are offered."""
        envs, ops, count = masks.slot_by_op.shape
        if count != len(slots):
            raise EsperError(f"masks of {count} slots, but the names are {', '.join(slots)}")
        quotes = obs.quotes[:, :, [blueprint_index(name) for name in blueprints]]
        parts = [step.op_probs, obs.base, obs.slots.flatten(1), quotes.flatten(1)]
        if step.slot_probs is not None:
            parts.append(step.slot_probs.flatten(1))
        packed = torch.cat([part.float() for part in parts], 1).cpu().numpy()
        op_probs, base, slot_features, quoted, *rest = np.split(
            packed, np.cumsum([p.shape[1] for p in parts])[:-1], 1
        )
        self.op_probs: list[list[float]] = op_probs.tolist()
        self.observations = np.concatenate([base, slot_features, quoted], 1)  # [E, D]
        self._joint = rest[0].reshape(envs, ops, count) * op_probs[:, :, None] if rest else None
        self._legal = masks.slot_by_op.cpu().numpy()
        self._sensors, self._reports, self._slots, self._max_seeds = sensors, reports, slots, max_seeds

    def fields(self, env: int) -> dict[str, Any]:
        """Payload of the env with this place in the batch."""
        slot_probs = None
        if self._joint is not None:
            slot_probs = {
                f"{OP_NAMES[op]} {self._slots[slot]}": float(self._joint[env, op, slot])
                for op, slot in np.argwhere(self._legal[env])
                if op != OP_WAIT  # which concerns no slot
            }
        measured = {
            f"{slot} {name}": float(np.float32(value))
            for name, by_slot in self._sensors.items()
            for slot, value in zip(self._slots, by_slot[env], strict=True)
            if np.isfinite(value)
        }
        return {
            "slot_probs": slot_probs,
            "vetoes": dict(self._vetoes(env)),
            "sensors": measured,
            "observation": self.observations[env],
        }

    def _vetoes(self, env: int) -> Iterator[tuple[str, str]]:
        reports = self._reports[env]
        for slot, report in reports.items():
            for op, veto in report.vetoes.items():
                yield f"{op.name} {slot}", veto.value
        full = 0 < self._max_seeds <= sum(report.stage in PRESENT_STAGES for report in reports.values())
        for slot, may_germinate in zip(self._slots, self._legal[env, OP_GERMINATE], strict=True):
            if slot not in reports and not may_germinate:
                yield f"GERMINATE {slot}", (Veto.TOO_MANY_SEEDS if full else Veto.TOO_LATE).value
