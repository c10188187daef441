"""Growth for a user's own `nn.Module` in its own training loop."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.grower.attach": ("attach", "load"),
        "esper.grower.decide": ("Decision",),
        "esper.grower.grower": ("Grower", "StepResult"),
        "esper.grower.places": ("SlotAt",),
    },
)
