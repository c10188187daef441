"""The environment half of the loop on real tasks: nothing leaks, neighbours do not show, disasters are
undone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from env_helpers import RandomValid, make_env, run_episode, small_task, wait
from esper.kasmina import PopulationOptimizer, snapshot_row
from esper.leyline import (
    CLOCK,
    GRAFT,
    TRANSITIONS,
    FactoredAction,
    LifecycleKind,
    LifecycleOp,
    PanicReason,
    SeedStage,
    TelemetryEventType,
    blueprint_index,
)
from esper.nissa import TelemetryHub
from esper.simic.training.evaluation import split_of
from memory_output import MemoryOutput

EMBEDDED = ("digits_baseline", "digits_impaired", "digits_scale", "digits_shift")


def legal(record) -> bool:
    """A record's transition is one of the table's, of the clock's, or the ramp down that a scheduled prune
    starts."""
    if record.stage_from is record.stage_to:
        return record.kind in (LifecycleKind.RETARGETED, LifecycleKind.PRUNE_SCHEDULED)
    by_op = any(
        stage is record.stage_from and t.to is record.stage_to for (stage, _), t in TRANSITIONS.items()
    ) or (record.kind is LifecycleKind.GERMINATED and record.stage_to is GRAFT.to)
    by_clock = record.stage_from in CLOCK and CLOCK[record.stage_from].to is record.stage_to
    return by_op or by_clock


def check_nothing_leaks(env) -> None:
    """Banks hold live rows only, the optimizer holds the model's parameters only, dead rows are zero."""
    for group in env.groups:
        group.optimizer.sync()
        held = {
            id(p)
            for banks in group.optimizer.groups.values()
            for b in banks.values()
            for p in b.parameters.values()
        }
        assert held == {id(p) for p in group.model.parameters()}
        for slot in group.model.slots():
            for name, bank in slot.banks.items():
                live = torch.tensor(slot.live_rows(name))
                assert live.any()
                for parameter in bank.parameters():
                    assert not parameter[~live].any()


