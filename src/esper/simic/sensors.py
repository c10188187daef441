"""Sensors: where would growth help? Measured for every slot of every network, dormant slots included, on one
batch.

A zero-initialised layer beside the slot would change nothing and still receive a gradient. The size of that
gradient says how much a new seed could do there at once (as in GradMax and expressivity-bottleneck methods).
The number of independent channels that reach the slot says what the layers before it can express. Users add
sensors of their own with `register_sensor`. Sensors are control input: they are measured at every telemetry
level and change nothing that training uses.

P rows, B batch, C channels or features, S slots, N samples times positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from esper.kasmina.layers import Layout
from esper.leyline import SlotConfig
from esper.leyline.errors import EsperError, unknown_name
from esper.tamiyo.columns import Feature, Normaliser
from esper.tamiyo.features import BASE, QUOTE, SLOT, sensor_feature
from esper.tamiyo.inputs import SENSORS

KERNEL = 3
CENTRE = KERNEL * KERNEL // 2
SMALL_MAP = 4
"""Up to this many pixels, a product of all pairs of pixels is several times as fast as the convolution's own
backward."""


SensorFunction = Callable[[Tensor, Tensor], Tensor]
"""(features [P, C, N], gradient [P, C, N]) → [P], at one slot. `features` reach the slot, `gradient` is the
loss's with respect to the slot's output. Row p of the result may depend on row p of the inputs only."""


@dataclass(frozen=True, slots=True)
class Sensor:
    """A registered sensor: what it computes, and how a policy sees it."""

    name: str
    function: SensorFunction
    feature: Feature


_REGISTERED: dict[str, Sensor] = {}


def register_sensor(name: str, function: SensorFunction, *, meaning: str, normaliser: Normaliser) -> Sensor:
    """Make a sensor available by name. It enters the observation of runs whose config names it in `sensors`,
    as one more feature of each slot, normalised, with a validity bit that is 0 where the result is not
    finite. `meaning` is one line of documentation."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise EsperError(f"sensor name {name!r}; allowed: lower-case letters, digits and _")
    if name in _REGISTERED or name in {feature.name for feature in (*BASE, *SLOT, *QUOTE)} | {*SENSORS}:
        raise EsperError(f"sensor {name!r} is already registered or a built-in feature; choose another name")
    if not callable(function):
        raise EsperError(f"sensor {name!r}: function is {function!r}, must be callable")
    if not isinstance(normaliser, Normaliser):
        raise EsperError(f"sensor {name!r}: normaliser is {normaliser!r}, must be a Normaliser")
    sensor = Sensor(name, function, sensor_feature(name, meaning, normaliser))
    _REGISTERED[name] = sensor
    return sensor


def registered_sensors(names: Sequence[str]) -> tuple[Sensor, ...]:
    """The registered sensors of these names, in this order."""
    if len(set(names)) < len(names):
        raise EsperError(f"sensors {', '.join(names)}: a name is given twice")
    for name in names:
        if name not in _REGISTERED:
            raise unknown_name("sensor", name, _REGISTERED)
    return tuple(_REGISTERED[name] for name in names)


