"""Evolution: rewards, attribution, the PPO agent and the loop that trains it."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "PPOAgent": "esper.simic.agent.ppo",
    "ParallelEnvState": "esper.simic.training.parallel_env_state",
    "TrainingConfig": "esper.simic.training.config",
    "advance_active_seed": "esper.simic.seed_management",
    "aggregate_ppo_metrics": "esper.simic.seed_management",
    "calculate_entropy_anneal_steps": "esper.simic.seed_management",
    "resolve_target_slot": "esper.simic.seed_management",
    "run_ppo_updates": "esper.simic.seed_management",
    "train_ppo_vectorized": "esper.simic.training.vectorized",
})
