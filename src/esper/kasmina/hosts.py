"""Hosts: backbones cut into segments at their slots. Each carries a population of independent networks.

Segment i leads from boundary i−1 to boundary i in execution order; the last leads to the output `[L, B, …,
classes]`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.layers import (
    Attention,
    BatchNorm2d,
    CrippledConv2d,
    Embedding,
    Lanes,
    LayerNorm,
    Linear,
    check_population,
    flatten_kernels,
    pool_lanes,
)
from esper.leyline import (
    EsperError,
    InjectionSpec,
    PopulationError,
    ShapeError,
    Topology,
    allowed,
    format_slot_id,
)


class Host(nn.Module):
    """Base of all hosts: a population, slots in two orders, and a spec from which to build it again."""

    topology: Topology

    def __init__(self, population: int) -> None:
        super().__init__()
        self.population = check_population(population)

    def injection_specs(self) -> Sequence[InjectionSpec]:
        raise NotImplementedError

    def execution_order(self) -> tuple[str, ...]:
        """Slot ids in the order in which activations pass them."""
        return tuple(spec.slot_id for spec in self.injection_specs())

    def segment(self, index: int, x: Tensor, lanes: Lanes) -> Tensor:
        raise NotImplementedError

    def spec(self) -> dict[str, Any]:
        raise NotImplementedError

    def check_input(self, x: Tensor, networks: int) -> None:
        """Raise unless `x` is input for this number of networks."""
        raise NotImplementedError

    def example_input(self, batch: int = 2) -> Tensor:
        """Zeros of the shape that one row takes, for tracing."""
        raise NotImplementedError


class ConvBlock(nn.Module):
    def __init__(self, population: int, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = CrippledConv2d(population, inputs, outputs, kernel)
        self.norm = BatchNorm2d(population, outputs)

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        return F.relu(self.norm(self.conv(x, lanes), lanes))


class CNNHost(Host):
    """Blocks of convolution, batch norm and ReLU, each twice as wide as the last; then average pooling and a
    classifier.

    Slots: `r0c<i>` after block i, `r1c<i>` after its pooling. Input `[B, L·C, H, W]`, output `[L, B,
    classes]`. Images are square, or with `height` 1 lines: kernels are then 1 high, and pooling halves the
    width only."""

    topology: Topology = "cnn"

    def __init__(
        self,
        population: int = 1,
        *,
        classes: int = 10,
        blocks: int = 3,
        base: int = 32,
        kernel: int = 3,
        pools: int | None = None,
        channels: int = 3,
        size: int = 32,
        height: int | None = None,
    ) -> None:
        super().__init__(population)
        if blocks < 2:
            raise EsperError(f"CNN host: blocks is {blocks}, must be at least 2")
        self.classes, self.base, self.kernel, self.channels, self.size = classes, base, kernel, channels, size
        if height not in (None, 1, size):
            raise EsperError(f"CNN host: height is {height}; allowed: 1, or the size {size}")
        self.line, self.height = height == 1, height or size
        self.pools = blocks if pools is None else pools
        if not 0 <= self.pools <= blocks or size >> self.pools < 1:
            raise EsperError(
                f"CNN host: pools is {self.pools}; allowed: 0 to {min(blocks, size.bit_length() - 1)}"
            )
        widths = [channels, *(base << i for i in range(blocks))]
        self.blocks = nn.ModuleList(ConvBlock(population, a, b, kernel) for a, b in pairwise(widths))
        if self.line:
            flatten_kernels(self.blocks)
        self.head = Linear(population, widths[-1], classes)
        # Segments in execution order: (is a pooling, block).
        self._steps = [
            (pool, i) for i in range(blocks) for pool in (False, True) if not pool or i < self.pools
        ]

    def injection_specs(self) -> tuple[InjectionSpec, ...]:
        specs = []
        for pool, i in self._steps:
            pools = min(i, self.pools) + pool  # so far
            height, width = 1 if self.line else self.size >> pools, self.size >> pools
            slot_id = format_slot_id(int(pool), i)
            specs.append(InjectionSpec(slot_id, self.base << i, self.line, (height, width)))
        return tuple(specs)

    def segment(self, index: int, x: Tensor, lanes: Lanes) -> Tensor:
        if index < len(self._steps):
            pool, block = self._steps[index]
            return F.max_pool2d(x, (1, 2) if self.line else 2) if pool else self.blocks[block](x, lanes)
        return self.head(pool_lanes(x, lanes), lanes)

    def set_centre_tap(self, row: int, crippled: Sequence[bool]) -> None:
        """Of the marked blocks of this row, leave only the centre tap of the kernel."""
        if len(crippled) != len(self.blocks):
            raise EsperError(
                f"CNN host: {len(crippled)} marks {list(crippled)} for {len(self.blocks)} blocks"
            )
        if not 0 <= row < self.population:
            raise PopulationError(f"row {row} is out of range; allowed: 0 to {self.population - 1}")
        for block, only in zip(self.blocks, crippled, strict=True):
            assert isinstance(block, ConvBlock)
            block.conv.set_centre_tap(row, only=only)

    def check_input(self, x: Tensor, networks: int) -> None:
        smallest = 1 << self.pools
        fits = x.dim() == 4 and x.shape[1] == networks * self.channels and x.shape[3] >= smallest
        if not fits or (x.shape[2] != 1 if self.line else x.shape[2] < smallest):
            height, sides = ("1", "width") if self.line else ("height", "height and width")
            wanted = f"[batch, {networks}·{self.channels}, {height}, width], {sides} at least {smallest}"
            raise ShapeError(f"CNN host: input has shape {tuple(x.shape)}, wanted {wanted}")

    def example_input(self, batch: int = 2) -> Tensor:
        return torch.zeros(batch, self.channels, self.height, self.size)

    def spec(self) -> dict[str, Any]:
        return {
            "kind": "cnn",
            "classes": self.classes,
            "blocks": len(self.blocks),
            "base": self.base,
            "kernel": self.kernel,
            "pools": self.pools,
            "channels": self.channels,
            "size": self.size,
            **({"height": 1} if self.line else {}),
        }


class GPTBlock(nn.Module):
    def __init__(self, population: int, features: int, heads: int, out_std: float) -> None:
        super().__init__()
        self.norm1 = LayerNorm(population, features)
        self.attention = Attention(population, features, heads, out_std=out_std)
        self.norm2 = LayerNorm(population, features)
        self.up = Linear(population, features, 4 * features, std=0.02)
        self.down = Linear(population, 4 * features, features, std=out_std)

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        x = x + self.attention(self.norm1(x, lanes), lanes)
        return x + self.down(F.gelu(self.up(self.norm2(x, lanes), lanes)), lanes)


class GPTHost(Host):
    """A pre-norm transformer with tied embeddings. Slots `r0c<i>` at the end of each segment of layers.

    Input tokens `[L, B, T]`, output `[L, B, T, vocabulary]`. Initialised so that the first loss is
    ln(vocabulary)."""

    topology: Topology = "transformer"

    def __init__(
        self,
        population: int = 1,
        *,
        vocabulary: int = 256,
        features: int = 64,
        heads: int = 4,
        layers: int = 3,
        context: int = 64,
        segments: int = 3,
    ) -> None:
        super().__init__(population)
        if layers % segments or features % heads:
            raise EsperError(
                f"GPT host: layers {layers} must be a multiple of segments {segments}, "
                f"features {features} of heads {heads}"
            )
        self.vocabulary, self.context = vocabulary, context
        self.features, self.heads, self.segments = features, heads, segments
        self.tokens = Embedding(population, vocabulary, features)
        self.positions = Embedding(population, context, features)
        # Each residual branch starts smaller, so that their sum over the depth starts at unit scale.
        out_std = 0.02 / math.sqrt(2 * layers)
        self.blocks = nn.ModuleList(GPTBlock(population, features, heads, out_std) for _ in range(layers))
        self.norm = LayerNorm(population, features)

    def injection_specs(self) -> tuple[InjectionSpec, ...]:
        return tuple(
            InjectionSpec(format_slot_id(0, i), self.features, positions=(self.context,))
            for i in range(self.segments)
        )

    def segment(self, index: int, x: Tensor, lanes: Lanes) -> Tensor:
        if index == 0:
            position = torch.arange(x.shape[-1], device=x.device).expand(lanes.count, 1, -1)
            x = self.tokens(x, lanes) + self.positions(position, lanes)
        if index == self.segments:
            return self.tokens.attend(self.norm(x, lanes), lanes)
        depth = len(self.blocks) // self.segments
        for block in self.blocks[index * depth : (index + 1) * depth]:
            x = block(x, lanes)
        return x

    def check_input(self, x: Tensor, networks: int) -> None:
        if x.dim() != 3 or x.shape[0] != networks or x.shape[2] > self.context:
            raise ShapeError(
                f"GPT host: input has shape {tuple(x.shape)}, "
                f"wanted [{networks}, batch, at most {self.context}]"
            )
        # Rows lie side by side in one table: a token outside would read, and teach, another network's
        # embedding. On another device to look would mean to wait for it; batches come from datasets that fit
        # the host.
        low, high = x.aminmax() if x.device.type == "cpu" else (0, 0)
        if low < 0 or high >= self.vocabulary:
            raise EsperError(
                f"GPT host: tokens from {int(low)} to {int(high)}; allowed: 0 to {self.vocabulary - 1}"
            )

    def example_input(self, batch: int = 2) -> Tensor:
        return torch.zeros(batch, self.context, dtype=torch.long)

    def spec(self) -> dict[str, Any]:
        return {
            "kind": "gpt",
            "vocabulary": self.vocabulary,
            "features": self.features,
            "heads": self.heads,
            "layers": len(self.blocks),
            "context": self.context,
            "segments": self.segments,
        }


class MLPHost(Host):
    """Linear layers with ReLU, slots `r0c<i>` after each hidden one. Input `[L, B, inputs]`, output `[L, B,
    classes]`."""

    topology: Topology = "mlp"

    def __init__(
        self, population: int = 1, *, inputs: int = 64, features: int = 32, layers: int = 2, classes: int = 10
    ) -> None:
        super().__init__(population)
        self.inputs, self.features, self.classes = inputs, features, classes
        widths = [inputs, *(features for _ in range(layers))]
        self.layers = nn.ModuleList(Linear(population, a, b) for a, b in pairwise(widths))
        self.head = Linear(population, features, classes)

    def injection_specs(self) -> tuple[InjectionSpec, ...]:
        return tuple(
            InjectionSpec(format_slot_id(0, i), self.features, positions=()) for i in range(len(self.layers))
        )

    def segment(self, index: int, x: Tensor, lanes: Lanes) -> Tensor:
        if index == len(self.layers):
            return self.head(x, lanes)
        return F.relu(self.layers[index](x, lanes))

    def check_input(self, x: Tensor, networks: int) -> None:
        if x.dim() != 3 or x.shape[0] != networks or x.shape[2] != self.inputs:
            raise ShapeError(
                f"MLP host: input has shape {tuple(x.shape)}, wanted [{networks}, batch, {self.inputs}]"
            )

    def example_input(self, batch: int = 2) -> Tensor:
        return torch.zeros(batch, self.inputs)

    def spec(self) -> dict[str, Any]:
        return {
            "kind": "mlp",
            "inputs": self.inputs,
            "features": self.features,
            "layers": len(self.layers),
            "classes": self.classes,
        }


HOSTS: dict[str, type[Host]] = {"cnn": CNNHost, "gpt": GPTHost, "mlp": MLPHost}


def build_host(spec: dict[str, Any], population: int = 1) -> Host:
    """The inverse of `Host.spec()`."""
    kind = spec.get("kind")
    if kind not in HOSTS:
        raise EsperError(f"host kind {kind!r} is unknown; {allowed(HOSTS)}")
    arguments = {name: value for name, value in spec.items() if name != "kind"}
    try:
        return HOSTS[kind](population, **arguments)
    except TypeError as error:
        raise EsperError(f"host spec {spec} does not fit a {kind} host: {error}") from None