class SensedNetwork(Protocol):
    """The part of a network that sensors look at."""

    @property
    def population(self) -> int: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def slot_config(self) -> SlotConfig: ...
    @property
    def host_params(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SensedLanes:
    """The lanes of a pass that not all rows of a population take part in."""

    population: int
    """Number of the lanes."""
    layout: Layout
    slot_config: SlotConfig
    host_params: int


@dataclass(frozen=True, slots=True)
class GrowthSensors:
    """Slots in the order of the model's `slot_config`. On the device. NaN where a network's own numbers are
    not finite and where a ratio has no denominator."""

    boundary_norm: Tensor
    """[P, S] ‖∂L/∂h‖ at the slot's output."""
    growth_score: Tensor
    """[P, S] gradient of the zero layer per √parameter, over the host's."""
    feature_rank: Tensor
    """[P, S] ln(effective number of independent channels that reach the slot) / ln(channels)."""
    tap_ratio: Tensor | None
    """[P, S] off-centre to centre taps of the zero layer's gradient, per tap. None without convolutions."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """[P, S] of each registered sensor that was asked for."""

    def named(self) -> dict[str, Tensor]:
        """Every measured sensor by name, [P, S] each."""
        built_in = {name: getattr(self, name) for name in SENSORS}
        return {name: values for name, values in built_in.items() if values is not None} | self.extra


class GrowthProbe:
    """Passed to `model.losses`, it lets the training step itself measure: it keeps the features that reach
    every slot and the gradient that comes back, and changes no bit of the step. Read it after backward, then
    discard it."""

    def __init__(self, extra: Sequence[Sensor] = ()) -> None:
        self._extra = extra
        self._features: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}

    def __call__(self, slot_id: str, before: Tensor, after: Tensor) -> Tensor:
        after = after if after.requires_grad else after.detach().requires_grad_()
        # Keeps the gradient itself: `retain_grad` would copy it, and in another memory order.
        after.register_hook(partial(self._gradients.__setitem__, slot_id))
        self._features[slot_id] = before.detach()
        return after

    def keep(self, slot_id: str, features: Tensor, gradient: Tensor) -> None:
        """Take what the caller measured itself, for networks that the probe cannot be passed through."""
        self._features[slot_id], self._gradients[slot_id] = features, gradient

    @torch.no_grad()
    def read(self, model: SensedNetwork, host_norm: Tensor, *, loss_scale: float = 1.0) -> GrowthSensors:
        """Sensors of all slots of all rows, in full precision. `host_norm` [P] is the norm of each host's
        gradient on the same batch (`optimizer.stats.host_norm`); the loss was multiplied by `loss_scale`
        before backward."""
        slots = model.slot_config.slot_ids
        for slot_id in slots:
            if slot_id not in self._gradients:
                raise EsperError(
                    f"slot {slot_id}: no gradient has come back yet; call backward on the losses first"
                )
        features = {s: _precise(self._features[s]) for s in slots}
        gradients = {s: _precise(self._gradients[s]) / loss_scale for s in slots}
        norms, taps = zip(*(_sense(model, features[s], gradients[s]) for s in slots), strict=True)
        ranks = [_effective_rank(model, features[s]) for s in slots]
        tap = torch.stack(taps, 1)  # [P, S, taps]
        host_rms = (host_norm / model.host_params**0.5).unsqueeze(1)
        score = torch.linalg.vector_norm(tap, dim=2) / (tap.shape[2] ** 0.5 * host_rms)
        ratio = None
        if model.layout.image:
            around = torch.linalg.vector_norm(
                torch.cat([tap[..., :CENTRE], tap[..., CENTRE + 1 :]], 2), dim=2
            )
            ratio = around / (tap.shape[2] - 1) ** 0.5 / tap[..., CENTRE]
        extra = {
            sensor.name: torch.stack(
                [
                    _measure(model, sensor, slot_id, features[slot_id], gradients[slot_id])
                    for slot_id in slots
                ],
                1,
            )
            for sensor in self._extra
        }
        return GrowthSensors(torch.stack(norms, 1), score, torch.stack(ranks, 1), ratio, extra)


def _measure(
    model: SensedNetwork, sensor: Sensor, slot_id: str, features: Tensor, gradient: Tensor
) -> Tensor:
    """[P] a registered sensor at one slot."""
    values = sensor.function(_by_channel(model, features), _by_channel(model, gradient))
    if not isinstance(values, Tensor) or values.shape != (model.population,):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise EsperError(
            f"sensor {sensor.name!r} at slot {slot_id}: the result is {shape}, "
            f"must be a tensor of shape ({model.population},)"
        )
    return values.to(features)


def _sense(model: SensedNetwork, features: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """At one slot: the norm of the gradient [P], and the norm of each tap of the zero layer's gradient per
    channel [P, taps].

    The zero layer itself is never run: its output is 0, and the gradient of its weight needs only its input
    and the gradient of its output."""
    rows = model.population
    if model.layout.image:
        channels = features.shape[1] // rows
        weight = _conv_gradient(features, gradient, rows, channels).unflatten(0, (rows, channels))
        norm = torch.linalg.vector_norm(_by_channel(model, gradient), dim=(1, 2))
        return norm, torch.linalg.vector_norm(weight, dim=(1, 2)).flatten(1) / channels
    channels = features.shape[-1]
    flat_features, flat_gradient = features.reshape(rows, -1, channels), gradient.reshape(rows, -1, channels)
    weight = torch.bmm(flat_gradient.transpose(1, 2), flat_features)
    return (
        torch.linalg.vector_norm(flat_gradient, dim=(1, 2)),
        torch.linalg.vector_norm(weight, dim=(1, 2)).unsqueeze(1) / channels,
    )


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _by_channel(model: SensedNetwork, x: Tensor) -> Tensor:
    """[P, C, N] with a row's numbers adjacent in memory, so that sums do not depend on the population."""
    if model.layout.image:
        return x.permute(1, 0, 2, 3).reshape(model.population, -1, x[:, 0].numel()).contiguous()
    return x.reshape(model.population, -1, x.shape[-1]).transpose(1, 2).contiguous()


def _effective_rank(model: SensedNetwork, features: Tensor) -> Tensor:
    """[P] ln((Σ eigenvalues)² / Σ eigenvalues²) of the channels' covariance over ln C: 1 if all channels vary
    equally and independently, 0 if they are all proportional. A share of channels would fall as a host gets
    wider. One channel has full rank. NaN if nothing varies."""
    samples = _by_channel(model, features)
    centred = samples - samples.mean(2, keepdim=True)
    covariance = torch.bmm(centred, centred.transpose(1, 2))
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1)
    number = 1 / (covariance / trace.view(-1, 1, 1)).square().sum((1, 2))
    return number if samples.shape[1] == 1 else number.log() / math.log(samples.shape[1])


