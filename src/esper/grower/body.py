"""The module `_esper` of a user's model: its slots, and the lifecycle of their seeds.

The lifecycle itself is Kasmina's; here it is bound to one network that this project did not write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgspec
from torch import Tensor, nn

from esper.grower.places import Place
from esper.grower.slot import Slot, is_extended, is_spliced
from esper.kasmina.model import GrowingSlots
from esper.kasmina.seed import Seed
from esper.leyline import (
    EsperError,
    GateConfig,
    GateLevel,
    Pacing,
    SlotConfig,
    SlotIdError,
    StructureError,
    allowed,
)
from esper.leyline.errors import near

PACING = Pacing(
    min_training_epochs=2,
    min_blending_epochs=0,
    min_prune_age=1,
    embargo_epochs=1,
    auto_forward_gates=frozenset({GateLevel.G1, GateLevel.G2, GateLevel.G3}),
)
"""A seed that incubates trains alone for two epochs, then blends in by itself."""


class Body(GrowingSlots):
    """All slots of one model, in the order in which they run. Row 0 is the model."""

    def __init__(
        self, model: nn.Module, places: Sequence[Place], *, measures: bool, makes_permanent: bool
    ) -> None:
        """`makes_permanent`: the clock does so with a seed that has been in HOLDING for an epoch."""
        super().__init__()
        gates = PACING.auto_forward_gates | ({GateLevel.G5} if makes_permanent else frozenset())
        self.gate_config = GateConfig(permissive=True)
        self.pacing = replace(PACING, auto_forward_gates=gates)
        self.population, self.version, self.germinations = 1, 0, [0]
        slots = [
            Slot(place, index, gates=self.gate_config, pacing=self.pacing, measures=measures)
            for index, place in enumerate(places)
        ]
        self.seed_slots = nn.ModuleDict({slot.slot_id: slot for slot in slots})
        self.slot_config = SlotConfig(tuple(self.seed_slots))
        self.origin = uuid4().hex
        """Shared by all copies of this module, and by nothing else."""
        self._host_params = sum(p.numel() for p in model.parameters())
        self.train(model.training)

    @property
    def host_params(self) -> int:
        return self._host_params

    def __iter__(self) -> Iterator[Slot]:
        for slot_id in self.slot_config.slot_ids:
            slot = self.seed_slots[slot_id]
            assert isinstance(slot, Slot)
            yield slot

    @property
    def names(self) -> list[str]:
        return [slot.name for slot in self]

    def slot_id(self, name: str) -> str:
        """The id of the slot that a user calls by the name of its module."""
        for slot in self:
            if slot.name == name:
                return slot.slot_id
        raise SlotIdError(f"slot {name!r} is unknown{near(name, self.names)}; {allowed(self.names)}")

    def changed(self) -> None:
        super().changed()
        for slot in self:
            slot.refresh()

    def parameters_of(self, slot: Slot) -> list[nn.Parameter]:
        return list(slot.banks.parameters())

    def check_places(self, model: nn.Module) -> None:
        """Raise unless every slot still follows the module of its name."""
        for slot in self:
            with suppress(AttributeError):
                if is_spliced(model.get_submodule(slot.name), slot):
                    continue
            raise EsperError(
                f"slot {slot.name!r}: the module of this name is no longer the one that was attached, so no "
                "seed can follow it; put that one back, or replace modules before you attach"
            )

    # -- passes ----------------------------------------------------------------------------------------------

    @contextmanager
    def muted(self, slot_ids: Sequence[str]) -> Iterator[None]:
        """Switch the seeds of these slots off."""
        chosen = [slot for slot in self if slot.slot_id in slot_ids]
        before = [slot.is_muted for slot in chosen]
        try:
            for slot in chosen:
                slot.is_muted = True
                slot.refresh()
            yield
        finally:
            for slot, was_muted in zip(chosen, before, strict=True):
                slot.is_muted = was_muted
                slot.refresh()

    @contextmanager
    def shadowing(self, slot: Slot) -> Iterator[None]:
        """Apply one incubating seed in full, and watch nothing."""
        sensing = [s.sensing for s in self]
        try:
            slot.is_shadowed = True
            for s in self:
                s.sensing = None
            slot.refresh()
            yield
        finally:
            slot.is_shadowed = False
            for s, watching in zip(self, sensing, strict=True):
                s.sensing = watching
            slot.refresh()

    # -- structure -------------------------------------------------------------------------------------------

    def structure(self) -> dict[str, Any]:
        """Slots and seeds as plain values."""
        return {
            "slots": [msgspec.to_builtins(slot.place) for slot in self],
            "seeds": {slot.name: seed.to_dict() for slot in self if (seed := slot.seeds[0]) is not None},
            "germinations": self.germinations[0],
        }

    def restore(self, structure: Mapping[str, Any], origin: object) -> None:
        """Rebuild the seeds; their weights are zeros until a state_dict is loaded. Everything is checked
        first."""
        try:
            stored, seeds = structure["slots"], structure["seeds"]
            germinations = int(structure["germinations"])
        except (KeyError, TypeError, ValueError) as error:
            raise StructureError(f"{origin}: not the structure of a grown model: {error}") from None
        here = [msgspec.to_builtins(slot.place) for slot in self]
        if stored != here:
            raise StructureError(
                f"{origin}: grown in slots {_described(stored)}, this model has {_described(here)}"
            )
        decoded = {
            self.slot_id(name): Seed.from_dict(data, f"{origin}: seed in {name}")
            for name, data in seeds.items()
        }
        for slot in self:
            seed = decoded.get(slot.slot_id)
            if seed is not None:
                for name in seed.bank_names:
                    slot.build_bank(name, 1)  # raises if the blueprint is unknown
        for slot in self:
            slot.adopt(0, decoded.get(slot.slot_id))
        self.germinations[0] = germinations
        self.changed()

    def signature(self) -> tuple[object, ...]:
        """Changes with whatever a copy has to follow: which seeds there are, and how they are blended in."""
        return tuple(
            None if seed is None else (seed.seed_id, seed.stage, seed.algorithm, seed.alpha.alpha)
            for seed in (slot.seeds[0] for slot in self)
        )

    def mirror(self, source: Body) -> None:
        """Take over another body's structure, as an average of the model must."""
        if self.names != source.names:
            raise EsperError(f"slots {self.names} cannot follow {source.names}")
        for slot, other in zip(self, source, strict=True):
            slot.mirror(other)
        self.germinations, self.version = list(source.germinations), source.version

    def checksum(self) -> list[float]:
        """Of the seeds' weights: equal on all ranks, or they have drifted apart."""
        return [_sum(parameter) for slot in self for parameter in slot.banks.parameters()]


def attached_part(model: nn.Module) -> str | None:
    """Name of a module in the model that is attached, or carries a slot; None if there is none."""
    modules = dict(model.named_modules())
    owners = [name.rpartition(".")[0] for name, module in modules.items() if isinstance(module, Body)]
    return next(iter([*owners, *(name for name, module in modules.items() if is_extended(module))]), None)


def _described(slots: Any) -> str:
    try:
        return ", ".join(f"{s['name']} ({s['shape']}, {s['channels']} channels)" for s in slots) or "none"
    except (TypeError, KeyError):
        return repr(slots)[:80]


def _sum(tensor: Tensor) -> float:
    return tensor.detach().double().sum().item()
