"""Optimizers for populations: every row has its own learning rate, momentum, decay and gradient clipping.

The model owns the groups (its host, and each slot's banks); the optimizer follows it through growth. State of
surviving parameters is kept, a row that begins or ends starts from zero, and only rows that learn ever move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper._archive import check_tensors
from esper.leyline import EsperError, check_number

if TYPE_CHECKING:
    from esper.kasmina.model import MorphogeneticModel

VANISHING, EXPLODING = 1e-7, 10.0
"""A parameter tensor whose gradient norm lies outside these counts against a seed's gradient health."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Host and seeds each have their learning rate and decay; `clip` bounds host and each slot separately."""

    kind: str = "sgd"
    host_lr: float = 0.01
    seed_lr: float = 0.01
    momentum: float = 0.9
    """SGD momentum, or Adam's β1."""
    beta2: float = 0.999
    host_decay: float = 5e-4
    seed_decay: float = 0.0
    clip: float = 1.0
    eps: float = 1e-6
    """Added to Adam's root mean square. A gradient that is 0 but for rounding (a bias in front of a norm:
    1e-10 to 1e-7 in float32) then moves a weight by a small part of the learning rate; gradients that mean
    something are 1e-4 and more."""
    newborn_warmup: int = 0
    """Number of a seed's first updates over which its learning rate rises linearly to the full rate; 0: full
    from the first."""

    def __post_init__(self) -> None:
        if self.kind not in ("sgd", "adamw"):
            raise EsperError(f"optimizer kind {self.kind!r} is unknown; allowed: sgd, adamw")
        for name in ("host_lr", "seed_lr", "momentum", "beta2", "host_decay", "seed_decay", "clip", "eps"):
            check_number("optimizer", name, getattr(self, name))
        check_number("optimizer", "newborn_warmup", self.newborn_warmup, integer=True)
        for name in ("momentum", "beta2"):
            if getattr(self, name) >= 1:
                raise EsperError(f"optimizer: {name} is {getattr(self, name)}, must be below 1")
        for name in ("clip", "eps"):
            if not getattr(self, name):
                raise EsperError(f"optimizer: {name} is 0, must be above 0")


