"""A user's optimizers follow growth: same objects, same groups, same state of whatever survives.

Every slot has one parameter group from the start, empty until a seed germinates. Schedulers know it from
their first step, so a newborn has the right learning rate. An optimizer is recognised by these groups when it
steps (torch's hook for all optimizers), and each time the structure changes its groups are looked up anew:
`load_state_dict` replaces them.

A group says which slot it trains, by a key that is saved. Whose slot it is, its list of parameters says:
`load_state_dict` keeps these lists, also in a resumed run that loads the groups of another process, and two
models with slots of the same name may share one optimizer."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Seen:
    """What one model's link knows of an optimizer."""

    groups: list[int]
    """Identities of its groups when it was looked at."""
    has_slots: bool
    """It has groups of this model's slots."""
    trains: bool
    """It has parameters of this model."""
    version: int = -1
    """Of the body that its groups follow."""


class OptimizerLink:
    """The optimizers of one model."""

    def __init__(self, model: nn.Module, body: Body) -> None:
        self._model, self._body = model, body
        self._issued: list[Group] = []
        """Groups of slots that were given out, or recognised. One that `load_state_dict` has replaced shares
        its list of parameters with the group that took its place."""
        self._seen: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()
        self._bare = ""
        """Class name of an optimizer that trained this model in this epoch and has no group of a slot."""
        self.steps = 0
        """Steps seen of optimizers with groups of slots."""
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
        live = self._parameters()
        issued: list[Group] = [{"params": list(live[name]), SLOT_KEY: name, **options} for name in names]
        self._issued += issued
        return groups + issued

    def host_parameters(self) -> list[nn.Parameter]:
        """The model's own parameters, tied ones once."""
        return [p for name, p in self._model.named_parameters() if not name.startswith(f"{ESPER}.")]

    def _parameters(self) -> dict[str, list[nn.Parameter]]:
        """Of the seed in each slot."""
        return {slot.name: self._body.parameters_of(slot) for slot in self._body}

    def _name(self, slot: str) -> str:
        self._body.slot_id(slot)
        return slot

    def learning_rate(self) -> float:
        """Of the group with most of the model's own parameters; NaN if no optimizer is known."""
        host = {id(p) for p in self.host_parameters()}
        sizes = [
            (sum(p.numel() for p in group["params"] if id(p) in host), group)
            for optimizer in self._following()
            for group in optimizer.param_groups
        ]
        size, largest = max(sizes, key=lambda entry: entry[0], default=(0, None))
        return math.nan if largest is None or size == 0 else float(largest["lr"])

    @property
    def steps_of_epoch(self) -> int:
        """Steps of each optimizer since the last epoch ended; 0 if none were seen."""
        return (self.steps - self._steps_before) // max(len(self._following()), 1)

    def next_epoch(self) -> None:
        self._steps_before = self.steps
        self._bare = ""

    # -- finding optimizers ----------------------------------------------------------------------------------

    def notice(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        seen = self._look_at(optimizer)
        if seen.has_slots:
            self.steps += 1
            if seen.version != self._body.version:
                self._sync(optimizer, seen)
        elif seen.trains:
            self._bare = type(optimizer).__name__

    def _look_at(self, optimizer: Any) -> _Seen:
        """What is known of an optimizer, found out again if its groups are not those of the last time."""
        groups = [id(group) for group in optimizer.param_groups]
        seen = self._seen.get(optimizer)
        if seen is None or seen.groups != groups:
            own = self._groups_of(optimizer)
            if own:
                self._check_duplicates(optimizer, own)
                self._issued += [group for group in own if not self.has_issued(group)]
            seen = self._seen[optimizer] = _Seen(groups, bool(own), self.is_trained_by(optimizer))
        return seen

    def _following(self) -> list[Any]:
        """The optimizers that train slots."""
        return [optimizer for optimizer, seen in self._seen.items() if seen.has_slots]

    def _groups_of(self, optimizer: Any) -> list[Group]:
        """The groups of this model's slots."""
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, list):
            return []
        return [group for group in groups if _owner(optimizer, group) is self]

    def has_slot(self, name: object) -> bool:
        return name in self._body.names

    def has_issued(self, group: Group) -> bool:
        return any(group["params"] is issued["params"] for issued in self._issued)

    def owns(self, group: Group) -> bool:
        """Whether a group was given out here or trains a seed of this model."""
        seeds = {id(p) for p in self._body.parameters()}
        return self.has_issued(group) or any(id(p) in seeds for p in group["params"])

    def is_trained_by(self, optimizer: Any) -> bool:
        ours = {id(p) for p in self._model.parameters()}
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])

    def track(self, optimizer: Any) -> None:
        """Follow an optimizer that does not inherit torch's, so that its steps cannot be seen."""
        if not self._groups_of(optimizer):
            raise EsperError(
                f"track: {type(optimizer).__name__} has no group of a slot; {_ADVICE}, and follow the API of "
                "torch.optim.Optimizer (param_groups, state)"
            )
        self._sync(optimizer, self._look_at(optimizer))

    def release(self, optimizer: Any) -> None:
        """Forget an optimizer, until it steps again."""
        if not self._groups_of(optimizer):
            raise EsperError(
                f"release: {type(optimizer).__name__} has no group of a slot of this model; name the "
                "optimizer that has trained the slots until now"
            )
        self._seen.pop(optimizer, None)

    def _check_duplicates(self, optimizer: Any, own: Sequence[Group]) -> None:
        counts = Counter(group[SLOT_KEY] for group in own)
        name, count = counts.most_common(1)[0]
        if count > 1:
            raise EsperError(
                f"slot {name!r} has {count} groups in one {type(optimizer).__name__}; give it the groups of "
                "grower.param_groups once"
            )
        if counts.keys() & self._taken(optimizer):
            gc.collect()  # An optimizer that nothing refers to may wait for this.
        twice = sorted(counts.keys() & self._taken(optimizer))
        if twice:
            raise EsperError(
                f"slot {twice[0]!r} has a group in two optimizers, the second is {type(optimizer).__name__}; "
                "give each its slots: grower.param_groups(slots=[…], …), or call grower.release(old) if the "
                "second replaces an old one"
            )

    def _taken(self, optimizer: Any) -> set[str]:
        """Slots that have a group in other optimizers."""
        return {
            group[SLOT_KEY]
            for other in self._following()
            if other is not optimizer
            for group in self._groups_of(other)
        }

    def check(self) -> None:
        """Raise unless every slot can be trained."""
        if self._bare and not self._following() and self.steps == self._steps_before:
            raise EsperError(
                f"the optimizer {self._bare} trains this model but has no groups for the slots, so seeds "
                f"would never learn; {_ADVICE}"
            )
        known = {group[SLOT_KEY] for group in self._issued}
        missing = [name for name in self._body.names if name not in known]
        if missing and known:
            raise EsperError(f"no optimizer has a group for slots {', '.join(missing)}; {_ADVICE}")

    # -- following growth ------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Bring the groups of all optimizers up to date: newborns in, pruned ones and their state out."""
        live = self._parameters()
        for group in self._issued:
            group["params"][:] = live[group[SLOT_KEY]]
        for optimizer in self._following():
            self._sync(optimizer, self._look_at(optimizer))

    def _sync(self, optimizer: Any, seen: _Seen) -> None:
        live = self._parameters()
        kept: set[int] = set()
        for group in optimizer.param_groups:
            if group.get(SLOT_KEY) in live and self.has_issued(group):
                parameters = live[group[SLOT_KEY]]
                _check_fit(optimizer, group, parameters)
                known = {id(p) for p in optimizer.state}
                group["params"][:] = parameters
                _begin(optimizer, group, [p for p in parameters if id(p) not in known])
            kept |= {id(p) for p in group["params"]}
        for parameter in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in kept]:
            del optimizer.state[parameter]
        seen.version = self._body.version


