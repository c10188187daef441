"""Names of the built-in reward modes and prices of their terms. Terms and registry are in simic.rewards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from esper.leyline.errors import EsperError, check_numbers


class RewardFamily(StrEnum):
    CONTRIBUTION = "contribution"
    LOSS = "loss"


class RewardMode(StrEnum):
    """Built-in modes. `sparse`, `shaped` and `escrow` have the same optimal policy as J. `minimal`, the
    default, adds a small price of interventions. The others are ablations."""

    SPARSE = "sparse"
    SHAPED = "shaped"
    ESCROW = "escrow"
    SIMPLIFIED = "simplified"
    BASIC = "basic"
    BASIC_PLUS = "basic_plus"
    MINIMAL = "minimal"


@dataclass(frozen=True, slots=True, kw_only=True)
class RentConfig:
    """Prices of size and of abrupt change, in units of J. Rent is the amount for a whole episode; each epoch
    pays its share."""

    rent_weight: float = 0.1
    """Price of ln(1 + parameters/host), each seed weighted by its alpha."""
    max_rent: float = 0.5
    """Maximum rent of an episode."""
    host_params_floor: int = 200
    """Smaller hosts pay rent as if they had this many parameters; otherwise tiny hosts could afford
    nothing."""
    slot_rent_ratio: float = 0.0039
    """Fixed charge of a blended slot, as a share of the host's parameters."""
    shock_coef: float = 0.01
    """Price of a squared change of alpha, times the seed's parameters over the host's."""
    max_shock: float = 0.05
    """Maximum charge of one step."""

    def __post_init__(self) -> None:
        check_numbers("RentConfig", self)
        if self.host_params_floor < 1:
            raise EsperError(f"RentConfig: host_params_floor is {self.host_params_floor}, must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Prices of the contribution family's terms. Each is a magnitude; the term adds the sign."""

    mode: str = RewardMode.MINIMAL.value
    """Name of a built-in or registered reward mode."""
    rent: RentConfig = RentConfig()
    potential_weight: float = 1.0
    """Scale of Φ in `shaped` and `escrow`."""
    live_share: float = 0.5
    """Weight in Φ of seeds that are blended but not yet permanent; 0: none, 1: like fossils."""
    escrow_window: int = 3
    """`escrow`: Φ takes the lowest contribution of this many epochs."""
    progress_weight: float = 1.0
    """Price of a change of the committed accuracy, in [0, 1]."""
    contribution_weight: float = 0.5
    """Price of a change of the live seeds' contributions; at most `progress_weight`, otherwise holding would
    beat fossilizing."""
    germinate_cost: float = 0.01
    """Cost of germinating a seed."""
    prune_cost: float = 0.001
    """Cost of pruning a seed."""
    set_alpha_target_cost: float = 0.001
    """Cost of changing a seed's alpha."""
    occupancy_cost: float = 0.02
    """Cost per episode of each seed beyond `free_slots`."""
    free_slots: int = 1
    """Number of seeds without occupancy cost."""
    fossilize_bonus: float = 0.02
    """Maximum bonus for fossilizing a seed that contributes."""
    prune_bonus: float = 0.005
    """Maximum bonus for pruning a seed that does harm; at most the cost of germinating and pruning, otherwise
    that cycle would pay."""
    prune_penalty: float = 0.01
    """Maximum penalty for pruning a seed that contributes."""
    hindsight_weight: float = 0.02
    """Maximum credit for earlier help from other seeds, paid when the seed becomes permanent."""
    drip_fraction: float = 0.7
    """`basic_plus`: share of a fossil's bonus that is paid over the following epochs."""

    def __post_init__(self) -> None:
        check_numbers("RewardConfig", self)
        if not isinstance(self.mode, str) or not self.mode:
            raise EsperError(f"RewardConfig: mode is {self.mode!r}, must be the name of a reward mode")
        object.__setattr__(self, "mode", str(self.mode).lower())
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
    """Prices of the loss family's terms. A loss counts as exp(−loss), the probability of the right answer."""

    improvement_weight: float = 1.0
    """Price of a change of exp(−loss)."""
    terminal_weight: float = 1.0
    """Price of exp(−loss) at the end of the episode, fossilized seeds only."""
    rent_weight: float = 0.05
    """Price of ln(1 + parameters/host) per episode."""
    grace_epochs: int = 3
    """Seeds younger than this pay no rent."""

    def __post_init__(self) -> None:
        check_numbers("LossRewardConfig", self)
