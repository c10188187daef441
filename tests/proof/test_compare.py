"""The comparison as a whole: its figures against plain arithmetic on its own episodes."""

from __future__ import annotations

import math

import numpy as np
import orjson
import pytest

from esper.leyline import EsperError
from esper.proof import play, prove
from esper.proof.compare import MEASURES, ProofConfig, growth_by_condition
from esper.proof.policies import simple_makers
from esper.runtime.tasks import draw_condition, parse_task
from esper.simic.training.evaluation import HELD_OUT
from esper.tamiyo import FixedSchedule, Planting
from esper.tamiyo.schedules import ScheduleResult, Schedules
from proof.worlds import IMPAIRED, SHIFT, policy

SEEDS, POLICIES = 8, {"one": 0, "two": 1}
PLAN = ScheduleResult(schedule=(Planting(1, 0, "norm"),), objective=0.0, gain=0.0, networks=1, env_steps=0)
NOTHING = ScheduleResult(schedule=(), objective=0.0, gain=0.0, networks=1, env_steps=0)
SCHEDULES = Schedules(
    task=SHIFT,
    root_seed=0,
    candidates=2,
    best=PLAN,
    by_pattern={(False, False): NOTHING, (False, True): PLAN, (True, False): PLAN, (True, True): PLAN},
)


@pytest.fixture(scope="module")
def result():
    policies = {name: policy(seed) for name, seed in POLICIES.items()}
    return prove(
        parse_task(SHIFT), policies, ProofConfig(networks=SEEDS, probe_networks=16), schedules=SCHEDULES
    )


def episodes(result, cohort, measure) -> np.ndarray:
    return np.array([[MEASURES[measure](p) for p in stratum] for stratum in result["episodes"][cohort]])


