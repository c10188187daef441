"""Ids of Gymnasium environments. Entry points are strings, so registration loads neither torch nor tasks."""

from __future__ import annotations

try:
    import gymnasium
except ImportError as error:
    raise ImportError(
        "esper.gym needs gymnasium 1.1 or newer: pip install 'gymnasium>=1.1' (the extra gym)"
    ) from error

BUILTIN = (
    "cifar_baseline",
    "cifar_deep_impaired",
    "cifar_deep_multichannel",
    "cifar_highres",
    "cifar_impaired",
    "cifar_minimal",
    "cifar_multichannel",
    "cifar_postpool",
    "cifar_scale",
    "digits_baseline",
    "digits_flops",
    "digits_impaired",
    "digits_mlp",
    "digits_scale",
    "digits_shift",
    "fashion14_baseline",
    "fashion_baseline",
    "fashion_impaired",
    "mnist14_baseline",
    "mnist1d_baseline",
    "shakespeare",
    "sotu",
    "tinystories",
)
"""Names of the built-in tasks; a test compares them with the tasks themselves."""


def env_id(task: str) -> str:
    """The id under which Gymnasium knows a task."""
    return f"Esper/{task}-v0"


def register(task: str) -> str:
    """Register a task under its name, and return the id of its environment. Tasks of your own are registered
    with `esper.runtime.tasks.register_task` before the first environment is made."""
    name = env_id(task)
    if name not in gymnasium.registry:
        gymnasium.register(
            name,
            entry_point="esper.gym.single:GrowthEnv",
            vector_entry_point="esper.gym.vector:GrowthVectorEnv",
            kwargs={"task": task},
        )
    return name


def register_builtin() -> None:
    """Register all built-in tasks."""
    for task in BUILTIN:
        register(task)
