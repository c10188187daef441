"""Esper's world as Gymnasium environments, for reinforcement learning libraries of others.

Importing this package registers an environment for each built-in task: `Esper/digits_shift-v0` and so on.
Nothing else in Esper imports gymnasium. torch loads with the first environment, not here."""

from esper._lazy import lazy_exports
from esper.gym.registration import register, register_builtin

__getattr__, __dir__, _exports = lazy_exports(
    __name__,
    {
        "esper.gym.actions": ("IllegalAction",),
        "esper.gym.sb3": ("SB3VecEnv",),
        "esper.gym.single": ("GrowthEnv",),
        "esper.gym.torchrl": ("make_torchrl_env",),
        "esper.gym.vector": ("GrowthVectorEnv",),
    },
)
__all__ = [*_exports, "register"]

register_builtin()
