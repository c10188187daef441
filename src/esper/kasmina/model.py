"""The morphogenetic model: a population of networks that grow independently.

Forward passes follow a plan, the list of blended seeds at each slot, rebuilt only when a lifecycle operation
or a tick changed something. Training losses, incubation and coalition tables all run on one primitive:
segments of the host on lanes, with seeds applied to some of the lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.hosts import Host
from esper.kasmina.layers import LANE_MULTIPLE, LAYOUTS, Lanes, Layout, Mode, seed_row
from esper.kasmina.movement import Places
from esper.kasmina.optim import Criterion, GradientStats
from esper.kasmina.seed import GATE_BANK, Seed
from esper.kasmina.slot import SeedSlot
from esper.leyline import (
    AlphaAlgorithm,
    AlphaCurve,
    FossilizeCause,
    GateConfig,
    GateLevel,
    Incubation,
    LifecycleRecord,
    OpResult,
    Pacing,
    PopulationError,
    PruneCause,
    SeedStage,
    SeedStateReport,
    ShapeError,
    SlotConfig,
    SlotIdError,
    allowed,
    stream_seed,
)

Probe = Callable[[str, Tensor, Tensor], Tensor]
"""(slot, features before its seeds, features after them) → features that go on."""


FEW_CLASSES, SAMPLE_MULTIPLE = 16, 32
"""With fewer classes than a vector has numbers, the softmax of one sample after the other is slow: 160 ns
each for 10 classes, against 20 for vectors of samples."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of each lane: outputs [L, B, …, classes], targets [L, B, …] → [L]."""
    if outputs.shape[:-1] != targets.shape:
        raise ShapeError(
            f"targets have shape {tuple(targets.shape)}, outputs want {tuple(outputs.shape[:-1])}"
        )
    flat, wanted = outputs.flatten(0, -2), targets.flatten()
    if flat.shape[1] >= FEW_CLASSES or flat.device.type != "cpu":
        losses = F.cross_entropy(flat, wanted, reduction="none")
    else:
        # Classes outermost: the kernel then works on vectors of samples. Samples beyond the last whole vector
        # would take another path, so there are none.
        columns, spare = flat.t(), -len(flat) % SAMPLE_MULTIPLE
        if spare:
            columns, wanted = F.pad(columns, (0, spare)), F.pad(wanted, (0, spare))
        log_probs = columns.contiguous().log_softmax(0)
        losses = F.nll_loss(log_probs.t(), wanted, reduction="none")
        if spare:
            losses = losses[: len(flat)]
    return losses.view(len(outputs), -1).mean(1)


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of one training batch. `main` trains the hosts and blended seeds, `incubation` the seeds in
    TRAINING."""

    main: Tensor  # [rows that train]
    incubation: Tensor | None  # [n]
    outputs: Tensor  # [rows that train, B, …, classes]

    def total(self) -> Tensor:
        """The scalar to call backward on. Rows are independent, so the sum gives each its own gradient."""
        total = self.main.sum()
        return total if self.incubation is None else total + self.incubation.sum()


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Tensors that the optimizer must hold: one bank of the group named `group`."""

    group: str
    name: str
    parameters: dict[str, Tensor]
    births: list[int]
    learning: list[bool]
    frozen: bool
    """A row that does not learn may receive a gradient."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Seeds of one bank at one slot, applied to some lanes."""

    bank: str
    members: list[int]  # positions of their lanes
    places: Places | None  # the same, padded; None: all lanes in order
    lanes: Lanes  # rows of those lanes, padded
    alpha: Tensor  # [lanes.count]
    multiply: Tensor | None  # [lanes.count] bool
    gate: Tensor | None  # [lanes.count] bool


@dataclass(frozen=True, slots=True)
class ShadowStep:
    """One segment of the shadow pass: blended seeds are applied to the lanes so far, then new lanes join."""

    slot_id: str
    growth: list[Growth]
    joining: Lanes | None = None
    taken: Tensor | None = None  # lanes of the training pass whose features they take; None: all in order
    seeds: list[Growth] = field(default_factory=list)  # the incubating seeds of the joining lanes
    lanes: Lanes = field(default_factory=lambda: Lanes(0, Mode.SHADOW))  # all lanes from here on


