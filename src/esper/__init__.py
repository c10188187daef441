"""Esper grows neural networks while they train."""

from esper._lazy import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, _exports = lazy_exports(__name__, {"esper.grower.attach": ("attach", "load")})
__all__ = ["__version__", *_exports]
