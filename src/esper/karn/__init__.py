"""The memory: reads run directories and shows, queries, compares and exports them. Never runs inside the
trainer."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.karn.compare": ("compare_runs",),
        "esper.karn.report": ("render_report",),
        "esper.karn.sync": ("sync_run",),
        "esper.karn.views": ("Views",),
    },
)
