"""Quality gates: pure functions of a seed, thresholds and pacing. A measurement that is missing fails."""

from __future__ import annotations

import math
from collections.abc import Iterator

from esper.kasmina.seed import Seed
from esper.leyline import AlphaMode, GateConfig, GateFailure, GateLevel, GateReason, GateResult, Pacing


def check_gate(gate: GateLevel, seed: Seed, config: GateConfig, pacing: Pacing) -> GateResult:
    """All checks that fail; the gate is open if none does."""
    return GateResult(gate, tuple(_CHECKS[gate](seed, config, pacing)))


def _germinate(seed: Seed, config: GateConfig, pacing: Pacing) -> Iterator[GateFailure]:  # noqa: ARG001
    if not seed.seed_id or not seed.blueprint_id:
        yield GateFailure(GateReason.MISSING_ID, None, None)


def _start_training(seed: Seed, config: GateConfig, pacing: Pacing) -> Iterator[GateFailure]:  # noqa: ARG001
    yield from ()


def _start_blending(seed: Seed, config: GateConfig, pacing: Pacing) -> Iterator[GateFailure]:
    m = seed.metrics
    if m.epochs_in_stage < pacing.min_training_epochs:
        yield GateFailure(GateReason.TOO_YOUNG, m.epochs_in_stage, pacing.min_training_epochs)
    if m.gradient_health is None or m.gradient_ratio is None:
        yield GateFailure(GateReason.GRADIENT_UNMEASURED, None, None)
    elif config.permissive:
        if m.gradient_exploding:
            yield GateFailure(GateReason.GRADIENT_EXPLODING, m.gradient_norm, None)
        if not m.gradient_health >= config.min_gradient_health:
            yield GateFailure(GateReason.GRADIENT_UNHEALTHY, m.gradient_health, config.min_gradient_health)
    elif not m.gradient_ratio >= config.min_gradient_ratio:
        yield GateFailure(GateReason.GRADIENT_RATIO_LOW, m.gradient_ratio, config.min_gradient_ratio)
    if not config.permissive:
        improvement = m.improvement_since_stage_start()
        if improvement is None or not improvement >= config.min_training_improvement:
            yield GateFailure(GateReason.IMPROVEMENT_LOW, improvement, config.min_training_improvement)


def _hold(seed: Seed, config: GateConfig, pacing: Pacing) -> Iterator[GateFailure]:
    alpha = seed.alpha
    if alpha.target != 1.0:
        yield GateFailure(GateReason.TARGET_NOT_FULL, alpha.target, 1.0)
    if alpha.mode is not AlphaMode.HOLD:
        yield GateFailure(GateReason.ALPHA_NOT_AT_TARGET, alpha.alpha, alpha.target)
    if not config.permissive and seed.metrics.epochs_in_stage < pacing.min_blending_epochs:
        yield GateFailure(GateReason.TOO_YOUNG, seed.metrics.epochs_in_stage, pacing.min_blending_epochs)


def _fossilize(seed: Seed, config: GateConfig, pacing: Pacing) -> Iterator[GateFailure]:  # noqa: ARG001
    contribution = seed.metrics.contribution
    if contribution is None or math.isnan(contribution):
        yield GateFailure(GateReason.CONTRIBUTION_UNMEASURED, None, config.min_contribution)
    elif not config.permissive and not contribution >= config.min_contribution:
        yield GateFailure(GateReason.CONTRIBUTION_LOW, contribution, config.min_contribution)


_CHECKS = {
    GateLevel.G0: _germinate,
    GateLevel.G1: _start_training,
    GateLevel.G2: _start_blending,
    GateLevel.G3: _hold,
    GateLevel.G5: _fossilize,
}
