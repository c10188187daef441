"""The scoreboard of blueprints: what became of the seeds of each, read from lifecycle events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from esper.leyline import LifecycleKind, TelemetryEvent, TelemetryEventType


@dataclass(frozen=True, slots=True, kw_only=True)
class BlueprintScore:
    """What the seeds of one blueprint came to. A mean over no seeds is None."""

    blueprint_id: str
    germinated: int
    fossilized: int
    pruned: int
    survival: float | None
    """Share fossilized, of those fossilized or pruned."""
    mean_contribution: float | None
    """Points that the fossilized ones contributed when they were made permanent, as last measured."""
    mean_pruned_contribution: float | None
    """Points that the pruned ones contributed when they were removed; negative ones were rightly removed."""
    mean_params: float | None
    """Parameters of a fossilized one: its cost."""
    mean_age: float | None
    """Epochs from germination to fossilization."""


@dataclass(slots=True)
class _Record:
    germinated: int = 0
    kept: list[Mapping[str, Any]] = field(default_factory=list)
    pruned: list[Mapping[str, Any]] = field(default_factory=list)


class BlueprintAnalytics:
    """An output of the hub; `observe` takes events from a log as well."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def emit(self, seq: int, event: TelemetryEvent) -> None:
        if event.event_type is TelemetryEventType.SEED_LIFECYCLE:
            self.observe(event.data)

    def observe(self, data: Mapping[str, Any]) -> None:
        """Take in the payload of a seed_lifecycle event."""
        record = self._records.setdefault(data["blueprint_id"], _Record())
        kind = data["kind"]
        if kind == LifecycleKind.GERMINATED:
            record.germinated += 1
        elif kind == LifecycleKind.FOSSILIZED:
            record.kept.append(dict(data))
        elif kind == LifecycleKind.PRUNED:
            record.pruned.append(dict(data))

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def scoreboard(self) -> list[BlueprintScore]:
        """One score per blueprint that was germinated, the most fossilized first."""
        scores = [_score(blueprint_id, record) for blueprint_id, record in self._records.items()]
        return sorted(scores, key=lambda s: (-s.fossilized, -s.germinated, s.blueprint_id))


def _score(blueprint_id: str, record: _Record) -> BlueprintScore:
    kept, pruned = record.kept, record.pruned
    return BlueprintScore(
        blueprint_id=blueprint_id,
        germinated=record.germinated,
        fossilized=len(kept),
        pruned=len(pruned),
        survival=len(kept) / (len(kept) + len(pruned)) if kept or pruned else None,
        mean_contribution=_mean(kept, "contribution"),
        mean_pruned_contribution=_mean(pruned, "contribution"),
        mean_params=_mean(kept, "params"),
        mean_age=_mean(kept, "epochs_total"),
    )


def _mean(seeds: list[Mapping[str, Any]], name: str) -> float | None:
    """Over the seeds of which it was measured."""
    values = [seed[name] for seed in seeds if seed[name] is not None]
    return fmean(values) if values else None
