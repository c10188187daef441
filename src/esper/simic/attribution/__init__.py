"""Who contributes what: every figure about a network's seeds is read from one table of evaluated coalitions."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "CoalitionTable": "esper.simic.attribution.table",
    "MissingCoalitionError": "esper.simic.attribution.table",
    "Score": "esper.simic.attribution.table",
    "ShapleyValue": "esper.simic.attribution.table",
    "required_coalitions": "esper.simic.attribution.table",
})
