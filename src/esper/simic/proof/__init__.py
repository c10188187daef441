"""The proof: policies on the same held-out seeds, side by side, with everything that a comparison needs."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "esper.simic.proof.compare": ("prove",),
    "esper.simic.proof.episodes": ("Played", "play"),
    "esper.simic.proof.flops": ("FlopMeter",),
    "esper.simic.proof.policies": ("load_policy", "ship_policy"),
    "esper.simic.proof.search": ("search_schedules",),
})
