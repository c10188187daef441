"""A grown network as a plain `nn.Module` that needs nothing of Esper.

Every population layer of the row becomes the ordinary torch layer it stands for, the glue between them is
traced, and the result is a GraphModule of torch layers: it can be pickled, scripted, exported or trained on
like any other."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, fx, nn

from esper.kasmina.layers import Lanes, Mode, PopulationLayer
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.plain import PlainModule
from esper.kasmina.seed import GATE_BANK
from esper.leyline import AlphaAlgorithm

_ONE = Lanes(1, Mode.EVAL)


class _LaneFree(nn.Module):
    """Calls a plain layer where the population's code passes lanes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        return self.layer(x)

    def attend(self, x: Tensor, lanes: Lanes) -> Tensor:
        assert isinstance(self.layer, nn.Embedding)
        return x @ self.layer.weight.transpose(0, 1)


def plain_copy(module: nn.Module, row: int) -> nn.Module:
    """The module with each population layer replaced by the plain layer of one row; its own code stays."""
    if isinstance(module, PopulationLayer):
        return _LaneFree(module.plain(row))
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._modules = {
        name: None if child is None else plain_copy(child, row) for name, child in module._modules.items()
    }
    return twin


class _Grown(nn.Module):
    """The row's segments and blended seeds in execution order."""

    def __init__(self, model: MorphogeneticModel, row: int) -> None:
        super().__init__()
        self.host = plain_copy(model.host, row)
        self.image = model.layout.image
        self.seeds, self.gates = nn.ModuleDict(), nn.ModuleDict()
        self.steps: list[tuple[str, AlphaAlgorithm, float] | None] = []
        for slot_id in model.slot_after:
            seed = None if slot_id is None else model.slot(slot_id).seeds[row]
            if slot_id is None or seed is None or not seed.is_blended:
                self.steps.append(None)
                continue
            banks = model.slot(slot_id).banks
            self.seeds[slot_id] = plain_copy(banks[seed.blueprint_id], row)
            if seed.algorithm is AlphaAlgorithm.GATE:
                self.gates[slot_id] = plain_copy(banks[GATE_BANK], row)
            self.steps.append((slot_id, seed.algorithm, seed.alpha.alpha))

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.image else x.unsqueeze(0)
        for index, step in enumerate(self.steps):
            h = self.host.segment(index, h, _ONE)  # type: ignore[operator]
            if step is None:
                continue
            slot_id, algorithm, alpha = step
            delta = self.seeds[slot_id](h, _ONE)
            if algorithm is AlphaAlgorithm.MULTIPLY:
                h = h * (1 + alpha * torch.tanh(delta))
            elif algorithm is AlphaAlgorithm.GATE:
                h = h + delta * (alpha * self.gates[slot_id](h, _ONE))
            else:
                h = h + alpha * delta
        return self.host.segment(len(self.steps), h, _ONE).squeeze(0)  # type: ignore[operator]


def as_graph(root: nn.Module, class_name: str) -> fx.GraphModule:
    """The module as a graph of the layers in it. A module that someone else wrote stays whole: its code may
    not be traceable."""
    whole = {id(m.module) for m in root.modules() if isinstance(m, PlainModule)}

    class Tracer(fx.Tracer):  # local, because a graph remembers any other class and would need Esper to load
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return id(m) in whole or super().is_leaf_module(m, module_qualified_name)

    graph = Tracer().trace(root)
    for node in graph.nodes:
        node.type = None  # the annotations of `forward` are strings here, which pickle cannot resolve
    return fx.GraphModule(root, graph, class_name=class_name)


def export_row(model: MorphogeneticModel, row: int = 0) -> fx.GraphModule:
    """The row as a plain module in eval mode: `[B, …]` → `[B, …, classes]`. Seeds that are not blended are
    left out."""
    model.check_row(row)
    return as_graph(_Grown(model, row).eval(), "GrownNetwork").eval()
