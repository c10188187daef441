"""A grown model as plain torch modules, without Esper.

The copy's modules get their own classes back. What each seed adds becomes a traced graph of torch layers:
appended where the module is an `nn.Sequential`, or becomes one. Elsewhere it is a forward hook of the module,
because only a hook keeps a signature and attributes that it does not know."""

from __future__ import annotations

import copy
import dataclasses
import operator
from itertools import count

import torch
from torch import Tensor, fx, nn

from esper.grower.body import Body, attached_part
from esper.grower.incubation import remove_hook
from esper.grower.places import ESPER, Place
from esper.grower.slot import ONE, Slot, remove_child, unsplice
from esper.kasmina.export import as_graph
from esper.kasmina.seed import GATE_BANK
from esper.leyline import AlphaAlgorithm, EsperError

GROWN = "grown"
"""Name of a seed's graph in the module that it follows."""


def export_model(model: nn.Module, body: Body) -> nn.Module:
    """A copy in eval or train mode as the model is; seeds that are not blended in are left out."""
    body.check_places(model)
    plain = copy.deepcopy(model)
    own = plain.get_submodule(ESPER)
    assert isinstance(own, Body)
    modules = [plain.get_submodule(slot.name) for slot in own]
    for slot, module in zip(own, modules, strict=True):
        unsplice(module, slot)
    remove_child(plain)
    remove_hook(plain)
    part = attached_part(plain)
    if part is not None:
        raise EsperError(f"export: {part!r} was attached later on its own; attach the whole model instead")
    for slot, module in zip(own, modules, strict=True):
        slot.is_muted = False
        slot.refresh()
        if slot.is_applied:
            _graft(plain, module, slot)
    for parameter in plain.parameters():
        parameter.grad = None
    assert body.origin == own.origin
    return plain


def _graft(plain: nn.Module, module: nn.Module, slot: Slot) -> None:
    """Add the slot's seed to its module, wherever in the model that is registered."""
    residual = as_graph(_Residual(slot), "Grown")
    residual.train(module.training)
    parents = [parent for parent in plain.modules() if any(m is module for m in parent._modules.values())]
    runs_children = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    if type(module).forward is nn.Sequential.forward:
        module.add_module(_free_name(module), _after(residual, slot.place))
    elif runs_children or (_all_sequential(parents) and not module._forward_hooks):
        _become_pair(module, _after(residual, slot.place))
    else:
        name = _free_name(module)
        module.add_module(name, _after(residual, slot.place, as_hook=True))
        module.register_forward_hook(module.get_submodule(name), prepend=True)


def _all_sequential(parents: list[nn.Module]) -> bool:
    """Whether these call a child with one argument, and want nothing else of it."""
    return all(type(parent) is nn.Sequential for parent in parents)


def _free_name(module: nn.Module) -> str:
    """A module that was exported before may have grown already."""
    names = (GROWN if number == 1 else f"{GROWN}{number}" for number in count(1))
    return next(name for name in names if not hasattr(module, name))


def _become_pair(module: nn.Module, residual: nn.Module) -> None:
    """Turn the object into an `nn.Sequential` of what it was and the residual, so that whatever refers to it
    runs both."""
    first = object.__new__(type(module))
    first.__dict__ = dict(vars(module))
    module.__class__ = nn.Sequential
    module.__dict__ = vars(nn.Sequential(first, residual).train(module.training))


class _Residual(nn.Module):
    """What a slot does to the tensor that passes it."""

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        seed = slot.seed(0)
        self.place, self.algorithm, self.alpha = slot.place, seed.algorithm, seed.alpha.alpha
        self.seed = slot.banks[seed.blueprint_id]
        self.gate = slot.banks[GATE_BANK] if seed.algorithm is AlphaAlgorithm.GATE else None

    def forward(self, h: Tensor) -> Tensor:
        x = self.place.to_seed(h)
        delta = self.seed(x, ONE)
        if self.gate is not None:
            delta = delta * self.gate(x, ONE)
        delta = self.place.from_seed(delta)
        if self.algorithm is AlphaAlgorithm.MULTIPLY:
            return h * (1 + self.alpha * torch.tanh(delta))
        return h + delta if self.alpha == 1.0 else h + self.alpha * delta


def _after(residual: fx.GraphModule, place: Place, *, as_hook: bool = False) -> fx.GraphModule:
    """`residual` as a function of the module's whole output; as a hook: (module, args, output) → output."""
    field = place.field
    if field is None and not as_hook:
        return residual
    graph = fx.Graph()
    if as_hook:
        graph.placeholder("module")
        graph.placeholder("args")
    output = graph.placeholder("output")
    if field is None:
        h = output
    elif place.container in ("tuple", "list", "mapping"):
        h = graph.call_function(operator.getitem, (output, field))
    else:
        h = graph.call_function(getattr, (output, field))
    grown = graph.call_module("residual", (h,))
    if field is None:
        result = grown
    elif place.container == "dataclass":
        result = graph.call_function(dataclasses.replace, (output,), {str(field): grown})
        result.meta["is_wrapped"] = True  # unpickling traces the code again, and must not look into this call
    elif place.container == "namedtuple":
        result = graph.call_method("_replace", (output,), {str(field): grown})
    elif place.container == "mapping":
        result = graph.call_function(operator.or_, (output, {str(field): grown}))
    else:
        assert isinstance(field, int)
        first = graph.call_function(operator.getitem, (output, slice(None, field)))
        last = graph.call_function(operator.getitem, (output, slice(field + 1, None)))
        middle = (grown,) if place.container == "tuple" else [grown]
        result = graph.call_function(operator.add, (first, middle))
        result = graph.call_function(operator.add, (result, last))
    graph.output(result)
    root = nn.Module()
    root.add_module("residual", residual)
    return fx.GraphModule(root, graph, class_name="GrownHook" if as_hook else "GrownOutput")
