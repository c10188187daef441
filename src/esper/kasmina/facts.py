"""Facts of a host, its slots and the seeds that could grow there: counted and measured, never written down.

B registered blueprints, S slots, N positions, C channels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from esper.kasmina.blueprints import FACTORIES, Blueprint, build_blueprint
from esper.kasmina.flops import SAMPLES, FlopMeter, count_training, countable
from esper.kasmina.hosts import Host
from esper.kasmina.layers import Lanes, Mode, PopulationLayer, Scale, seed_row
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import SeedSlot
from esper.leyline import BlueprintError, Topology, blueprint_ids
from esper.leyline.facts import TRAITS, HostFacts

Floats = npt.NDArray[np.float64]

MAX_SIDE, MAX_CHANNELS = 16, 32
"""Traits are measured at most at this size, where they are cheap to measure and the same. A reach that ends
before the edge there counts as so many positions, one that does not as the whole map."""
DRAWS = 16
"""Random inputs per question: whatever is dead for one of them (a ReLU) is rarely dead for all."""
TOLERANCE = 1e-7
"""Relative to the largest gradient or output, what counts as 0."""

_ONE = Lanes(1, Mode.EVAL)


@dataclass(frozen=True, slots=True)
class SeedFacts:
    """What a seed of one blueprint would be at one slot."""

    params: int
    flops: float
    """Of training on one sample. NaN: unknown."""
    traits: tuple[float, ...]


# -- traits --------------------------------------------------------------------------------------------------


def measure_traits(
    topology: Topology, name: str, channels: int, positions: tuple[int, ...], *, line: bool = False
) -> tuple[float, ...]:
    """The traits of a blueprint, in the order of `TRAITS`, at a slot with these channels and positions: what
    the output of a seed with γ = 1 depends on, by its gradients.

    A norm passes the gradient of an element to that element alone: through its mean and variance every output
    reads every input a little, which would say nothing about the seed."""
    factory: object = FACTORIES.get((topology, name))
    own = channels, positions
    capped = _fewer(channels), tuple(min(side, MAX_SIDE) for side in positions)
    for size in dict.fromkeys([capped, own]):
        try:
            read, *flags = _measure(factory, topology, name, *size, line)
            break
        except (ValueError, RuntimeError):
            if size == own:
                raise  # a blueprint may need its slot's own size, which comes last
    reach = 1.0 if read == max((1, *size[1])) else read / max((1, *positions))
    return reach, *flags


def _fewer(channels: int) -> int:
    """Halved until it is small, because blueprints may need a number that divides well."""
    while channels > MAX_CHANNELS and channels % 2 == 0:
        channels //= 2
    return channels


@cache
def _measure(
    factory: object, topology: Topology, name: str, channels: int, positions: tuple[int, ...], line: bool
) -> tuple[float, ...]:
    """Number of positions read along the longest side, and the other traits. `factory` is part of the key: a
    name may be registered anew."""
    del factory
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        bank = build_blueprint(topology, name, 1, channels, line=line, positions=positions)
    seed_row(bank, 0, 0)
    with torch.no_grad():
        for parameter in bank.parameters():  # a layer that starts at 0 reads nothing yet
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        for module in bank.modules():
            if isinstance(module, Scale):
                module.weight.fill_(1.0)
    run = _Run(bank, topology, channels, positions, generator)
    with sdpa_kernel(SDPBackend.MATH):
        reads, elsewhere = run.positions()
        return reads, float(elsewhere), float(run.channels_mixed()), float(run.multiplies())


class _Run:
    """One seed on random inputs `[B, C, N]`."""

    def __init__(
        self,
        bank: Blueprint,
        topology: Topology,
        channels: int,
        positions: tuple[int, ...],
        generator: torch.Generator,
    ) -> None:
        self.bank, self.topology, self.channels, self.generator = bank, topology, channels, generator
        self.shape = positions or (1,)
        self.axis = self.shape.index(max(self.shape))

    def _inputs(self, batch: int) -> Tensor:
        return torch.randn(batch, self.channels, math.prod(self.shape), generator=self.generator)

    def _output(self, x: Tensor) -> Tensor:
        if self.topology == "cnn":
            return self.bank(x.unflatten(2, self.shape), _ONE).flatten(2)
        features = x.transpose(1, 2) if self.topology == "transformer" else x.squeeze(2)
        out = self.bank(features.unsqueeze(0), _ONE).squeeze(0)
        return out.transpose(1, 2) if self.topology == "transformer" else out.unsqueeze(2)

    def _spot(self, place: int) -> int:
        """Index of the position with this place along the longest side, in the middle of the others."""
        index = [side // 2 for side in self.shape]
        index[self.axis] = place
        return int(np.ravel_multi_index(index, self.shape))

    def _read(self, spots: list[int], channels: list[int] | None = None) -> Tensor:
        """[len(spots), C, N]: whether the output at this position reads an input, in any of the draws; the
        output of this channel if `channels` are given."""
        x = self._inputs(DRAWS * len(spots)).requires_grad_()
        with _FixedStatistics():
            out = self._output(x)
        wanted = torch.zeros_like(out)
        for sample, spot in enumerate(spots * DRAWS):
            chosen = slice(None) if channels is None else channels[sample % len(spots)]
            wanted[sample, chosen, spot] = 1.0
        if not out.requires_grad:
            return torch.zeros(len(spots), *x.shape[1:], dtype=torch.bool)
        # Random signs, so that channels do not cancel each other.
        weights = wanted * torch.randn(wanted.shape, generator=self.generator)
        gradient = torch.autograd.grad((out * weights).sum(), x)[0].abs()
        read = gradient > TOLERANCE * gradient.max()
        return read.unflatten(0, (DRAWS, len(spots))).any(0)

    def positions(self) -> tuple[int, bool]:
        """How many positions along the longest side the output reads, where it reads most; and whether it
        reads any position but its own."""
        side = self.shape[self.axis]
        spots = [self._spot(place) for place in sorted({0, side // 2, side - 1})]
        read = self._read(spots).any(1)
        others = read.clone()
        for row, spot in enumerate(spots):
            others[row, spot] = False
        along = read.unflatten(1, self.shape).movedim(1 + self.axis, 1)
        count = along.reshape(len(spots), side, -1).any(2).sum(1)
        return int(count.max()), bool(others.any())

    def channels_mixed(self) -> bool:
        """Whether an output channel reads another channel of its own position."""
        channels = sorted({0, self.channels // 3, self.channels // 2, self.channels - 1})
        spot = self._spot(self.shape[self.axis] // 2)
        read = self._read([spot] * len(channels), channels)[:, :, spot]
        for row, channel in enumerate(channels):
            read[row, channel] = False
        return bool(read.any())

    @torch.no_grad()
    def multiplies(self) -> bool:
        """Whether the output is 0 wherever the input is, and not everywhere."""
        x = self._inputs(DRAWS)
        silent = torch.rand(x.shape, generator=self.generator) < 0.5
        out = self._output(x.masked_fill(silent, 0.0)).abs()
        return bool(out.max() > 0 and (out[silent] <= TOLERANCE * out.max()).all())


_NORMS: tuple[Callable[..., Any], ...] = (
    F.group_norm,
    F.layer_norm,
    F.instance_norm,
    F.rms_norm,
    F.batch_norm,
    torch.group_norm,
    torch.layer_norm,
    torch.instance_norm,
    torch.rms_norm,
    torch.batch_norm,
)


class _FixedStatistics(TorchFunctionMode):
    """Mean and variance of norms are constants for the gradient."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _NORMS:
            return out
        x = args[0] if args else (kwargs or {})["input"]
        # Only which elements are read matters here, and any factor but 1 will do: a norm minus its input must
        # not cancel.
        return out.detach() + 0.5 * (x - x.detach())


