"""The senses: a hub that orders what a run reports, and the outputs that keep it. Never changes training."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "Alert": "esper.nissa.alerts",
    "AlertEngine": "esper.nissa.alerts",
    "JsonlOutput": "esper.nissa.outputs",
    "ParquetOutput": "esper.nissa.tables",
    "RunDirectory": "esper.nissa.rundir",
    "TelemetryError": "esper.nissa.hub",
    "TelemetryHub": "esper.nissa.hub",
    "evaluate": "esper.nissa.alerts",
    "get_hub": "esper.nissa.hub",
    "read_events": "esper.nissa.outputs",
})
