"""Seeds in ordinary torch: each row of a bank is a module of its own, as its author wrote it.

A bank stacks the tensors of its rows, `[P, …]`, as all banks do. A pass runs the module once for each lane,
with copies of that lane's tensors, so what happens in one row cannot reach another.

Whatever would make a row depend on more than its own tensors and its input is refused by `check_module`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.kasmina.layers import Lanes, Mode, PopulationLayer, pick, settled
from esper.leyline import BlueprintError, Topology

MakeModule = Callable[[int], nn.Module]
"""channels → a module that maps a tensor to one of the same shape."""


class PlainModule(nn.Module):
    """One row's module in the place of a population layer: it takes images as they are, and `[1, B, …, D]`
    otherwise. Dimensions between batch and features are one for it: `[B, T, D]`."""

    def __init__(self, module: nn.Module, topology: Topology) -> None:
        super().__init__()
        self.module, self.topology = module, topology

    def forward(self, x: Tensor) -> Tensor:
        if self.topology == "cnn":
            return self.module(x)
        if self.topology == "mlp":
            return self.module(x.squeeze(0)).unsqueeze(0)
        return self.module(x.squeeze(0).flatten(1, -2)).unflatten(1, x.shape[2:-1]).unsqueeze(0)


class ModuleRows(PopulationLayer):
    """One module per row: `[B, L·C, H, W]` or `[L, B, …, D]`, as the topology has it."""

    def __init__(self, population: int, channels: int, make: MakeModule, topology: Topology) -> None:
        super().__init__()
        self.channels, self.make, self.topology = channels, make, topology
        with _own_generator():
            template = make(channels)
        self.rows = _stacked(template, population, {})
        # Its code runs with the tensors of one row after the other. No child: its own tensors are no part of
        # the bank.
        self._template = (template,)

    def reset_row(self, row: int, generator: torch.Generator) -> None:
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        own = _tensors(self.rows)
        with torch.no_grad():
            for name, tensor in _tensors(_drawn(self.make, self.channels, seed)).items():
                own[name][row] = tensor.to(own[name])

    def plain(self, row: int) -> nn.Module:
        with _own_generator():
            module = self.make(self.channels)
        own = _tensors(self.rows)
        with torch.no_grad():
            for name, tensor in _tensors(module).items():
                tensor.data = own[name][row].detach().to(tensor.device, copy=True)
        return PlainModule(module, self.topology)

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        module = self._template[0].train(lanes.mode is not Mode.EVAL)
        parameters = {name: pick(p, lanes).unbind(0) for name, p in self.rows.named_parameters()}
        buffers = {name: pick(b, lanes).unbind(0) for name, b in self.rows.named_buffers()}
        outputs: list[Tensor] = []
        recorded: list[dict[str, Tensor]] = []
        real = lanes.count - lanes.padding
        for lane, h in enumerate(self._split(x, lanes.count)[:real]):
            # Copies: a row's place in its bank must not decide how its memory is aligned, and with that the
            # kernel that it gets.
            state = {name: rows[lane].clone() for name, rows in (*parameters.items(), *buffers.items())}
            out = functional_call(module, state, (h,))
            _check_output(out, h)
            outputs.append(settled(out, torch.contiguous_format))
            recorded.append({name: state[name] for name in buffers})
        if lanes.mode is Mode.TRAIN and buffers:
            self._record(recorded, None if lanes.rows is None else lanes.rows[:real])
        outputs += outputs[:1] * lanes.padding  # those lanes repeat the first
        return self._join(outputs, x)

    def _split(self, x: Tensor, lanes: int) -> list[Tensor]:
        """One contiguous copy per lane, as the module takes it: code in ordinary torch may view it."""
        if self.topology != "cnn":
            pieces = [piece.clone(memory_format=torch.contiguous_format) for piece in x.unbind(0)]
            return [piece.flatten(1, -2) for piece in pieces] if self.topology == "transformer" else pieces
        pixels = settled(x, torch.channels_last).permute(0, 2, 3, 1).unflatten(3, (lanes, -1))
        return [p.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format) for p in pixels.unbind(3)]

    def _join(self, outputs: list[Tensor], x: Tensor) -> Tensor:
        if self.topology != "cnn":
            return torch.stack(outputs).view(x.shape)
        return torch.cat(outputs, 1).contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def _record(self, recorded: list[dict[str, Tensor]], rows: Tensor | None) -> None:
        """Keep what the pass has written into the buffers of these rows; None: of all."""
        for name, buffer in self.rows.named_buffers():
            values = torch.stack([state[name] for state in recorded])
            if rows is None:
                buffer.copy_(values)
            else:
                buffer.index_copy_(0, rows, values)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _stacked(module: nn.Module, population: int, known: dict[int, nn.Parameter]) -> nn.Module:
    """Zeros for the tensors of `population` modules, under the same names. `known`: by id of a parameter of
    the module, so that those that it shares are shared here."""
    stack = nn.Module()
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in known:
            known[id(parameter)] = nn.Parameter(parameter.detach().new_zeros(population, *parameter.shape))
        stack.register_parameter(name, known[id(parameter)])
    for name, buffer in module.named_buffers(recurse=False):
        stack.register_buffer(name, buffer.new_zeros(population, *buffer.shape))
    for name, child in module.named_children():
        stack.add_module(name, _stacked(child, population, known))
    return stack


@contextmanager
def _own_generator() -> Iterator[torch.Generator]:
    """Torch's layers draw initial weights when they are built; the caller's generator must not notice."""
    with torch.random.fork_rng(devices=[]):
        yield torch.default_generator


def _drawn(make: MakeModule, channels: int, seed: int) -> nn.Module:
    """A module whose initial values come from this random seed. Drawn on the CPU, so that they do not depend
    on the device."""
    with _own_generator() as generator, torch.device("cpu"):
        generator.manual_seed(seed)
        return make(channels)


def _check_output(out: Any, x: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise BlueprintError(f"a seed's module returned a {type(out).__name__}, must return a tensor")
    if out.shape != x.shape:
        raise BlueprintError(
            f"a seed's module turned a tensor of shape {tuple(x.shape)} into {tuple(out.shape)}; the shape "
            "must stay"
        )


# -- what is refused -----------------------------------------------------------------------------------------


def check_module(
    name: str, make: MakeModule, topology: Topology, channels: int, positions: tuple[int, ...] | None
) -> None:
    """Raise a BlueprintError that says why, unless this module can be a seed at a slot with these channels
    and positions (None: unknown, then nothing runs)."""
    try:
        with torch.device("cpu"):
            _check(make, topology, channels, positions)
    except BlueprintError as error:
        raise BlueprintError(f"blueprint {name!r}: {error}") from error
    except Exception as error:
        raise BlueprintError(
            f"blueprint {name!r}: the module for {channels} channels fails: {type(error).__name__}: {error}"
        ) from error


def _check(make: MakeModule, topology: Topology, channels: int, positions: tuple[int, ...] | None) -> None:
    modules = [_drawn(make, channels, seed) for seed in (0, 0, 1)]
    for module in modules:
        _check_tensors(module)
    _check_reproducible(modules[0], modules[1])
    if positions is None:
        return
    shape = (2, channels, *positions) if topology == "cnn" else (2, *positions, channels)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for mode in (True, False):
        _check_pass(modules[0].train(mode), x)
    with torch.no_grad():
        once, twice = modules[0](x), modules[0](x)
    if not torch.equal(once.nan_to_num(), twice.nan_to_num()):
        raise BlueprintError("its output differs between two passes in eval mode on the same input")
    _check_own_tensors(modules[0], modules[2].eval(), x)


def _check_tensors(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise BlueprintError(
            f"its factory returned a {type(module).__name__}; it takes a number of channels and must return "
            "an nn.Module"
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise BlueprintError(f"parameter {name} has no shape yet; use no lazy layers")
        if not parameter.is_floating_point():
            raise BlueprintError(f"parameter {name} is {parameter.dtype}, must be floating point")
        if not parameter.requires_grad:
            raise BlueprintError(
                f"parameter {name} requires no gradient, but all parameters of a seed are trained; make it a "
                "buffer (register_buffer)"
            )


def _check_reproducible(first: nn.Module, second: nn.Module) -> None:
    a, b = _tensors(first), _tensors(second)
    for name in a:
        if name not in b or not torch.equal(a[name].nan_to_num(), b[name].nan_to_num()):
            raise BlueprintError(
                f"{name} differs between two modules that were made with the same random seed of torch; draw "
                "initial values with torch only, without a generator of your own"
            )


def _check_pass(module: nn.Module, x: Tensor) -> None:
    mode = "training" if module.training else "eval"
    buffers, before = dict(module.named_buffers()), x.clone()
    with _own_generator() as generator:
        drawn = generator.get_state()
        _check_output(module(x), x)
        if not torch.equal(generator.get_state(), drawn):
            raise BlueprintError(
                f"it draws random numbers in {mode} mode (dropout?) from a stream that all networks share, "
                "so that a network would depend on its neighbours; leave dropout out, or set p to 0"
            )
    if not torch.equal(x, before):
        raise BlueprintError(
            "it changes its input in place, which is the host's too; use inplace=False in its first layer"
        )
    for name, buffer in module.named_buffers():
        if buffers.get(name) is not buffer:
            raise BlueprintError(
                f"its forward pass replaces buffer {name}, and the new one would be lost; change it in "
                "place, as with copy_ or add_"
            )


def _check_own_tensors(template: nn.Module, other: nn.Module, x: Tensor) -> None:
    """The code of one module with the tensors of another must be the other."""
    with torch.no_grad(), _own_generator():
        state = {name: tensor.clone() for name, tensor in _tensors(other).items()}
        out, wanted = functional_call(template.eval(), state, (x.clone(),)), other(x.clone())
    if not torch.equal(out.nan_to_num(), wanted.nan_to_num()):
        raise BlueprintError(
            "its output depends on tensors that are neither parameters nor buffers; register what differs "
            "between two modules, and keep no results from one pass to the next"
        )
