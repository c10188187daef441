"""Where seeds may grow in a user's model: named modules, proven on an example.

The example runs once in eval mode. It shows which of the named modules run, in which order, how often, and
what shape their outputs have. Whatever cannot carry a seed is refused here, before anything has changed."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline import EsperError, ShapeError, SlotIdError, Topology, allowed
from esper.leyline.errors import near

Shape = Literal["BCHW", "BCL", "BTD", "BD"]
"""Meaning of an output's dimensions. BTD stands for any number of dimensions between batch and features."""
SHAPES: tuple[Shape, ...] = get_args(Shape)
Container = Literal["tensor", "tuple", "list", "mapping", "dataclass", "namedtuple"]
"""What a module returns; in all but the first the tensor is a field."""
ESPER = "_esper"
"""Name of the module that holds all that Esper adds to a model."""


@dataclass(frozen=True, slots=True)
class SlotAt:
    """A slot in other words than a module's name: `field` chooses the tensor where the module returns several
    (an index of a tuple, or a name), `shape` says what its dimensions mean where that cannot be told."""

    name: str
    field: int | str | None = None
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """One proven slot: where it is, which tensor it grows on, and the size of that tensor."""

    name: str
    field: int | str | None
    container: Container
    shape: Shape
    channels: int

    @property
    def is_image(self) -> bool:
        return self.shape in ("BCHW", "BCL")

    @property
    def topology(self) -> Topology:
        return "cnn" if self.is_image else "transformer" if self.shape == "BTD" else "mlp"

    def take(self, output: Any) -> Tensor:
        """The tensor that carries the seed."""
        if self.container == "tensor":
            return output
        if self.container in ("dataclass", "namedtuple"):
            return getattr(output, self.field)  # type: ignore[arg-type]
        return output[self.field]

    def put(self, output: Any, tensor: Tensor) -> Any:
        """The module's output with that tensor replaced."""
        if self.container == "tensor":
            return tensor
        if self.container == "dataclass":
            return dataclasses.replace(output, **{str(self.field): tensor})
        if self.container == "namedtuple":
            return output._replace(**{str(self.field): tensor})
        if self.container == "mapping":
            return output | {self.field: tensor}
        at = self.field
        assert isinstance(at, int)
        changed = (tensor,) if self.container == "tuple" else [tensor]
        return output[:at] + changed + output[at + 1 :]

    def to_seed(self, h: Tensor) -> Tensor:
        """The tensor as blueprints at population 1 take it: `[B, C, H, W]` or `[1, B, …, D]`."""
        if self.is_image:
            return h if self.shape == "BCHW" else h.unsqueeze(2)
        return h.unsqueeze(0)

    def from_seed(self, delta: Tensor) -> Tensor:
        """The inverse of `to_seed`."""
        if self.is_image:
            return delta if self.shape == "BCHW" else delta.squeeze(2)
        return delta.squeeze(0)

    def positions(self, tensor: Tensor) -> tuple[int, ...]:
        """Sizes of the positions that a seed sees in such a tensor: height and width, tokens, or none."""
        sizes = tuple(tensor.shape)
        if self.is_image:
            return sizes[2:] if self.shape == "BCHW" else (1, sizes[2])
        return (math.prod(sizes[1:-1]),) if self.shape == "BTD" else ()


@dataclass(frozen=True, slots=True)
class Features:
    """What the seed of a place receives: the sizes of the positions (None: unknown), and the device and dtype
    that its weights need."""

    positions: tuple[int, ...] | None
    device: torch.device
    dtype: torch.dtype