@dataclass(frozen=True, slots=True)
class ShadowPlan:
    steps: list[ShadowStep]
    taken: Tensor | None  # lanes of the training pass that all lanes stand for; None: all in order
    real: Tensor  # lanes that are not padding


class GrowingSlots(nn.Module):
    """Slots and the lifecycle of their seeds, whatever the network is around them. A subclass sets the
    attributes below and says how many parameters its host has."""

    population: int
    seed_slots: nn.ModuleDict
    """By slot id, in execution order."""
    slot_config: SlotConfig
    gate_config: GateConfig
    pacing: Pacing
    germinations: list[int]
    version: int

    # -- rows and slots --------------------------------------------------------------------------------------

    def slot(self, slot_id: str) -> SeedSlot:
        if slot_id not in self.seed_slots:
            raise SlotIdError(f"slot {slot_id!r} is unknown; {allowed(self.slot_config.slot_ids)}")
        slot = self.seed_slots[slot_id]
        assert isinstance(slot, SeedSlot)
        return slot

    def slots(self) -> list[SeedSlot]:
        """All slots in execution order."""
        return [self.slot(slot_id) for slot_id in self.seed_slots]

    @property
    def slot_depths(self) -> tuple[float, ...]:
        """Place of each slot, in slot order, among those that activations pass: 0 first, 1 last."""
        order = list(self.seed_slots)
        last = max(len(order) - 1, 1)
        return tuple(order.index(slot_id) / last for slot_id in self.slot_config.slot_ids)

    def check_row(self, row: int) -> int:
        if not 0 <= row < self.population:
            raise PopulationError(f"row {row} is out of range; allowed: 0 to {self.population - 1}")
        return row

    def changed(self) -> None:
        """Note that structure or alpha changed: plans and optimizers are out of date."""
        self.version += 1

    # -- lifecycle -------------------------------------------------------------------------------------------

    def germinate(
        self,
        slot_id: str,
        blueprint_id: str,
        *,
        row: int = 0,
        init_seed: int | None = None,
        algorithm: AlphaAlgorithm = AlphaAlgorithm.ADD,
        ramp_curve: AlphaCurve = AlphaCurve.SIGMOID,
        tempo_epochs: int = 0,
        seed_id: str | None = None,
    ) -> OpResult:
        """Plant a seed. Its initial weights come from `init_seed`, by default a stream of (row, number of
        germination). `tempo_epochs` 0 grafts it: no isolation and no ramp, it trains with its host from the
        next batch on. The output does not change, because a newborn seed computes exactly 0. Otherwise the
        seed is trained in isolation first, and then blended in over `tempo_epochs` epochs."""
        slot, number = self.slot(slot_id), self.germinations[self.check_row(row)]
        result = slot.germinate(
            row,
            Seed(
                seed_id=f"{slot_id}-{blueprint_id}-{number}" if seed_id is None else seed_id,
                blueprint_id=blueprint_id,
                algorithm=algorithm,
                ramp_curve=ramp_curve,
                tempo_epochs=tempo_epochs,
                init_seed=stream_seed(0, "germination", 0, row, number) if init_seed is None else init_seed,
            ),
        )
        if result.done:
            slot.seed(row).update_metrics(host_params=self.host_params)
            self.germinations[row] += 1
        self.changed()
        return result

    def plant_fossil(
        self,
        slot_id: str,
        blueprint_id: str,
        *,
        row: int = 0,
        init_seed: int | None = None,
        algorithm: AlphaAlgorithm = AlphaAlgorithm.ADD,
    ) -> None:
        """Give a fresh network a permanent seed at alpha 1 that learns from the first epoch. It passes no
        stages and no gates: the network has this structure from the start."""
        self.germinate(
            slot_id, blueprint_id, row=row, init_seed=init_seed, algorithm=algorithm, tempo_epochs=0
        )
        self.slot(slot_id).seed(row).enter(SeedStage.FOSSILIZED)
        self.changed()

    def advance(self, slot_id: str, *, row: int = 0) -> OpResult:
        """To the next stage, if its gate is open."""
        return self._done(self.slot(slot_id).advance(self.check_row(row)))

    def fossilize(self, slot_id: str, *, row: int = 0) -> OpResult:
        """Make a holding seed permanent, if its gate is open."""
        return self._done(self.slot(slot_id).fossilize(self.check_row(row)))

    def prune(self, slot_id: str, *, row: int = 0, cause: PruneCause = PruneCause.POLICY) -> OpResult:
        """Remove a seed at once."""
        return self._done(self.slot(slot_id).prune(self.check_row(row), cause=cause))

    def schedule_prune(
        self,
        slot_id: str,
        *,
        row: int = 0,
        steps: int,
        curve: AlphaCurve = AlphaCurve.LINEAR,
        steepness: float = 12.0,
    ) -> OpResult:
        """Blend a seed out over `steps` epochs, then remove it."""
        return self._done(
            self.slot(slot_id).schedule_prune(
                self.check_row(row), steps=steps, curve=curve, steepness=steepness
            )
        )

    def set_alpha_target(
        self,
        slot_id: str,
        target: float,
        *,
        row: int = 0,
        steps: int,
        curve: AlphaCurve = AlphaCurve.LINEAR,
        steepness: float = 12.0,
        algorithm: AlphaAlgorithm | None = None,
    ) -> OpResult:
        """Ramp a blended seed to another alpha. Where that adds a gate, its initial weights come from the
        seed's own stream."""
        slot = self.slot(slot_id)
        return self._done(
            slot.set_alpha_target(
                self.check_row(row),
                target,
                steps=steps,
                curve=curve,
                steepness=steepness,
                algorithm=algorithm,
            )
        )

    def step_epoch(self, rows: Iterable[int] | None = None) -> list[LifecycleRecord]:
        """One tick of the clock for all rows, or those given."""
        records: list[LifecycleRecord] = []
        for row in range(self.population) if rows is None else rows:
            self.check_row(row)
            if GateLevel.G5 in self.pacing.auto_forward_gates:
                records += self._make_permanent(row)
            for slot in self.slots():
                records += slot.step_epoch(row)
        self.changed()
        return records

    def _make_permanent(self, row: int) -> tuple[LifecycleRecord, ...]:
        """Fossilize the first seed, in slot order, that waits for it. At most one seed of a network becomes
        permanent per epoch, so that the epoch's coalitions include the network as it is afterwards."""
        slots = [self.slot(slot_id) for slot_id in self.slot_config.slot_ids]
        if any(slot.is_new_fossil(row) for slot in slots):
            return ()
        for slot in slots:
            if slot.awaits_permanence(row):
                return slot.fossilize(row, cause=FossilizeCause.CLOCK).records
        return ()

    def _done(self, result: OpResult) -> OpResult:
        self.changed()
        return result

    # -- reports ---------------------------------------------------------------------------------------------

    def reports(self, row: int = 0) -> dict[str, SeedStateReport]:
        """Reports of the row's occupied slots, in slot order; an empty slot has none."""
        reports = {
            slot_id: self.slot(slot_id).report(self.check_row(row)) for slot_id in self.slot_config.slot_ids
        }
        return {slot_id: report for slot_id, report in reports.items() if report is not None}

    def seed_in(self, slot_id: str, row: int = 0) -> Seed | None:
        return self.slot(slot_id).seeds[self.check_row(row)]

    @property
    def host_params(self) -> int:
        """Parameters of one host."""
        raise NotImplementedError

    def seed_params(self, row: int = 0, *, stages: Iterable[SeedStage] | None = None) -> int:
        """Parameters of the row's seeds, of those in the given stages if any are given."""
        self.check_row(row)
        wanted = None if stages is None else frozenset(stages)
        return sum(
            slot.params(row)
            for slot in self.slots()
            if (seed := slot.seeds[row]) is not None and (wanted is None or seed.stage in wanted)
        )

    def total_params(self, row: int = 0) -> int:
        return self.host_params + self.seed_params(row)

    def record_epoch(
        self, row: int, accuracy: float, *, contributions: Mapping[str, float] | None = None
    ) -> None:
        """Give the row's seeds this epoch's validation accuracy and fresh leave-one-out contributions
        (percentage points)."""
        for slot in self.slots():
            seed = slot.seeds[self.check_row(row)]
            if seed is not None and seed.is_present:
                seed.record_accuracy(accuracy)
                if contributions is not None and slot.slot_id in contributions:
                    seed.record_contribution(contributions[slot.slot_id])

    def record_gradients(
        self,
        stats: GradientStats,
        table: Sequence[Sequence[float]] | None = None,
        *,
        rows: Iterable[int] | None = None,
    ) -> None:
        """Record the gradient statistics of the last step in every seed that learns, of all rows or of those
        given.

        `table` holds the values of `stats.packed()` if the caller has already copied them from the device."""
        chosen = range(self.population) if rows is None else list(rows)
        host, *rest = stats.packed().tolist() if table is None else table
        slots = list(stats.norm)
        count = len(slots)
        for i, slot_id in enumerate(slots):
            norm, vanishing, exploding = rest[i], rest[count + i], rest[2 * count + i]
            for row in chosen:
                seed = self.slot(slot_id).seeds[row]
                if seed is not None and seed.is_learning:
                    seed.record_gradient(norm[row], host[row], vanishing[row], exploding[row])


