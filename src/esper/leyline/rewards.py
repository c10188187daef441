"""Reward modes and the prices of their terms. The terms themselves live in simic.rewards."""
from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from esper.leyline.errors import EsperError, allowed, check_number


class RewardFamily(StrEnum):
    CONTRIBUTION = "contribution"
    LOSS = "loss"


class RewardMode(StrEnum):
    """`sparse`, `shaped` and `escrow` share their best policy with J; the others are ablations."""

    SPARSE = "sparse"
    SHAPED = "shaped"
    ESCROW = "escrow"
    SIMPLIFIED = "simplified"
    BASIC = "basic"
    BASIC_PLUS = "basic_plus"
    MINIMAL = "minimal"


def _check_prices(config: object) -> None:
    for f in fields(config):  # type: ignore[arg-type]
        if f.type in ("float", "int"):
            check_number(type(config).__name__, f.name, getattr(config, f.name), integer=f.type == "int")


@dataclass(frozen=True, slots=True, kw_only=True)
class RentConfig:
    """What size and abrupt change cost per epoch."""

    rent_weight: float = 0.5
    max_rent: float = 1.5
    host_params_floor: int = 200
    """A host below this size pays rent as if it had it, or tiny hosts could afford nothing."""
    slot_rent_ratio: float = 0.0039
    """Standing charge of an occupied slot, as a share of the host's parameters."""
    shock_coef: float = 0.1958
    max_shock: float = 1.0

    def __post_init__(self) -> None:
        _check_prices(self)
        if self.host_params_floor < 1:
            raise EsperError(f"RentConfig: host_params_floor is {self.host_params_floor}, must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Prices of the contribution family's terms; each is a magnitude, the term owns the sign."""

    mode: RewardMode = RewardMode.SHAPED
    rent: RentConfig = RentConfig()
    potential_weight: float = 1.0
    """Scale of Φ in `shaped` and `escrow`."""
    escrow_window: int = 3
    """`escrow`: Φ counts the lowest contribution of this many epochs."""
    contribution_weight: float = 1.0
    germinate_cost: float = 0.15
    prune_cost: float = 0.005
    fossilize_cost: float = 0.01
    set_alpha_target_cost: float = 0.005
    occupancy_cost: float = 0.01
    free_slots: int = 1
    fossil_upkeep: float = 0.002
    fossilize_bonus: float = 0.5
    prune_bonus: float = 0.1
    prune_penalty: float = 0.3
    hindsight_weight: float = 0.1
    max_hindsight: float = 0.2
    accuracy_delta_weight: float = 5.0
    drip_fraction: float = 0.7
    """`basic_plus`: share of a fossil's bonus that is paid out over the following epochs."""
    max_drip: float = 0.1

    def __post_init__(self) -> None:
        _check_prices(self)
        if not isinstance(self.mode, RewardMode):
            raise EsperError(f"RewardConfig: mode is {self.mode!r}; {allowed(RewardMode)}")
        if self.drip_fraction > 1:
            raise EsperError(f"RewardConfig: drip_fraction is {self.drip_fraction}, must lie in [0, 1]")
        if self.escrow_window < 1:
            raise EsperError(f"RewardConfig: escrow_window is {self.escrow_window}, must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRewardConfig:
    """Prices of the loss family's terms."""

    loss_delta_weight: float = 5.0
    max_loss_delta: float = 5.0
    regression_scale: float = 0.5
    typical_loss_delta: float = 0.1
    rent_weight: float = 0.05
    max_rent: float = 5.0
    grace_epochs: int = 3
    terminal_weight: float = 1.0
    baseline_loss: float = 2.3
    target_loss: float = 0.3

    def __post_init__(self) -> None:
        _check_prices(self)
        if self.baseline_loss <= self.target_loss:
            raise EsperError(f"LossRewardConfig: baseline_loss {self.baseline_loss} must exceed target_loss {self.target_loss}")
        check_number("LossRewardConfig", "typical_loss_delta", self.typical_loss_delta, low=1e-9)
