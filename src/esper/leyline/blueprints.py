"""Names and indices of blueprints. An index stands for a blueprint in actions, masks and observations; files
and events carry names.

Blueprints are open: kasmina's `register_blueprint` declares a new name here, and the name gets the next
index. Indices never change within a process."""

from __future__ import annotations

import re

from esper.leyline.errors import BlueprintError, allowed, near

NOOP = 0
"""Index of the seed that does nothing. Policies are never offered it."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_IDS = [
    "noop",
    "conv_light",
    "attention",
    "norm",
    "depthwise",
    "bottleneck",
    "conv_small",
    "conv_heavy",
    "lora",
    "lora_large",
    "mlp_small",
    "mlp",
    "flex_attention",
    "residual",
    "transformer_block",
    "conv_1d",
]


def blueprint_ids() -> tuple[str, ...]:
    """Names of all blueprints, in the order of their indices."""
    return tuple(_IDS)


def blueprint_index(name: str) -> int:
    if name not in _IDS:
        raise BlueprintError(f"blueprint {name!r} is unknown{near(name, _IDS)}; {allowed(_IDS)}")
    return _IDS.index(name)


def blueprint_id(index: int) -> str:
    if not 0 <= index < len(_IDS):
        raise BlueprintError(f"blueprint index {index} is out of range; allowed: 0 to {len(_IDS) - 1}")
    return _IDS[index]


def declare_blueprint(name: str) -> int:
    """The index of this name; a new name is appended."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BlueprintError(
            f"blueprint name {name!r}; allowed: a lower-case letter, then lower-case letters, digits and _, "
            "at most 64 in all"
        )
    if name not in _IDS:
        _IDS.append(name)
    return _IDS.index(name)
