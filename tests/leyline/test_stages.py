"""The transition table against one written independently, and what is derived from it."""

from __future__ import annotations

import pytest

from esper.leyline import (
    BLENDED_STAGES,
    CLOCK,
    COOLDOWN_STAGES,
    LIVE_STAGES,
    TRANSITIONS,
    GateLevel,
    LifecycleOp,
    OnEnter,
    SeedStage,
    legal_ops,
)

VALUES = {
    "UNKNOWN": 0,
    "DORMANT": 1,
    "GERMINATED": 2,
    "TRAINING": 3,
    "BLENDING": 4,
    "HOLDING": 6,
    "FOSSILIZED": 7,
    "PRUNED": 8,
    "EMBARGOED": 9,
    "RESETTING": 10,
}

# stage        op                to            gate   on entry
TABLE = """
  DORMANT      GERMINATE         GERMINATED    G0     BUILD
  GERMINATED   ADVANCE           TRAINING      G1     NOTHING
  GERMINATED   PRUNE             PRUNED        -      FREE
  TRAINING     ADVANCE           BLENDING      G2     START_RAMP
  TRAINING     PRUNE             PRUNED        -      FREE
  BLENDING     ADVANCE           HOLDING       G3     PIN_ALPHA
  BLENDING     SET_ALPHA_TARGET  BLENDING      -      RETARGET
  BLENDING     PRUNE             PRUNED        -      FREE
  HOLDING      SET_ALPHA_TARGET  BLENDING      -      RETARGET
  HOLDING      FOSSILIZE         FOSSILIZED    G5     PIN_ALPHA
  HOLDING      PRUNE             PRUNED        -      FREE
"""
ROWS = {
    (stage, op): (to, gate, enter)
    for stage, op, to, gate, enter in (line.split() for line in TABLE.strip().splitlines())
}


def test_stage_names_and_values() -> None:
    assert {stage.name: stage.value for stage in SeedStage} == VALUES


def test_gate_values() -> None:
    assert {gate.name: gate.value for gate in GateLevel} == {"G0": 0, "G1": 1, "G2": 2, "G3": 3, "G5": 5}


@pytest.mark.parametrize("stage", list(VALUES))
@pytest.mark.parametrize("op", [op.name for op in LifecycleOp])
def test_every_pair_of_stage_and_op(stage: str, op: str) -> None:
    found = TRANSITIONS.get((SeedStage[stage], LifecycleOp[op]))
    if (stage, op) not in ROWS:
        assert found is None
    else:
        to, gate, enter = ROWS[stage, op]
        assert found is not None
        assert (found.to, found.gate, found.on_enter) == (
            SeedStage[to],
            None if gate == "-" else GateLevel[gate],
            OnEnter[enter],
        )


def test_clock() -> None:
    assert {(stage.name, step.to.name, step.gate, step.on_enter.name) for stage, step in CLOCK.items()} == {
        ("PRUNED", "EMBARGOED", None, "NOTHING"),
        ("EMBARGOED", "RESETTING", None, "NOTHING"),
        ("RESETTING", "DORMANT", None, "EMPTY"),
    }


def test_tables_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[SeedStage.FOSSILIZED, LifecycleOp.PRUNE] = CLOCK[SeedStage.PRUNED]  # type: ignore[index]
    with pytest.raises(TypeError):
        CLOCK[SeedStage.DORMANT] = CLOCK[SeedStage.PRUNED]  # type: ignore[index]


@pytest.mark.parametrize("stage", list(VALUES))
def test_legal_ops(stage: str) -> None:
    ops = legal_ops(SeedStage[stage])
    assert {op.name for op in ops} == {op for (s, op) in ROWS if s == stage}
    assert len(ops) == len(set(ops))


def test_fossilized_is_the_only_end() -> None:
    ends = {stage for stage in SeedStage if not legal_ops(stage) and stage not in CLOCK}
    assert ends == {SeedStage.UNKNOWN, SeedStage.FOSSILIZED}


def test_stage_sets() -> None:
    assert {s.name for s in LIVE_STAGES} == {"GERMINATED", "TRAINING", "BLENDING", "HOLDING"}
    assert {s.name for s in BLENDED_STAGES} == {"BLENDING", "HOLDING", "FOSSILIZED"}
    assert {s.name for s in COOLDOWN_STAGES} == {"PRUNED", "EMBARGOED", "RESETTING"}


def test_live_means_prunable() -> None:
    assert {stage for stage in SeedStage if LifecycleOp.PRUNE in legal_ops(stage)} == LIVE_STAGES


def test_the_retired_stage_cannot_be_constructed() -> None:
    with pytest.raises(ValueError, match="5"):
        SeedStage(5)
