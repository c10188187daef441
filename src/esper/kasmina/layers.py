"""Layers that carry a population: P independent networks in one fused graph.

Parameters are `[P, …]`. Activations carry lanes; a lane is one copy of one row's network. Images are `[B,
L·C, H, W]` in channels_last (memory order B, H, W, L, C), everything else is `[L, B, …]`. A layer never mixes
lanes: what happens in one cannot reach another, NaN included. In float32 on a CPU with one thread a lane's
results are also the same bits for any number and order of lanes that is a multiple of `LANE_MULTIPLE`
(tests/kasmina/test_layers.py and test_company.py).

B batch, L lanes, P rows of the population, C channels, T tokens, D features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import movement
from esper.kasmina.movement import Places
from esper.leyline import PopulationError

LANE_MULTIPLE = 8
"""Populations above one row, and lists of lanes in them, are multiples of this. Vectorised kernels then treat
a lane the same at any position and beside any neighbours; with other lane counts some do not."""
ALIGNMENT = 4
"""Numbers that one lane of a batched matrix product must be a multiple of: the kernel of a lane depends on
whether its memory is aligned."""


class Mode(Enum):
    """TRAIN: parameters learn, batch statistics are used and recorded. SHADOW: batch statistics are used,
    nothing is recorded, parameters are constants. EVAL: recorded statistics, nothing changes."""

    TRAIN = 0
    SHADOW = 1
    EVAL = 2


@dataclass(frozen=True, slots=True)
class Lanes:
    """Which row each lane belongs to, and how the pass runs. `rows` None means lane i is row i. The last
    `padding` lanes repeat another lane: they fill the list up and record nothing."""

    count: int
    mode: Mode
    rows: Tensor | None = None
    padding: int = 0


def check_population(population: int) -> int:
    if population != 1 and (population < 1 or population % LANE_MULTIPLE):
        raise PopulationError(f"population is {population}; allowed: 1 or a multiple of {LANE_MULTIPLE}")
    return population


def pick(parameter: Tensor, lanes: Lanes) -> Tensor:
    """The parameter's rows as the lanes need them: `[L, …]`."""
    if lanes.mode is Mode.SHADOW:
        parameter = parameter.detach()
    return parameter if lanes.rows is None else parameter.index_select(0, lanes.rows)


# -- sums over pixels ----------------------------------------------------------------------------------------
#
# `sum` and `mean` over the outer axes of a channels_last tensor add up in an order that depends on how many
# channels lie side by side, so on the number of lanes. Pooling adds pixel after pixel in any case.


def pool_pixels(x: Tensor, lanes: Lanes) -> Tensor:
    """Mean over the pixels: `[B, L·C, H, W]` → `[B, L·C, 1, 1]`."""
    return x.mean((2, 3), keepdim=True) if lanes.count == 1 else F.avg_pool2d(x, x.shape[2:])


def pool_lanes(x: Tensor, lanes: Lanes) -> Tensor:
    """Mean over the pixels, lanes outermost: `[B, L·C, H, W]` → `[L, B, C]`."""
    if lanes.count == 1:
        return x.mean((2, 3)).unsqueeze(0)
    return pool_pixels(x, lanes).flatten(1).unflatten(1, (lanes.count, -1)).transpose(0, 1)


def scale_channels(x: Tensor, factor: Tensor, lanes: Lanes) -> Tensor:
    """`x` `[B, L·C, H, W]` times a factor for each channel: `[1, L·C, 1, 1]` or `[B, L·C, 1, 1]`."""
    return x * factor if lanes.count == 1 else _ScaleChannels.apply(x, factor)


class _ScaleChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, factor = ctx.saved_tensors
        to_x, to_factor = ctx.needs_input_grad
        return grad * factor if to_x else None, _sum_pixels(grad * x, len(factor)) if to_factor else None


def _sum_pixels(x: Tensor, batch: int) -> Tensor:
    """Sum over the pixels, and over the images too where `batch` is 1: `[B, L·C, H, W]` → `[batch, L·C, 1,
    1]`."""
    x = x.contiguous(memory_format=torch.channels_last)
    sums = F.avg_pool2d(x, x.shape[2:], divisor_override=1)
    if batch == len(sums):
        return sums
    return F.avg_pool2d(sums.permute(2, 1, 0, 3), (len(sums), 1), divisor_override=1)


