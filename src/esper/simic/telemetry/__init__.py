"""Sensors, emitters and the anomaly detector. Nothing here changes what it measures, or waits for the device unasked."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "AnomalyDetector": "esper.simic.telemetry.anomaly_detector",
    "AnomalyReport": "esper.simic.telemetry.anomaly_detector",
    "GrowthProbe": "esper.simic.telemetry.growth_sensors",
    "GrowthSensors": "esper.simic.telemetry.growth_sensors",
    "LayerGradientStats": "esper.simic.telemetry.debug_telemetry",
    "TelemetryConfig": "esper.simic.telemetry.telemetry_config",
    "TelemetryLevel": "esper.simic.telemetry.telemetry_config",
    "check_numerical_stability": "esper.simic.telemetry.debug_telemetry",
    "collect_host_gradients_async": "esper.simic.telemetry.gradient_collector",
    "collect_per_layer_gradients": "esper.simic.telemetry.gradient_collector",
    "collect_seed_gradients_async": "esper.simic.telemetry.gradient_collector",
    "collect_seed_gradients_only_async": "esper.simic.telemetry.gradient_collector",
})
