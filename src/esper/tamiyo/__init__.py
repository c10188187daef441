"""The brain: sensors to features, legality to masks, and the policies that decide."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "AlwaysWait": "esper.tamiyo.scripted",
    "FixedSchedule": "esper.tamiyo.scripted",
    "Planting": "esper.tamiyo.scripted",
    "RandomValid": "esper.tamiyo.scripted",
    "RecurrentPolicy": "esper.tamiyo.policy",
    "SignalTracker": "esper.tamiyo.tracker",
    "TamiyoNetwork": "esper.tamiyo.network",
    "batch_obs_to_features": "esper.tamiyo.features",
    "build_slot_states": "esper.tamiyo.masks",
    "compute_action_masks": "esper.tamiyo.masks",
})
