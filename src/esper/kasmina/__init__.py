"""The body: hosts, seeds, slots, alpha, gates and the networks that grow."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.kasmina.alpha": ("AlphaController", "curve_value"),
        "esper.kasmina.blueprints": ("Blueprint", "blueprint_names", "build_blueprint", "register_blueprint"),
        "esper.kasmina.coalitions": (
            "all_coalitions",
            "blended_slots",
            "default_coalitions",
            "evaluate_coalitions",
        ),
        "esper.kasmina.export": ("export_row",),
        "esper.kasmina.facts": ("host_facts", "measure_traits"),
        "esper.kasmina.flops": ("FlopMeter",),
        "esper.kasmina.gates": ("check_gate",),
        "esper.kasmina.hosts": ("CNNHost", "GPTHost", "MLPHost", "build_host"),
        "esper.kasmina.model": ("MorphogeneticModel", "cross_entropy"),
        "esper.kasmina.optim": ("OptimizerConfig", "PopulationOptimizer"),
        "esper.kasmina.row": ("GovernedRow", "NetworkRow", "OptimizerRow"),
        "esper.kasmina.snapshot": (
            "RowSnapshot",
            "load_network",
            "restore_row",
            "save_network",
            "snapshot_row",
        ),
    },
)
