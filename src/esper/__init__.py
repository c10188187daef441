"""Esper grows neural networks while they train."""

from esper._lazy import lazy_exports

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from esper.grower.attach import attach, load

__getattr__, __dir__, _ = lazy_exports(__name__, {"esper.grower.attach": ("attach", "load")})
__all__ = ["__version__", "attach", "load"]
