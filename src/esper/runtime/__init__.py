"""Tasks and data: the worlds that networks grow in."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "Condition": "esper.runtime.tasks",
    "ConditionSpace": "esper.runtime.tasks",
    "TaskSpec": "esper.runtime.tasks",
    "apply_condition": "esper.runtime.tasks",
    "draw_condition": "esper.runtime.tasks",
    "get_task_spec": "esper.runtime.tasks",
    "register_task": "esper.runtime.tasks",
    "task_names": "esper.runtime.tasks",
})