def settled(x: Tensor, memory: torch.memory_format) -> Tensor:
    """`x`, its gradient in this memory order."""
    return _SettledGradient.apply(x, memory) if x.requires_grad else x


class _SettledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: torch.memory_format) -> Tensor:
        ctx.memory = memory
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.contiguous(memory_format=ctx.memory), None


def batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[L, N, in]`, `[L, out, in]`, `[L, out]` → `[L, N, out]`; every lane's memory is aligned."""
    samples, outputs = x.shape[1], weight.shape[1]
    spare = -outputs % ALIGNMENT if outputs * weight.shape[2] % ALIGNMENT else 0
    if spare:
        weight = F.pad(weight, (0, 0, 0, spare))
        bias = None if bias is None else F.pad(bias, (0, spare))
    if samples % ALIGNMENT:
        x = F.pad(x, (0, 0, 0, -samples % ALIGNMENT))
    x = x.contiguous()
    if bias is None:
        out = torch.bmm(x, weight.transpose(1, 2))
    else:
        out = torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
    # The bias' gradient is a sum, which runs in memory order.
    return settled(out, torch.contiguous_format)[:, :samples, :outputs]


class PopulationLayer(nn.Module):
    """A leaf layer. Subclasses draw one row's initial values and build the plain torch layer of one row."""

    def reset_row(self, row: int, generator: torch.Generator) -> None:
        raise NotImplementedError

    def plain(self, row: int) -> nn.Module:
        raise NotImplementedError

    def row_changed(self) -> None:
        """Called after a row's tensors were written from outside."""

    def _draw_uniform(self, row: int, bound: float, generator: torch.Generator) -> None:
        # Drawn on the CPU, so that a row's initial values do not depend on the device.
        for parameter in self.parameters():
            values = torch.empty(parameter.shape[1:], dtype=torch.float32).uniform_(
                -bound, bound, generator=generator
            )
            with torch.no_grad():
                parameter[row] = values.to(parameter)

    def _draw_normal(self, parameter: Tensor, row: int, std: float, generator: torch.Generator) -> None:
        values = torch.empty(parameter.shape[1:], dtype=torch.float32).normal_(0.0, std, generator=generator)
        with torch.no_grad():
            parameter[row] = values.to(parameter)

    def _fill(self, row: int, **values: float) -> None:
        with torch.no_grad():
            for name, value in values.items():
                getattr(self, name)[row] = value


def seed_row(module: nn.Module, row: int, seed: int) -> None:
    """Draw one row's initial values from its own stream; layers draw in the order in which they were
    declared."""
    generator = torch.Generator().manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, PopulationLayer):
            layer.reset_row(row, generator)


def copy_row(target: nn.Module, source: PopulationLayer, row: int) -> nn.Module:
    """Give a plain layer the values of one row; names agree, so this is all that `plain` needs."""
    own = dict(source.named_parameters(recurse=False)) | dict(source.named_buffers(recurse=False))
    target.to(dtype=next(iter(own.values())).dtype)
    with torch.no_grad():
        for name, tensor in (*target.named_parameters(), *target.named_buffers()):
            if name in own:
                tensor.copy_(own[name][row])
    return target


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


class Conv2d(PopulationLayer):
    """Convolution with same padding: `[B, L·in, H, W]` → `[B, L·out, H, W]`."""

    def __init__(
        self, population: int, inputs: int, outputs: int, kernel: int, *, groups: int = 1, bias: bool = False
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.groups = inputs, outputs, groups
        self.kernel = kernel, kernel  # height, width
        self.weight = _parameter(population, outputs, inputs // groups, *self.kernel)
        self.bias = _parameter(population, outputs) if bias else None

    @property
    def padding(self) -> tuple[int, int]:
        return self.kernel[0] // 2, self.kernel[1] // 2

    def keep_middle_row(self) -> None:
        """Make the kernel 1 high. Call it before any row is drawn."""
        self.kernel = 1, self.kernel[1]
        self.weight = _parameter(*self.weight.shape[:3], *self.kernel)

    def reset_row(self, row: int, generator: torch.Generator) -> None:
        self._draw_uniform(row, 1 / math.sqrt(self.weight[row, 0].numel()), generator)

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        bias = None if self.bias is None else pick(self.bias, lanes).flatten()
        return F.conv2d(
            x, self._kernels(lanes).flatten(0, 1), bias, 1, self.padding, 1, lanes.count * self.groups
        )

    def plain(self, row: int) -> nn.Module:
        layer = nn.Conv2d(
            self.inputs,
            self.outputs,
            self.kernel,
            1,
            self.padding,
            groups=self.groups,
            bias=self.bias is not None,
        )
        return copy_row(layer, self, row)

    def _kernels(self, lanes: Lanes) -> Tensor:
        return pick(self.weight, lanes)


class CrippledConv2d(Conv2d):
    """A convolution whose kernel can be reduced to its centre tap, row by row."""

    def __init__(self, population: int, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__(population, inputs, outputs, kernel)
        self._add_taps()

    def _add_taps(self) -> None:
        # 1 everywhere, or only at the centre tap of a crippled row; multiplied in only while some row is
        # crippled.
        self.register_buffer("taps", torch.ones(len(self.weight), 1, 1, *self.kernel))
        self.taps: Tensor
        self.crippled = False

    def keep_middle_row(self) -> None:
        super().keep_middle_row()
        self._add_taps()

    def reset_row(self, row: int, generator: torch.Generator) -> None:
        super().reset_row(row, generator)
        self.set_centre_tap(row, only=False)

    def set_centre_tap(self, row: int, *, only: bool) -> None:
        """Reduce the row's kernel to its centre tap, or give it its whole kernel back."""
        self.taps[row] = 0.0 if only else 1.0
        self.taps[row, :, :, self.padding[0], self.padding[1]] = 1.0
        self.row_changed()

    def row_changed(self) -> None:
        self.crippled = not bool(self.taps.all())

    def _kernels(self, lanes: Lanes) -> Tensor:
        kernels = pick(self.weight, lanes)
        return kernels * pick(self.taps, lanes) if self.crippled else kernels

    def plain(self, row: int) -> nn.Module:
        layer = super().plain(row)
        assert isinstance(layer, nn.Conv2d)
        with torch.no_grad():
            layer.weight.mul_(self.taps[row].to(layer.weight))
        return layer


def flatten_kernels(module: nn.Module) -> None:
    """Make every kernel of a new module 1 high, for images of height 1: the other rows of a kernel would see
    nothing but padding."""
    for layer in module.modules():
        if isinstance(layer, Conv2d):
            layer.keep_middle_row()


class Norm(PopulationLayer):
    """Base of all norms: a gain and an offset per channel, 1 and 0 at birth."""

    def __init__(self, population: int, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.weight, self.bias = _parameter(population, channels), _parameter(population, channels)

    def reset_row(self, row: int, generator: torch.Generator) -> None:
        self._fill(row, weight=1.0, bias=0.0)


class BatchNorm2d(Norm):
    """Batch norm; each row has its own batch, so its own statistics."""

    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        self.register_buffer("running_mean", torch.zeros(population, channels))
        self.register_buffer("running_var", torch.ones(population, channels))
        self.running_mean: Tensor
        self.running_var: Tensor

    def reset_row(self, row: int, generator: torch.Generator) -> None:
        super().reset_row(row, generator)
        self._fill(row, running_mean=0.0, running_var=1.0)

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        weight, bias = pick(self.weight, lanes).flatten(), pick(self.bias, lanes).flatten()
        if lanes.mode is Mode.SHADOW:
            return F.batch_norm(x, None, None, weight, bias, True)
        mean, var = pick(self.running_mean, lanes), pick(self.running_var, lanes)
        out = F.batch_norm(x, mean.flatten(), var.flatten(), weight, bias, lanes.mode is Mode.TRAIN)
        if lanes.mode is Mode.TRAIN and lanes.rows is not None:
            # `pick` copied the rows, and the statistics were recorded in the copies.
            real = lanes.count - lanes.padding
            self.running_mean.index_copy_(0, lanes.rows[:real], mean[:real])
            self.running_var.index_copy_(0, lanes.rows[:real], var[:real])
        return out

    def plain(self, row: int) -> nn.Module:
        return copy_row(nn.BatchNorm2d(self.channels), self, row)


def group_count(channels: int) -> int:
    """Number of groups, each of at least 16 channels. Fewer channels form one group, because a group of one
    channel and one pixel is always 0."""
    return next((g for g in (32, 16, 8, 4, 2) if channels % g == 0 and channels // g >= 16), 1)


class GroupNorm(Norm):
    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        self.groups = group_count(channels)

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        weight, bias = pick(self.weight, lanes).flatten(), pick(self.bias, lanes).flatten()
        if weight.requires_grad and not x.requires_grad:
            # The channels_last backward of torch 2.13 on CPU writes the input's gradient even when none is
            # wanted, and crashes the process. Ask for it, and let it go.
            x = x.detach().requires_grad_()
        return F.group_norm(x, lanes.count * self.groups, weight, bias)

    def plain(self, row: int) -> nn.Module:
        return copy_row(nn.GroupNorm(self.groups, self.channels), self, row)


def _lift(parameter: Tensor, x: Tensor) -> Tensor:
    """`[L, D]` broadcast against `[L, B, …, D]`."""
    return parameter.view(parameter.shape[0], *(1,) * (x.dim() - 2), parameter.shape[1])


class LayerNorm(Norm):
    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        weight, bias = pick(self.weight, lanes), pick(self.bias, lanes)
        if lanes.count == 1:
            return F.layer_norm(x, (self.channels,), weight.squeeze(0), bias.squeeze(0))
        return torch.addcmul(_lift(bias, x), F.layer_norm(x, (self.channels,)), _lift(weight, x))

    def plain(self, row: int) -> nn.Module:
        return copy_row(nn.LayerNorm(self.channels), self, row)


class Linear(PopulationLayer):
    """`[L, B, …, in]` → `[L, B, …, out]`."""

    def __init__(
        self, population: int, inputs: int, outputs: int, *, bias: bool = True, std: float | None = None
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.std = inputs, outputs, std
        self.weight = _parameter(population, outputs, inputs)
        self.bias = _parameter(population, outputs) if bias else None

    def reset_row(self, row: int, generator: torch.Generator) -> None:
        if self.std is None:
            self._draw_uniform(row, 1 / math.sqrt(self.inputs), generator)
        else:
            self._draw_normal(self.weight, row, self.std, generator)
            if self.bias is not None:
                self._fill(row, bias=0.0)

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        weight = pick(self.weight, lanes)
        bias = None if self.bias is None else pick(self.bias, lanes)
        if lanes.count == 1:
            # Views: the gradient of an index would be copied into zeros.
            return F.linear(x, weight.squeeze(0), None if bias is None else bias.squeeze(0))
        out = batched_linear(x.reshape(lanes.count, -1, self.inputs), weight, bias)
        return out.reshape(*x.shape[:-1], self.outputs)

    def plain(self, row: int) -> nn.Module:
        return copy_row(nn.Linear(self.inputs, self.outputs, bias=self.bias is not None), self, row)


class Embedding(PopulationLayer):
    """`[L, B, T]` tokens → `[L, B, T, D]`; `attend` is the tied output projection back to the vocabulary."""

    def __init__(self, population: int, vocabulary: int, features: int, std: float = 0.02) -> None:
        super().__init__()
        self.vocabulary, self.features, self.std = vocabulary, features, std
        self.weight = _parameter(population, vocabulary, features)

    def reset_row(self, row: int, generator: torch.Generator) -> None:
        self._draw_normal(self.weight, row, self.std, generator)

    def forward(self, tokens: Tensor, lanes: Lanes) -> Tensor:
        weight = pick(self.weight, lanes)
        first = torch.arange(lanes.count, device=tokens.device) * self.vocabulary
        offset = first.view(-1, *(1,) * (tokens.dim() - 1))
        return F.embedding(tokens + offset, weight.flatten(0, 1))

    def attend(self, x: Tensor, lanes: Lanes) -> Tensor:
        weight = pick(self.weight, lanes)
        out = batched_linear(x.reshape(lanes.count, -1, self.features), weight, None)
        return out.reshape(*x.shape[:-1], self.vocabulary)

    def plain(self, row: int) -> nn.Module:
        return copy_row(nn.Embedding(self.vocabulary, self.features), self, row)


class PlainScale(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Scale(PopulationLayer):
    """γ: one factor per channel. It is 0 at birth, so a seed starts without effect."""

    def __init__(self, population: int, channels: int, *, image: bool) -> None:
        super().__init__()
        self.channels, self.image = channels, image
        self.weight = _parameter(population, channels)

    def reset_row(self, row: int, generator: torch.Generator) -> None:
        self._fill(row, weight=0.0)

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        weight = pick(self.weight, lanes)
        if self.image:
            return scale_channels(x, weight.reshape(1, -1, 1, 1), lanes)
        return x * _lift(weight, x)

    def plain(self, row: int) -> nn.Module:
        layer = PlainScale((self.channels, 1, 1) if self.image else (self.channels,)).to(
            dtype=self.weight.dtype
        )
        with torch.no_grad():
            layer.weight.copy_(self.weight[row].view(layer.weight.shape))
        return layer


class Attention(nn.Module):
    """Causal self-attention `[L, B, T, D]` → `[L, B, T, D]`. With `distance_bias`, scores fall with distance,
    each head at its own fixed rate, which lets heads specialise in near and far context."""

    def __init__(
        self,
        population: int,
        features: int,
        heads: int,
        *,
        std: float = 0.02,
        out_std: float = 0.02,
        distance_bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.distance_bias = heads, distance_bias
        self.qkv = Linear(population, features, 3 * features, std=std)
        self.proj = Linear(population, features, features, std=out_std)

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        # [L, B, T, 3·D] → three of [L·B, heads, T, D/heads]
        q, k, v = (
            self.qkv(x, lanes)
            .flatten(0, 1)
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        if self.distance_bias:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._bias(x))
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2).view(x.shape), lanes)

    def _bias(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[-2], device=x.device)
        distance = (position.unsqueeze(1) - position).to(x.dtype)
        rate = 2.0 ** (-8.0 * torch.arange(1, self.heads + 1, device=x.device, dtype=x.dtype) / self.heads)
        return torch.where(distance >= 0, -distance * rate.view(-1, 1, 1), -math.inf)


@dataclass(frozen=True, slots=True)
class Layout:
    """How lanes are laid out in activations of one topology, and how to move them."""

    image: bool

    def take(self, x: Tensor, lanes: int, index: Tensor) -> Tensor:
        """The lanes at `index` (repeats allowed), in that order. No gradient passes."""
        return movement.take(x, lanes, Places(index, len(index)), image=self.image)

    def part(self, x: Tensor, lanes: int, places: Sequence[Places]) -> tuple[Tensor, list[Tensor]]:
        """`x` itself and copies of some of its lanes, for `reunite`; with gradients."""
        return movement.part(x, lanes, places, image=self.image)

    def reunite(self, rest: Tensor, lanes: int, places: Sequence[Places], pieces: Sequence[Tensor]) -> Tensor:
        """The lanes of `rest`, those that were taken apart replaced by the pieces; with gradients."""
        return movement.reunite(rest, lanes, places, pieces, image=self.image)

    def line_up(self, pieces: Sequence[tuple[Tensor, int, int]], lanes: int) -> Tensor:
        """Lanes of all pieces side by side, filled up with the first to `lanes`. Pieces are given as
        (activations, number of lanes, number of lanes that count)."""
        axis = 3 if self.image else 0
        cut = []
        for piece, n, count in pieces:
            by_lane = piece.permute(0, 2, 3, 1).unflatten(3, (n, -1)) if self.image else piece
            cut.append(by_lane.narrow(axis, 0, count))
        first = next(part for part in cut if part.shape[axis]).narrow(axis, 0, 1)
        cut += [first] * (lanes - sum(count for *_, count in pieces))
        out = torch.cat(cut, axis)
        return out.flatten(3).permute(0, 3, 1, 2) if self.image else out

    def cat(self, x: Tensor, y: Tensor) -> Tensor:
        """The lanes of both, side by side."""
        return torch.cat([x, y], 1 if self.image else 0)

    def take_real(self, x: Tensor, lanes: int, places: Places) -> Tensor:
        """These lanes, 0 in those that are padding. No gradient passes."""
        return movement.take_real(x, lanes, places, image=self.image)

    def settle(self, x: Tensor) -> Tensor:
        """`x`, its gradient in the same memory order whatever comes after it: sums run in memory order, and a
        lane's must not depend on whether it was moved."""
        return settled(x, torch.channels_last) if self.image else x

    def per_lane(self, values: Tensor, x: Tensor, lanes: int) -> Tensor:
        """One value per lane, shaped to broadcast over its activations."""
        if not self.image:
            return values.view(-1, *(1,) * (x.dim() - 1))
        return values.repeat_interleave(x.shape[1] // lanes).view(1, -1, 1, 1)

    def scale(self, x: Tensor, factor: Tensor, lanes: Lanes) -> Tensor:
        """`x` times a factor that broadcasts over pixels (images) or features."""
        return scale_channels(x, factor, lanes) if self.image else x * factor


IMAGE, SEQUENCE = Layout(image=True), Layout(image=False)
LAYOUTS = {"cnn": IMAGE, "transformer": SEQUENCE, "mlp": SEQUENCE}