@dataclass(slots=True)
class Bank:
    """Tensors `[P, …]` that live and die together, and their optimizer state."""

    parameters: dict[str, Tensor]
    births: Tensor
    """[P] counter of each row's beginnings and endings, as of the last step."""
    learning: Tensor
    """[P] bool: rows that the optimizer may move."""
    still: Tensor | None
    """Rows that do not learn, where one of them may take part in a pass: its gradient must be taken out."""
    bias: Tensor
    """[P, 2] 1 − β1ᵗ and 1 − β2ᵗ after the row's t updates (Adam's bias corrections), kept by recurrence: `β
    ** t` rounds differently with the length of the vector, and a row must not depend on how many others there
    are."""
    updates: Tensor
    """[P] number of the row's updates, counted while it warms up."""
    state: dict[str, list[Tensor]]
    """Moment name → one tensor per parameter."""
    tables: list[Tensor] = field(default_factory=list)
    """The parameters as views `[P, n]`."""
    state_tables: dict[str, list[Tensor]] = field(default_factory=dict)
    """The moments as views `[P, n]`."""

    def lay_out(self) -> None:
        """Make the views anew: a parameter's memory may have been replaced."""
        self.tables = [p.detach().view(len(p), -1) for p in self.parameters.values()]
        self.state_tables = {
            moment: [t.view(len(t), -1) for t in tensors] for moment, tensors in self.state.items()
        }

    def forget(self, rows: Tensor | int) -> None:
        """Back to the state of a row that has never learned."""
        self.bias[rows] = 0
        self.updates[rows] = 0
        for tensors in self.state.values():
            for tensor in tensors:
                tensor[rows] = 0


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Gradient norms before clipping, per row; control input, so measured at every step."""

    host_norm: Tensor  # [P]
    norm: dict[str, Tensor]  # slot → [P]
    vanishing: dict[str, Tensor]  # slot → [P], share of tensors without gradient
    exploding: dict[str, Tensor]  # slot → [P], share of tensors with an exploding or non-finite one

    def replaced(self, rows: Tensor, by: GradientStats) -> GradientStats:
        """These statistics, but for the given rows. What was not measured of a row is 0."""

        def merge(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
            nothing = torch.zeros_like(self.host_norm)
            return {
                slot: mine.get(slot, nothing).index_copy(
                    0, rows, theirs.get(slot, nothing).index_select(0, rows)
                )
                for slot in {**mine, **theirs}
            }

        host = self.host_norm.index_copy(0, rows, by.host_norm.index_select(0, rows))
        return GradientStats(
            host,
            merge(self.norm, by.norm),
            merge(self.vanishing, by.vanishing),
            merge(self.exploding, by.exploding),
        )

    def packed(self) -> Tensor:
        """Everything in one tensor [1 + 3·slots, P], for one transfer."""
        return torch.stack(
            [self.host_norm, *self.norm.values(), *self.vanishing.values(), *self.exploding.values()]
        )


@dataclass(frozen=True, slots=True)
class Work:
    """A bank that a pass has reached, in its group, and its gradients as tables `[P, n]`."""

    group: str
    bank: Bank
    grads: list[Tensor]


class Norms:
    """Norms of a step's gradients before clipping: of each group of each row, and of each tensor."""

    def __init__(self, work: Sequence[Work]) -> None:
        # One row of norms for each tensor, one column for each network.
        norms = torch.cat([torch.linalg.vector_norm(g, dim=1) for w in work for g in w.grads])
        norms = norms.view(-1, len(work[0].bank.learning))
        tensors = [len(w.grads) for w in work]
        self._parts = norms.split(tensors)
        self._owners = [(w.group, w.bank.learning) for w in work]
        # Squares add up within a bank first: banks of other rows add exactly 0 to a row's sum.
        banks: dict[str, list[Tensor]] = {}
        for w, squares in zip(work, norms.square().split(tensors), strict=True):
            banks.setdefault(w.group, []).append(squares.sum(0))
        self.groups = list(banks)
        sums = [parts[0] if len(parts) == 1 else torch.stack(parts).sum(0) for parts in banks.values()]
        self.totals = torch.stack(sums).sqrt()  # one row for each group

    @cached_property
    def stats(self) -> GradientStats:
        """What is worth knowing; computed when asked for, which is once per epoch."""
        norm = dict(zip(self.groups, self.totals.unbind(0), strict=True))
        host_norm = norm.pop("host")
        vanishing, exploding = {}, {}
        for group in norm:
            parts = [
                (learning, part)
                for (owner, learning), part in zip(self._owners, self._parts, strict=True)
                if owner == group
            ]
            norms = torch.cat([part for _, part in parts])
            # A row's seed lives in one bank (and perhaps the gate's): only its own tensors count.
            own = torch.cat([learning.expand(len(part), -1) for learning, part in parts])
            count = own.sum(0).clamp(min=1)
            vanishing[group] = (own & (norms < VANISHING)).sum(0) / count
            exploding[group] = (own & ~(norms <= EXPLODING)).sum(0) / count
        return GradientStats(host_norm, norm, vanishing, exploding)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of K banks, [K, P] each: those of the host or of seeds, and none for rows that do not learn."""

    source: list[Tensor | Bank]
    """What they were computed from."""
    versions: list[int]
    """Of the model, and of the optimizer's rates, which may be written in place."""
    seeds: Tensor  # [K, 1] bool
    learning: Tensor  # bool
    lr: Tensor
    decay: Tensor
    keep: Tensor
    """Share of the momentum that stays."""
    columns: dict[str, list[Tensor]]
    """−lr, decay and keep as one column [P, 1] for each tensor of each bank."""


