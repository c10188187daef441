"""The metabolism: a governor that undoes disasters, the model factory and device validation."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "GovernorConfig": "esper.tolaria.governor",
    "TolariaGovernor": "esper.tolaria.governor",
    "Veto": "esper.tolaria.governor",
    "create_model": "esper.tolaria.factory",
    "preflight": "esper.tolaria.governor",
    "validate_device": "esper.tolaria.devices",
})
