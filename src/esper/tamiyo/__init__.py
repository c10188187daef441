"""The brain: sensors to features, legality to masks, and the policies that decide."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "TamiyoNetwork": "esper.tamiyo.network",
    "RecurrentPolicy": "esper.tamiyo.policy",
})
