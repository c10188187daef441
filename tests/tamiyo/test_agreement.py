"""Masks and executor agree: over random steps of real environments, whatever is unmasked executes and nothing
else would."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from env_helpers import make_env, run_episode, small_task
from esper.leyline import (
    FactoredAction,
    GateConfig,
    LifecycleOp,
    Pacing,
    TempoAction,
    stack_reports,
)
from esper.simic.training.action_execution import parse_sampled_action
from esper.tamiyo import RandomValid
from esper.tamiyo.masks import build_slot_states, compute_action_masks

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
            epochs_left=env.envs[i].planned.certain,
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


def greedy(seen, rng: np.random.Generator) -> list[list[int]]:
    """Germinate wherever that is legal, at any tempo that is offered; otherwise move seeds on, never remove
    one."""
    actions = []
    for i in range(len(seen.signals)):
        action = FactoredAction.wait()
        for op in (LifecycleOp.GERMINATE, LifecycleOp.FOSSILIZE, LifecycleOp.ADVANCE):
            slots = np.flatnonzero(seen.masks.slot_by_op[i, op].numpy())
            if len(slots):
                action = replace(action, op=op, slot_idx=int(rng.choice(slots)))
                if op is LifecycleOp.GERMINATE:
                    blueprints = np.flatnonzero(seen.masks.blueprint[i].numpy())
                    tempos = np.flatnonzero(seen.masks.tempo[i].numpy())
                    action = replace(
                        action,
                        blueprint=int(rng.choice(blueprints)),
                        tempo=TempoAction(rng.choice(tempos)),
                    )
                break
        actions.append(list(action.to_indices()))
    return actions


@pytest.mark.parametrize("epochs", [2, 3, 5, 9, 16])
@pytest.mark.parametrize("name", ["digits_impaired", "digits_shift"])
def test_no_seed_is_left_unfinished(name, epochs) -> None:
    """All gates are automatic, and nothing is germinated that cannot become permanent in time."""
    env, rng = make_env(small_task(name, epochs=epochs), 16), np.random.default_rng(epochs)
    outcomes = run_episode(env, 0, lambda seen: greedy(seen, rng))
    assert [(o.germinated, o.pruned) for o in outcomes] == [(o.fossilized, 0) for o in outcomes]
    assert all(o.germinated for o in outcomes)
    assert max(o.germinated for o in outcomes) == (1 if epochs < 5 else 3)


def masks_of(env, *, epochs_left: int, needed=(6, 8, 11, 1), max_seeds: int = 0):
    table = stack_reports([member.model.reports() for member in env.envs], env.rules.slot_config)
    return compute_action_masks(
        build_slot_states(table),
        env.rules.blueprint_mask,
        epochs_left=epochs_left,
        epochs_needed=needed,
        max_seeds=max_seeds,
    )


def test_tempos_are_masked_by_the_time_that_is_left() -> None:
    env = make_env(small_task("digits_impaired"), 2)
    env.begin_round(0)
    for left, tempos in (
        (11, {"FAST", "STANDARD", "SLOW", "INSTANT"}),
        (10, {"FAST", "STANDARD", "INSTANT"}),
        (7, {"FAST", "INSTANT"}),
        (5, {"INSTANT"}),
        (1, {"INSTANT"}),
        (0, set()),
    ):
        masks = masks_of(env, epochs_left=left)
        for i in range(2):
            assert {t.name for t in TempoAction if masks.tempo[i, t]} == tempos
        assert masks.slot_by_op[:, LifecycleOp.GERMINATE].all().item() == bool(tempos)
        assert masks.op[:, LifecycleOp.GERMINATE].all().item() == bool(tempos)
        assert masks.op[:, LifecycleOp.WAIT].all()


def test_live_seeds_need_an_epoch_each_to_become_permanent() -> None:
    """At most one seed of a network becomes permanent per epoch; only the env that holds them is affected."""
    env = make_env(small_task("digits_impaired"), 2)
    env.begin_round(0)
    first, second, _ = env.rules.slot_config.slot_ids
    for slot_id in (first, second):
        assert env.envs[1].model.germinate(slot_id, "norm").done
    for left, wanted in ((3, [True, True]), (2, [True, False]), (1, [True, False])):
        masks = masks_of(env, epochs_left=left)
        assert masks.op[:, LifecycleOp.GERMINATE].tolist() == wanted
        assert masks.tempo[:, TempoAction.INSTANT].tolist() == wanted
    assert build_slot_states(
        stack_reports([member.model.reports() for member in env.envs], env.rules.slot_config)
    ).live.tolist() == [[False] * 3, [True, True, False]]


def test_the_rules_know_how_long_each_tempo_takes() -> None:
    for name in TASKS:
        assert make_env(small_task(name), 1, population=8).rules.epochs_needed == (6, 8, 11, 1)
    strict = small_task("digits_impaired", gates=GateConfig(), pacing=Pacing())
    assert make_env(strict, 1, population=8).rules.epochs_needed == (22, 22, 22, 1)


@pytest.mark.slow
def test_ten_thousand_random_steps() -> None:
    strict = {"gates": GateConfig()}
    assert sum(fuzz(name, 64, 24, seed=2, **changes) for name in TASKS for changes in ({}, strict)) > STEPS
