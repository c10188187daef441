"""The body: hosts, seeds, slots, alpha, gates and the networks that grow."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "AlphaController": "esper.kasmina.alpha",
    "CNNHost": "esper.kasmina.hosts",
    "GPTHost": "esper.kasmina.hosts",
    "MLPHost": "esper.kasmina.hosts",
    "MorphogeneticModel": "esper.kasmina.model",
    "NetworkRow": "esper.kasmina.row",
    "OptimizerConfig": "esper.kasmina.optim",
    "PopulationOptimizer": "esper.kasmina.optim",
    "RowSnapshot": "esper.kasmina.snapshot",
    "all_coalitions": "esper.kasmina.coalitions",
    "blended_slots": "esper.kasmina.coalitions",
    "blueprint_names": "esper.kasmina.blueprints",
    "build_blueprint": "esper.kasmina.blueprints",
    "build_host": "esper.kasmina.hosts",
    "check_gate": "esper.kasmina.gates",
    "cross_entropy": "esper.kasmina.model",
    "curve_value": "esper.kasmina.alpha",
    "default_coalitions": "esper.kasmina.coalitions",
    "evaluate_coalitions": "esper.kasmina.coalitions",
    "export_row": "esper.kasmina.export",
    "load_network": "esper.kasmina.snapshot",
    "restore_row": "esper.kasmina.snapshot",
    "save_network": "esper.kasmina.snapshot",
    "snapshot_row": "esper.kasmina.snapshot",
})
