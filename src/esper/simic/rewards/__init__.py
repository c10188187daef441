"""Rewards: sums of named terms over one step of one env, after the outcome of its action is known."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "RewardComponentsTelemetry": "esper.simic.rewards.telemetry",
    "RewardEngine": "esper.simic.rewards.engine",
    "compute_loss_reward": "esper.simic.rewards.loss",
    "compute_rent_and_shock_inputs": "esper.simic.rewards.terms",
    "compute_reward": "esper.simic.rewards.contribution",
    "compute_scaffold_hindsight_credit": "esper.simic.rewards.terms",
    "potential": "esper.simic.rewards.shaping",
})
