"""The proof: policies on the same held-out seeds, side by side, with everything that a comparison needs."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "FlopMeter": "esper.simic.proof.flops",
    "Played": "esper.simic.proof.episodes",
    "load_policy": "esper.simic.proof.policies",
    "play": "esper.simic.proof.episodes",
    "prove": "esper.simic.proof.compare",
    "search_schedules": "esper.simic.proof.search",
    "ship_policy": "esper.simic.proof.policies",
})
