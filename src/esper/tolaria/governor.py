"""The governor: watches one network's validation loss, keeps its last good state, and restores it after a
disaster.

Thresholds are multiples of the task's chance loss (the loss of guessing), so that one configuration fits any
number of classes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from esper._files import decode
from esper.leyline import (
    LIVE_STAGES,
    NOOP,
    PRESENT_STAGES,
    EsperError,
    FactoredAction,
    GovernorReport,
    LifecycleOp,
    LifecycleRecord,
    PanicReason,
    PruneCause,
    SeedStage,
    SeedStateReport,
    SlotConfig,
    StructureError,
    Veto,
    check_number,
    legal_ops,
)

if TYPE_CHECKING:
    from esper.kasmina import GovernedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorConfig:
    """When to panic, and how often to keep a copy.

    The loss diverges if it exceeds all of three limits (`absolute`, `sensitivity`, `multiplier`) in `panics`
    checks in a row. It collapses if the healthy losses lay below `healthy_share` of the chance loss, and it
    is now within `collapse_band` of the chance loss. The chance loss is that of guessing."""

    absolute: float = 5.0
    """Divergence, limit 1 of 3: this many times the chance loss."""
    sensitivity: float = 6.0
    """Divergence, limit 2 of 3: the mean of the healthy losses plus this many standard deviations."""
    multiplier: float = 3.0
    """Divergence, limit 3 of 3: this many times the mean of the healthy losses."""
    panics: int = 3
    """Divergence: number of checks in a row with a loss above the limits."""
    healthy_share: float = 0.6
    """Collapse: share of the chance loss below which both the mean and the last of the healthy losses lay."""
    collapse_band: float = 0.065
    """Collapse: distance of the loss from the chance loss, as a share of the chance loss."""
    history_window: int = 20
    """Number of healthy losses that are remembered."""
    min_samples: int = 10
    """Number of healthy losses needed to judge divergence or collapse; until then, only a loss that is not
    finite is a panic."""
    snapshot_every: int = 5
    """Number of epochs between copies of a healthy network."""

    def __post_init__(self) -> None:
        for name in ("absolute", "sensitivity", "multiplier", "healthy_share", "collapse_band"):
            check_number("governor", name, getattr(self, name))
        for name in ("panics", "history_window", "min_samples", "snapshot_every"):
            check_number("governor", name, getattr(self, name), low=1, integer=True)
        if self.min_samples > self.history_window:
            raise EsperError(
                f"governor: min_samples is {self.min_samples}, must not exceed history_window "
                f"{self.history_window}"
            )
        if self.healthy_share + self.collapse_band >= 1.0:
            raise EsperError(
                f"governor: healthy_share {self.healthy_share} and collapse_band {self.collapse_band} "
                "overlap; their sum must stay below 1"
            )


@dataclass(frozen=True, slots=True)
class GovernorState:
    """What a checkpoint keeps of a governor beside its snapshot."""

    history: list[float]
    """Healthy losses, oldest first."""
    consecutive: Annotated[int, msgspec.Meta(ge=0)]
    """Suspicious checks in a row."""
    requested: bool
    """A snapshot is due as soon as the network is healthy."""


class TolariaGovernor:
    """Watches one network. Each epoch: `check_vital_signs`; on a report `rollback`; else, after the epoch's
    actions, `snapshot` where `due` says so. A copy of the network as it is now is made at once."""

    def __init__(self, network: GovernedRow, config: GovernorConfig, chance_loss: float) -> None:
        check_number("governor", "chance_loss", chance_loss, low=1e-9)
        self.network, self.config, self.chance_loss = network, config, chance_loss
        self.reset()

    def reset(self) -> None:
        """A fresh network stands in the row: forget the old one, keep a copy of the new."""
        self._history: deque[float] = deque(maxlen=self.config.history_window)
        self.consecutive = 0
        self.snapshot()

    # -- vital signs -----------------------------------------------------------------------------------------

    def check_vital_signs(self, loss: float) -> GovernorReport | None:
        """Judge this epoch's validation loss; a report means that the network must be rolled back. Healthy
        losses are remembered, suspicious ones are not."""
        if not math.isfinite(loss):
            return self._panic(PanicReason.NON_FINITE, loss, math.inf)
        if len(self._history) >= self.config.min_samples:
            floor = self._collapse_floor()
            if (
                floor is not None
                and abs(loss - self.chance_loss) <= self.config.collapse_band * self.chance_loss
            ):
                return self._panic(PanicReason.COLLAPSE, loss, floor)
            limit = self._divergence_limit()
            if loss > limit:
                report = self._panic(PanicReason.DIVERGENCE, loss, limit)
                return report if self.consecutive >= self.config.panics else None
        self._history.append(loss)
        self.consecutive = 0
        return None

    def _panic(self, reason: PanicReason, loss: float, limit: float) -> GovernorReport:
        self.consecutive += 1
        return GovernorReport(reason=reason, loss=loss, limit=limit, consecutive=self.consecutive)

    def _divergence_limit(self) -> float:
        """Three tests at once are one: the loss exceeds the largest of the three limits."""
        mean, config = fmean(self._history), self.config
        return max(
            config.absolute * self.chance_loss,
            mean + config.sensitivity * pstdev(self._history),
            config.multiplier * mean,
        )

    def _collapse_floor(self) -> float | None:
        """The loss from which on a network that was clearly better counts as collapsed; None for one that was
        not. Its last loss counts too: one that drifts up over many epochs overfits, it does not collapse."""
        healthy = self.config.healthy_share * self.chance_loss
        if fmean(self._history) >= healthy or self._history[-1] >= healthy:
            return None
        return (1 - self.config.collapse_band) * self.chance_loss

    # -- the last good state ---------------------------------------------------------------------------------

    def request_snapshot(self) -> None:
        """Something became permanent: the next `due` is true, whatever the epoch."""
        self._requested = True

    def due(self, epoch: int) -> bool:
        """Whether to take a snapshot at the end of this epoch (1, 2, …). Never of a network under suspicion:
        then a request waits until it is healthy, or is void because it was rolled back."""
        return self.consecutive == 0 and (self._requested or epoch % self.config.snapshot_every == 0)

    def snapshot(self) -> None:
        """Keep a copy of the network as it is."""
        self.last_good: Any = self.network.snapshot_committed()
        self._requested = False

    def rollback(self) -> Sequence[LifecycleRecord]:
        """Back to the last good state: live seeds go, host and fossils are restored, momentum is zero. The
        history starts anew, because it belongs to a network with those seeds: measured against it, a bare
        host would panic for ever."""
        records = self.network.prune_live(PruneCause.ROLLBACK)
        self.network.restore_committed(self.last_good)
        self.network.forget_optimizer()
        self._history.clear()
        self.consecutive = 0
        self._requested = False
        return records

    # -- checkpoints -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain values. The tensors are in `last_good`, which the caller stores."""
        return asdict(GovernorState(list(self._history), self.consecutive, self._requested))

    def load_state(self, state: object, last_good: Any) -> None:
        """Restore what `state` returned, decoded strictly, and the snapshot `last_good`."""
        stored = decode(GovernorState, state, "governor")
        window = self.config.history_window
        if len(stored.history) > window or not all(math.isfinite(loss) for loss in stored.history):
            raise StructureError(
                f"governor: history is {stored.history!r}, must be at most {window} finite numbers"
            )
        self._history = deque(stored.history, maxlen=window)
        self.consecutive, self._requested, self.last_good = stored.consecutive, stored.requested, last_good