def _conv_gradient(before: Tensor, gradient: Tensor, rows: int, channels: int) -> Tensor:
    """Gradient [P·C, C, 3, 3] of the weight of a convolution with P groups."""
    batch, _, height, width = before.shape
    if height * width > SMALL_MAP:
        shape = (rows * channels, channels, KERNEL, KERNEL)
        return conv2d_weight(before, shape, gradient, padding=KERNEL // 2, groups=rows)
    # On few pixels: correlate every pixel with every other, then sum the pairs that one tap connects.
    left, right = (
        x.permute(0, 2, 3, 1).reshape(batch, height * width, rows, channels) for x in (gradient, before)
    )
    pairs = torch.bmm(left.permute(2, 1, 3, 0).flatten(1, 2), right.permute(2, 0, 1, 3).flatten(2))
    pairs = pairs.view(rows, height * width, channels, height * width, channels).permute(0, 2, 4, 1, 3)
    weight = pairs.flatten(3).flatten(0, 2) @ _taps(height, width).to(pairs)
    return weight.view(rows * channels, channels, KERNEL, KERNEL)


@cache
def _taps(height: int, width: int) -> Tensor:
    """[pixels out · pixels in, taps]: 1 where the tap leads from that pixel in to that pixel out."""
    row, column = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    down, right = (x - x.unsqueeze(1) + KERNEL // 2 for x in (row, column))
    inside = (down >= 0) & (down < KERNEL) & (right >= 0) & (right < KERNEL)
    tap = torch.where(inside, down * KERNEL + right, KERNEL * KERNEL)
    return F.one_hot(tap.flatten(), KERNEL * KERNEL + 1)[:, :-1]
