"""How long a seed takes to become permanent: what the pacing says against seeds that live."""

from __future__ import annotations

from itertools import chain, combinations, product

import pytest

from esper.kasmina import MorphogeneticModel, blended_slots
from esper.leyline import AUTOMATIC_GATES, GateConfig, GateLevel, Pacing, SeedStage
from helpers import make, passed, stage_of

SLOT = "r0c0"
SUBSETS = [
    frozenset(some)
    for some in chain.from_iterable(combinations(sorted(AUTOMATIC_GATES), n) for n in range(5))
]


def measure_as_training_does(model: MorphogeneticModel, epoch: int) -> None:
    """Accuracy of the network, contributions of blended seeds, gradients of those that learn: all good."""
    model.record_epoch(0, 20.0 + 2 * epoch, contributions=dict.fromkeys(blended_slots(model, 0), 5.0))
    seed = model.seed_in(SLOT)
    if seed is not None and seed.is_learning:
        seed.record_gradient(1.0, 1.0, 0.0, 0.0)


def epochs_until_permanent(model: MorphogeneticModel, tempo: int) -> int:
    """One decision per epoch: germinate, then use every gate at once that the clock does not open."""
    measure_as_training_does(model, 0)
    passed(model.germinate(SLOT, "norm", tempo_epochs=tempo))
    model.step_epoch()
    for epoch in range(1, 40):
        measure_as_training_does(model, epoch)
        report = model.reports()[SLOT]
        if report.can_advance:
            passed(model.advance(SLOT))
        elif report.can_fossilize:
            passed(model.fossilize(SLOT))
        model.step_epoch()
        if stage_of(model, SLOT) is SeedStage.FOSSILIZED:
            return epoch
    raise AssertionError("never permanent")


@pytest.mark.parametrize("tempo", [0, 1, 3])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("gates", SUBSETS, ids=lambda gates: "".join(g.name for g in sorted(gates)) or "none")
def test_a_seed_is_permanent_when_the_pacing_says_so(gates, strict, tempo) -> None:
    """Strict gates ask for an improvement too: 0 points here, because more could take any time."""
    thresholds = GateConfig(permissive=not strict, min_training_improvement=0.0)
    for training, blending in product(range(4), range(5)):
        pacing = Pacing(min_training_epochs=training, min_blending_epochs=blending, auto_forward_gates=gates)
        model = make("mlp", pacing=pacing, gates=thresholds)
        wanted = pacing.epochs_to_permanence(tempo, strict=strict)
        assert epochs_until_permanent(model, tempo) == wanted, pacing


@pytest.mark.parametrize("tempo", [0, 1, 3])
@pytest.mark.parametrize("training", range(4))
def test_a_policy_that_only_waits_needs_as_long_where_all_gates_are_automatic(training, tempo) -> None:
    pacing = Pacing(min_training_epochs=training, auto_forward_gates=AUTOMATIC_GATES)
    model = make("mlp", pacing=pacing)
    passed(model.germinate(SLOT, "norm", tempo_epochs=tempo))
    model.step_epoch()
    for epoch in range(1, pacing.epochs_to_permanence(tempo) + 1):
        assert stage_of(model, SLOT) is not SeedStage.FOSSILIZED
        measure_as_training_does(model, epoch)
        model.step_epoch()
    assert stage_of(model, SLOT) is SeedStage.FOSSILIZED


def test_numbers_by_hand() -> None:
    slow = Pacing(min_training_epochs=10, min_blending_epochs=7)
    assert slow.epochs_to_permanence(0) == slow.epochs_to_permanence(0, strict=True) == 1
    assert slow.epochs_to_permanence(3) == 1 + 10 + 3 + 1
    assert slow.epochs_to_permanence(3, strict=True) == 1 + 10 + 7 + 1
    assert slow.epochs_to_permanence(8, strict=True) == 1 + 10 + 8 + 1
    quick = Pacing(min_training_epochs=0, auto_forward_gates=frozenset({GateLevel.G1}))
    assert quick.epochs_to_permanence(3) == 1 + 3 + 1
