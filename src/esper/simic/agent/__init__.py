"""The PPO agent: rollout buffer, normalisers, update, metrics and checkpoints."""
