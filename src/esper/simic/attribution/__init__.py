"""Attribution: the contribution of each seed, read from one table of evaluated coalitions."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.simic.attribution.table": (
            "CoalitionTable",
            "MissingCoalitionError",
            "Score",
            "ShapleyValue",
            "most_coalitions",
            "most_open_coalitions",
            "open_coalitions",
            "required_coalitions",
        ),
    },
)
