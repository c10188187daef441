"""Rewards: sums of named terms over one step of one env, after the outcome of its action is known."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.simic.rewards.contribution": ("compute_reward",),
        "esper.simic.rewards.engine": ("RewardEngine",),
        "esper.simic.rewards.loss": ("compute_loss_reward",),
        "esper.simic.rewards.shaping": ("potential",),
        "esper.simic.rewards.telemetry": ("RewardComponentsTelemetry",),
        "esper.simic.rewards.terms": ("compute_rent_and_shock_inputs", "compute_scaffold_hindsight_credit"),
    },
)