_ADVICE = (
    "build it with grower.param_groups(lr=…), or call optimizer.add_param_group with each group of "
    "grower.param_groups(host=[], lr=…)"
)
_LINKS: weakref.WeakSet[OptimizerLink] = weakref.WeakSet()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    for link in tuple(_LINKS):
        link.notice(optimizer)


register_optimizer_step_pre_hook(_before_step)


def _owner(optimizer: Any, group: Group) -> OptimizerLink | None:
    """Whose slot a group trains. An empty copy of a group that was given out does not tell; it goes to the
    model that the optimizer trains."""
    name = group.get(SLOT_KEY)
    links = [link for link in tuple(_LINKS) if link.has_slot(name)]
    for link in links:
        if link.owns(group):
            return link
    if group["params"]:
        return None
    of_slot = [other for other in optimizer.param_groups if other.get(SLOT_KEY) == name]
    waiting = [
        link
        for link in links
        if link.is_trained_by(optimizer) and not any(link.owns(other) for other in of_slot)
    ]
    if len(waiting) > 1:
        raise EsperError(
            f"{type(optimizer).__name__} trains {len(waiting)} models that have a slot {name!r}, and its "
            "groups are copies; give it the groups that grower.param_groups returns"
        )
    return waiting[0] if waiting else None


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
