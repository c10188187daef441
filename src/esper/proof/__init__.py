"""Comparisons of policies and their rivals on the same held-out networks, schedule search, grown networks."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.proof.compare": ("prove",),
        "esper.proof.episodes": ("Played", "play"),
        "esper.proof.ladder": ("halve", "hindsight", "ladder", "train_ladder"),
        "esper.proof.policies": ("ship_policy",),
        "esper.proof.search": ("search_schedules",),
    },
)
