"""One slot of a user's model: the seed in it, in ordinary torch layers, and its splice into the module.

A slot is a permanent module under `_esper`. The module that it follows keeps its name, its attributes, its
keys and its identity; only its class is replaced by a subclass of the same name, whose `forward` passes the
output through the slot. That is plain module code: torch.compile traces it and guards on it, deepcopy and
pickle keep it, and nothing depends on hooks, which compiled code ignores when they come late."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from esper.grower.places import ESPER, Place
from esper.grower.sensing import Sensing
from esper.kasmina.export import plain_copy
from esper.kasmina.layers import Lanes, Mode, seed_row
from esper.kasmina.seed import GATE_BANK
from esper.kasmina.slot import SeedSlot
from esper.leyline import (
    AlphaAlgorithm,
    BlueprintError,
    EsperError,
    GateConfig,
    GateLevel,
    GateReason,
    GateResult,
    InjectionSpec,
    Pacing,
    SeedStage,
    ShapeError,
    Transition,
    format_slot_id,
)

ONE = Lanes(1, Mode.EVAL)
"""The one lane of an ordinary network. Ordinary layers ignore it; the bodies of blueprints pass it on."""


class Slot(SeedSlot):
    """The one row of a slot. Its banks are the blueprints' bodies on ordinary layers (`nn.Conv2d`,
    `nn.Linear` …): one definition, and parameters of the shapes that optimizers expect."""

    def __init__(
        self, place: Place, index: int, *, gates: GateConfig, pacing: Pacing, measures: bool
    ) -> None:
        """`measures`: contributions are measured. Without, a seed may become permanent unmeasured."""
        spec = InjectionSpec(format_slot_id(0, index), place.channels, line=place.shape == "BCL")
        super().__init__(spec, place.topology, 1, gates=gates, pacing=pacing)
        self.place, self.measures = place, measures
        self.sensing: Sensing | None = None
        self.is_muted = False
        self.is_shadowed = False
        """The seed incubates, and this pass is its own: it is applied in full although it is not blended."""
        self.is_applied = False
        self._bank, self._algorithm, self._is_full = "", AlphaAlgorithm.ADD, True
        self._learns = True
        """As new banks do; the weights follow when this changes, and what the user froze stays so."""
        # A tensor, so that a ramp does not change the compiled graph.
        self.register_buffer("alpha", torch.ones(()), persistent=False)
        self.alpha: Tensor

    @property
    def name(self) -> str:
        return self.place.name

    # -- passes ----------------------------------------------------------------------------------------------

    def forward(self, output: Any) -> Any:
        """The module's output, the seed applied to it."""
        sensing = None
        if not torch.compiler.is_compiling():
            sensing = self.sensing if self.training and torch.is_grad_enabled() else None
            if sensing is not None and not sensing.due(self.slot_id):
                sensing = None
        if sensing is None and not self.is_applied:
            return output
        before = self.place.take(output)
        after = self._blend(before) if self.is_applied else before
        if sensing is not None and not self.is_shadowed:
            sensing.watch(self.slot_id, self.place, before, after)
        return output if after is before else self.place.put(output, after)

    def _blend(self, h: Tensor) -> Tensor:
        if h.is_nested:
            raise ShapeError(
                f"slot {self.name!r}: seeds do not grow on nested tensors; build nn.TransformerEncoder with "
                "enable_nested_tensor=False"
            )
        x = self.place.to_seed(h)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not x.requires_grad:
            # torch 2.13's group norm on CPU crashes in channels_last when only its weights want a gradient.
            x = x.detach().requires_grad_()
        delta = self.banks[self._bank](x, ONE)
        if delta.shape != x.shape:
            raise BlueprintError(
                f"slot {self.name!r}: seed {self._bank!r} turned a tensor of shape {tuple(x.shape)} into "
                f"{tuple(delta.shape)}; the shape must stay"
            )
        if self._algorithm is AlphaAlgorithm.GATE:
            delta = delta * self.banks[GATE_BANK](x, ONE)
        # Autocast computes norms in float32; the host's precision goes on.
        delta = self.place.from_seed(delta).to(h.dtype)
        if self._algorithm is AlphaAlgorithm.MULTIPLY:
            return h * (1 + self.alpha.to(h.dtype) * torch.tanh(delta))
        return h + delta if self._is_full else torch.addcmul(h, delta, self.alpha.to(h.dtype))

    def refresh(self) -> None:
        """Follow the seed: whether and how it is applied, and whether its weights learn."""
        seed = self.seeds[0]
        self.is_applied = False
        if seed is None or not seed.is_present:
            return
        self._bank, self._algorithm = seed.blueprint_id, seed.algorithm
        alpha = 1.0 if self.is_shadowed else seed.alpha.alpha
        self._is_full = alpha == 1.0
        self.alpha.fill_(alpha)
        self.is_applied = not self.is_muted and (seed.is_blended or self.is_shadowed)
        if not seed.is_learning:
            self.banks.requires_grad_(False)
        elif not self._learns:
            self.banks.requires_grad_(True)
        self._learns = seed.is_learning

    @property
    def is_incubating(self) -> bool:
        seed = self.seeds[0]
        return seed is not None and seed.stage is SeedStage.TRAINING

    # -- the ordinary form -----------------------------------------------------------------------------------

    def build_bank(self, name: str, population: int) -> nn.Module:
        with _own_generator():
            return plain_copy(super().build_bank(name, 1), 0)

    def params(self, row: int) -> int:
        seed = self.seeds[row]
        if seed is None or not seed.is_present:
            return 0
        return sum(p.numel() for name in seed.bank_names for p in self.banks[name].parameters())

    def _write(self, row: int, name: str, init_seed: int) -> None:
        drawn = super().build_bank(name, 1)
        seed_row(drawn, 0, init_seed)
        with _own_generator():
            self.banks[name].load_state_dict(plain_copy(drawn, 0).state_dict())
        self.births[name][row] += 1

    def _clear(self, row: int, name: str) -> None:
        # The bank of the only row goes away with its seed.
        if name in self.births:
            self.births[name][row] += 1

    def _check(self, row: int, transition: Transition) -> GateResult:
        result = super()._check(row, transition)
        if self.measures or result.gate is not GateLevel.G5:
            return result
        known = tuple(f for f in result.failures if f.reason is not GateReason.CONTRIBUTION_UNMEASURED)
        return GateResult(result.gate, known)

    def mirror(self, source: Slot) -> None:
        """Take over another slot's structure. Weights that are here already stay as they are, new ones are
        copied."""
        seed = source.seeds[0]
        self.seeds[0] = None if seed is None else type(seed).from_dict(seed.to_dict())
        for name in list(self.banks):
            if name not in source.banks or self.births.get(name) != source.births[name]:
                del self.banks[name]
        for name, bank in source.banks.items():
            if name not in self.banks:
                twin = self.build_bank(name, 1).to(self.anchor.device, self.anchor.dtype)
                twin.load_state_dict(bank.state_dict())
                self.banks[name] = twin
        self.births = {name: list(births) for name, births in source.births.items()}
        self.refresh()
        self.banks.requires_grad_(False)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a model are not watched by its grower.
        return {**self.__dict__, "sensing": None}