def middle_half(values: np.ndarray) -> float:
    assert values.size % 4 == 0
    return float(np.sort(values.ravel())[values.size // 4 : -values.size // 4].mean())


def test_every_cohort_is_there(result):
    once = {
        "static",
        "random",
        "heuristic",
        "periodic",
        "plateau",
        "fixed_schedule",
        "schedule_final",
        "oracle",
        "probe",
        "static_equal",
        "static_flops",
    }
    per_policy = {"learned", "learned_sampled", "static_final", "learned_shuffled"}
    assert set(result["episodes"]) == once | per_policy
    for name, strata in result["episodes"].items():
        assert len(strata) == (2 if name in per_policy else 1), name
        assert all([p.network for p in stratum] == list(range(SEEDS)) for stratum in strata)
    assert result["absent"] == {}
    assert set(result["learned_minus"]) == set(result["episodes"]) - {"learned"}


def test_figures_are_means_of_the_episodes(result):
    for cohort, row in result["cohorts"].items():
        for measure, found in row.items():
            values = episodes(result, cohort, measure)
            assert found["mean"].value == pytest.approx(values.mean(), rel=1e-12, abs=1e-12)
            assert found["iqm"].value == pytest.approx(middle_half(values), rel=1e-9, abs=1e-12)
            assert found["mean"].low <= found["mean"].value <= found["mean"].high


def test_differences_are_paired_seed_by_seed(result):
    for other, row in result["learned_minus"].items():
        for measure, found in row.items():
            gaps = episodes(result, "learned", measure) - episodes(result, other, measure)
            assert found["mean"].value == pytest.approx(gaps.mean(), rel=1e-9, abs=1e-12)
            assert found["iqm"].value == pytest.approx(middle_half(gaps), rel=1e-9, abs=1e-12)
            assert [one["mean"].value for one in found["by_policy"]] == pytest.approx(
                gaps.mean(1).tolist(), rel=1e-9, abs=1e-12
            )


def test_cohorts_without_a_part_in_the_policy_do_not_depend_on_it(result):
    task = parse_task(SHIFT)
    for name, make in simple_makers(task, HELD_OUT).items():
        assert result["episodes"][name] == [play(task, make, root_seed=HELD_OUT, networks=range(SEEDS))]


def test_equals_are_equal(result):
    for learned, final in zip(result["episodes"]["learned"], result["episodes"]["static_final"], strict=True):
        assert [sorted(map(str, p.fossils)) for p in learned] == [sorted(map(str, p.fossils)) for p in final]
        assert [p.outcome.added_params for p in learned] == [p.outcome.added_params for p in final]
    wanted, steps = (
        episodes(result, "learned", "flops").mean(),
        episodes(result, "static", "flops").mean() / 2,
    )
    assert episodes(result, "static_flops", "flops").mean() == max(1, round(wanted / steps)) * steps
    size = {p.outcome.host_params + p.outcome.added_params for p in result["episodes"]["static_equal"][0]}
    assert len(size) == 1
    assert size.pop() >= result["host_params"]


def test_growth_by_condition_counts_fossils(result):
    played = [p for stratum in result["episodes"]["learned"] for p in stratum]
    assert {row["block"] for row in result["growth_by_condition"]} == {0, 1}
    for row in result["growth_by_condition"]:
        block = row["block"]
        for part, crippled in (("crippled", True), ("healthy", False)):
            group = [p for p in played if p.condition.crippled[block] is crippled]
            share = sum(any(f.slot == row["slot"] for f in p.fossils) for p in group) / len(group)
            assert row[part].value == pytest.approx(share)
        gap = row["difference"]
        assert gap.value == pytest.approx(row["crippled"].value - row["healthy"].value)
        assert gap.low <= gap.value <= gap.high


def test_growth_rates_differ_where_growth_follows_the_condition():
    """The oracle plants only where blocks are crippled; told as if it were learned, its table says so."""
    task = parse_task(SHIFT.replace("episode_length=8", "episode_length=12"))
    follow = {True: (Planting(1, 0, "norm"),), False: ()}
    played = play(
        task,
        lambda envs: FixedSchedule(
            [follow[draw_condition(task, HELD_OUT, 0, env).crippled[0]] for env in envs]
        ),
        root_seed=HELD_OUT,
        networks=range(16),
    )
    first = growth_by_condition(task, [played])[0]
    assert (
        first["slot"],
        first["block"],
        first["crippled"].value,
        first["healthy"].value,
        first["difference"].low,
    ) == ("r0c0", 0, 1.0, 0.0, 1.0)


def test_a_task_without_conditions_or_schedule():
    result = prove(
        parse_task(IMPAIRED.replace("episode_length=8", "episode_length=3")),
        {"one": policy()},
        ProofConfig(networks=2),
    )
    assert "learned_shuffled" not in result["episodes"]
    assert "growth_by_condition" not in result
    assert list(result["absent"]) == ["fixed_schedule"]
    assert result["schedule"] is None


def test_no_policy_and_brief():
    task = parse_task(IMPAIRED.replace("episode_length=8", "episode_length=2"))
    result = prove(task, {}, ProofConfig(networks=2, brief=True))
    assert list(result["cohorts"]) == ["static", "random", "heuristic"]
    assert result["learned_minus"] == {}
    assert math.isfinite(orjson.loads(orjson.dumps(result))["cohorts"]["static"]["J"]["mean"]["value"])


def test_other_numbers_are_other_networks():
    task = parse_task(IMPAIRED)
    all_, late = (
        prove(task, {}, ProofConfig(networks=networks, first_network=first, brief=True))["episodes"][
            "static"
        ][0]
        for networks, first in ((6, 0), (3, 3))
    )
    assert [p.network for p in late] == [3, 4, 5]
    assert [p.outcome.objective for p in late] == pytest.approx(
        [p.outcome.objective for p in all_[3:]], abs=1e-3
    )
    assert [p.outcome.objective for p in late] != [p.outcome.objective for p in all_[:3]]


@pytest.mark.parametrize(
    "settings", [{"networks": 1}, {"networks": 2.5}, {"first_network": -1}, {"probe_networks": 0}]
)
def test_bad_settings(settings):
    with pytest.raises(EsperError, match=next(iter(settings))):
        ProofConfig(**settings)


def test_cohorts_of_a_task_with_a_budget_of_flops_have_equal_flops():
    """All cohorts within one epoch's measurements of each other, and none with more steps for the same
    structure."""
    sizes = "steps_per_epoch=3,batch_size=16,val_size=32,final_val_size=0,population=8,budget_steps=12"
    task = parse_task(f"digits_flops:{sizes}")
    result = prove(task, {"one": policy(0)}, ProofConfig(networks=4), schedules=None)
    assert result["absent"].keys() == {"fixed_schedule", "static_flops", "halving"}
    assert "12" in result["absent"]["halving"], "a budget that cannot be divided"
    assert {"static", "learned", "static_final", "static_equal", "periodic"} <= result["episodes"].keys()
    budget = episodes(result, "static", "flops").mean()
    for cohort in result["episodes"]:
        flops = episodes(result, cohort, "flops") / (8 if cohort == "halving_8x" else 1)
        assert (flops >= budget).all(), cohort
        assert (flops < 1.5 * budget).all(), cohort
