"""Copies of a model that grow with it: averages of its weights."""

from __future__ import annotations

import gc
import weakref

from torch import nn
from torch.optim.swa_utils import AveragedModel

from esper.grower.body import Body
from esper.leyline import EsperError


class Followers:
    """Every `AveragedModel` of this model, and copies that the user named.

    An average is made by a deepcopy, which leaves no trace in the original; a growing one would silently pair
    the wrong tensors. So when the structure changes, living averages are looked for."""

    def __init__(self, model: nn.Module, body: Body) -> None:
        self._model, self._body = model, body
        self._named: weakref.WeakSet[Body] = weakref.WeakSet()
        self._signature = body.signature()

    def add(self, average: nn.Module) -> None:
        bodies = [module for module in average.modules() if isinstance(module, Body)]
        if not bodies:
            raise EsperError(f"follow: this {type(average).__name__} is no copy of an attached model")
        for body in bodies:
            if body is self._body:
                raise EsperError("follow: this is the attached model itself, not a copy of it")
            body.mirror(self._body)
            self._named.add(body)

    def sync(self) -> None:
        signature = self._body.signature()
        if signature == self._signature:
            return
        self._signature = signature
        for body in {*self._named, *self._averages()}:
            body.mirror(self._body)

    def _averages(self) -> set[Body]:
        found = set()
        # `type` and not `isinstance`: asking some objects for their class has side effects.
        for average in [o for o in gc.get_objects() if issubclass(type(o), AveragedModel)]:
            for body in average.modules():
                if isinstance(body, Body) and body.origin == self._body.origin:
                    found.add(body)
        return found
