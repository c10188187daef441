"""A user's optimizers follow growth: same objects, same groups, same state of whatever survives.

Every slot has one parameter group from the start, empty until a seed germinates. Schedulers know it from
their first step, so a newborn has the right learning rate. An optimizer is recognised by these groups when it
steps (torch's hook for all optimizers), and each time the structure changes its groups are looked up anew:
`load_state_dict` replaces them, so a reference to a group would go stale."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from esper.grower.body import Body
from esper.grower.places import ESPER
from esper.leyline import EsperError

SLOT_KEY = "esper_slot"
"""Every group of a slot has this option; its value is the slot's name."""
Group = dict[str, Any]


class OptimizerLink:
    """The optimizers of one model."""

    def __init__(self, model: nn.Module, body: Body) -> None:
        self._model, self._body = model, body
        self._issued: list[Group] = []
        self._mine: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Optimizers with groups of slots → version of the body that they follow."""
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        self._bare: list[str] = []
        """Class names of optimizers that train this model and have no group of a slot."""
        self.steps = 0
        """Optimizer steps seen."""
        self._steps_before = 0
        """The same at the end of the last epoch."""
        _LINKS.add(self)

    # -- groups ----------------------------------------------------------------------------------------------

    def param_groups(
        self, host: Iterable[Any] | None, slots: Sequence[str] | None, options: Mapping[str, Any]
    ) -> list[Group]:
        """Groups for one optimizer: the host's, then one per slot."""
        names = self._body.names if slots is None else [self._name(slot) for slot in slots]
        groups = _host_groups(self.host_parameters() if host is None else host, options)
        live = {slot.name: self._body.parameters_of(slot) for slot in self._body}
        issued: list[Group] = [{"params": list(live[name]), SLOT_KEY: name, **options} for name in names]
        self._issued = [g for g in self._issued if g[SLOT_KEY] not in names] + issued
        return groups + issued

    def host_parameters(self) -> list[nn.Parameter]:
        """The model's own parameters, tied ones once."""
        return [p for name, p in self._model.named_parameters() if not name.startswith(f"{ESPER}.")]

    def _name(self, slot: str) -> str:
        self._body.slot_id(slot)
        return slot

    def learning_rate(self) -> float:
        """Of the group with most of the model's own parameters; NaN if no optimizer is known."""
        groups = [g for o in self._mine for g in o.param_groups if SLOT_KEY not in g and g["params"]]
        if not groups:
            return math.nan
        largest = max(groups, key=lambda group: sum(p.numel() for p in group["params"]))
        return float(largest["lr"])

    @property
    def steps_of_epoch(self) -> int:
        """Steps of each optimizer since the last epoch ended; 0 if none were seen."""
        return (self.steps - self._steps_before) // max(len(self._mine), 1)

    def next_epoch(self) -> None:
        self._steps_before = self.steps

    # -- finding optimizers ----------------------------------------------------------------------------------

    def notice(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        if optimizer in self._others:
            return
        if optimizer not in self._mine and not self._recognise(optimizer):
            return
        self.steps += 1
        if self._mine[optimizer] != self._body.version:
            self._sync(optimizer)

    def _recognise(self, optimizer: Any) -> bool:
        groups = optimizer.param_groups
        of_slots = [group for group in groups if SLOT_KEY in group]
        is_issued = any(group is issued for group in of_slots for issued in self._issued)
        ours = {id(p) for p in self._model.parameters()}
        trains = any(id(p) in ours for group in groups for p in group["params"])
        if of_slots and (is_issued or trains):
            self._check_duplicates(optimizer, of_slots)
            self._mine[optimizer] = -1
            return True
        self._others.add(optimizer)
        if trains:
            self.steps += 1
            self._bare.append(type(optimizer).__name__)
        return False

    def track(self, optimizer: Any) -> None:
        """Follow an optimizer that does not inherit torch's, so that its steps cannot be seen."""
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, list) or not any(SLOT_KEY in group for group in groups):
            raise EsperError(
                f"track: {type(optimizer).__name__} has no group of a slot; {_ADVICE}, and follow the API of "
                "torch.optim.Optimizer (param_groups, state)"
            )
        self._mine[optimizer] = -1
        self._sync(optimizer)

    def _check_duplicates(self, optimizer: Any, of_slots: Sequence[Group]) -> None:
        taken = {g[SLOT_KEY] for other in self._mine for g in other.param_groups if SLOT_KEY in g}
        for group in of_slots:
            if group[SLOT_KEY] in taken:
                raise EsperError(
                    f"slot {group[SLOT_KEY]!r} has a group in two optimizers, the second is "
                    f"{type(optimizer).__name__}; give each its slots: grower.param_groups(slots=[…], …)"
                )

    def check(self) -> None:
        """Raise unless every slot can be trained."""
        grouped = {g[SLOT_KEY] for o in self._mine for g in o.param_groups if SLOT_KEY in g}
        if self._bare and not self._mine:
            raise EsperError(
                f"the optimizer {self._bare[0]} trains this model but has no groups for the slots, so seeds "
                f"would never learn; {_ADVICE}"
            )
        known = grouped | {group[SLOT_KEY] for group in self._issued}
        missing = [name for name in self._body.names if name not in known]
        if missing and (self._mine or self._issued):
            raise EsperError(f"no optimizer has a group for slots {', '.join(missing)}; {_ADVICE}")

    # -- following growth ------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Bring the groups of all optimizers up to date: newborns in, pruned ones and their state out."""
        live = {slot.name: self._body.parameters_of(slot) for slot in self._body}
        for group in self._issued:
            group["params"][:] = live[group[SLOT_KEY]]
        for optimizer in list(self._mine):
            self._sync(optimizer)

    def _sync(self, optimizer: Any) -> None:
        live = {slot.name: self._body.parameters_of(slot) for slot in self._body}
        kept: set[int] = set()
        for group in optimizer.param_groups:
            if group.get(SLOT_KEY) in live:
                parameters = live[group[SLOT_KEY]]
                _check_fit(optimizer, group, parameters)
                known = {id(p) for p in optimizer.state}
                group["params"][:] = parameters
                _begin(optimizer, group, [p for p in parameters if id(p) not in known])
            kept |= {id(p) for p in group["params"]}
        for parameter in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in kept]:
            del optimizer.state[parameter]
        self._mine[optimizer] = self._body.version