class PopulationOptimizer:
    """SGD with momentum, or AdamW, on the rows of a population."""

    def __init__(self, model: MorphogeneticModel, config: OptimizerConfig | None = None) -> None:
        self.model = model
        self.config = config or OptimizerConfig()
        like = next(model.host.parameters())
        one_per_row = torch.ones(model.population, dtype=like.dtype, device=like.device)
        self.host_lr = one_per_row * self.config.host_lr
        self.seed_lr = one_per_row * self.config.seed_lr
        self.momentum = one_per_row * self.config.momentum
        self.host_decay = one_per_row * self.config.host_decay
        self.seed_decay = one_per_row * self.config.seed_decay
        self.clip = one_per_row * self.config.clip
        self._norms: Norms | None = None
        self._rates: Rates | None = None
        # Banks that are clipped together: those of "host", and those of each slot.
        self.groups: dict[str, dict[str, Bank]] = {}
        self._version = -1
        self.sync()

    # -- following the model ---------------------------------------------------------------------------------

    def sync(self) -> None:
        """Follow the model's groups: keep the state of surviving banks, add new banks, drop the others."""
        if self._version == self.model.version:
            return
        old = self._banks()
        self.groups = {}
        for spec in self.model.optimizer_groups():
            known = old.get(spec.name)
            if known is None or any(known.parameters[n] is not p for n, p in spec.parameters.items()):
                known = self._new_bank(spec.parameters)
            births = torch.tensor(spec.births)
            reborn = births != known.births
            if reborn.any():
                known.forget(reborn)
            known.births, known.learning = births, torch.tensor(spec.learning, device=self.host_lr.device)
            known.still = None
            if spec.frozen and not all(spec.learning):
                still = [row for row, learns in enumerate(spec.learning) if not learns]
                known.still = torch.tensor(still, device=self.host_lr.device)
            known.lay_out()
            self.groups.setdefault(spec.group, {})[spec.name] = known
        self._version = self.model.version

    def _new_bank(self, parameters: dict[str, Tensor]) -> Bank:
        population = self.model.population
        moments = ("momentum",) if self.config.kind == "sgd" else ("mean", "square")
        state = {moment: [torch.zeros_like(p) for p in parameters.values()] for moment in moments}
        return Bank(
            parameters,
            torch.zeros(population, dtype=torch.long),
            torch.zeros(population, dtype=torch.bool),
            None,
            self.host_lr.new_zeros(population, 2),
            self.host_lr.new_zeros(population),
            state,
        )

    def _banks(self) -> dict[str, Bank]:
        return {name: bank for banks in self.groups.values() for name, bank in banks.items()}

    # -- stepping --------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        for bank in self._banks().values():
            for parameter in bank.parameters.values():
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Clip each group of each row, then move the rows that learn. All tensors of all banks go through
        each operation in one call."""
        self.sync()
        work = [
            Work(group, bank, grads)
            for group, banks in self.groups.items()
            for bank in banks.values()
            if (grads := _gradients(bank)) is not None
        ]
        assert [w.group for w in work[:1]] == ["host"], "step() needs a backward pass first"
        self._norms = norms = Norms(work)
        clip = (self.clip / (norms.totals + 1e-6)).clamp(max=1.0).unsqueeze(2)
        column_of = dict(zip(norms.groups, clip.unbind(0), strict=True))
        grads = [g for w in work for g in w.grads]
        torch._foreach_mul_(grads, [column_of[w.group] for w in work for _ in w.grads])
        self._update(work, grads)

    @property
    def stats(self) -> GradientStats | None:
        """Gradients of the last step."""
        return None if self._norms is None else self._norms.stats

    def _rates_of(self, work: list[Work]) -> Rates:
        """The rates of these banks, computed again only where something has changed."""
        rates = [getattr(self, name) for name in _RATES]
        source = [*rates, *(w.bank for w in work)]
        versions = [self._version, *(rate._version for rate in rates)]
        known = self._rates
        if known is not None and known.versions == versions and _same(known.source, source):
            return known
        seeds = torch.tensor([[w.group != "host"] for w in work], device=self.host_lr.device)
        learning = torch.stack([w.bank.learning for w in work])
        lr = torch.where(learning, torch.where(seeds, self.seed_lr, self.host_lr), 0.0)
        decay = torch.where(learning, torch.where(seeds, self.seed_decay, self.host_decay), 0.0)
        keep = torch.where(learning, self.momentum, 1.0)
        columns = {
            name: _columns(values, work)
            for name, values in {"-lr": -lr, "decay": decay, "keep": keep}.items()
        }
        self._rates = Rates(source, versions, seeds, learning, lr, decay, keep, columns)
        return self._rates

    def _update(self, work: list[Work], grads: list[Tensor]) -> None:
        """K banks, P rows: each bank's rates are a row of [K, P]."""
        tables = [table for w in work for table in w.bank.tables]
        rates = self._rates_of(work)
        lr, descent, seeds, learning = rates.lr, rates.columns["-lr"], rates.seeds, rates.learning
        if self.config.newborn_warmup:
            updates = torch.stack([w.bank.updates for w in work]) + (learning & seeds)
            share = (updates / self.config.newborn_warmup).clamp(max=1.0)
            lr = lr * torch.where(seeds, share, 1.0)
            descent = _columns(-lr, work)
            for w, count in zip(work, updates.unbind(0), strict=True):
                w.bank.updates = count
        if self.config.kind == "sgd":
            momentum = _moments(work, "momentum")
            torch._foreach_addcmul_(grads, tables, rates.columns["decay"])
            torch._foreach_mul_(momentum, rates.columns["keep"])
            torch._foreach_add_(momentum, grads)
            torch._foreach_addcmul_(tables, momentum, descent)
            return
        beta2 = torch.where(learning, torch.full_like(lr, self.config.beta2), 1.0)
        gain2 = torch.where(learning, torch.full_like(lr, 1 - self.config.beta2), 0.0)
        bias = torch.stack([w.bank.bias for w in work])
        bias = bias + torch.stack([1 - rates.keep, gain2], 2) * (1 - bias)
        for w, correction in zip(work, bias.unbind(0), strict=True):
            w.bank.bias = correction
        # A row that has never learned does not move: any divisor but 0 will do.
        bias1, bias2 = torch.where(bias > 0, bias, 1.0).unbind(2)
        torch._foreach_mul_(tables, _columns(1 - lr * rates.decay, work))
        mean, square = _moments(work, "mean"), _moments(work, "square")
        torch._foreach_mul_(mean, rates.columns["keep"])
        torch._foreach_addcmul_(mean, grads, _columns(1 - rates.keep, work))
        torch._foreach_mul_(square, _columns(beta2, work))
        torch._foreach_addcmul_(square, torch._foreach_mul(grads, grads), _columns(1 - beta2, work))
        root = torch._foreach_div(square, _columns(bias2, work))
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, self.config.eps)
        torch._foreach_addcmul_(tables, torch._foreach_div(mean, root), _columns(-lr / bias1, work))

    @property
    def param_groups(self) -> list[dict[str, list[Tensor]]]:
        """Every tensor that has a gradient, as a gradient scaler wants to see them."""
        self.sync()
        return [{"params": [p for bank in self._banks().values() for p in bank.parameters.values()]}]

    # -- rows ------------------------------------------------------------------------------------------------

    def forget_row(self, row: int) -> None:
        """Zero the row's momentum, as after a rollback."""
        self.model.check_row(row)
        self.sync()
        for bank in self._banks().values():
            bank.forget(row)

    def row_state(self, row: int) -> dict[str, Tensor]:
        """Copies of the row's state where it lives, by stable names."""
        return {name: place[row].clone() for name, place in self._places(row).items()}

    def load_row_state(self, row: int, state: dict[str, Tensor]) -> None:
        """The inverse of `row_state`, strict."""
        load_row(self._places(row), state, row, label="optimizer state")

    def _places(self, row: int) -> dict[str, Tensor]:
        """Every `[P, …]` tensor in which the row has state, by stable names."""
        live = self.model.live_banks(self.model.check_row(row))
        self.sync()
        places: dict[str, Tensor] = {f"rates.{name}": getattr(self, name) for name in _RATES}
        for name, bank in self._banks().items():
            if name in live:
                places[f"{name}.bias_correction"] = bank.bias
                if self.config.newborn_warmup and name != "host":
                    places[f"{name}.updates"] = bank.updates
                for moment, tensors in bank.state.items():
                    places |= {
                        f"{name}.{p}.{moment}": t for p, t in zip(bank.parameters, tensors, strict=True)
                    }
        return places


