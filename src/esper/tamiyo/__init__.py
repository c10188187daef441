"""The brain: sensors to features, legality to masks, and the policies that decide."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.tamiyo.features": ("batch_obs_to_features",),
        "esper.tamiyo.masks": ("build_slot_states", "compute_action_masks"),
        "esper.tamiyo.network": ("TamiyoNetwork",),
        "esper.tamiyo.policy": ("RecurrentPolicy",),
        "esper.tamiyo.schedules": ("Schedules", "load_schedules", "save_schedules"),
        "esper.tamiyo.scripted": ("AlwaysWait", "FixedSchedule", "Planting", "RandomValid"),
        "esper.tamiyo.shipped": ("load_policy", "shipped_policies", "shipped_schedules", "tuned_thresholds"),
        "esper.tamiyo.tracker": ("SignalTracker",),
    },
)