def _own_generator() -> AbstractContextManager[None]:
    """Torch's layers draw initial weights when they are built; the user's generator must not notice."""
    return torch.random.fork_rng(devices=[])


# -- the splice ----------------------------------------------------------------------------------------------


def splice(module: nn.Module, slot: Slot) -> None:
    """Let the module's output pass through the slot."""
    if isinstance(module, torch.jit.ScriptModule):
        raise EsperError(f"slot {slot.name!r} is a TorchScript module, whose forward cannot be extended")
    if "forward" in vars(module):
        raise EsperError(
            f"slot {slot.name!r}: this object's forward was replaced (module.forward = …), so the class's "
            "does not run; attach before whatever replaces it"
        )
    base: Any = type(module)
    module.__class__ = _spliced(base)
    vars(module)["_esper_slot"] = slot


def is_extended(module: nn.Module) -> bool:
    """Whether the module's class is one of those that Esper makes."""
    return hasattr(type(module), "_esper_base")


def is_spliced(module: nn.Module, slot: Slot) -> bool:
    """Whether the module's output passes through this slot."""
    return is_extended(module) and vars(module).get("_esper_slot") is slot


def unsplice(module: nn.Module, slot: Slot) -> None:
    """The inverse of `splice`. A parametrization that was registered since then stays."""
    if not is_spliced(module, slot):
        return
    cls: Any = type(module)
    if "_esper_base" in vars(cls):
        module.__class__ = cls._esper_base
    elif is_parametrized(module) and "_esper_base" in vars(cls.__base__):
        content = {name: v for name, v in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        module.__class__ = type(cls.__name__, (cls._esper_base,), content)
    else:
        raise EsperError(
            f"slot {slot.name!r}: its class became {cls.__name__} after the model was attached; undo that, "
            "or do it before you attach"
        )
    del vars(module)["_esper_slot"]


@cache
def _spliced(base: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.forward(self, *args, **kwargs)
        slot = self._esper_slot
        return output if slot is None else slot(output)

    return _subclass(base, {"forward": forward, "_esper_slot": None})


@cache
def _with_hidden_child(base: Any) -> Any:
    """An `nn.Sequential` that has the child `_esper` and does not run it."""

    def shown(self: nn.Sequential) -> dict[str, nn.Module]:
        children = self._modules.items()
        return {name: child for name, child in children if name != ESPER and child is not None}

    def __iter__(self: nn.Sequential) -> Any:
        return iter(shown(self).values())

    def __len__(self: nn.Sequential) -> int:
        return len(shown(self))

    def __getitem__(self: nn.Sequential, index: Any) -> nn.Module:
        if isinstance(index, slice):
            return base(OrderedDict(list(shown(self).items())[index]))
        return list(shown(self).values())[index]

    methods = {"__iter__": __iter__, "__len__": __len__, "__getitem__": __getitem__}
    return _subclass(base, methods)


def _subclass(base: type[Any], methods: dict[str, Any]) -> type[Any]:
    """A subclass that looks like its base, and can be copied and pickled."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        if "_esper_base" not in vars(type(self)):  # a class that was put on top of this one
            return base.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        return _rebuild, (base, tuple(sorted(methods))), self.__getstate__()

    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(
        base.__name__, (base,), {**names, **methods, "_esper_base": base, "__reduce_ex__": __reduce_ex__}
    )


def _rebuild(base: Any, methods: tuple[str, ...]) -> nn.Module:
    cls = _spliced(base) if "forward" in methods else _with_hidden_child(base)
    return cls.__new__(cls)


def hide_child(model: nn.Module) -> None:
    """Make room for the child `_esper` in a model that would run it."""
    if isinstance(model, nn.Sequential):
        base: Any = type(model)
        model.__class__ = _with_hidden_child(base)


def remove_child(model: nn.Module) -> None:
    """Remove the child `_esper`, and the room that `hide_child` made for it."""
    model._modules.pop(ESPER, None)
    if "_esper_base" in vars(type(model)):
        base: Any = type(model)
        model.__class__ = base._esper_base
