"""Incubation in a user's loop: a seed learns from the loss that the model would have with it, while the model
itself runs without it.

The model runs once more for each incubating seed. Its own weights are constants in that pass, its buffers are
copies and its random numbers are drawn twice, so host, buffers and generators are the same bits as without
the seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.grower.body import Body
from esper.grower.places import cuda_devices
from esper.leyline import EsperError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class Incubator:
    """Keeps the inputs of the newest training pass while a seed incubates."""

    def __init__(self, model: nn.Module, body: Body) -> None:
        self._model, self._body = model, body
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._hook: RemovableHandle | None = None
        self.was_asked = False
        """`loss` was called in this epoch, so a seed that incubates will learn."""

    def loss(self, criterion: Callable[[Any], Tensor]) -> Tensor:
        self.was_asked = True
        slots = [slot for slot in self._body if slot.is_incubating]
        total = torch.zeros((), device=self._body.slot(self._body.slot_config.slot_ids[0]).anchor.device)
        if not slots:
            return total
        if self._inputs is None:
            raise EsperError(
                "grower.loss: no training pass of this model was seen; call it after loss = …model(x)…, on "
                "the model itself and not on a compiled one"
            )
        args, kwargs = self._inputs
        for slot in slots:
            with self._body.shadowing(slot), torch.random.fork_rng(devices=cuda_devices(self._model)):
                total = total + criterion(functional_call(self._model, self._constants(slot), args, kwargs))
        return total

    def _constants(self, slot: nn.Module) -> dict[str, Tensor]:
        mine = {id(p) for p in slot.parameters()}
        constants = {n: p.detach() for n, p in self._model.named_parameters() if id(p) not in mine}
        return constants | {n: b.detach().clone() for n, b in self._model.named_buffers()}

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watches = self._hook is not None and module.training and torch.is_grad_enabled()
        if watches and not any(s.is_shadowed for s in self._body):
            self._inputs = args, kwargs

    def __getstate__(self) -> dict[str, Any]:
        # The hook goes into copies and pickles of the model; there it keeps nothing.
        return {**self.__dict__, "_inputs": None, "_hook": None}

    def sync(self) -> None:
        """Watch the model's inputs only while a seed incubates."""
        incubates = any(slot.is_incubating for slot in self._body)
        if incubates and self._hook is None:
            self._hook = self._model.register_forward_pre_hook(self._keep, with_kwargs=True)
        elif not incubates and self._hook is not None:
            self._hook.remove()
            self._hook, self._inputs = None, None

    def next_epoch(self) -> None:
        self.was_asked = False


def remove_hook(model: nn.Module) -> None:
    """Remove the hook that a copy of a model has from its original."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(getattr(hook, "__self__", None), Incubator):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
