"""The metabolism: a governor that undoes disasters, the model factory and device validation."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.tolaria.factory": ("create_model", "validate_device"),
        "esper.tolaria.governor": ("GovernorConfig", "TolariaGovernor", "Veto", "preflight"),
    },
)
