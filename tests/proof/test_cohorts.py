"""Who is compared: final structure from the start, hosts of equal size, oracle and probe."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.kasmina import FlopMeter
from esper.leyline import EsperError, LifecycleOp, SeedStage
from esper.proof import play
from esper.proof.cohorts import at_equal_flops, oracle, priced, widened, with_fossils
from esper.proof.episodes import Fossil
from esper.runtime.tasks import ConditionSpace, draw_condition, get_task_spec, parse_task
from esper.simic.training.evaluation import HELD_OUT, TRAINING, in_populations, open_env
from esper.simic.training.probe import Probe, ProbePolicy, fit_probe, flat
from esper.tamiyo import AlwaysWait, Planting
from proof.worlds import IMPAIRED, SHIFT

LIGHT, NORM = Fossil("r0c0", "conv_light", "ADD"), Fossil("r0c2", "norm", "GATE")


def still(envs) -> AlwaysWait:
    return AlwaysWait()


# -- the final structure from the start ----------------------------------------------------------------------


def test_fossils_are_there_and_learn_from_the_first_epoch():
    task = parse_task(IMPAIRED)
    env = open_env(task, [0, 1], root_seed=HELD_OUT, rows=8)
    env.begin_round(0)
    with_fossils({0: [LIGHT, NORM], 1: []})(env)
    grown, bare = env.envs
    reports = grown.model.reports()
    assert {slot: (r.blueprint_id, r.stage, r.alpha) for slot, r in reports.items()} == {
        "r0c0": ("conv_light", SeedStage.FOSSILIZED, 1.0),
        "r0c2": ("norm", SeedStage.FOSSILIZED, 1.0),
    }
    assert not bare.model.reports()
    before = grown.model.snapshot().tensors
    env.train_epoch(1)
    after = grown.model.snapshot().tensors
    for bank in ("r0c0.conv_light", "r0c2.norm", "r0c2._gate"):
        moved = [
            name for name in before if name.startswith(bank) and not torch.equal(before[name], after[name])
        ]
        assert moved, bank


def test_their_size_is_priced_and_nothing_is_wasted():
    task = parse_task(IMPAIRED)
    fossils = {0: [LIGHT], 1: []}
    static = play(task, still, root_seed=HELD_OUT, networks=range(2))
    final = play(task, still, root_seed=HELD_OUT, networks=range(2), plant=with_fossils(fossils))
    assert final[1] == static[1], "a network without fossils is static"
    end = final[0].outcome
    assert (end.germinated, end.fossilized, end.pruned) == (1, 1, 0)
    assert end.added_params == 2 * 2 * 9 + 3 * 2  # kernel; norm and γ
    price = task.objective.size_price * math.log1p(end.added_params / task.host_params)
    assert end.objective == pytest.approx(end.committed_accuracy / 100 - price, abs=1e-12)
    assert final[0].fossils == (LIGHT,)
    assert final[0].flops > static[0].flops


@pytest.mark.parametrize("steps", [0.3, 2.0, 6.5, 11.0, 12.2, 16.0, 99.0])
def test_equal_flops_are_met_to_the_step(steps):
    """Against a count of single steps. The episode has 8 epochs of 2 steps."""
    task = parse_task(IMPAIRED)
    fossils = {0: [LIGHT], 1: [LIGHT]}
    (whole, _) = play(task, still, root_seed=HELD_OUT, networks=range(2), plant=with_fossils(fossils))
    step = whole.flops / 16
    shorter, last_steps = at_equal_flops(task, fossils.values(), steps * step)
    played = play(
        shorter,
        still,
        root_seed=HELD_OUT,
        networks=range(2),
        plant=with_fossils(fossils),
        last_steps=last_steps,
    )
    assert {p.flops for p in played} == {min(math.ceil(steps), 16) * step}


def test_a_last_epoch_may_end_early():
    task = parse_task(SHIFT)
    whole, same, shorter = (
        play(task, still, root_seed=HELD_OUT, networks=range(8), last_steps=last_steps)
        for last_steps in (None, 2, 1)
    )
    assert whole == same
    assert all(a.flops * 15 == b.flops * 16 for a, b in zip(whole, shorter, strict=True))
    assert [p.test_accuracy for p in whole] != [p.test_accuracy for p in shorter]


# -- equal size ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 40, 160, 700, 5000])
def test_a_widened_host_is_the_nearest(more):
    task = get_task_spec("digits_shift")
    target = task.host_params + more
    sizes = {base: replace(task, host={**task.host, "base": base}).host_params for base in range(4, 40)}
    assert widened(task, target).host_params == min(sizes.values(), key=lambda size: abs(size - target))


def test_a_host_without_width_is_refused():
    with pytest.raises(EsperError, match="transformer"):
        widened(get_task_spec("sotu"), 1e6)


def test_what_a_wider_host_has_more_is_priced_as_added():
    task = parse_task(SHIFT)
    wide = widened(task, task.host_params + 300)
    (played,) = play(wide, still, root_seed=HELD_OUT, networks=[0])
    ours = priced(played, task).outcome
    added = wide.host_params - task.host_params
    assert (ours.host_params, ours.added_params) == (task.host_params, added)
    assert ours.objective == pytest.approx(
        played.outcome.committed_accuracy / 100
        - task.objective.size_price * math.log(1 + added / task.host_params),
        abs=1e-12,
    )


# -- rulers --------------------------------------------------------------------------------------------------

BY_PATTERN = {
    (False, False): (),
    (False, True): (Planting(1, 1, "norm"),),
    (True, False): (Planting(1, 0, "norm"),),
    (True, True): (Planting(1, 0, "conv_light"), Planting(2, 1, "conv_light")),
}


def plantings(played) -> list[tuple[int, str, str]]:
    return [(d.epoch, d.slot, d.blueprint) for d in played.decisions if d.op == LifecycleOp.GERMINATE.name]


def expected(pattern, task) -> list[tuple[int, str, str]]:
    return [(p.epoch, task.slots[p.slot], p.blueprint) for p in BY_PATTERN[pattern]]


def test_the_oracle_follows_what_each_seed_has_drawn():
    task = parse_task(SHIFT)
    played = play(task, oracle(task, BY_PATTERN, HELD_OUT), root_seed=HELD_OUT, networks=range(12))
    patterns = [draw_condition(task, HELD_OUT, 0, p.network).crippled for p in played]
    assert len(set(patterns)) == 4
    for one, pattern in zip(played, patterns, strict=True):
        assert plantings(one) == expected(pattern, task)


def test_the_probe_looks_and_follows_what_it_sees():
    task = parse_task(SHIFT)
    probe = fit_probe(task, 24)
    shown = {}

    class Spy(Probe):
        def __call__(self, features):
            shown["patterns"] = super().__call__(features)
            return shown["patterns"]

    spying = Spy(probe.mean, probe.scale, probe.weights)
    played = play(task, lambda envs: ProbePolicy(spying, BY_PATTERN), root_seed=HELD_OUT, networks=range(8))
    assert len(set(shown["patterns"])) > 1
    for one, pattern in zip(played, shown["patterns"], strict=True):
        assert plantings(one) == expected(pattern, task)


def test_the_probe_is_the_ridge_solution():
    """Against least squares on an augmented system, and right where classes are separable."""
    task = parse_task(SHIFT)
    probe = fit_probe(task, 16)
    seen = []
    for networks in in_populations(range(16), task.population):
        env = open_env(task, networks, root_seed=TRAINING, rows=task.population)
        env.begin_round(0)
        policy = AlwaysWait()

        def decide(observation, env=env, policy=policy):
            from esper.simic.training.batch_ops import batch_signals_to_features

            obs = batch_signals_to_features(observation.signals, observation.table, env.envs, "cpu")
            seen.append(flat(obs))
            return policy.act(obs, None, observation.masks).actions.tolist()

        env.step(1, decide)
    features = np.concatenate(seen)
    x = np.hstack([(features - features.mean(0)) / (features.std(0) + 1e-6), np.ones((16, 1))])
    y = np.array(
        [[1.0 if c else -1.0 for c in draw_condition(task, TRAINING, 0, seed).crippled] for seed in range(16)]
    )
    rows = np.vstack([x, np.sqrt(10.0) * np.eye(x.shape[1])])
    wanted = np.linalg.lstsq(rows, np.vstack([y, np.zeros((x.shape[1], 2))]), rcond=None)[0]
    np.testing.assert_allclose(probe.weights, wanted, atol=1e-8)


# -- budgets of FLOPs ----------------------------------------------------------------------------------------

FLOPS = (
    "digits_flops:steps_per_epoch=3,batch_size=16,val_size=32,final_val_size=48,population=8,budget_steps=20"
)


def test_networks_that_never_grow_spend_their_budget_on_training_alone():
    task = parse_task(FLOPS)
    step = FlopMeter(task.build_model(1, [0])).per_sample({}) * task.batch_size
    static = play(task, still, root_seed=HELD_OUT, networks=range(2), static=True)
    assert [(p.flops, p.outcome.epochs) for p in static] == [(20 * step, 7)] * 2
    measured = play(task, still, root_seed=HELD_OUT, networks=range(2))
    assert all(p.flops > 20 * step and p.outcome.epochs < 7 for p in measured)
    fossils = {0: [Fossil("r0c0", "conv_light", "ADD")], 1: []}
    (final, bare) = play(
        task, still, root_seed=HELD_OUT, networks=range(2), static=True, plant=with_fossils(fossils)
    )
    assert bare == static[1]
    assert final.outcome.epochs < 7
    assert 20 * step <= final.flops < 20 * step + 5 * step, "one step of the larger network at most"


def test_a_wider_host_has_the_same_flops():
    task = parse_task(FLOPS)
    wide = widened(task, 3 * task.host_params)
    assert wide.host_params > 2 * task.host_params
    total, other = (t.budget_steps * FlopMeter(t.build_model(1, [0])).per_sample({}) for t in (task, wide))
    assert total <= other < total + FlopMeter(wide.build_model(1, [0])).per_sample({})
    assert at_equal_flops(task, [()], 1.0) == (task, task.steps_per_epoch)
    space = ConditionSpace(cripple_probability=0.0, budgets=(10, 20))
    drawn = widened(replace(task, conditions=space), 3 * task.host_params)
    assert drawn.conditions is not None
    assert drawn.conditions.budgets[1] == wide.budget_steps


def test_the_bar_of_a_cohort_is_full_at_its_end():
    task, steps = parse_task(FLOPS), []
    play(task, still, root_seed=HELD_OUT, networks=range(3), advance=steps.append)
    assert sum(steps) == 3 * task.episode_length
