"""Gradient statistics, emitters and the anomaly detector. Nothing here changes training."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.simic.telemetry.anomaly_detector": ("AnomalyDetector", "AnomalyReport"),
        "esper.simic.telemetry.debug_telemetry": ("LayerGradientStats", "check_numerical_stability"),
        "esper.simic.telemetry.gradient_collector": (
            "collect_host_gradients_async",
            "collect_per_layer_gradients",
            "collect_seed_gradients_async",
            "collect_seed_gradients_only_async",
        ),
        "esper.simic.telemetry.telemetry_config": ("TelemetryConfig", "TelemetryLevel"),
    },
)