_ADVICE = "build it with grower.param_groups(lr=…), or add grower.param_groups(host=[], lr=…) to your groups"
_LINKS: weakref.WeakSet[OptimizerLink] = weakref.WeakSet()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    for link in tuple(_LINKS):
        link.notice(optimizer)


register_optimizer_step_pre_hook(_before_step)


def _host_groups(host: Iterable[Any], options: Mapping[str, Any]) -> list[Group]:
    """Parameters, or groups, as an optimizer takes them."""
    items = list(host)
    if all(isinstance(item, Mapping) for item in items):
        return [{**options, **item} for item in items]
    return [{"params": items, **options}]


def _check_fit(optimizer: Any, group: Group, parameters: Sequence[Tensor]) -> None:
    if isinstance(optimizer, torch.optim.Muon) and any(p.dim() != 2 for p in parameters):
        raise EsperError(
            f"slot {group[SLOT_KEY]!r} is in a Muon optimizer, which takes matrices only; put the slots into "
            "another one: AdamW(grower.param_groups(host=[…], lr=…))"
        )


def _begin(optimizer: Any, group: Group, newborn: list[Tensor]) -> None:
    """Fresh state for newborn parameters, where an optimizer makes it in its constructor. The others make it
    at a parameter's first step."""
    if newborn and isinstance(optimizer, torch.optim.Adagrad):
        twin = type(optimizer)([{**group, "params": newborn}])
        optimizer.state.update(twin.state)