_RATES = ("host_lr", "seed_lr", "momentum", "host_decay", "seed_decay", "clip")


def load_row(places: dict[str, Tensor], values: dict[str, Tensor], row: int, *, label: str) -> None:
    """Copy named values into one row of named tensors; names, shapes and types must agree exactly."""
    targets = {name: place.detach()[row] for name, place in places.items()}
    check_tensors(label, targets, values)
    for name, target in targets.items():
        target.copy_(values[name])


def _gradients(bank: Bank) -> list[Tensor] | None:
    """The bank's gradients as tables `[P, n]`, 0 in rows that do not learn; None where no pass reached it."""
    given = [p.grad for p in bank.parameters.values()]
    if all(g is None for g in given):
        return None
    grads = [
        torch.zeros_like(table) if g is None else g.view(len(g), -1)
        for g, table in zip(given, bank.tables, strict=True)
    ]
    if bank.still is not None:
        # Rows that take no part in a pass have no gradient. That of one that may not move is overwritten, not
        # multiplied by 0: it may be NaN.
        for g in grads:
            g.index_fill_(0, bank.still, 0.0)
    return grads


def _columns(values: Tensor, work: Sequence[Work]) -> list[Tensor]:
    """Values [K, P] of the banks as one column [P, 1] for each of their tensors."""
    columns = values.unsqueeze(2).unbind(0)
    return [column for column, w in zip(columns, work, strict=True) for _ in w.grads]


def _same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether both hold the same objects."""
    return len(these) == len(those) and all(a is b for a, b in zip(these, those, strict=True))


def _moments(work: Sequence[Work], moment: str) -> list[Tensor]:
    return [table for w in work for table in w.bank.state_tables[moment]]


Criterion = Callable[[Tensor, Tensor], Tensor]
"""(outputs [L, B, …, classes], targets [L, B, …]) → losses [L]."""