class MorphogeneticModel(GrowingSlots):
    """A host, its slots and the seeds that grow in them, for `population` independent networks."""

    def __init__(
        self,
        host: Host,
        slots: Iterable[str] | None = None,
        *,
        gates: GateConfig | None = None,
        pacing: Pacing | None = None,
        incubation: Incubation = Incubation.SHADOW,
        random_seeds: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        specs = {spec.slot_id: spec for spec in host.injection_specs()}
        wanted = tuple(specs) if slots is None else tuple(slots)
        for slot_id in wanted:
            if slot_id not in specs:
                raise SlotIdError(f"slot {slot_id!r} is unknown to this host; {allowed(specs)}")
        self.host = host
        self.population: int = host.population
        self.layout = LAYOUTS[host.topology]
        self.incubation = incubation
        self.gate_config, self.pacing = gates or GateConfig(), pacing or Pacing()
        self.slot_config = SlotConfig.from_ids(wanted)
        order = host.execution_order()
        self.seed_slots = nn.ModuleDict(
            {
                slot_id: SeedSlot(
                    specs[slot_id], host.topology, self.population, gates=self.gate_config, pacing=self.pacing
                )
                for slot_id in order
                if slot_id in wanted
            }
        )
        self.slot_after = [slot_id if slot_id in wanted else None for slot_id in order]
        self.version = 0
        self._members: list[int] | None = None
        self._plan: dict[str, list[Growth]] | None = None
        self._training_plan: dict[str, list[Growth]] | None = None
        self._training_lanes: Lanes | None = None
        self._shadow_plan: ShadowPlan | None = None
        self._incubating_rows: dict[str, list[int]] | None = None
        self.germinations = [0] * self.population
        # Counts each row's host beginnings, as SeedSlot.births does for seeds.
        self.host_births = [0] * self.population
        if random_seeds is not None and len(random_seeds) != self.population:
            counts = f"{len(random_seeds)} random seeds for a population of {self.population}"
            raise PopulationError(f"{counts}; allowed: one per row")
        for row in range(self.population):
            self.reset_row(row, row if random_seeds is None else random_seeds[row])

    def reset_row(self, row: int, random_seed: int) -> None:
        """A fresh network in this row: all slots empty, the host drawn from the random seed."""
        self.check_row(row)
        for slot in self.slots():
            slot.clear_row(row)
        seed_row(self.host, row, random_seed)
        self.germinations[row] = 0
        self.host_births[row] += 1
        self.changed()

    def changed(self) -> None:
        super().changed()
        self._plan = self._training_plan = self._training_lanes = self._shadow_plan = None
        self._incubating_rows = None

    def train_only(self, rows: Sequence[int] | None) -> None:
        """Only these rows, in ascending order, train from now on; None: all. The others rest: they cost
        nothing, and their weights, statistics and optimizer state stay as they are."""
        members = None if rows is None or len(rows) == self.population else list(rows)
        if members is not None and (not members or members != sorted({*map(self.check_row, members)})):
            raise PopulationError(f"rows that train: {members}; allowed: one or more, in ascending order")
        if members != self._members:
            self._members = members
            self.changed()

    @property
    def members(self) -> list[int]:
        """The rows that train."""
        return list(range(self.population)) if self._members is None else self._members

    @property
    def training_lanes(self) -> Lanes:
        """The lanes of a training pass: the rows that train, padded."""
        if self._training_lanes is None:
            rows = self.members if self._members is None else self.padded(self._members)
            self._training_lanes = self.lanes(rows, Mode.TRAIN, padding=len(rows) - len(self.members))
        return self._training_lanes

    @property
    def host_params(self) -> int:
        """Parameters of one host."""
        return sum(p[0].numel() for p in self.host.parameters())

    def _apply(self, fn: Any, recurse: bool = True) -> MorphogeneticModel:
        # Plans and optimizers hold tensors of the device and dtype that the network is about to leave.
        self.changed()
        return super()._apply(fn, recurse)

    # -- passes ----------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Outputs `[P, B, …]` of all rows. Seeds in TRAINING take no part."""
        self.host.check_input(x, self.population)
        lanes = Lanes(self.population, Mode.TRAIN if self.training else Mode.EVAL)
        return self._walk(x, lanes, self._forward_plan())

    def losses(
        self, x: Tensor, targets: Tensor, criterion: Criterion = cross_entropy, *, probe: Probe | None = None
    ) -> Losses:
        """Training losses of one batch, incubation included, of the rows that train. `x` and `targets` are
        those of `training_lanes`. The hosts' part is bit-identical with or without incubation.

        A `probe` sees the features before and after each slot's blended seeds; its return value goes on."""
        lanes = self.training_lanes
        self.host.check_input(x, lanes.count)
        incubating = self._incubating()
        taps: dict[str, Tensor] = {}
        plan = self._plan_training()
        outputs = self._walk(x, lanes, plan, taps=taps, incubating=incubating, probe=probe)
        if self.population == 1 and targets.dim() == outputs.dim() - 2:
            targets = targets.unsqueeze(0)
        main, shadow = criterion(outputs, targets), None
        if self.incubation is Incubation.SHADOW and incubating:
            shadow = self._shadow_losses(taps, targets, criterion)
        if lanes.padding:  # it repeats a row, whose gradient must not count twice
            real = lanes.count - lanes.padding
            main, outputs = main[:real], outputs[:real]
        return Losses(main, shadow, outputs)

    def _walk(
        self,
        x: Tensor,
        lanes: Lanes,
        plan: Mapping[str, list[Growth]],
        *,
        taps: dict[str, Tensor] | None = None,
        incubating: Mapping[str, list[int]] | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """All segments; at each slot the seeds of the plan are applied.

        Where a slot incubates, the features that reach it are noted in `taps` (SHADOW) or routed through it
        (STE)."""
        for index, slot_id in enumerate(self.slot_after):
            x = self.host.segment(index, x, lanes)
            if slot_id is None:
                continue
            if incubating and slot_id in incubating:
                if self.incubation is Incubation.STE:
                    x = self._straight_through(slot_id, incubating[slot_id], x, lanes)
                elif taps is not None:
                    taps[slot_id] = x.detach()
            before = x
            if plan.get(slot_id):
                x = self.grow(slot_id, x, lanes, plan[slot_id])
            if probe is not None:
                x = probe(slot_id, before, x)
        return self.host.segment(len(self.slot_after), x, lanes)

    def grow(self, slot_id: str, x: Tensor, lanes: Lanes, growth: Sequence[Growth]) -> Tensor:
        """Apply seeds to the lanes that have them; all others pass untouched."""
        if growth[0].places is None:
            return self.layout.settle(self.blend(slot_id, x, growth[0], lanes.mode))
        places = [g.places for g in growth if g.places is not None]
        rest, pieces = self.layout.part(x, lanes.count, places)
        seeded = [self.blend(slot_id, h, g, lanes.mode) for h, g in zip(pieces, growth, strict=True)]
        return self.layout.reunite(rest, lanes.count, places, seeded)

    def blend(self, slot_id: str, h: Tensor, g: Growth, mode: Mode) -> Tensor:
        """The features of the growth's lanes with their seeds."""
        slot = self.slot(slot_id)
        lanes = replace(g.lanes, mode=mode)
        delta = slot.banks[g.bank](h, lanes)
        alpha = self.layout.per_lane(g.alpha, h, lanes.count)
        out = torch.addcmul(h, delta, alpha)
        if g.gate is not None:
            gated = h + self.layout.scale(delta, alpha * slot.banks[GATE_BANK](h, lanes), lanes)
            out = torch.where(self.layout.per_lane(g.gate, h, lanes.count), gated, out)
        if g.multiply is not None:
            out = torch.where(
                self.layout.per_lane(g.multiply, h, lanes.count), h * (1 + alpha * torch.tanh(delta)), out
            )
        return out

    # -- incubation ------------------------------------------------------------------------------------------

    def _incubating(self) -> dict[str, list[int]]:
        """The rows that train and whose seed is in TRAINING, by slot; slots without one are left out."""
        if self._incubating_rows is None:
            incubating: dict[str, list[int]] = {}
            for slot in self.slots():
                for row in self.members:
                    seed = slot.seeds[row]
                    if seed is not None and seed.stage is SeedStage.TRAINING:
                        incubating.setdefault(slot.slot_id, []).append(row)
            self._incubating_rows = incubating
        return self._incubating_rows

    def _incubator(self, slot_id: str, rows: Sequence[int]) -> list[Growth]:
        """The TRAINING seeds of a slot at full alpha, on lanes 0 … n−1 that stand for `rows`."""
        return self.growth_at(slot_id, range(len(rows)), rows, alpha=1.0)

    def _shadow_losses(self, features: Mapping[str, Tensor], targets: Tensor, criterion: Criterion) -> Tensor:
        """The losses at the incubating seeds' own outputs. Their features go on through the frozen rest of
        their hosts, all in one pass: at each slot the lanes of its incubating seeds join those that are under
        way."""
        plan = self._shadow_plan = self._shadow_plan or self._plan_shadows()
        x: Tensor | None = None
        lanes = Lanes(0, Mode.SHADOW)
        for index, step in enumerate(plan.steps):
            if x is not None:
                x = self.host.segment(index, x, lanes)
                if step.growth:
                    x = self.grow(step.slot_id, x, lanes, step.growth)
            if step.joining is not None:
                joining = Lanes(step.joining.count, Mode.TRAIN, step.joining.rows)
                taken = features[step.slot_id]
                if step.taken is not None:
                    taken = self.layout.take(taken, self.training_lanes.count, step.taken)
                # These seeds learn; everything after them is constant.
                seeded = self.grow(step.slot_id, taken, joining, step.seeds)
                x = seeded if x is None else self.layout.cat(x, seeded)
                lanes = step.lanes
        assert x is not None
        outputs = self.host.segment(len(plan.steps), x, lanes)
        wanted = targets if plan.taken is None else targets.index_select(0, plan.taken)
        return criterion(outputs, wanted).index_select(0, plan.real)

    def _plan_shadows(self) -> ShadowPlan:
        incubating, device = self._incubating(), self.slots()[0].anchor.device
        steps: list[ShadowStep] = []
        rows: list[int] = []
        real: list[int] = []
        for slot_id in self.slot_after:
            if slot_id is None:
                steps.append(ShadowStep("", []))
                continue
            blended = [i for i, row in enumerate(rows) if self._is_blended(slot_id, row)]
            growth = self.growth_at(slot_id, blended, rows) if blended else []
            if slot_id not in incubating:
                steps.append(ShadowStep(slot_id, growth))
                continue
            mine = self.padded(incubating[slot_id])
            real += range(len(rows), len(rows) + len(incubating[slot_id]))
            rows += mine
            steps.append(
                ShadowStep(
                    slot_id,
                    growth,
                    self.lanes(mine, Mode.SHADOW),
                    self._lanes_of(mine),
                    self._incubator(slot_id, incubating[slot_id]),
                    self.lanes(rows, Mode.SHADOW),
                )
            )
        return ShadowPlan(steps, self._lanes_of(rows), torch.tensor(real, device=device))

    def _lanes_of(self, rows: list[int]) -> Tensor | None:
        """Lanes of the training pass in which these rows train; None: all lanes in order."""
        lane_of = {row: lane for lane, row in enumerate(self.members)}
        places = [lane_of[row] for row in rows]
        if places == list(range(self.training_lanes.count)):
            return None
        return torch.tensor(places, device=self.slots()[0].anchor.device)

    def _is_blended(self, slot_id: str, row: int) -> bool:
        seed = self.slot(slot_id).seeds[row]
        return seed is not None and seed.is_blended

    def _straight_through(self, slot_id: str, rows: list[int], x: Tensor, lanes: Lanes) -> Tensor:
        """Leave the features as they are, and hand the gradient that reaches them to the incubating seeds as
        well."""
        padded = self.padded(rows)
        index = self._lanes_of(padded)
        if index is None:
            index = torch.arange(lanes.count, device=x.device)
        taken = self.layout.take(x.detach(), lanes.count, index)
        seeded = self.grow(slot_id, taken, self.lanes(padded, Mode.TRAIN), self._incubator(slot_id, rows))
        return _StraightThrough.apply(x, seeded, self.layout, lanes.count, Places(index, len(rows)))

    # -- the plan --------------------------------------------------------------------------------------------

    def _forward_plan(self) -> dict[str, list[Growth]]:
        """The blended seeds of each slot, all rows."""
        if self._plan is None:
            self._plan = self._plan_for(range(self.population))
        return self._plan

    def _plan_training(self) -> dict[str, list[Growth]]:
        """The blended seeds of each slot, rows that train."""
        if self._members is None:
            return self._forward_plan()
        if self._training_plan is None:
            self._training_plan = self._plan_for(self._members)
        return self._training_plan

    def _plan_for(self, rows: Sequence[int]) -> dict[str, list[Growth]]:
        """The blended seeds of each slot on lanes that stand for these rows."""
        return {
            slot_id: self.growth_at(slot_id, seeded, rows)
            for slot_id in self.seed_slots
            if (seeded := [lane for lane, row in enumerate(rows) if self._is_blended(slot_id, row)])
        }

    def growth_at(
        self, slot_id: str, positions: Sequence[int], lane_rows: Sequence[int], *, alpha: float | None = None
    ) -> list[Growth]:
        """The seeds of one slot for the lanes at `positions`, by bank, each list padded; at their own alpha,
        or at that given. `lane_rows`: the rows that all lanes stand for, padding not counted."""
        slot = self.slot(slot_id)
        anchor = slot.anchor
        growth = []
        for bank in sorted({slot.seed(lane_rows[i]).blueprint_id for i in positions}):
            members = [i for i in positions if slot.seed(lane_rows[i]).blueprint_id == bank]
            padded = self.padded(members)
            rows = [lane_rows[i] for i in padded]
            seeds = [slot.seed(row) for row in rows]
            # Padding lanes repeat the first lane, so where every lane has a seed of this bank nothing need be
            # moved.
            everywhere = len(members) == len(lane_rows)
            growth.append(
                Growth(
                    bank=bank,
                    members=members,
                    places=None
                    if everywhere
                    else Places(torch.tensor(padded, device=anchor.device), len(members)),
                    lanes=self.lanes(rows, Mode.TRAIN, padding=len(rows) - len(members)),
                    alpha=torch.tensor(
                        [seed.alpha.alpha if alpha is None else alpha for seed in seeds],
                        dtype=anchor.dtype,
                        device=anchor.device,
                    ),
                    multiply=_flags(seeds, AlphaAlgorithm.MULTIPLY, anchor),
                    gate=_flags(seeds, AlphaAlgorithm.GATE, anchor),
                )
            )
        return growth

    def lanes(self, rows: list[int], mode: Mode, *, padding: int = 0) -> Lanes:
        """Lanes that stand for `rows`, of which the last `padding` fill the list up."""
        if rows == list(range(self.population)):
            return Lanes(len(rows), mode)
        device = self.slots()[0].anchor.device
        return Lanes(len(rows), mode, torch.tensor(rows, device=device), padding)

    def padded(self, items: Sequence[Any]) -> list[Any]:
        """The items, filled up with the first one to a multiple of `LANE_MULTIPLE`. A population of 1 needs
        no padding."""
        if self.population == 1:
            return list(items)
        return [*items, *[items[0]] * (-len(items) % LANE_MULTIPLE)]

    # -- optimizer groups ------------------------------------------------------------------------------------

    def optimizer_groups(self) -> list[GroupSpec]:
        """The host, then each bank of each slot; names are stable across growth."""
        members = {*self.members}
        everyone = [row in members for row in range(self.population)]
        groups = [
            GroupSpec(
                "host", "host", dict(self.host.named_parameters()), list(self.host_births), everyone, False
            )
        ]
        for slot in self.slots():
            learning = [
                trains and seed is not None and seed.is_learning
                for trains, seed in zip(everyone, slot.seeds, strict=True)
            ]
            for name, bank in slot.banks.items():
                mine = [a and b for a, b in zip(slot.live_rows(name), learning, strict=True)]
                # Seeds that are being blended out run and do not learn; gates run for all seeds beside one
                # that is gated.
                frozen = name == GATE_BANK or any(
                    s is not None and s.is_blended and not s.is_learning for s in slot.seeds
                )
                groups.append(
                    GroupSpec(
                        slot.slot_id,
                        f"{slot.slot_id}.{name}",
                        dict(bank.named_parameters()),
                        list(slot.births[name]),
                        mine,
                        frozen,
                    )
                )
        return groups

    def live_banks(self, row: int) -> set[str]:
        """Names of the banks in which this row has weights."""
        return {
            "host",
            *(
                f"{slot.slot_id}.{name}"
                for slot in self.slots()
                for name in slot.banks
                if slot.live_rows(name)[row]
            ),
        }


class _StraightThrough(torch.autograd.Function):
    """Forward: the host's features, untouched even where the seed's are NaN. Backward: the gradient goes both
    ways."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        seeded: Tensor,  # noqa: ARG004
        layout: Layout,
        lanes: int,
        places: Places,
    ) -> Tensor:
        ctx.layout, ctx.lanes, ctx.places = layout, lanes, places
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        # Padding lanes repeat a seed; a gradient of theirs would teach it again.
        return grad, ctx.layout.take_real(grad, ctx.lanes, ctx.places), None, None, None


def _flags(seeds: Sequence[Seed], wanted: AlphaAlgorithm, anchor: Tensor) -> Tensor | None:
    flags = [seed.algorithm is wanted for seed in seeds]
    return torch.tensor(flags, device=anchor.device) if any(flags) else None
