"""Lazy package attributes (PEP 562): a package names the exports of its modules, each of which loads on first
use.

`import esper` loads this file and nothing else, so it imports nothing that Python has not loaded itself."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing takes longer to import than the rest of Esper's start
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


def lazy_exports(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package that exports these names of these
    modules."""
    origins = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(origins[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *origins})

    return __getattr__, __dir__, sorted(origins)
