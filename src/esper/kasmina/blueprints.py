"""The registry of blueprints, and those that ship. A seed computes δ = γ·body(x); γ is 0 at birth and nothing
non-linear follows it, so every seed is born silent and still receives a gradient.

Each class is one small body on population layers; a bank of seeds is one instance, its rows are the seeds.
A blueprint of a user may also be a module in ordinary torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, get_args, overload

import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.layers import (
    Attention,
    Conv2d,
    GroupNorm,
    Lanes,
    LayerNorm,
    Linear,
    Scale,
    flatten_kernels,
    pool_lanes,
    pool_pixels,
    scale_channels,
)
from esper.kasmina.plain import MakeModule, ModuleRows, check_module
from esper.leyline import BlueprintError, Topology, allowed, declare_blueprint

_F = TypeVar("_F", bound=Callable[..., Any])


class Blueprint(nn.Module):
    """Base of all seeds: `forward` gives δ, shaped like its input."""

    image: bool
    """Whether the seed grows on images (topology cnn), or on features."""
    line_only = False
    """Whether the seed grows on images of height 1 only."""

    def __init__(self, population: int, channels: int) -> None:
        super().__init__()
        self.gamma = Scale(population, channels, image=self.image)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        return self.gamma(self.body(x, lanes), lanes)


class ModuleSeed(Blueprint):
    """A seed whose body is a module in ordinary torch, one for each row."""

    def __init__(self, population: int, channels: int, make: MakeModule, topology: Topology) -> None:
        self.image = topology == "cnn"
        super().__init__(population, channels)
        self.module = ModuleRows(population, channels, make, topology)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        return self.module(x, lanes)


class ModuleFactory:
    """Builds banks of such seeds, once their module was found to be fit."""

    line_only = False

    def __init__(self, name: str, topology: Topology, make: MakeModule) -> None:
        self.name, self.topology, self.make = name, topology, make
        self._checked: set[tuple[int, tuple[int, ...] | None]] = set()

    def __call__(self, population: int, channels: int) -> Blueprint:
        return ModuleSeed(population, channels, self.make, self.topology)

    def check(self, channels: int, positions: tuple[int, ...] | None) -> None:
        """Raise a BlueprintError that says why, unless the module can grow at a slot of this size."""
        if (channels, positions) not in self._checked:
            check_module(self.name, self.make, self.topology, channels, positions)
            self._checked.add((channels, positions))


FACTORIES: dict[tuple[Topology, str], type[Blueprint] | ModuleFactory] = {}


@overload
def register_blueprint(name: str, topologies: Topology | Sequence[Topology], factory: _F) -> _F: ...
@overload
def register_blueprint(name: str, topologies: Topology | Sequence[Topology]) -> Callable[[_F], _F]: ...
def register_blueprint(name: str, topologies: Topology | Sequence[Topology], factory: Any = None) -> Any:
    """Make a blueprint available under a name, for hosts of one topology or several.

    `factory` is a function of the number of channels that returns an `nn.Module` in ordinary torch, which
    maps a tensor to one of the same shape: `[B, C, H, W]` for topology cnn, `[B, T, D]` for transformer, `[B,
    D]` for mlp. Each network trains a module of its own. Or it is a subclass of `Blueprint` on population
    layers, which runs all networks at once. Without `factory`, this decorates one."""
    if factory is None:
        return partial(register_blueprint, name, topologies)
    wanted = (topologies,) if isinstance(topologies, str) else tuple(topologies)
    is_class = isinstance(factory, type) and issubclass(factory, Blueprint)
    _check_registration(name, wanted, factory, is_class=is_class)
    declare_blueprint(name)
    for topology in wanted:
        FACTORIES[topology, name] = factory if is_class else ModuleFactory(name, topology, factory)
    return factory


def _check_registration(name: str, topologies: tuple[Topology, ...], factory: Any, *, is_class: bool) -> None:
    known = get_args(Topology)
    if not topologies or len(set(topologies)) < len(topologies):
        wrong = "one is named twice" if topologies else "no topology is given"
        raise BlueprintError(f"blueprint {name!r}: topologies are {topologies}, {wrong}; {allowed(known)}")
    if isinstance(factory, nn.Module) or not callable(factory):
        raise BlueprintError(
            f"blueprint {name!r}: factory is {factory!r}, must be a function of the number of channels that "
            "returns an nn.Module, or a subclass of Blueprint"
        )
    for topology in topologies:
        if topology not in known:
            raise BlueprintError(f"blueprint {name!r}: topology {topology!r} is unknown; {allowed(known)}")
        if (topology, name) in FACTORIES:
            raise BlueprintError(f"blueprint {name!r} is already registered for {topology}")
        image = getattr(factory, "image", topology == "cnn")
        if is_class and image is not (topology == "cnn"):
            has = "images, topology {} has none" if image else "features, topology {} has images"
            raise BlueprintError(f"blueprint {name!r}: {factory.__name__} grows on {has.format(topology)}")
    if isinstance(name, str) and hasattr(nn.ModuleDict, name):
        raise BlueprintError(
            f"blueprint {name!r}: a slot keeps its seeds in an nn.ModuleDict, which has an attribute of this "
            "name; choose another"
        )


def blueprint_names(topology: Topology) -> tuple[str, ...]:
    return tuple(sorted(name for t, name in FACTORIES if t == topology))


def build_blueprint(
    topology: Topology,
    name: str,
    population: int,
    channels: int,
    *,
    line: bool = False,
    positions: tuple[int, ...] | None = None,
) -> Blueprint:
    """A bank of seeds. `line`: for images of height 1, on which every kernel is 1 high. `positions`: sizes of
    the features besides channels, where they are known."""
    if (topology, name) not in FACTORIES:
        raise BlueprintError(
            f"blueprint {name!r} is unknown for topology {topology}; {allowed(blueprint_names(topology))}. "
            "If it is your own, import the module that registers it (on the command line: --import MODULE)"
        )
    factory = FACTORIES[topology, name]
    if factory.line_only and not line:
        raise BlueprintError(
            f"blueprint {name!r} grows on features of height 1, as in a host with height 1; this slot's are "
            "higher"
        )
    if isinstance(factory, ModuleFactory):
        factory.check(channels, positions)
    seeds = factory(population, channels)
    if line:
        flatten_kernels(seeds)
    return seeds


class ImageSeed(Blueprint):
    image = True


class FeatureSeed(Blueprint):
    image = False


@register_blueprint("noop", ("cnn", "transformer", "mlp"))
class Noop(Blueprint):
    """No parameters, δ = 0. Policies are never offered it."""

    def __init__(self, population: int, channels: int) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        return x.new_zeros(x.shape)


@register_blueprint("norm", "cnn")
class ImageNorm(ImageSeed):
    """Moves the features towards their group-normalised form."""

    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        self.norm = GroupNorm(population, channels)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        return self.norm(x, lanes) - x


@register_blueprint("norm", ("transformer", "mlp"))
class FeatureNorm(FeatureSeed):
    """Moves the features towards their layer-normalised form."""

    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        self.norm = LayerNorm(population, channels)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        return self.norm(x, lanes) - x


@register_blueprint("attention", "cnn")
class SqueezeExcite(ImageSeed):
    """Weighs channels by their mean over the whole image."""

    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        hidden = max(channels // 4, 2)
        self.squeeze = Conv2d(population, channels, hidden, 1)
        self.excite = Conv2d(population, hidden, channels, 1, bias=True)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        weights = self.excite(F.relu(self.squeeze(pool_pixels(x, lanes), lanes)), lanes)
        return scale_channels(x, weights.sigmoid(), lanes)


@register_blueprint("conv_light", "cnn")
class ConvLight(ImageSeed):
    kernel = 3

    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        self.conv = Conv2d(population, channels, channels, self.kernel)
        self.norm = GroupNorm(population, channels)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        return F.relu(self.norm(self.conv(x, lanes), lanes))


@register_blueprint("conv_small", "cnn")
class ConvSmall(ConvLight):
    kernel = 1


@register_blueprint("conv_heavy", "cnn")
class ConvHeavy(ConvLight):
    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        self.conv2 = Conv2d(population, channels, channels, 3)
        self.norm2 = GroupNorm(population, channels)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        return F.relu(self.norm2(self.conv2(super().body(x, lanes), lanes), lanes))


@register_blueprint("conv_1d", "cnn")
class Conv1d(ConvLight):
    """Five taps along a line."""

    kernel = 5
    line_only = True


@register_blueprint("residual", "cnn")
class ResidualBlock(ImageSeed):
    """The branch of a residual block: two 3×3 convolutions with norms. The network gets one block deeper."""

    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        self.conv = Conv2d(population, channels, channels, 3)
        self.norm = GroupNorm(population, channels)
        self.conv2 = Conv2d(population, channels, channels, 3)
        self.norm2 = GroupNorm(population, channels)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        hidden = F.relu(self.norm(self.conv(x, lanes), lanes))
        return self.norm2(self.conv2(hidden, lanes), lanes)


@register_blueprint("depthwise", "cnn")
class Depthwise(ImageSeed):
    """3×3 per channel, then 1×1 across channels: spatial reach at little cost."""

    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        self.depth = Conv2d(population, channels, channels, 3, groups=channels)
        self.point = Conv2d(population, channels, channels, 1)
        self.norm = GroupNorm(population, channels)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        return F.relu(self.norm(self.point(self.depth(x, lanes), lanes), lanes))


@register_blueprint("bottleneck", "cnn")
class Bottleneck(ImageSeed):
    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        hidden = max(8, channels // 4)
        self.down = Conv2d(population, channels, hidden, 1)
        self.conv = Conv2d(population, hidden, hidden, 3)
        self.up = Conv2d(population, hidden, channels, 1)
        self.norm = GroupNorm(population, channels)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        x = F.relu(self.conv(F.relu(self.down(x, lanes)), lanes))
        return self.norm(self.up(x, lanes), lanes)


@register_blueprint("lora", ("transformer", "mlp"))
class Lora(FeatureSeed):
    rank = 8

    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        self.down = Linear(population, channels, self.rank, bias=False)
        self.up = Linear(population, self.rank, channels, bias=False)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        return self.up(self.down(x, lanes), lanes)


@register_blueprint("lora_large", ("transformer", "mlp"))
class LoraLarge(Lora):
    rank = 32


@register_blueprint("mlp", ("transformer", "mlp"))
class MLP(FeatureSeed):
    expansion = 4

    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        self.up = Linear(population, channels, self.expansion * channels)
        self.down = Linear(population, self.expansion * channels, channels)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        return self.down(F.gelu(self.up(x, lanes)), lanes)


@register_blueprint("mlp_small", ("transformer", "mlp"))
class MLPSmall(MLP):
    expansion = 2


@register_blueprint("attention", "transformer")
class CausalAttention(FeatureSeed):
    heads = 4
    distance_bias = False

    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        if channels % self.heads:
            raise BlueprintError(
                f"attention needs channels divisible by {self.heads}, the slot has {channels}"
            )
        # The default scale suits a branch that γ silences; a small one would also slow γ's own gradient.
        std = channels**-0.5
        self.attention = Attention(
            population, channels, self.heads, std=std, out_std=std, distance_bias=self.distance_bias
        )

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        return self.attention(x, lanes)


@register_blueprint("flex_attention", "transformer")
class DistanceAttention(CausalAttention):
    """Causal attention whose scores fall with distance, at another rate in each head."""

    distance_bias = True


@register_blueprint("transformer_block", "transformer")
class TransformerBlock(CausalAttention):
    """A whole pre-norm block, causal attention and MLP: the network gets one layer deeper."""

    expansion = 4

    def __init__(self, population: int, channels: int) -> None:
        super().__init__(population, channels)
        self.attention_norm = LayerNorm(population, channels)
        self.mlp_norm = LayerNorm(population, channels)
        self.up = Linear(population, channels, self.expansion * channels)
        self.down = Linear(population, self.expansion * channels, channels)

    def body(self, x: Tensor, lanes: Lanes) -> Tensor:
        attended = self.attention(self.attention_norm(x, lanes), lanes)
        hidden = F.gelu(self.up(self.mlp_norm(x + attended, lanes), lanes))
        return attended + self.down(hidden, lanes)


class Gate(nn.Module):
    """A learned factor in (0, 1) on a seed's δ: one for each image, from its pooled features; one for each
    token or vector otherwise, from itself alone, because a pooled sequence would tell a token about those
    that follow it."""

    def __init__(self, population: int, channels: int, *, image: bool) -> None:
        super().__init__()
        self.image = image
        hidden = max(8, channels // 4)
        self.inner = Linear(population, channels, hidden)
        self.outer = Linear(population, hidden, 1)

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        # [L, B, …, C]
        pooled = pool_lanes(x, lanes) if self.image else x
        gate = self.outer(F.relu(self.inner(pooled, lanes)), lanes).sigmoid()  # [L, B, …, 1]
        if not self.image:
            return gate
        channels = x.shape[1] // lanes.count
        return gate.transpose(0, 1).expand(-1, -1, channels).flatten(1).unsqueeze(-1).unsqueeze(-1)