def find_places(
    model: nn.Module, slots: Sequence[str | SlotAt], example: Any
) -> tuple[list[Place], list[Features], Any]:
    """The places of these slots in the order in which they run, the features at each, and the example's
    output."""
    wanted = resolve_names(model, slots)
    calls: list[tuple[str, Any]] = []
    in_autocast: set[str] = set()

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        calls.append((name, output))
        if any(map(torch.is_autocast_enabled, _device_types(model))):
            in_autocast.add(name)

    hooks = [model.get_submodule(at.name).register_forward_hook(partial(note, at.name)) for at in wanted]
    try:
        with undisturbed(model), torch.no_grad():
            output = run_example(model.eval(), example)
    except Exception as error:
        raise EsperError(
            f"example: the model cannot run on it: {type(error).__name__}: {error}. It must be an input of "
            "the model: a tensor, a tuple of arguments, or a dict of keyword arguments"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    ran = [name for name, _ in calls]
    for at in wanted:
        if at.name not in ran:
            raise EsperError(
                f"slot {at.name!r}: the module does not run in the example's forward pass, so no seed can "
                "follow it; name a module that is called"
            )
        if ran.count(at.name) > 1:
            raise EsperError(
                f"slot {at.name!r}: the module runs {ran.count(at.name)} times in one forward pass, and a "
                "seed would be applied each time; name a module that runs once"
            )
    by_name = {at.name: at for at in wanted}
    places = [_place(by_name[name], model.get_submodule(name), out) for name, out in calls]
    kinds = {place.is_image for place in places}
    if len(kinds) > 1:
        images = ", ".join(p.name for p in places if p.is_image)
        others = ", ".join(p.name for p in places if not p.is_image)
        raise ShapeError(f"slots {images} carry images, {others} do not; choose slots of one kind")
    features = []
    for place, (_, out) in zip(places, calls, strict=True):
        tensor = place.take(out)
        # Autocast casts whatever a seed multiplies; the seed's weights are then as precise as the model's.
        like = nearest_parameter(model, place.name) if place.name in in_autocast else tensor
        features.append(Features(place.positions(tensor), tensor.device, like.dtype))
    return places, features, output


def nearest_parameter(model: nn.Module, name: str) -> Tensor:
    """The last parameter of the module of this name; if it has none, the first of the model."""
    own = [p for p in model.get_submodule(name).parameters() if p.is_floating_point()]
    others = (p for p in model.parameters() if p.is_floating_point())
    return own[-1] if own else next(others, torch.empty(0))


def _device_types(model: nn.Module) -> set[str]:
    return {p.device.type for p in model.parameters()}


def resolve_names(model: nn.Module, slots: Sequence[str | SlotAt]) -> list[SlotAt]:
    """Slots by their modules' names; a pattern such as `layers.*` stands for all modules that it matches."""
    if isinstance(slots, str) or not isinstance(slots, Sequence) or not slots:
        raise SlotIdError(f"slots is {slots!r}, must be a list of names of modules, such as ['layer1']")
    known = [name for name, _ in model.named_modules() if name and name.split(".")[0] != ESPER]
    places: list[SlotAt] = []
    for slot in slots:
        at = slot if isinstance(slot, SlotAt) else SlotAt(slot)
        if not isinstance(at.name, str):
            raise SlotIdError(f"slot {at.name!r} is a {type(at.name).__name__}, must be a module's name")
        if at.shape is not None and at.shape not in SHAPES:
            raise ShapeError(f"slot {at.name!r}: shape is {at.shape!r}; {allowed(SHAPES)}")
        names = [name for name in known if _matches(name, at.name)]
        if not names:
            closest = near(at.name, known)
            children = [name for name in known if "." not in name]
            raise SlotIdError(
                f"slot {at.name!r}: the model has no module of this name{closest}; its children are "
                f"{', '.join(children)}. Names are those of model.named_modules()"
            )
        places += [dataclasses.replace(at, name=name) for name in names]
    names = [at.name for at in places]
    for name in names:
        if names.count(name) > 1:
            raise SlotIdError(f"slot {name!r} is named twice")
    return places


def _matches(name: str, pattern: str) -> bool:
    """A `*` matches within one part of a dotted name."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def run_example(model: nn.Module, example: Any) -> Any:
    """The model's output for a tensor, a tuple of positional or a mapping of keyword arguments."""
    if isinstance(example, Mapping):
        return model(**example)
    if isinstance(example, (tuple, list)):
        return model(*example)
    return model(example)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore random generators, buffers and training flags, whatever happens inside."""
    flags = {module: module.training for module in model.modules()}
    buffers = {id(b): (b, b.detach().clone()) for b in model.buffers()}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  the user's global state
    with torch.random.fork_rng(devices=cuda_devices(model)):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
            for module, flag in flags.items():
                module.training = flag
            with torch.no_grad():
                for buffer, value in buffers.values():
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


def cuda_devices(model: nn.Module) -> list[int]:
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return [device.index or 0 for device in devices]


# -- shapes --------------------------------------------------------------------------------------------------


def _place(at: SlotAt, module: nn.Module, output: Any) -> Place:
    container, field, tensor = _tensor(at, output)
    if not tensor.is_floating_point():
        raise ShapeError(f"slot {at.name!r}: the output is {tensor.dtype}, seeds grow on floating point only")
    shape = at.shape or _shape(at.name, module, tensor)
    wanted_dims = {"BCHW": (4,), "BCL": (3,), "BTD": range(3, 9), "BD": (2,)}[shape]
    if tensor.dim() not in wanted_dims:
        raise ShapeError(
            f"slot {at.name!r}: the output has shape {tuple(tensor.shape)}, which is not {shape}"
        )
    channels = tensor.shape[1] if shape in ("BCHW", "BCL") else tensor.shape[-1]
    return Place(at.name, field, container, shape, channels)


def _tensor(at: SlotAt, output: Any) -> tuple[Container, int | str | None, Tensor]:
    """Which part of the output carries the seed: the one that was named, else the first."""
    if isinstance(output, Tensor) and at.field is None:
        return "tensor", None, output
    container, names = _parts(output)
    field = at.field
    if field is None and names:
        field = names[0]
    elif isinstance(field, int) and container in ("tuple", "list") and field < 0:
        field += len(names)
    part = output[field] if container in ("tuple", "list", "mapping") and field in names else None
    if container in ("dataclass", "namedtuple") and field in names:
        part = getattr(output, str(field))
    if container is None or not isinstance(part, Tensor):
        raise ShapeError(
            f"slot {at.name!r}: the module returns a {type(output).__name__}, whose part {field!r} is no "
            f"tensor; choose one with SlotAt(name, field=…); {allowed(names or ['none'])}"
        )
    return container, field, part


def _parts(output: Any) -> tuple[Container | None, list[Any]]:
    """The kind of an output, and the names of its parts that hold something."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = [f.name for f in dataclasses.fields(output)]
        return "dataclass", [name for name in fields if getattr(output, name) is not None]
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return "namedtuple", list(output._fields)
    if isinstance(output, Mapping):
        return "mapping", list(output)
    if isinstance(output, (tuple, list)):
        return "tuple" if isinstance(output, tuple) else "list", list(range(len(output)))
    return None, []


def _shape(name: str, module: nn.Module, tensor: Tensor) -> Shape:
    """What the dimensions mean. With 3 or 4 of them the layers inside the module decide: convolutions and
    batch norms have channels in dimension 1, linear layers and layer norms have features in the last."""
    sizes = tuple(tensor.shape)
    if len(sizes) == 2:
        return "BD"
    if len(sizes) not in (3, 4):
        raise ShapeError(
            f"slot {name!r}: the output has shape {sizes}; "
            + allowed(["[B, C, H, W]", "[B, C, L]", "[B, T, D]", "[B, D]"])
        )
    first, last = _evidence(module, sizes)
    if first is last:
        options = "'BCHW' or 'BTD'" if len(sizes) == 4 else "'BCL' or 'BTD'"
        raise ShapeError(
            f"slot {name!r}: the output has shape {sizes}, and it cannot be told whether dimension 1 or the "
            f"last holds the channels; say it with SlotAt({name!r}, shape={options})"
        )
    if last:
        return "BTD"
    return "BCHW" if len(sizes) == 4 else "BCL"


def _evidence(module: nn.Module, sizes: tuple[int, ...]) -> tuple[bool, bool]:
    """Whether the last layers that fit speak for channels in dimension 1, or in the last dimension."""
    for layer in reversed(list(module.modules())):
        first = last = False
        channels = getattr(layer, "out_channels", getattr(layer, "num_channels", None))
        if isinstance(layer, (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)):
            channels = layer.num_features
        features = getattr(layer, "out_features", getattr(layer, "embed_dim", getattr(layer, "nf", None)))
        if isinstance(layer, nn.LayerNorm):
            features = layer.normalized_shape[-1]
        elif isinstance(layer, nn.RNNBase):
            features = layer.hidden_size
        first = isinstance(channels, int) and channels == sizes[1]
        last = isinstance(features, int) and features == sizes[-1]
        if first or last:
            return first, last
    # No layer of its own speaks (an activation, a user's own parameter): images in 4 dimensions are the rule.
    return (len(sizes) == 4 and sizes[2] == sizes[3]), False
