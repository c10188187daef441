"""What executes in which stage: a table over stage × op, and masks that say the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from env_helpers import make_env, small_task
from esper.leyline import (
    NOOP,
    AlphaSpeedAction,
    FactoredAction,
    GateLevel,
    LifecycleOp,
    Pacing,
    SeedStage,
    TempoAction,
    blueprint_index,
)

# Rows: the stage in which a seed of slot 0 is; columns: what then executes there.
TABLE = {
    SeedStage.DORMANT: {"WAIT", "GERMINATE"},
    SeedStage.GERMINATED: {"WAIT", "ADVANCE", "PRUNE"},
    SeedStage.TRAINING: {"WAIT", "ADVANCE", "PRUNE"},
    SeedStage.BLENDING: {"WAIT", "ADVANCE", "PRUNE", "SET_ALPHA_TARGET"},
    SeedStage.HOLDING: {"WAIT", "FOSSILIZE", "PRUNE", "SET_ALPHA_TARGET"},
    SeedStage.FOSSILIZED: {"WAIT"},
    SeedStage.PRUNED: {"WAIT"},
    SeedStage.EMBARGOED: {"WAIT"},
    SeedStage.RESETTING: {"WAIT"},
}


def action(op: LifecycleOp, **heads) -> tuple[int, ...]:
    """Seeds are germinated at a tempo that takes them through every stage."""
    known = {"blueprint": blueprint_index("conv_light"), "tempo": TempoAction.STANDARD} | heads
    return replace(FactoredAction.wait(), op=op, **known).to_indices()


def env_in(stage: SeedStage):
    """A real env whose first slot has reached the stage, by legal operations only, alpha at rest."""
    pacing = Pacing(min_training_epochs=0, min_blending_epochs=0, min_prune_age=0, embargo_epochs=2)
    env = make_env(small_task("digits_impaired", epochs=40, pacing=pacing), 1)
    env.begin_round(0)
    slot = env.rules.slot_config.slot_ids[0]
    epoch = 0
    while True:
        epoch += 1
        env.train_epoch(epoch)
        env.validate(epoch)
        seen = env.sense(epoch)
        report = seen.reports[0].get(slot)
        now = SeedStage.DORMANT if report is None else report.stage
        moving = report is not None and report.time_to_target > 0
        if now is stage and not moving:
            return env, seen
        cooling = stage in (SeedStage.PRUNED, SeedStage.EMBARGOED, SeedStage.RESETTING)
        if now is SeedStage.DORMANT:
            op = LifecycleOp.GERMINATE
        elif cooling and now is SeedStage.GERMINATED:
            op = LifecycleOp.PRUNE
        elif moving or now in (SeedStage.PRUNED, SeedStage.EMBARGOED):
            op = LifecycleOp.WAIT
        else:
            op = LifecycleOp.FOSSILIZE if now is SeedStage.HOLDING else LifecycleOp.ADVANCE
        # A prune frees the slot and the same epoch's tick moves it on to EMBARGOED, so PRUNED itself is only
        # ever seen where the clock has not ticked: act on the network directly for it.
        if op is LifecycleOp.PRUNE and stage is SeedStage.PRUNED:
            env.envs[0].model.prune(slot)
            return env, env.sense(epoch)
        env.act(seen, [action(op)])
        assert epoch < 30


@pytest.mark.parametrize("stage", TABLE)
@pytest.mark.parametrize("op", LifecycleOp)
def test_stage_by_op(stage, op) -> None:
    env, seen = env_in(stage)
    result = env.act(seen, [action(op, alpha_speed=AlphaSpeedAction.FAST)])
    outcome = result.outcomes[0]
    assert outcome.executed is (op.name in TABLE[stage])
    assert (outcome.spec.veto is None) is outcome.executed
    assert outcome.effective_op is (op if outcome.executed else LifecycleOp.WAIT)


@pytest.mark.parametrize("stage", TABLE)
def test_masks_say_the_same(stage) -> None:
    _, seen = env_in(stage)
    offered = {op.name for op in LifecycleOp if seen.masks.slot_by_op[0, op, 0]}
    assert offered == TABLE[stage]
    assert seen.masks.op[0, LifecycleOp.WAIT]


def test_the_seed_limit_blocks_germination_only() -> None:
    env, seen = env_in(SeedStage.TRAINING)
    env.rules = replace(env.rules, max_seeds=1)
    seen = env.sense(2)
    assert not seen.masks.op[0, LifecycleOp.GERMINATE]
    assert seen.masks.op[0, LifecycleOp.ADVANCE]
    outcome = env.act(seen, [action(LifecycleOp.GERMINATE, slot_idx=1)]).outcomes[0]
    assert not outcome.executed
    assert outcome.spec.veto == "too_many_seeds"


def test_a_blueprint_that_is_not_offered_is_vetoed() -> None:
    env, seen = env_in(SeedStage.DORMANT)
    heads = replace(
        FactoredAction.wait(), op=LifecycleOp.GERMINATE, blueprint=blueprint_index("lora")
    ).to_indices()
    outcome = env.act(seen, [heads]).outcomes[0]
    assert outcome.spec.veto == "blueprint_unknown"
    assert not seen.masks.blueprint[0, blueprint_index("lora")]
    assert not seen.masks.blueprint[0, NOOP]


def test_auto_forwarded_gates_need_no_action() -> None:
    gates = frozenset({GateLevel.G1, GateLevel.G2, GateLevel.G3})
    pacing = Pacing(min_training_epochs=1, min_blending_epochs=0, min_prune_age=0, auto_forward_gates=gates)
    env = make_env(small_task("digits_impaired", epochs=40, pacing=pacing), 1)
    env.begin_round(0)
    slot, stages = env.rules.slot_config.slot_ids[0], []
    for epoch in range(1, 14):
        env.step(epoch, lambda _, e=epoch: [action(LifecycleOp.GERMINATE if e == 1 else LifecycleOp.WAIT)])
        stages.append(env.envs[0].model.reports()[slot].stage.name)
    assert list(dict.fromkeys(stages)) == ["TRAINING", "BLENDING", "HOLDING"]