# -- preflight -----------------------------------------------------------------------------------------------


def preflight(
    action: FactoredAction,
    reports: Mapping[str, SeedStateReport],
    *,
    slots: SlotConfig,
    blueprints: Collection[int],
    val_loss: float,
    val_accuracy: float,
    epochs_left: int,
    epochs_needed: Sequence[int],
    max_seeds: int = 0,
) -> Veto | None:
    """The first reason against this operation on one network: its measurements, then the legality that the
    report of the slot states and the action masks show too. Waiting is never vetoed.

    `reports` covers the occupied slots; `blueprints` are indices of those that may be germinated here;
    `max_seeds` 0 means no limit. A germination is too late if the seed might not become permanent in the
    `epochs_left`: it takes `epochs_needed` by tempo, and each live seed may take one epoch more, because at
    most one seed becomes permanent per epoch."""
    if action.op is LifecycleOp.WAIT:
        return None
    if not math.isfinite(val_loss):
        return Veto.LOSS_NON_FINITE
    if not math.isfinite(val_accuracy):
        return Veto.ACCURACY_NON_FINITE
    if not 0 <= action.slot_idx < slots.num_slots:
        return Veto.SLOT_UNKNOWN
    report = reports.get(slots.slot_id_for_index(action.slot_idx))
    if report is not None:
        return report.vetoes.get(action.op)
    if action.op not in legal_ops(SeedStage.DORMANT):
        return Veto.SLOT_EMPTY
    if 0 < max_seeds <= sum(other.stage in PRESENT_STAGES for other in reports.values()):
        return Veto.TOO_MANY_SEEDS
    if action.blueprint == NOOP or action.blueprint not in blueprints:
        return Veto.BLUEPRINT_UNKNOWN
    live = sum(other.stage in LIVE_STAGES for other in reports.values())
    if epochs_left < epochs_needed[action.tempo] + live:
        return Veto.TOO_LATE
    return None
