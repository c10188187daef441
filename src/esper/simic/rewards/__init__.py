"""Rewards: sums of named terms of one step of one env, computed after the outcome of its action is known."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.simic.rewards.engine": (
            "RewardComponentsTelemetry",
            "RewardEngine",
            "check_reward_mode",
            "compute_loss_reward",
            "compute_reward",
            "prices_size",
            "register_reward",
        ),
        "esper.simic.rewards.shaping": ("potential",),
        "esper.simic.rewards.terms": ("compute_rent_and_shock_inputs", "compute_scaffold_hindsight_credit"),
    },
)
