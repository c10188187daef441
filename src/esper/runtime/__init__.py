"""Tasks and data: the worlds that networks grow in."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.runtime.tasks": (
            "Condition",
            "ConditionSpace",
            "TaskSpec",
            "apply_condition",
            "draw_condition",
            "get_task_spec",
            "register_task",
            "task_names",
        ),
    },
)
