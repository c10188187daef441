"""Evolution: rewards, attribution, the PPO agent and the loop that trains it."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.simic.agent.ppo": ("PPOAgent",),
        "esper.simic.rewards": ("register_reward",),
        "esper.simic.sensors": ("register_sensor",),
        "esper.simic.seed_management": (
            "advance_active_seed",
            "aggregate_ppo_metrics",
            "calculate_entropy_anneal_steps",
            "resolve_target_slot",
            "run_ppo_updates",
        ),
        "esper.simic.training.config": ("TrainingConfig",),
        "esper.simic.training.parallel_env_state": ("ParallelEnvState",),
        "esper.simic.training.vectorized": ("train_ppo_vectorized",),
    },
)
