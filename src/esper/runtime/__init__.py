"""Tasks and datasets, built in and registered by users."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.runtime.data.datasets": ("register_dataset",),
        "esper.runtime.tasks": (
            "Condition",
            "ConditionSpace",
            "TaskSpec",
            "apply_condition",
            "draw_condition",
            "get_task_spec",
            "parse_task",
            "register_task",
            "task_names",
        ),
        "esper.runtime.worlds": ("World", "draw_world"),
    },
)
