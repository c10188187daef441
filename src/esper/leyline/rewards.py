"""Reward modes and the prices of their terms. The terms themselves live in simic.rewards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from esper.leyline.errors import EsperError, allowed, check_numbers


class RewardFamily(StrEnum):
    CONTRIBUTION = "contribution"
    LOSS = "loss"


class RewardMode(StrEnum):
    """`sparse`, `shaped` and `escrow` share their best policy with J; in `minimal`, the default,
    interventions have a small price besides; the others are ablations."""

    SPARSE = "sparse"
    SHAPED = "shaped"
    ESCROW = "escrow"
    SIMPLIFIED = "simplified"
    BASIC = "basic"
    BASIC_PLUS = "basic_plus"
    MINIMAL = "minimal"


@dataclass(frozen=True, slots=True, kw_only=True)
class RentConfig:
    """What size and abrupt change cost. Like all prices here they are in units of J; standing charges are
    those of a whole episode, of which each epoch pays its part."""

    rent_weight: float = 0.1
    """Price of ln(1 + parameters/host), each seed counted by its alpha."""
    max_rent: float = 0.5
    """More than this is never charged."""
    host_params_floor: int = 200
    """A host below this size pays rent as if it had it, or tiny hosts could afford nothing."""
    slot_rent_ratio: float = 0.0039
    """Standing charge of a blended slot, as a share of the host's parameters."""
    shock_coef: float = 0.01
    """Price of a squared change of alpha, times the seed's parameters over the host's."""
    max_shock: float = 0.05
    """More than this is never charged for one step."""

    def __post_init__(self) -> None:
        check_numbers("RentConfig", self)
        if self.host_params_floor < 1:
            raise EsperError(f"RentConfig: host_params_floor is {self.host_params_floor}, must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Prices of the contribution family's terms; each is a magnitude, the term owns the sign."""

    mode: RewardMode = RewardMode.MINIMAL
    rent: RentConfig = RentConfig()
    potential_weight: float = 1.0
    """Scale of Φ in `shaped` and `escrow`."""
    live_share: float = 0.5
    """How far Φ counts seeds that are blended but not yet permanent; 0: not at all, 1: like fossils."""
    escrow_window: int = 3
    """`escrow`: Φ counts the lowest contribution of this many epochs."""
    progress_weight: float = 1.0
    """Price of a change of the committed accuracy, in [0, 1]."""
    contribution_weight: float = 0.5
    """Price of a change of what live seeds contribute; at most `progress_weight`, or holding would beat
    fossilizing."""
    germinate_cost: float = 0.01
    """What planting a seed costs."""
    prune_cost: float = 0.001
    """What removing a seed costs."""
    set_alpha_target_cost: float = 0.001
    """What changing a seed's alpha costs."""
    occupancy_cost: float = 0.02
    """What each seed beyond `free_slots` costs in an episode."""
    free_slots: int = 1
    """Seeds that cost no occupancy."""
    fossilize_bonus: float = 0.02
    """For making a seed permanent that contributes some points."""
    prune_bonus: float = 0.005
    """For removing a seed that does harm; at most what germinating and pruning cost, or that cycle would
    pay."""
    prune_penalty: float = 0.01
    """For removing a seed that contributes."""
    hindsight_weight: float = 0.02
    """At most so much for the help that a seed had from others, when it becomes permanent."""
    drip_fraction: float = 0.7
    """`basic_plus`: share of a fossil's bonus that is paid out over the following epochs."""

    def __post_init__(self) -> None:
        check_numbers("RewardConfig", self)
        if not isinstance(self.mode, RewardMode):
            raise EsperError(f"RewardConfig: mode is {self.mode!r}; {allowed(RewardMode)}")
        if not isinstance(self.rent, RentConfig):
            raise EsperError(f"RewardConfig: rent is {self.rent!r}, must be a RentConfig")
        for name in ("live_share", "drip_fraction"):
            if getattr(self, name) > 1:
                raise EsperError(f"RewardConfig: {name} is {getattr(self, name)}, must lie in [0, 1]")
        if self.escrow_window < 1:
            raise EsperError(f"RewardConfig: escrow_window is {self.escrow_window}, must be at least 1")
        for name, limit in (
            ("contribution_weight", self.progress_weight),
            ("prune_bonus", self.germinate_cost + self.prune_cost),
        ):
            if getattr(self, name) > limit:
                raise EsperError(
                    f"RewardConfig: {name} is {getattr(self, name)}, must lie in [0, {limit:g}]: at most "
                    + ("progress_weight" if name == "contribution_weight" else "germinate_cost + prune_cost")
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRewardConfig:
    """Prices of the loss family's terms. A loss counts as exp(−loss), the probability given to the right
    answer."""

    improvement_weight: float = 1.0
    """Price of its change."""
    terminal_weight: float = 1.0
    """Price of its value at the end, fossilized seeds only."""
    rent_weight: float = 0.05
    """Price of ln(1 + parameters/host) in an episode."""
    grace_epochs: int = 3
    """Seeds younger than this pay no rent."""

    def __post_init__(self) -> None:
        check_numbers("LossRewardConfig", self)
