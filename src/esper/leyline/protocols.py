"""Interfaces between packages of one tier, which do not import each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PanicReason(StrEnum):
    """Why a validation loss makes the governor panic."""

    NON_FINITE = "non_finite"
    DIVERGENCE = "divergence"
    COLLAPSE = "collapse"


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorReport:
    """Why a network must be rolled back."""

    reason: PanicReason
    loss: float
    limit: float
    """Limit that the loss exceeded; infinity for a non-finite loss."""
    consecutive: int
    """Number of suspicious checks in a row, including this one."""


@dataclass(frozen=True, slots=True)
class PolicyObservation:
    """Input of a policy, batched over envs. E envs, S slots, B registered blueprints."""

    base: Tensor  # [E, Db]
    slots: Tensor  # [E, S, Ds]
    quotes: Tensor  # [E, S, B, Dq], what each blueprint would cost and do in each slot; zeros: not offered
    blueprints: Tensor  # [E, S] int64, −1 where the slot is empty; for scripted policies, not for networks
    exists: Tensor = field(default=None)  # type: ignore[assignment]  # [E, S] bool
    """False where a row is only filled up to the number of slots of another task; default: all True."""
    family: Tensor = field(default=None)  # type: ignore[assignment]  # [E] int64
    """Index of the env's task family among those that the policy knows; default: the first."""

    def __post_init__(self) -> None:
        if self.exists is None:
            object.__setattr__(self, "exists", self.blueprints.new_ones(self.blueprints.shape).bool())
        if self.family is None:
            object.__setattr__(self, "family", self.blueprints.new_zeros(self.base.shape[:-1]))


@dataclass(frozen=True, slots=True)
class ActionMasks:
    """Legal values of each head. True means allowed. B registered blueprints."""

    op: Tensor  # [E, 6]
    slot_by_op: Tensor  # [E, 6, S]
    blueprint: Tensor  # [E, B]
    style: Tensor  # [E, 4]
    tempo: Tensor  # [E, 4]
    alpha_target: Tensor  # [E, 3]
    alpha_speed: Tensor  # [E, 4]
    alpha_curve: Tensor  # [E, 5]


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """One batched decision."""

    actions: Tensor  # [E, 8] int64, in head order
    log_prob: Tensor  # [E], joint over relevant heads
    head_log_probs: Tensor  # [E, 8], 0 where irrelevant
    value: Tensor  # [E]
    op_probs: Tensor  # [E, 6]
    hidden: tuple[Tensor, Tensor] | None
    slot_probs: Tensor | None = None  # [E, 6, S] of each slot given the op; None: the policy has none


class PolicyProtocol(Protocol):
    """Anything that decides: learned, heuristic, scripted or random.

    An episode is `begin`, then one `act` per epoch. Recurrent state travels through `hidden`; other memory of
    the episode stays in the policy and is saved with `state`."""

    def initial_hidden(self, num_envs: int) -> tuple[Tensor, Tensor] | None:
        """Recurrent state at the start of an episode; None if the policy has none."""

    def begin(self, num_envs: int) -> None:
        """Start a new episode in every env."""

    def act(
        self,
        obs: PolicyObservation,
        hidden: tuple[Tensor, Tensor] | None,
        masks: ActionMasks,
        *,
        deterministic: bool = False,
    ) -> PolicyStep:
        """One decision for each env."""

    def state(self) -> dict[str, Any]:
        """Plain values from which `load_state` continues a run, in the middle of an episode too."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
