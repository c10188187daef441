"""Sensors in a user's training loop: features and gradients at every slot, kept from the last batch of an
epoch, and the norms of all gradients.

Nothing says which batch is the last. In the first epoch every batch is watched; from then on those that come
when as many have passed as in the epoch before, less one. A watched pass computes the same bits: tensors are
kept by reference, gradients are read by hooks on tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.kasmina.layers import Layout
from esper.kasmina.optim import EXPLODING, VANISHING, GradientStats
from esper.leyline import SlotConfig
from esper.simic.sensors import GrowthProbe
from esper.tamiyo.inputs import SENSORS

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from esper.grower.places import Place


@dataclass(slots=True)
class _Watched:
    """What one slot showed in the newest watched batch."""

    place: Place
    features: Tensor
    version: int
    """Of the features when they were kept: a later one means that the model changed them in place."""
    gradient: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _OneSlot:
    """One slot as the sensors look at a network."""

    layout: Layout
    slot_config: SlotConfig
    host_params: int
    population: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """Sensors by name and slot, and gradient statistics; None where nothing was measured."""

    sensors: dict[str, list[float]]
    host_norm: float | None = None
    seed_norms: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Slot id → norm, share of vanishing tensors, share of exploding tensors."""

    def gradient_stats(self) -> GradientStats | None:
        if self.host_norm is None or not self.seed_norms:
            return None
        columns = [
            {slot: torch.tensor([values[i]]) for slot, values in self.seed_norms.items()} for i in range(3)
        ]
        return GradientStats(torch.tensor([self.host_norm]), *columns)


class Sensing:
    """Watches the slots of one model."""

    def __init__(self, model: nn.Module, slot_ids: tuple[str, ...]) -> None:
        self._model, self.slot_ids = model, slot_ids
        self._passes = dict.fromkeys(slot_ids, 0)
        self._expected: dict[str, int] = dict.fromkeys(slot_ids, 0)
        self._watched: dict[str, _Watched] = {}
        self._changed_in_place: set[str] = set()
        self._norms: dict[str, Tensor] = {}
        self._hooks: dict[str, RemovableHandle] = {}

    # -- during training -------------------------------------------------------------------------------------

    def due(self, slot_id: str) -> bool:
        """Count a training pass through a slot; whether it is to be watched."""
        self._passes[slot_id] += 1
        return self._passes[slot_id] >= self._expected[slot_id]

    def watch(self, slot_id: str, place: Place, before: Tensor, after: Tensor) -> None:
        """Keep the features that reach the slot, and the gradient that comes back to its output."""
        if not after.requires_grad:
            return
        old = self._watched.get(slot_id)
        if old is not None and old.features._version != old.version:
            self._changed_in_place.add(slot_id)
        features = before.detach().clone() if slot_id in self._changed_in_place else before.detach()
        watched = _Watched(place, features, features._version)
        self._watched[slot_id] = watched
        after.register_hook(partial(setattr, watched, "gradient"))
        self._watch_parameters()

    def _watch_parameters(self) -> None:
        for name, parameter in self._model.named_parameters():
            if name not in self._hooks and parameter.requires_grad:
                self._hooks[name] = parameter.register_hook(partial(self._keep_norm, name))

    def _keep_norm(self, name: str, gradient: Tensor) -> None:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        precise = torch.promote_types(values.dtype, torch.float32)
        self._norms[name] = torch.linalg.vector_norm(values.detach(), dtype=precise)

    # -- at the end of an epoch ------------------------------------------------------------------------------

    @property
    def has_gradient(self) -> bool:
        return any(watched.gradient is not None for watched in self._watched.values())

    @torch.no_grad()
    def read(self, seeds: Mapping[str, str], host_params: int, *, loss_scale: float) -> Measured:
        """Everything that the epoch's last watched batch showed. `seeds` are the prefixes of the parameters'
        names of each slot with a seed. Gradients were multiplied by `loss_scale`."""
        norms = {name: norm.item() / loss_scale for name, norm in self._norms.items()}
        mine = {slot: [n for name, n in norms.items() if name.startswith(p)] for slot, p in seeds.items()}
        theirs = tuple(seeds.values())
        host = (
            [n for name, n in norms.items() if not name.startswith(theirs)] if theirs else [*norms.values()]
        )
        host_norm = sum(n * n for n in host) ** 0.5 if host else None
        sensors = {name: [float("nan")] * len(self.slot_ids) for name in SENSORS}
        for index, slot_id in enumerate(self.slot_ids):
            watched = self._watched.get(slot_id)
            if host_norm is None or watched is None or watched.gradient is None:
                continue
            if watched.features._version != watched.version:
                self._changed_in_place.add(slot_id)
                continue
            for name, value in _sense(slot_id, watched, host_norm, host_params, loss_scale).items():
                sensors[name][index] = value
        return Measured(
            sensors, host_norm, {slot: _health(values) for slot, values in mine.items() if values}
        )

    def next_epoch(self) -> None:
        """Forget the batch, and expect as many as have passed."""
        self._expected = {slot: max(passes - 1, 0) for slot, passes in self._passes.items()}
        self._passes = dict.fromkeys(self.slot_ids, 0)
        self._watched.clear()
        self._norms.clear()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def state(self) -> dict[str, Any]:
        return {"expected": dict(self._expected), "in_place": sorted(self._changed_in_place)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._expected, self._changed_in_place = dict(state["expected"]), set(state["in_place"])


def _sense(
    slot_id: str, watched: _Watched, host_norm: float, host_params: int, loss_scale: float
) -> dict[str, float]:
    assert watched.gradient is not None
    place, probe = watched.place, GrowthProbe()
    probe.keep(slot_id, place.to_seed(watched.features), place.to_seed(watched.gradient))
    view = _OneSlot(Layout(place.is_image), SlotConfig((slot_id,)), host_params)
    norm = torch.tensor([host_norm], device=watched.gradient.device)
    return {name: v.item() for name, v in probe.read(view, norm, loss_scale=loss_scale).named().items()}


def _health(norms: list[float]) -> tuple[float, float, float]:
    """Norm of a seed's gradient, and the shares of its tensors that vanish and explode."""
    total = sum(n * n for n in norms) ** 0.5
    vanishing = sum(n < VANISHING for n in norms) / len(norms)
    return total, vanishing, sum(not n <= EXPLODING for n in norms) / len(norms)
