"""Evolution: rewards, attribution, the PPO agent and the loop that trains it."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "PPOAgent": "esper.simic.agent.ppo",
})
