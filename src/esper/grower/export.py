"""A grown model as plain torch modules, without Esper.

The copy's modules get their own classes back. What each seed adds becomes a traced graph of torch layers:
appended to the module where an `nn.Sequential` runs it, and a forward hook of the module elsewhere, because
only a hook keeps a signature that it does not know."""

from __future__ import annotations

import copy
import dataclasses
import operator

import torch
from torch import Tensor, fx, nn

from esper.grower.body import Body
from esper.grower.places import ESPER, Place
from esper.grower.slot import ONE, Slot, unsplice
from esper.kasmina.export import as_graph
from esper.kasmina.seed import GATE_BANK
from esper.leyline import AlphaAlgorithm, EsperError

GROWN = "grown"
"""Name of a seed's graph in the module that it follows."""


def export_model(model: nn.Module, body: Body) -> nn.Module:
    """A copy in eval or train mode as the model is; seeds that are not blended in are left out."""
    plain = copy.deepcopy(model)
    own = plain._modules.pop(ESPER)
    assert isinstance(own, Body)
    for module in plain.modules():
        unsplice(module)
    unsplice(plain)
    for slot in own:
        slot.is_muted = False
        slot.refresh()
        if slot.is_applied:
            _graft(plain, slot)
    for parameter in plain.parameters():
        parameter.grad = None
    assert body.origin == own.origin
    return plain


def _graft(plain: nn.Module, slot: Slot) -> None:
    name = slot.place.name
    parent_name, _, child = name.rpartition(".")
    parent, module = plain.get_submodule(parent_name), plain.get_submodule(name)
    residual = as_graph(_Residual(slot), "Grown")
    residual.train(module.training)
    if slot.place.field is None and type(parent) is nn.Sequential:
        setattr(parent, child, nn.Sequential(module, residual))
    elif slot.place.field is None and type(module) is nn.Sequential:
        module.add_module(GROWN, residual)
    else:
        if hasattr(module, GROWN):
            raise EsperError(f"export: module {name!r} has an attribute {GROWN!r} already; rename it")
        module.add_module(GROWN, _as_hook(residual, slot.place))
        module.register_forward_hook(module.get_submodule(GROWN))


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


def _as_hook(residual: fx.GraphModule, place: Place) -> fx.GraphModule:
    """`residual` as a forward hook: (module, args, output) → output."""
    graph = fx.Graph()
    graph.placeholder("module")
    graph.placeholder("args")
    output = graph.placeholder("output")
    field = place.field
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
    return fx.GraphModule(root, graph, class_name="GrownHook")
