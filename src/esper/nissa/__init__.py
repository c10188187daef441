"""The senses: a hub that orders the events of a run, and outputs that record them. Never changes training."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.nissa.alerts": ("Alert", "AlertEngine", "evaluate"),
        "esper.nissa.analytics": ("BlueprintAnalytics",),
        "esper.nissa.hub": ("TelemetryError", "TelemetryHub", "get_hub"),
        "esper.nissa.outputs": ("JsonlOutput", "read_events"),
        "esper.nissa.rundir": ("RunDirectory",),
        "esper.nissa.tables": ("ParquetOutput",),
    },
)
