"""The memory: reads run directories and shows, queries, compares and exports them. Never runs inside the trainer."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "Views": "esper.karn.views",
    "compare_runs": "esper.karn.compare",
    "render_report": "esper.karn.report",
    "sync_run": "esper.karn.sync",
})
