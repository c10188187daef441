"""Training FLOPs of a growing network, as torch counts them on the meta device, where nothing is computed.

Convolutions and matrix products count, two FLOPs for each multiply-add. Norms, activations, pooling, the
optimizer and the policy count as 0. Every module is counted forward and backward, because a training step is
not three forward passes everywhere: nothing needs the gradient of the data, incubating seeds read features
that are constants for them, and the frozen network behind them needs no gradients of its weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.blueprints import FACTORIES, ModuleSeed
from esper.kasmina.layers import Lanes, Mode, seed_row
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.seed import GATE_BANK
from esper.leyline import BLENDED_STAGES, AlphaAlgorithm, Incubation, SeedStage, SeedStateReport

SAMPLES = 4
"""Samples of a counted batch. Batch norms need two, and multiples of four need no padding."""
SENSOR_TAPS = 9
"""Taps of the zero layer whose gradient the sensors measure at a slot of a CNN."""

Run = Callable[[Tensor, Lanes], Tensor]
_COUNTED: dict[object, Cost] = {}
"""Costs of seeds by factory and place: a count takes longer than a training step, and worlds share many."""


class Cost(NamedTuple):
    """FLOPs of one module on one sample."""

    forward: int
    training: int
    """Forward pass, and gradients of the weights and of the input."""
    first: int
    """The same without the gradient of the input, which is a constant."""
    frozen: int
    """Forward pass, and the gradient of the input: the weights are constants."""
    learns: bool
    """Whether the output has a gradient when the input is a constant."""

    def plus(self, other: Cost) -> Cost:
        return Cost(
            self.forward + other.forward,
            self.training + other.training,
            self.first + other.first,
            self.frozen + other.frozen,
            self.learns or other.learns,
        )


class FlopMeter:
    """FLOPs per sample of networks with one architecture."""

    def __init__(self, model: MorphogeneticModel) -> None:
        """Only the architecture of `model` matters: its population, weights and seeds do not."""
        self._model = model
        host = copy.deepcopy(model.host).to("meta")
        rows = None if model.population == 1 else torch.zeros(1, dtype=torch.int64, device="meta")
        x = host.example_input(SAMPLES).to("meta")
        if not model.layout.image:
            x = x.unsqueeze(0)
        self._order = host.execution_order()
        self._hosts: list[Cost] = []
        self._features: dict[str, Tensor] = {}
        for index, slot_id in enumerate((*self._order, "")):
            cost, x = count(partial(host.segment, index), x, rows)
            self._hosts.append(cost)
            self._features[slot_id] = x
        self.segments = [cost.forward for cost in self._hosts]
        """Forward FLOPs of the host between slots, in execution order."""
        self.training = [self._hosts[0].first, *(cost.training for cost in self._hosts[1:])]
        """The same for training: the data need no gradient."""
        self.bank = cache(self._count_bank)

    def _count_bank(self, slot_id: str, bank: str) -> Cost:
        """FLOPs of one seed, or of the gate beside it."""
        slot, x = self._model.slot(slot_id), self._features[slot_id]
        place = slot.topology, slot.channels, slot.line, slot.positions
        key = FACTORIES.get((slot.topology, bank)), bank, place, tuple(x.shape)
        if key not in _COUNTED:
            _COUNTED[key] = count(*countable(partial(slot.build_bank, bank, 1), x))[0]
        return _COUNTED[key]

    def _seed(self, slot_id: str, report: SeedStateReport) -> Cost:
        seed = self.bank(slot_id, report.blueprint_id)
        if report.alpha_algorithm is not AlphaAlgorithm.GATE:
            return seed
        return seed.plus(self.bank(slot_id, GATE_BANK))

    def _blended(self, reports: Mapping[str, SeedStateReport]) -> dict[str, Cost]:
        """The seeds that change the output, by slot."""
        return {
            slot_id: self._seed(slot_id, report)
            for slot_id, report in reports.items()
            if report.stage in BLENDED_STAGES and report.alpha > 0.0
        }

    def per_sample(self, reports: Mapping[str, SeedStateReport]) -> int:
        """Training a network with these seeds on one sample: host, blended seeds and incubation."""
        blended = self._blended(reports)
        total = sum(self.training) + sum(cost.training for cost in blended.values())
        for slot_id, report in reports.items():
            if report.stage is not SeedStage.TRAINING:
                continue
            seed = self._seed(slot_id, report)
            total += seed.first
            if self._model.incubation is Incubation.SHADOW:
                behind = self._behind(slot_id, blended)
                total += sum(cost.frozen if seed.learns else cost.forward for cost in behind)
        return total

    def _behind(self, slot_id: str, blended: Mapping[str, Cost]) -> list[Cost]:
        """All that the features of a seed in this slot still pass."""
        at = self._order.index(slot_id) + 1
        return [*self._hosts[at:], *(blended[other] for other in self._order[at:] if other in blended)]

    def forward(self, reports: Mapping[str, SeedStateReport]) -> int:
        """One validation pass of a network with these seeds, on one sample."""
        return sum(self.segments) + sum(cost.forward for cost in self._blended(reports).values())

    def coalitions(self, reports: Mapping[str, SeedStateReport], wanted: Collection[frozenset[str]]) -> int:
        """Evaluating these coalitions on one sample: each distinct prefix once, as in `evaluate_coalitions`.
        All blended seeds as the only coalition cost what `forward` says."""
        blended = self._blended(reports)
        total = 0
        for index, cost in enumerate(self._hosts):
            total += len(_prefixes(wanted, self._order[:index])) * cost.forward
        for index, slot_id in enumerate(self._order):
            if slot_id in blended:
                on = [coalition for coalition in wanted if slot_id in coalition]
                total += len(_prefixes(on, self._order[:index])) * blended[slot_id].forward
        return total

    def bound(
        self,
        reports: Mapping[str, SeedStateReport],
        blueprints: Collection[str],
        coalitions: Callable[[int], int],
    ) -> tuple[int, int]:
        """Upper bounds per sample for a network that plants one more seed of these blueprints in whatever
        slot is empty: of `per_sample`, and of evaluating as many coalitions as `coalitions` says of a number
        of seeds. They hold whatever the stages of all seeds will be."""
        present = {slot_id: self._seed(slot_id, report) for slot_id, report in reports.items()}
        empty = [slot_id for slot_id in self._model.seed_slots if slot_id not in present]
        futures = [present | {slot_id: self._dearest(slot_id, blueprints)} for slot_id in empty] or [present]
        return (
            max(self._most_training(seeds) for seeds in futures),
            max(self._most_evaluation(seeds, coalitions(len(seeds))) for seeds in futures),
        )

    def _dearest(self, slot_id: str, blueprints: Collection[str]) -> Cost:
        gate = self.bank(slot_id, GATE_BANK)
        costs = [self.bank(slot_id, name).plus(gate) for name in blueprints]
        return Cost(*(max(values) for values in zip(*costs, strict=True)))

    def _most_training(self, seeds: Mapping[str, Cost]) -> int:
        """With every seed in its dearest stage: blended, or incubating in front of all others."""
        total = sum(self.training)
        for slot_id, seed in seeds.items():
            behind = sum(max(cost.frozen, cost.forward) for cost in self._behind(slot_id, seeds))
            total += max(seed.training, seed.first + behind)
        return total

    def _most_evaluation(self, seeds: Mapping[str, Cost], coalitions: int) -> int:
        """With all seeds blended. Every seed that is passed doubles the prefixes, up to one per coalition."""
        total, prefixes = self._hosts[0].forward, 1
        for slot_id, behind in zip(self._order, self._hosts[1:], strict=True):
            if slot_id in seeds:
                total += prefixes * seeds[slot_id].forward
                prefixes = min(2 * prefixes, coalitions)
            total += prefixes * behind.forward
        return total

    def sensors(self) -> int:
        """Measuring the growth sensors of all slots on one sample: at each, the gradient of a zero layer's
        weight and the covariance of the channels. They run on one batch per epoch. On small images their
        code multiplies more pairs of pixels than these, because that takes less time."""
        taps = SENSOR_TAPS if self._model.layout.image else 1
        total = 0
        for slot_id in self._model.seed_slots:
            features = self._features[slot_id]
            channels = features.shape[1 if self._model.layout.image else -1]
            total += 2 * (taps + 1) * channels * features.numel() // SAMPLES
        return total


def _prefixes(coalitions: Collection[frozenset[str]], passed: Sequence[str]) -> set[frozenset[str]]:
    return {coalition & frozenset(passed) for coalition in coalitions}


@torch.enable_grad()
def count(run: Run, x: Tensor, rows: Tensor | None = None) -> tuple[Cost, Tensor]:
    """FLOPs per sample of a module on a batch of `SAMPLES`, and its output."""
    with torch.no_grad():
        forward, _ = _count_step(run, x, Lanes(1, Mode.EVAL, rows), to_input=False)
    training, _ = _count_step(run, x, Lanes(1, Mode.TRAIN, rows), to_input=True)
    first, out = _count_step(run, x, Lanes(1, Mode.TRAIN, rows), to_input=False)
    frozen, _ = _count_step(run, x, Lanes(1, Mode.SHADOW, rows), to_input=True)
    return Cost(forward, training, first, frozen, out.requires_grad), out.detach()


def countable(build: Callable[[], nn.Module], x: Tensor) -> tuple[nn.Module, Tensor]:
    """A bank and its input as they can be counted: on the meta device. Code in ordinary torch may look at
    values, so it gets real ones."""
    with torch.device("meta"):
        bank = build()
    if not isinstance(bank, ModuleSeed):
        return bank, x
    with torch.device("cpu"):
        bank = build()
    seed_row(bank, 0, 0)
    return bank, torch.randn(x.shape, generator=torch.Generator().manual_seed(0), device="cpu")


@torch.enable_grad()
def count_training(run: Run, x: Tensor) -> int:
    """`Cost.training` alone."""
    return _count_step(run, x, Lanes(1, Mode.TRAIN), to_input=True)[0]


def _count_step(run: Run, x: Tensor, lanes: Lanes, *, to_input: bool) -> tuple[int, Tensor]:
    """FLOPs of a forward and, where anything has a gradient, a backward pass. The fused attention kernel of
    the CPU is not counted by torch, so attention runs as plain matrix products here."""
    x = x.detach().requires_grad_(to_input and x.is_floating_point())
    formulas = {torch.ops.aten.convolution_backward: _conv_backward}
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with sdpa_kernel(SDPBackend.MATH), counter:
        out = run(x, lanes)
        if out.requires_grad:
            out.sum().backward()
    return counter.get_total_flops() // SAMPLES, out


def _conv_backward(
    grad_out: Sequence[int],
    x: Sequence[int],
    weight: Sequence[int],
    _bias: object,
    _stride: object,
    _padding: object,
    _dilation: object,
    transposed: bool,
    _output_padding: object,
    _groups: int,
    wanted: Sequence[bool],
    **_: object,
) -> int:
    """FLOPs of a convolution's backward pass from the shapes: each of the gradients of input and weight costs
    what the forward pass costs. Torch's own formula for the weight ignores groups, so it would count a
    depthwise convolution as often as it has channels."""
    one = 2 * math.prod(x if transposed else grad_out) * math.prod(weight[1:])
    return one * (wanted[0] + wanted[1])
