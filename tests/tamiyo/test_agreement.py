"""Masks and executor agree: over random steps of real environments, whatever is unmasked executes and nothing
else would."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from env_helpers import make_env, small_task
from esper.leyline import FactoredAction, GateConfig, LifecycleOp, TempoAction
from esper.simic.training.action_execution import parse_sampled_action
from esper.tamiyo import RandomValid

TASKS = ("digits_baseline", "digits_impaired", "digits_scale", "digits_shift")
STEPS = 10_000


def possible(env, seen, i: int, actions) -> None:
    """Every operation in every slot at every tempo: the executor's preflight refuses exactly what the masks
    leave out."""
    for op, slot, tempo in product(LifecycleOp, range(seen.table.shape[1]), TempoAction):
        action = replace(
            FactoredAction.from_indices(*actions[i]),
            op=op,
            slot_idx=slot,
            tempo=tempo,
            blueprint=max(env.rules.blueprints),
        )
        spec = parse_sampled_action(
            i,
            action.to_indices(),
            seen.reports[i],
            env.rules,
            epoch=seen.epoch,
            val_loss=1.0,
            val_accuracy=50.0,
        )
        offered = bool(seen.masks.slot_by_op[i, op, slot])
        if op is LifecycleOp.GERMINATE:
            offered &= bool(seen.masks.tempo[i, tempo])
        assert (spec.veto is None) == offered, (op, slot, tempo, spec.veto)


def fuzz(name: str, envs: int, epochs: int, *, seed: int, max_seeds: int = 0, **changes) -> int:
    """An episode of random valid actions; the number of steps taken."""
    task = small_task(name, epochs=epochs, **changes)
    env, policy, steps = make_env(task, envs), RandomValid(seed, range(envs)), 0
    env.rules = replace(env.rules, max_seeds=max_seeds)
    env.begin_round(0)
    for epoch in range(1, epochs + 1):
        env.train_epoch(epoch)
        env.validate(epoch)
        seen = env.sense(epoch)
        actions = policy.act(None, None, seen.masks).actions.tolist()
        possible(env, seen, epoch % envs, actions)
        for i, outcome in enumerate(env.act(seen, actions).outcomes):
            if i not in seen.panics:
                assert outcome.executed, outcome
                assert outcome.spec.veto is None
                assert outcome.gate is None or outcome.gate.passed
                steps += 1
    return steps


@pytest.mark.parametrize("gates", [GateConfig(permissive=True), GateConfig()], ids=["permissive", "strict"])
def test_a_few_hundred_random_steps(gates) -> None:
    assert fuzz("digits_impaired", 8, 16, seed=1, gates=gates) > 100


def test_a_limit_on_seeds() -> None:
    assert fuzz("digits_impaired", 8, 8, seed=3, max_seeds=1) > 50


@pytest.mark.slow
def test_ten_thousand_random_steps() -> None:
    strict = {"gates": GateConfig()}
    assert sum(fuzz(name, 64, 24, seed=2, **changes) for name in TASKS for changes in ({}, strict)) > STEPS
