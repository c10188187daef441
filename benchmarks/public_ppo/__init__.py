"""Side by side with a public recurrent PPO on a task that needs memory."""
