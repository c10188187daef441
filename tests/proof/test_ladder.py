"""The ladder of static networks: equal FLOPs, the best rung in hindsight, and successive halving."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from esper.kasmina import FlopMeter
from esper.leyline import EsperError, FactoredAction, ObjectiveConfig, stream_seed
from esper.proof.cohorts import with_fossils
from esper.proof.compare import ProofConfig, prove
from esper.proof.episodes import play
from esper.proof.ladder import Rung, halve, halving_rounds, hindsight, ladder, train_ladder
from esper.proof.policies import simple_makers
from esper.runtime import get_task_spec
from esper.runtime.data import test_batches as batches_of_test
from esper.runtime.data import validation_batches
from esper.runtime.tasks import ConditionSpace, TaskSpec
from esper.simic.training.evaluation import HELD_OUT, open_env, split_of

SIZES = "steps_per_epoch=6,batch_size=16,val_size=64,final_val_size=96,population=8,budget_steps=60"


def small(**changes) -> TaskSpec:
    return replace(get_task_spec(f"digits_flops:{SIZES}"), **changes)


def step_cost(task: TaskSpec, rung: Rung) -> int:
    model = task.build_model(1, [0])
    for fossil in rung.fossils:
        model.plant_fossil(fossil.slot, fossil.blueprint)
    return task.batch_size * FlopMeter(model).per_sample(model.reports())


def test_a_ladder_has_nothing_each_slot_and_all_slots_light_and_heavy() -> None:
    task = replace(get_task_spec("worlds_small:1"), slots=("r0c0", "r0c1", "r1c0"))
    rungs = {rung.name: {f.slot: f.blueprint for f in rung.fossils} for rung in ladder(task)}
    expected: dict[str, dict[str, str]] = {"nothing": {}}
    for weight, blueprint in (("light", "conv_light"), ("heavy", "residual")):
        for place, slot in enumerate(("r0c0", "r1c0", "r0c1"), 1):
            expected[f"{weight} {place}"] = {slot: blueprint}
        expected[f"{weight} all"] = dict.fromkeys(("r0c0", "r1c0", "r0c1"), blueprint)
    assert rungs == expected
    costs = [step_cost(task, rung) for rung in ladder(task)]
    assert max(costs) == costs[-1]
    assert min(costs) == costs[0]


@pytest.mark.parametrize("even", [False, True])
def test_all_rungs_spend_the_same_within_one_step(even) -> None:
    task = small(even_epochs=even)
    total = 60 * step_cost(task, Rung("nothing", ()))
    rungs = ladder(task)
    for rung, played in zip(rungs, train_ladder(task, range(2), root_seed=0), strict=True):
        for one in played:
            assert total <= one.flops < total + step_cost(task, rung)
            assert one.flops % step_cost(task, rung) == 0
            assert one.fossils == rung.fossils
    if even:
        assert {one.outcome.epochs for one in played} == {10}


def test_a_rung_is_the_network_that_is_played_with_these_seeds() -> None:
    """To the last bit, through the whole environment with its sensors and coalitions, and whatever other
    rungs are trained beside it."""
    task = small(even_epochs=True)
    rungs = ladder(task)
    trained = train_ladder(task, [4, 2, 3], root_seed=-1, rungs=rungs)
    wait = simple_makers(task, -1)["static"]
    for place in (0, 2, 4, 8):
        plant = with_fossils(dict.fromkeys((2, 3, 4), rungs[place].fossils))
        played = play(task, wait, root_seed=-1, networks=[2, 3, 4], plant=plant, static=True)
        for ours, theirs in zip(trained[place], played, strict=True):
            same = ("committed_accuracy", "objective", "added_params", "epochs", "fossilized", "germinated")
            assert [getattr(ours.outcome, n) for n in same] == [getattr(theirs.outcome, n) for n in same]
            assert ours.network == theirs.network
            assert (ours.test_accuracy, ours.flops) == (theirs.test_accuracy, theirs.flops)
    alone = train_ladder(task, [3], root_seed=-1, rungs=[rungs[8]])
    assert alone[0][0] == trained[8][1]


def test_a_task_with_epochs_has_no_ladder() -> None:
    with pytest.raises(EsperError, match="budget of epochs; a ladder needs one of flops"):
        train_ladder(get_task_spec("digits_baseline"), [0], root_seed=0)


# -- hindsight -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("networks", [2, 3, 4, 9])
def test_hindsight_chooses_on_three_other_networks(networks) -> None:
    validation = np.random.default_rng(networks).random((9, networks))
    for network, rung in enumerate(hindsight(validation)):
        sums = []
        for other_rung in range(9):
            total, counted, at = 0.0, 0, network
            while counted < 3:
                at = 0 if at + 1 == networks else at + 1
                if at == network:
                    break
                total, counted = total + validation[other_rung, at], counted + 1
            sums.append(total)
        assert rung == max(range(9), key=lambda r: sums[r])


def test_luck_of_a_network_does_not_choose_its_rung() -> None:
    validation = np.array([[50.0] * 4, [10.0, 90.0, 10.0, 10.0]])
    assert hindsight(validation) == [0, 0, 0, 0]
    with pytest.raises(EsperError, match="two or more"):
        hindsight(validation[:, :1])


# -- halving -------------------------------------------------------------------------------------------------


def test_rounds_halve_the_rungs_and_double_the_time() -> None:
    assert [(one.rungs, one.epochs) for one in halving_rounds(9)] == [(9, 1), (4, 2), (2, 4)]
    assert [(one.rungs, one.epochs) for one in halving_rounds(2)] == [(2, 1)]


@pytest.mark.parametrize("budgets", [1, 8])
def test_halving_spends_its_budget_in_all(budgets) -> None:
    task = small(budget_steps=130)
    rungs = ladder(task)
    steps = [step_cost(task, rung) for rung in rungs]
    for winner in halve(task, range(2), root_seed=0, budgets=budgets):
        total = budgets * 130 * steps[0]
        own = steps[[rung.fossils for rung in rungs].index(winner.fossils)]
        assert total <= winner.flops < total + steps[0] + own


@pytest.mark.parametrize("price", [0.0, 0.2])
def test_halving_keeps_the_best_half_after_each_round(price) -> None:
    """Against all rungs trained to the end side by side, from which survivors are picked afterwards by J."""
    task, networks = small(budget_steps=400, objective=ObjectiveConfig(size_price=price)), [0, 1, 2]
    rungs = ladder(task)
    reserve = math.ceil(sum(step_cost(task, rung) for rung in rungs) / step_cost(task, rungs[0]))
    steps, left = divmod(400 - reserve, 9 * 1 + 4 * 2 + 2 * 4)
    paced = replace(task, steps_per_epoch=steps, budget_steps=7 * steps + left + reserve, even_epochs=True)
    numbers = [9 * network + rung for network in networks for rung in range(9)]
    env = open_env(paced, numbers, root_seed=0, rows=32, twins=9)
    env.budget = env.budget.without_measuring()
    env.begin_round(0)
    for member in env.envs:
        for i, fossil in enumerate(rungs[member.number % 9].fossils):
            seed = stream_seed(0, "germination", 0, member.world, i)
            member.model.plant_fossil(fossil.slot, fossil.blueprint, init_seed=seed)
    sizes = [member.model.total_params() / task.host_params for member in env.envs]
    wait = list(FactoredAction.wait().to_indices())
    validation = validation_batches(split_of(paced, 0), 32, final=True)
    remaining = {network: list(range(9)) for network in networks}
    for epoch in range(1, paced.episode_length + 1):
        if env.done:
            break
        env.step(epoch, lambda seen: [wait] * len(seen.envs))
        if epoch in (1, 3, 7):
            accuracy = env.test(validation)
            for network, going in remaining.items():
                first = 9 * networks.index(network)
                scores = {
                    rung: accuracy[first + rung] / 100 - price * math.log(sizes[first + rung])
                    for rung in going
                }
                ranked = sorted(going, key=lambda rung: (-scores[rung], rung))
                remaining[network] = ranked[: math.floor(len(going) / 2)]
                for rung in ranked[len(ranked) // 2 :]:
                    env.envs[first + rung].done = True
        if epoch == 7:  # the winner gets what the others have left
            for network, (rung,) in remaining.items():
                members = env.envs[9 * networks.index(network) :][:9]
                others = sum(member.flops for i, member in enumerate(members) if i != rung)
                members[rung].budget_steps = 400 - others // step_cost(task, rungs[0])
    tested = env.test(batches_of_test(split_of(paced, 0), 32))
    winners = halve(task, networks, root_seed=0)
    assert (len({winner.fossils for winner in winners}) > 1) == (not price), (
        "at a high price the smallest wins"
    )
    for winner, (network, going) in zip(winners, remaining.items(), strict=True):
        assert winner.fossils == rungs[going[0]].fossils
        assert winner.test_accuracy == tested[9 * networks.index(network) + going[0]]


def test_a_budget_that_halving_cannot_divide_is_refused() -> None:
    task = small(budget_steps=24)
    each = math.ceil(sum(step_cost(task, rung) for rung in ladder(task)) / step_cost(task, ladder(task)[0]))
    message = f"24 steps of the bare host is too small for 9 rungs; allowed: {25 + each}"
    with pytest.raises(EsperError, match=message):
        halve(task, [0], root_seed=0)
    drawn = small(conditions=ConditionSpace(cripple_probability=0.0, budgets=(60, 90)))
    with pytest.raises(EsperError, match="draw budgets; allowed: one for all"):
        halve(drawn, [0], root_seed=0)


# -- the comparison ------------------------------------------------------------------------------------------


def test_a_comparison_at_equal_flops_has_ladder_halving_and_rules() -> None:
    task = small(even_epochs=True, budget_steps=72)
    result = prove(task, {}, ProofConfig(networks=3, probe_networks=2))
    names = set(result["cohorts"])
    rungs = {f"rung {rung.name}" for rung in ladder(task)[1:]}
    assert rungs | {"static", "ladder_hindsight", "halving", "halving_8x"} <= names
    assert {"periodic", "plateau", "last_slot_first"} <= names
    (best,) = result["episodes"]["ladder_hindsight"]
    played = train_ladder(task, range(4), root_seed=HELD_OUT)  # each network's rung is chosen on three others
    values = np.array([[p.outcome.objective for p in stratum] for stratum in played])
    assert len(best) == 3
    for network, rung in enumerate(hindsight(values)[:3]):
        assert best[network].outcome == played[rung][network].outcome
    for rung, stratum in zip(ladder(task)[1:], played[1:], strict=True):
        assert result["episodes"][f"rung {rung.name}"] == [stratum[:3]]
    grown = result["episodes"]["last_slot_first"][0]
    assert [d.slot for d in grown[0].decisions][:2] == ["r0c1", "r1c0"]
