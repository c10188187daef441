"""Functions that format and emit events. They never touch training state."""
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from esper.leyline import TelemetryEvent

if TYPE_CHECKING:
    from esper.nissa import TelemetryHub


def emit_with_env_context(hub: TelemetryHub, event: TelemetryEvent, env_id: int, device: str) -> None:
    """Stamp an event with its env and emit it."""
    hub.emit(replace(event, env_id=env_id, device=device))


__all__ = ["emit_with_env_context"]