# -- costs ---------------------------------------------------------------------------------------------------


def seed_facts(
    topology: Topology, name: str, channels: int, positions: tuple[int, ...] | None, *, line: bool = False
) -> SeedFacts | None:
    """Costs and traits of a blueprint at a slot with these channels and positions; None where it cannot
    grow. noop grows nowhere. Where positions are unknown, FLOPs are NaN and traits those at `MAX_SIDE`."""
    if (topology, name) not in FACTORIES or name == "noop":
        return None
    factory: object = FACTORIES[topology, name]
    return _seed_facts(factory, topology, name, channels, positions, line)


@cache
def _seed_facts(
    factory: object,
    topology: Topology,
    name: str,
    channels: int,
    positions: tuple[int, ...] | None,
    line: bool,
) -> SeedFacts | None:
    del factory
    build = partial(build_blueprint, topology, name, 1, channels, line=line, positions=positions)
    sizes = positions or ()
    shape = (SAMPLES, channels, *sizes) if topology == "cnn" else (1, SAMPLES, *sizes, channels)
    try:
        bank, x = countable(build, torch.empty(shape, device="meta"))
    except BlueprintError:
        return None
    if positions is None:
        flops = math.nan
        positions = {"cnn": (1 if line else MAX_SIDE, MAX_SIDE), "transformer": (MAX_SIDE,), "mlp": ()}[
            topology
        ]
    else:
        flops = float(count_training(bank, x))
    traits = measure_traits(topology, name, channels, positions, line=line)
    return SeedFacts(sum(p.numel() for p in bank.parameters()), flops, traits)


