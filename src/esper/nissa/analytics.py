"""Scoreboard of blueprints: the fate of the seeds of each one, computed from lifecycle events. The SQL view
`blueprints` is filled from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from esper.leyline import LifecycleKind, TelemetryEvent, TelemetryEventType


@dataclass(frozen=True, slots=True, kw_only=True)
class BlueprintScore:
    """Fate of the seeds of one blueprint. A mean over no seeds is None."""

    blueprint_id: str
    germinated: int
    fossilized: int
    pruned: int
    survival: float | None
    """Share fossilized, of the seeds that were fossilized or pruned."""
    mean_contribution: float | None
    """Mean last measured contribution of the fossilized seeds, in points."""
    mean_pruned_contribution: float | None
    """Mean last measured contribution of the pruned seeds, in points."""
    mean_params: float | None
    """Mean parameters of a fossilized seed."""
    mean_age: float | None
    """Mean epochs from germination to fossilization."""


@dataclass(slots=True)
class _Record:
    germinated: int = 0
    fossilized: list[Mapping[str, Any]] = field(default_factory=list)
    pruned: list[Mapping[str, Any]] = field(default_factory=list)

    def score(self, blueprint_id: str) -> BlueprintScore:
        ended = len(self.fossilized) + len(self.pruned)
        return BlueprintScore(
            blueprint_id=blueprint_id,
            germinated=self.germinated,
            fossilized=len(self.fossilized),
            pruned=len(self.pruned),
            survival=len(self.fossilized) / ended if ended else None,
            mean_contribution=_mean(self.fossilized, "contribution"),
            mean_pruned_contribution=_mean(self.pruned, "contribution"),
            mean_params=_mean(self.fossilized, "params"),
            mean_age=_mean(self.fossilized, "epochs_total"),
        )


class BlueprintAnalytics:
    """An output of the hub. `observe` accepts payloads from a log as well."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def emit(self, seq: int, event: TelemetryEvent) -> None:
        if event.event_type is TelemetryEventType.SEED_LIFECYCLE:
            self.observe(event.data)

    def observe(self, data: Mapping[str, Any]) -> None:
        """Count the payload of a seed_lifecycle event. A payload that names no blueprint is not counted."""
        blueprint_id, kind = data.get("blueprint_id"), data.get("kind")
        if blueprint_id is None:
            return
        record = self._records.setdefault(blueprint_id, _Record())
        if kind == LifecycleKind.GERMINATED:
            record.germinated += 1
        elif kind == LifecycleKind.FOSSILIZED:
            record.fossilized.append(dict(data))
        elif kind == LifecycleKind.PRUNED:
            record.pruned.append(dict(data))

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def scoreboard(self) -> list[BlueprintScore]:
        """One score per blueprint, most fossilized first."""
        scores = [record.score(blueprint_id) for blueprint_id, record in self._records.items()]
        return sorted(scores, key=lambda s: (-s.fossilized, -s.germinated, s.blueprint_id))


def _mean(seeds: list[Mapping[str, Any]], name: str) -> float | None:
    """Mean over the seeds for which the value was measured."""
    values = [seed[name] for seed in seeds if seed.get(name) is not None]
    return fmean(values) if values else None
