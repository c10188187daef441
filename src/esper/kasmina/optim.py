"""Optimizers for populations: every row has its own learning rate, momentum, decay and gradient clipping.

The model owns the groups (its host, and each slot's banks); the optimizer follows it through growth. State of
surviving parameters is kept, a row that begins or ends starts from zero, and only rows that learn ever move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    frozen: bool
    """Some row takes part in a pass and may still not move, so its gradient must be taken out."""
    bias: Tensor
    """[P, 2] 1 − β1ᵗ and 1 − β2ᵗ after the row's t updates (Adam's bias corrections), kept by recurrence: `β
    ** t` rounds differently with the length of the vector, and a row must not depend on how many others there
    are."""
    updates: Tensor
    """[P] number of the row's updates, counted while it warms up."""
    state: dict[str, list[Tensor]]
    """Moment name → one tensor per parameter."""

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

    def packed(self) -> Tensor:
        """Everything in one tensor [1 + 3·slots, P], for one transfer."""
        return torch.stack(
            [self.host_norm, *self.norm.values(), *self.vanishing.values(), *self.exploding.values()]
        )


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
        self.stats: GradientStats | None = None
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
            known.frozen = spec.frozen
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
            False,
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
        """Clip each group of each row, then move the rows that learn."""
        self.sync()
        host_norm, norm, vanishing, exploding = None, {}, {}, {}
        for name, banks in self.groups.items():
            work = [(bank, grads) for bank in banks.values() if (grads := self._gradients(bank)) is not None]
            if not work:
                continue
            # One row of norms for each tensor, one column for each network.
            norms = torch.stack(
                [torch.linalg.vector_norm(g.flatten(1), dim=1) for _, grads in work for g in grads]
            )
            # Squares add up within a bank first: banks of other rows add exactly 0 to a row's sum.
            squares = [part.square().sum(0) for part in norms.split([len(grads) for _, grads in work])]
            total = torch.stack(squares).sum(0).sqrt()
            if name == "host":
                host_norm = total
            else:
                norm[name] = total
                vanishing[name], exploding[name] = self._health(work, norms)
            scale = (self.clip / (total + 1e-6)).clamp(max=1.0)
            for bank, grads in work:
                torch._foreach_mul_(grads, _columns(scale, grads))
                self._update(bank, grads, is_host=name == "host")
        assert host_norm is not None, "step() needs a backward pass first"
        self.stats = GradientStats(host_norm, norm, vanishing, exploding)

    @staticmethod
    def _health(work: list[tuple[Bank, list[Tensor]]], norms: Tensor) -> tuple[Tensor, Tensor]:
        # A row's seed lives in one bank (and perhaps the gate's): only its own tensors count.
        own = torch.cat([bank.learning.expand(len(grads), -1) for bank, grads in work])
        count = own.sum(0).clamp(min=1)
        return (own & (norms < VANISHING)).sum(0) / count, (own & ~(norms <= EXPLODING)).sum(0) / count

    def _gradients(self, bank: Bank) -> list[Tensor] | None:
        """The bank's gradients, 0 in rows that do not learn; None where no pass reached the bank."""
        parameters = list(bank.parameters.values())
        if not parameters or all(p.grad is None for p in parameters):
            return None
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        if not bank.frozen:
            return grads
        # Rows that take no part in a pass have no gradient. That of a frozen one is selected out, not
        # multiplied by 0: it may be NaN.
        return [torch.where(_column(bank.learning, g), g, 0.0) for g in grads]

    def _update(self, bank: Bank, grads: list[Tensor], *, is_host: bool) -> None:
        parameters = list(bank.parameters.values())
        learning = bank.learning
        lr = torch.where(learning, self.host_lr if is_host else self.seed_lr, 0.0)
        decay = torch.where(learning, self.host_decay if is_host else self.seed_decay, 0.0)
        keep = torch.where(learning, self.momentum, 1.0)
        if self.config.newborn_warmup and not is_host:
            bank.updates += learning
            lr = lr * (bank.updates / self.config.newborn_warmup).clamp(max=1.0)
        if self.config.kind == "sgd":
            momentum = bank.state["momentum"]
            torch._foreach_addcmul_(grads, parameters, _columns(decay, parameters))
            torch._foreach_mul_(momentum, _columns(keep, momentum))
            torch._foreach_add_(momentum, grads)
            torch._foreach_addcmul_(parameters, momentum, _columns(-lr, parameters))
            return
        beta2 = torch.where(learning, torch.full_like(lr, self.config.beta2), 1.0)
        gain2 = torch.where(learning, torch.full_like(lr, 1 - self.config.beta2), 0.0)
        bank.bias += torch.stack([1 - keep, gain2], 1) * (1 - bank.bias)
        # A row that has never learned does not move: any divisor but 0 will do.
        bias1, bias2 = torch.where(bank.bias > 0, bank.bias, 1.0).unbind(1)
        torch._foreach_mul_(parameters, _columns(1 - lr * decay, parameters))
        for p, g, mean, square in zip(
            parameters, grads, bank.state["mean"], bank.state["square"], strict=True
        ):
            mean.mul_(_column(keep, p)).addcmul_(g, _column(1 - keep, p))
            square.mul_(_column(beta2, p)).addcmul_(g * g, _column(1 - beta2, p))
            root = (square / _column(bias2, p)).sqrt_().add_(self.config.eps)
            p.addcmul_(mean / root, _column(-lr / bias1, p))

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


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (like.dim() - 1))


def _columns(values: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [_column(values, t) for t in like]


Criterion = Callable[[Tensor, Tensor], Tensor]
"""(outputs [L, B, …, classes], targets [L, B, …]) → losses [L]."""