def run_random(name: str, episodes: int, *, seed: int) -> None:
    task = small_task(name, epochs=12)
    env = make_env(task, 16, root_seed=seed)
    decide = RandomValid(seed)
    for episode in range(episodes // 16):
        env.begin_round(episode)
        for epoch in range(1, task.episode_length + 1):
            result = env.step(epoch, decide)
            for outcome, valid in zip(result.outcomes, result.valid, strict=True):
                assert outcome.executed or not valid, outcome
                assert all(legal(record) for record in outcome.records)
            check_nothing_leaks(env)
        assert [o.env_id for o in env.ledger.outcomes] == list(range(16))
        for outcome, member in zip(env.ledger.outcomes, env.envs, strict=True):
            live = sum(
                r.stage in (SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)
                for r in member.model.reports().values()
            )
            assert outcome.germinated == outcome.fossilized + outcome.pruned + live
            assert math.isfinite(outcome.objective)


@pytest.mark.parametrize("name", EMBEDDED)
def test_random_valid_episodes(name) -> None:
    run_random(name, 48, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", EMBEDDED)
def test_many_random_valid_episodes(name) -> None:
    run_random(name, 512, seed=2)


def everything(env, i: int):
    """All that env i is: weights, optimizer state, outcome."""
    member = env.envs[i]
    group = next(g for g in env.groups if member in g.envs)
    return (
        snapshot_row(group.model, member.row),
        group.optimizer.row_state(member.row),
        [o for o in env.ledger.outcomes if o.env_id == i],
    )


def assert_same(one, two) -> None:
    (snap_a, opt_a, out_a), (snap_b, opt_b, out_b) = one, two
    assert out_a == out_b
    assert snap_a.seeds == snap_b.seeds
    for a, b in ((snap_a.tensors, snap_b.tensors), (opt_a, opt_b)):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("name", ["digits_impaired", "digits_shift"])
def test_an_env_does_not_depend_on_how_many_there_are(name) -> None:
    task = small_task(name, epochs=10)
    results = []
    for envs in (1, 4, 16, 20):
        env = make_env(task, envs)
        run_episode(env, 3, RandomValid(7))
        results.append(everything(env, 0))
        if envs == 4:
            third = everything(env, 3)
        if envs == 20:
            assert_same(third, everything(env, 3))
    for other in results[1:]:
        assert_same(results[0], other)


def test_two_runs_are_bit_identical_and_another_episode_is_not() -> None:
    task = small_task("digits_shift")
    first, second = (make_env(task, 4) for _ in range(2))
    run_episode(first, 0, RandomValid(3))
    run_episode(second, 1, RandomValid(9))
    assert second.ledger.outcomes != first.ledger.outcomes
    run_episode(second, 0, RandomValid(3))
    for i in range(4):
        assert_same(everything(first, i), everything(second, i))


def poison(optimizer: PopulationOptimizer, env) -> None:
    with torch.no_grad():
        next(iter(optimizer.model.host.parameters()))[env.row] = math.nan


@pytest.mark.parametrize("when", range(1, 9))
def test_a_disaster_at_any_epoch_is_undone(when) -> None:
    task = small_task("digits_baseline", epochs=8)
    memory = MemoryOutput()
    env, twin = make_env(task, 4, hub=TelemetryHub([memory])), make_env(task, 4)
    decide, other = RandomValid(5), RandomValid(5)
    env.begin_round(0)
    twin.begin_round(0)
    victim = env.envs[1]
    for epoch in range(1, task.episode_length + 1):
        if epoch == when:
            poison(env.groups[0].optimizer, victim)
        kept = victim.governor.last_good
        env.train_epoch(epoch)
        env.validate(epoch)
        seen = env.sense(epoch)
        result = env.act(seen, decide(seen))
        twin.step(epoch, other)
        if epoch == when:
            assert seen.panics[1].reason is PanicReason.NON_FINITE
            assert not result.valid[1]
            assert result.penalties == [(1, -task.objective.rollback_price)]
            assert victim.train_total > 0, "what the epoch measured in training stays"
            now = snapshot_row(env.groups[0].model, victim.row, committed_only=True)
            assert all(torch.equal(now.tensors[name], kept.tensors[name]) for name in now.tensors)
            state = env.groups[0].optimizer.row_state(victim.row)
            assert not any(t.any() for name, t in state.items() if not name.startswith("rates."))
            assert all(
                r.stage not in (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)
                for r in victim.model.reports().values()
            )
        else:
            assert not seen.panics
            assert result.penalties == []
    outcome = env.ledger.outcomes[1]
    assert len(env.ledger.outcomes) == 4
    assert (outcome.env_id, outcome.rollbacks) == (1, 1)
    assert math.isfinite(outcome.objective)
    assert sum(e.event_type is TelemetryEventType.ROLLBACK for _, e in memory.events) == 1
    for i in (0, 2, 3):
        assert_same(everything(env, i), everything(twin, i))


def test_the_last_epochs_fossil_counts_in_the_objective() -> None:
    """Committed accuracy is read for the seeds that are fossilized when the episode ends, the last action
    included."""
    task = small_task("digits_impaired", epochs=12)
    env = make_env(task, 16)
    run_episode(env, 0, RandomValid(11))
    for outcome, member in zip(env.ledger.outcomes, env.envs, strict=True):
        fossils = frozenset(s for s, r in member.model.reports().items() if r.stage is SeedStage.FOSSILIZED)
        assert outcome.committed_accuracy == member.coalitions.accuracy(fossils)
        assert outcome.added_params == sum(
            r.metrics.params for s, r in member.model.reports().items() if s in fossils
        )


def correct(member, split, samples) -> float:
    """Accuracy in percent of the env's plain network on these training samples, normalised here."""
    data = split.dataset
    images = (data.train_x[samples].float() / data.scale - data.mean[0]) / data.std[0]
    with torch.no_grad():
        hits = member.model.export()(images).argmax(-1) == data.train_y[samples]
    return 100 * hits.double().mean().item()


def test_the_last_epoch_is_measured_on_more_samples() -> None:
    """J is decided on `split.final`, with a graft that the clock made permanent; the rest on `split.val`."""
    task = replace(small_task("digits_baseline", epochs=4, steps=12), final_val_size=190)
    split = split_of(task, 0)
    assert set(split.val) < set(split.final)
    assert not set(split.final) & set(split.train)
    assert (len(split.val), len(split.final)) == (48, 190)
    env = make_env(task, 4)
    graft = replace(
        FactoredAction.wait(), op=LifecycleOp.GERMINATE, blueprint=blueprint_index("conv_light")
    ).to_indices()
    env.begin_round(0)
    for epoch in range(1, 5):
        env.train_epoch(epoch)
        env.validate(epoch)
        seen = env.sense(epoch)
        samples = split.final if epoch == 4 else split.val
        for member, signals in zip(env.envs, seen.signals, strict=True):
            assert signals.val_accuracy == pytest.approx(correct(member, split, samples), abs=1e-9)
        action = graft if epoch == 2 else FactoredAction.wait().to_indices()
        env.act(seen, [action, FactoredAction.wait().to_indices()] * 2)
    others = 0
    for member, outcome in zip(env.envs, env.ledger.outcomes, strict=True):
        accuracy = correct(member, split, split.final)
        assert outcome.final_accuracy == outcome.committed_accuracy == pytest.approx(accuracy, abs=1e-9)
        assert outcome.fossilized == outcome.germinated == (member.env_idx % 2 == 0)
        size = math.log(1 + outcome.added_params / outcome.host_params)
        price = task.objective.size_price
        assert outcome.objective == pytest.approx(accuracy / 100 - price * size, abs=1e-9)
        others += accuracy != correct(member, split, split.val)
    assert others, "the two sets differ in what they say"


def test_static_networks_learn() -> None:
    task = small_task("digits_baseline", epochs=8, steps=12, val_size=128)
    outcomes = run_episode(make_env(task, 8), 0, wait)
    assert sum(o.final_accuracy for o in outcomes) / len(outcomes) > 35
    assert all(o.final_accuracy == o.committed_accuracy and o.germinated == 0 for o in outcomes)