def seed_tables(slots: Sequence[SeedSlot]) -> tuple[Floats, Floats, Floats]:
    """`HostFacts.seed_params`, `seed_flops` and `traits` of these slots."""
    names = blueprint_ids()
    params, flops = np.full((2, len(slots), len(names)), np.nan)
    traits = np.full((len(slots), len(names), len(TRAITS)), np.nan)
    for s, slot in enumerate(slots):
        for b, name in enumerate(names):
            facts = seed_facts(slot.topology, name, slot.channels, slot.positions, line=slot.line)
            if facts is not None:
                params[s, b], flops[s, b], traits[s, b] = facts.params, facts.flops, facts.traits
    return params, flops, traits


def relative_widths(slots: Sequence[SeedSlot]) -> Floats:
    """Channels of each slot over those of the widest."""
    channels = np.array([slot.channels for slot in slots], dtype=np.float64)
    return channels / channels.max()


# -- hosts ---------------------------------------------------------------------------------------------------


def host_facts(model: MorphogeneticModel, *, classes: int | None, val_samples: int | None) -> HostFacts:
    """Facts of a task's host. Only its architecture matters, so they are measured once for each."""
    topology = model.host.topology
    factories = tuple(FACTORIES.get((topology, name)) for name in blueprint_ids())
    key = (type(model.host), repr(sorted(model.host.spec().items())), model.slot_config.slot_ids, factories)
    if key not in _KNOWN:
        _KNOWN[key] = _measured(model)
    return replace(_KNOWN[key], classes=classes, val_samples=val_samples)


_KNOWN: dict[tuple[object, ...], HostFacts] = {}


def _measured(model: MorphogeneticModel) -> HostFacts:
    host = model.host
    slots = [model.slot(slot_id) for slot_id in model.slot_config.slot_ids]
    order = host.execution_order()
    segments = [order.index(slot.slot_id) + 1 for slot in slots]
    """Number of those before each slot."""
    flops, params = FlopMeter(model).training, _segment_params(host)
    seed_params, seed_flops, traits = seed_tables(slots)
    first = {"cnn": 2, "transformer": 1, "mlp": 2}[host.topology]
    whole = math.prod(host.example_input(1).shape[first:])
    facts = HostFacts(
        classes=None,
        val_samples=None,
        params=model.host_params,
        flops=float(sum(flops)),
        depth=np.array(model.slot_depths),
        width=relative_widths(slots),
        resolution=np.array([math.prod(slot.positions or ()) / whole for slot in slots]),
        params_before=np.array([sum(params[:n]) / sum(params) for n in segments]),
        flops_before=np.array([sum(flops[:n]) / sum(flops) for n in segments]),
        seed_params=seed_params,
        seed_flops=seed_flops,
        traits=traits,
    )
    for array in (getattr(facts, field.name) for field in fields(facts)):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False  # shared by all runs of the process
    return facts


def _segment_params(host: Host) -> list[int]:
    """Parameters of one host by the segment that uses them first."""
    host = copy.deepcopy(host).to("meta")
    rows = None if host.population == 1 else torch.zeros(1, dtype=torch.int64, device="meta")
    lanes = Lanes(1, Mode.EVAL, rows)
    x = host.example_input(2).to("meta")
    if host.topology != "cnn":
        x = x.unsqueeze(0)
    left = {
        layer: sum(p[0].numel() for p in layer.parameters())
        for layer in host.modules()
        if isinstance(layer, PopulationLayer)
    }
    used: list[Any] = []
    for layer in left:
        layer.register_forward_pre_hook(lambda layer, _: used.append(layer))
    counts = []
    with torch.no_grad():
        for index in range(len(host.execution_order()) + 1):
            used.clear()
            x = host.segment(index, x, lanes)
            counts.append(sum(left.pop(layer, 0) for layer in used))
    return counts
