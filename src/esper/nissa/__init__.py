"""The senses: a hub that orders what a run reports, and the outputs that keep it. Never changes training."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "JsonlOutput": "esper.nissa.outputs",
    "MemoryOutput": "esper.nissa.outputs",
    "TelemetryHub": "esper.nissa.hub",
    "get_hub": "esper.nissa.hub",
})
