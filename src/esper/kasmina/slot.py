"""One slot of a population: in each row at most one seed, and the banks that hold the seeds' weights.

Seeds of one blueprint share a bank, a module whose rows are the seeds. Germination writes a row, pruning
clears it. Every operation returns records of its effects. An operation that the stage forbids raises and
changes nothing."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import TypeVar

import torch
from torch import nn

from esper.kasmina.blueprints import Gate, build_blueprint
from esper.kasmina.gates import check_gate
from esper.kasmina.layers import seed_row
from esper.kasmina.seed import GATE_BANK, Seed
from esper.leyline import (
    CLOCK,
    GRAFT,
    TRANSITIONS,
    AlphaAlgorithm,
    AlphaCurve,
    AlphaMode,
    EsperError,
    FossilizeCause,
    GateConfig,
    GateLevel,
    GateResult,
    InjectionSpec,
    LifecycleKind,
    LifecycleOp,
    LifecycleRecord,
    OnEnter,
    OpResult,
    Pacing,
    PruneCause,
    SeedStage,
    SeedStateReport,
    Topology,
    Transition,
    TransitionError,
    Veto,
    allowed,
    blueprint_index,
    legal_ops,
)

_E = TypeVar("_E", bound=IntEnum)


def _member(kind: type[_E], value: int) -> _E:
    """The member itself, also where its number was given: stages and blends compare by identity."""
    try:
        return kind(value)
    except ValueError:
        raise EsperError(
            f"{kind.__name__} {value!r} is unknown; {allowed(f'{m.name} ({m.value})' for m in kind)}"
        ) from None


class SeedSlot(nn.Module):
    """The seeds of one slot, one per row, and their banks."""

    def __init__(
        self, spec: InjectionSpec, topology: Topology, population: int, *, gates: GateConfig, pacing: Pacing
    ) -> None:
        super().__init__()
        self.slot_id, self.channels = spec.slot_id, spec.channels
        self.line, self.positions = spec.line, spec.positions
        self.topology, self.population = topology, population
        self.gate_config, self.pacing = gates, pacing
        self.seeds: list[Seed | None] = [None] * population
        self.banks = nn.ModuleDict()
        # A row's counter moves whenever its weights begin or end, so that an optimizer can tell old state
        # from new.
        self.births: dict[str, list[int]] = {}
        # Empty; moves with the network, so that new banks know its device and dtype.
        self.register_buffer("anchor", torch.empty(0), persistent=False)
        self.anchor: torch.Tensor

    # -- lifecycle -------------------------------------------------------------------------------------------

    def germinate(self, row: int, seed: Seed) -> OpResult:
        """Plant a seed; at a tempo of 0 epochs as a graft, which is blended in from its first step."""
        if seed.tempo_epochs < 0:
            raise EsperError(f"tempo of {seed.tempo_epochs} epochs, must be 0 (a graft) or more")
        seed.algorithm = _member(AlphaAlgorithm, seed.algorithm)
        seed.ramp_curve = _member(AlphaCurve, seed.ramp_curve)
        if not 0 <= seed.init_seed < 1 << 63:
            raise EsperError(f"initial seed is {seed.init_seed}, must lie in [0, 2⁶³)")
        transition = self._legal(row, LifecycleOp.GERMINATE)
        if seed.is_graft:
            transition = GRAFT
        gate = check_gate(GateLevel.G0, seed, self.gate_config, self.pacing)
        if not gate.passed:
            return OpResult(False, (), gate)
        # Whatever can fail fails here, before the slot or its banks change.
        self._ensure_bank(seed.blueprint_id)
        self._write(row, seed.blueprint_id, seed.init_seed)
        if seed.algorithm is AlphaAlgorithm.GATE:
            self._add_gate(row, seed.init_seed)
        self.seeds[row] = seed
        seed.update_metrics(params=self.params(row))
        if transition.on_enter is OnEnter.GRAFT:
            seed.alpha.pin(1.0)
        seed.enter(transition.to)
        return OpResult(True, (self._record(LifecycleKind.GERMINATED, row, SeedStage.DORMANT),), gate)

    def advance(self, row: int) -> OpResult:
        return self._pass_gate(row, LifecycleOp.ADVANCE)

    def fossilize(self, row: int, *, cause: FossilizeCause = FossilizeCause.POLICY) -> OpResult:
        result = self._pass_gate(row, LifecycleOp.FOSSILIZE)
        if not result.done:
            return result
        return replace(result, records=tuple(replace(record, cause=cause) for record in result.records))

    def is_new_fossil(self, row: int) -> bool:
        """Whether the row's seed became permanent since the last tick of the clock."""
        seed = self.seeds[row]
        return seed is not None and seed.stage is SeedStage.FOSSILIZED and seed.metrics.epochs_in_stage == 0

    def awaits_permanence(self, row: int) -> bool:
        """Whether the clock may make the row's seed permanent: it has been in HOLDING for an epoch, so that
        its contribution was measured, and G5 is open."""
        seed = self.seeds[row]
        if seed is None or seed.stage is not SeedStage.HOLDING or seed.metrics.epochs_in_stage < 1:
            return False
        return self._check(row, TRANSITIONS[SeedStage.HOLDING, LifecycleOp.FOSSILIZE]).passed

    def set_alpha_target(
        self,
        row: int,
        target: float,
        *,
        steps: int,
        curve: AlphaCurve = AlphaCurve.LINEAR,
        steepness: float = 12.0,
        algorithm: AlphaAlgorithm | None = None,
    ) -> OpResult:
        """Ramp to another alpha, and mix by another operator if one is given. A holding seed stays so at a
        full target."""
        if not 0.0 < target <= 1.0:
            raise EsperError(f"alpha target is {target}, must lie in (0, 1]; to remove a seed, prune it")
        curve = _member(AlphaCurve, curve)
        if algorithm is not None:
            algorithm = _member(AlphaAlgorithm, algorithm)
        transition = self._legal(row, LifecycleOp.SET_ALPHA_TARGET)
        seed = self.seed(row)
        seed.alpha.retarget(target, steps, curve, steepness)
        before = seed.stage
        if algorithm is not None and algorithm is not seed.algorithm:
            if seed.algorithm is AlphaAlgorithm.GATE:
                self._clear(row, GATE_BANK)
            if algorithm is AlphaAlgorithm.GATE:
                self._add_gate(row, seed.init_seed)
            seed.algorithm = algorithm
            seed.update_metrics(params=self.params(row))
            self._drop_idle_banks()
        if before is SeedStage.HOLDING and seed.alpha.target < 1.0:
            seed.enter(transition.to)
        return OpResult(True, (self._record(LifecycleKind.RETARGETED, row, before),))

    def schedule_prune(
        self, row: int, *, steps: int, curve: AlphaCurve = AlphaCurve.LINEAR, steepness: float = 12.0
    ) -> OpResult:
        """Ramp alpha down and prune at the end of the ramp; at once where there is nothing to ramp."""
        if steps < 0:
            raise EsperError(f"prune over {steps} epochs, must be 0 or more")
        curve = _member(AlphaCurve, curve)
        self._legal(row, LifecycleOp.PRUNE)
        seed = self.seed(row)
        if steps == 0 or not seed.is_blended:
            return self.prune(row)
        before = seed.stage
        seed.alpha.retarget(0.0, steps, curve, steepness)
        seed.prune_cause = PruneCause.POLICY
        if before is SeedStage.HOLDING:
            seed.enter(SeedStage.BLENDING)
        return OpResult(True, (self._record(LifecycleKind.PRUNE_SCHEDULED, row, before),))

    def prune(self, row: int, *, cause: PruneCause = PruneCause.POLICY) -> OpResult:
        """Remove the seed now; the slot rests before it can be germinated again."""
        transition = self._legal(row, LifecycleOp.PRUNE)
        before = self.seed(row).stage
        self.seed(row).prune_cause = cause
        self._enter(row, transition)
        return OpResult(True, (self._record(LifecycleKind.PRUNED, row, before),))

    def step_epoch(self, row: int) -> tuple[LifecycleRecord, ...]:
        """One tick of the one clock. A gate that opens by itself does so first, as if the policy had just
        advanced the seed; then ages grow, alpha moves and cooldowns count down."""
        seed = self.seeds[row]
        if seed is None:
            return ()
        transition = TRANSITIONS.get((seed.stage, LifecycleOp.ADVANCE))
        records: tuple[LifecycleRecord, ...] = ()
        if (
            transition is not None
            and transition.gate in self.pacing.auto_forward_gates
            and self._check(row, transition).passed
        ):
            records = self.advance(row).records
        seed.update_metrics(epochs_in_stage=seed.metrics.epochs_in_stage + 1)
        if seed.stage in CLOCK:
            resting = (
                seed.stage is SeedStage.EMBARGOED
                and seed.metrics.epochs_in_stage < self.pacing.embargo_epochs
            )
            return () if resting else (self._clock(row),)
        seed.update_metrics(epochs_total=seed.metrics.epochs_total + 1)
        if seed.metrics.contribution_age is not None:
            seed.update_metrics(contribution_age=seed.metrics.contribution_age + 1)
        if seed.alpha.tick() and seed.alpha.alpha == 0.0:
            records += self.prune(row).records
        return records

    def clear_row(self, row: int) -> None:
        """Forget whatever the row holds, cooldown included: the slot is empty again."""
        for name in self.banks:
            self._clear(row, name)
        self.seeds[row] = None
        self._drop_idle_banks()

    # -- reports ---------------------------------------------------------------------------------------------

    def seed(self, row: int) -> Seed:
        """The row's seed, where there is one."""
        seed = self.seeds[row]
        assert seed is not None, "legality was checked first"
        return seed

    def report(self, row: int) -> SeedStateReport | None:
        seed = self.seeds[row]
        if seed is None:
            return None
        return SeedStateReport(
            slot_id=self.slot_id,
            seed_id=seed.seed_id,
            blueprint_id=seed.blueprint_id,
            blueprint_index=blueprint_index(seed.blueprint_id),
            stage=seed.stage,
            alpha=seed.alpha.alpha,
            alpha_target=seed.alpha.target,
            alpha_mode=seed.alpha.mode,
            alpha_steps_total=seed.alpha.steps_total,
            alpha_steps_done=seed.alpha.steps_done,
            alpha_velocity=seed.alpha.velocity,
            alpha_algorithm=seed.algorithm,
            tempo_epochs=seed.tempo_epochs,
            vetoes=self._vetoes(row),
            metrics=seed.metrics,
        )

    def params(self, row: int) -> int:
        """Parameters of the row's seed, its gate included; 0 where there are no weights."""
        seed = self.seeds[row]
        if seed is None or not seed.is_present:
            return 0
        return sum(p[0].numel() for name in seed.bank_names for p in self.banks[name].parameters())

    # -- inside ----------------------------------------------------------------------------------------------

    def _stage(self, row: int) -> SeedStage:
        seed = self.seeds[row]
        return SeedStage.DORMANT if seed is None else seed.stage

    def _legal(self, row: int, op: LifecycleOp) -> Transition:
        stage = self._stage(row)
        if (stage, op) not in TRANSITIONS:
            raise TransitionError(
                f"slot {self.slot_id}, row {row}: {op.name} is not possible in stage {stage.name}; "
                + allowed([LifecycleOp.WAIT.name, *(o.name for o in legal_ops(stage))])
            )
        return TRANSITIONS[stage, op]

    def _check(self, row: int, transition: Transition) -> GateResult:
        assert transition.gate is not None
        return check_gate(transition.gate, self.seed(row), self.gate_config, self.pacing)

    def _vetoes(self, row: int) -> dict[LifecycleOp, Veto]:
        """Every operation that a policy may not choose for the row's seed now. This is the one place where
        legality is decided, from the transition table, the gates and the pacing; masks and preflight read
        the result."""
        vetoes = {op: self._veto(row, op) for op in LifecycleOp}
        return {op: veto for op, veto in vetoes.items() if veto is not None}

    def _veto(self, row: int, op: LifecycleOp) -> Veto | None:
        seed = self.seed(row)
        if op is LifecycleOp.WAIT:
            return None
        if op is LifecycleOp.GERMINATE:
            return Veto.SLOT_OCCUPIED
        transition = TRANSITIONS.get((seed.stage, op))
        if transition is None:
            return Veto.STAGE_FORBIDS
        if transition.gate is not None:
            return None if self._check(row, transition).passed else Veto.GATE_SHUT
        if seed.alpha.mode is not AlphaMode.HOLD:
            return Veto.ALPHA_MOVING
        if op is LifecycleOp.PRUNE and seed.metrics.epochs_total < self.pacing.min_prune_age:
            return Veto.TOO_YOUNG
        return None

    def _pass_gate(self, row: int, op: LifecycleOp) -> OpResult:
        transition = self._legal(row, op)
        gate, before = self._check(row, transition), self._stage(row)
        if not gate.passed:
            return OpResult(False, (self._record(LifecycleKind.GATE_REFUSED, row, before, gate),), gate)
        self._enter(row, transition)
        kind = LifecycleKind.FOSSILIZED if op is LifecycleOp.FOSSILIZE else LifecycleKind.STAGE_CHANGED
        return OpResult(True, (self._record(kind, row, before, gate),), gate)

    def _enter(self, row: int, transition: Transition) -> None:
        seed = self.seed(row)
        if transition.on_enter is OnEnter.START_RAMP:
            seed.alpha.retarget(1.0, seed.tempo_epochs, seed.ramp_curve)
        elif transition.on_enter is OnEnter.PIN_ALPHA:
            seed.alpha.pin(1.0)
        elif transition.on_enter is OnEnter.FREE:
            for name in self.banks:
                self._clear(row, name)
            seed.alpha.pin(0.0)
        seed.enter(transition.to)
        if transition.on_enter is OnEnter.FREE:
            self._drop_idle_banks()

    def _clock(self, row: int) -> LifecycleRecord:
        seed = self.seed(row)
        before, transition = seed.stage, CLOCK[seed.stage]
        seed.enter(transition.to)
        record = self._record(LifecycleKind.STAGE_CHANGED, row, before)
        if transition.on_enter is OnEnter.EMPTY:
            self.seeds[row] = None
        return record

    def _record(
        self, kind: LifecycleKind, row: int, before: SeedStage, gate: GateResult | None = None
    ) -> LifecycleRecord:
        seed = self.seed(row)
        return LifecycleRecord(
            kind=kind,
            row=row,
            slot_id=self.slot_id,
            seed_id=seed.seed_id,
            blueprint_id=seed.blueprint_id,
            stage_from=before,
            stage_to=seed.stage,
            alpha=seed.alpha.alpha,
            params=seed.metrics.params,
            epochs_total=seed.metrics.epochs_total,
            contribution=seed.metrics.contribution,
            gate=gate,
            cause=seed.prune_cause,
        )

    # -- banks -----------------------------------------------------------------------------------------------

    def build_bank(self, name: str, population: int) -> nn.Module:
        """A bank for this slot, not yet part of it."""
        if name == GATE_BANK:
            return Gate(population, self.channels, image=self.topology == "cnn")
        return build_blueprint(
            self.topology, name, population, self.channels, line=self.line, positions=self.positions
        )

    def adopt(self, row: int, seed: Seed | None) -> None:
        """Make room for a seed whose weights the caller writes next, or empty the row."""
        self.clear_row(row)
        self.seeds[row] = seed
        if seed is not None and seed.is_present:
            for name in seed.bank_names:
                self._ensure_bank(name)
                self.births[name][row] += 1

    def _ensure_bank(self, name: str) -> None:
        if name not in self.banks:
            self.banks[name] = self.build_bank(name, self.population).to(
                self.anchor.device, self.anchor.dtype
            )
            self.births[name] = [0] * self.population

    def _add_gate(self, row: int, init_seed: int) -> None:
        self._ensure_bank(GATE_BANK)
        self._write(row, GATE_BANK, init_seed + 1)

    def _write(self, row: int, name: str, init_seed: int) -> None:
        self._clear(row, name)
        seed_row(self.banks[name], row, init_seed)

    def _clear(self, row: int, name: str) -> None:
        """Zero the row's parameters and buffers: nothing of a seed outlives it."""
        if name not in self.banks:
            return
        bank = self.banks[name]
        with torch.no_grad():
            for tensor in (*bank.parameters(), *bank.buffers()):
                tensor[row] = 0
        self.births[name][row] += 1

    def live_rows(self, name: str) -> list[bool]:
        """Rows whose seed has weights in this bank."""
        return [seed is not None and seed.is_present and name in seed.bank_names for seed in self.seeds]

    def _drop_idle_banks(self) -> None:
        for name in list(self.banks):
            if not any(self.live_rows(name)):
                del self.banks[name]
                del self.births[name]
