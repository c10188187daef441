"""A/B of reward modes: paired, interleaved, with intervals that say what they should."""

from __future__ import annotations

import numpy as np
import pytest

from esper._statistics import estimate, interquartile_mean, mean, paired
from esper.leyline import EsperError, RewardMode, TelemetryEventType
from esper.simic.training import vectorized
from esper.simic.training.dual_ab import ABResult, train_dual_ab
from run_helpers import SMALL, story


def test_groups_play_the_same_episodes_until_they_learn_otherwise(tmp_path) -> None:
    result = train_dual_ab(**SMALL, ab_reward_modes=("sparse", "shaped"), telemetry_dir=str(tmp_path))
    sparse, shaped = (result.objectives[mode] for mode in (RewardMode.SPARSE, RewardMode.SHAPED))
    assert sparse.shape == shaped.shape == (SMALL["rounds"], SMALL["envs"])
    assert np.array_equal(sparse[0], shaped[0]), "before its first update no group can know its reward"
    assert set(result.differences) == {(RewardMode.SPARSE, RewardMode.SHAPED)}
    for mode in ("sparse", "shaped"):
        started = story(tmp_path / mode)[0]
        assert started["event_type"] == "run_started"
        assert started["data"]["reward_mode"] == mode


def test_a_comparison_goes_on_where_it_was_stopped(tmp_path) -> None:
    """Told to stop in the second group's last round, when the first has finished; then it goes on, and
    nothing is missing."""
    modes = {"ab_reward_modes": ("sparse", "shaped")}
    whole = train_dual_ab(**SMALL, **modes)
    hub, seen = vectorized.get_hub(), []

    class Stop:
        def emit(self, seq, event) -> None:
            seen.append(event.event_type)
            if seen.count(TelemetryEventType.BATCH_COMPLETED) == 2 * SMALL["rounds"] - 1:
                vectorized.request_stop()

        def flush(self) -> None: ...

        def close(self) -> None: ...

    with hub.attached(Stop()):
        assert train_dual_ab(**SMALL, **modes, telemetry_dir=str(tmp_path)).stopped
    again = train_dual_ab(**SMALL, **modes, telemetry_dir=str(tmp_path), resume="auto")
    for mode, values in whole.objectives.items():
        assert np.array_equal(again.objectives[mode], values)
        assert [event["event_type"] for event in story(tmp_path / mode)].count("run_ended") == 1
    assert again.differences == whole.differences


def test_one_mode_is_no_comparison() -> None:
    with pytest.raises(EsperError, match="two or more"):
        train_dual_ab(**SMALL)


def test_groups_are_compared_over_the_rounds_that_all_have_played() -> None:
    played = {
        RewardMode.SPARSE: {r: [0.5, 0.6] for r in range(8)},
        RewardMode.SHAPED: {r: [0.4, 0.4] for r in range(2, 7)},
    }
    result = ABResult.of(played)
    assert {len(values) for values in result.objectives.values()} == {5}
    difference = result.differences[RewardMode.SPARSE, RewardMode.SHAPED]
    assert difference.value == pytest.approx(0.15)
    assert difference.low > 0
    with pytest.raises(EsperError, match="nothing to compare"):
        ABResult.of({RewardMode.SPARSE: {0: [0.1]}, RewardMode.SHAPED: {}})


def width(result: ABResult) -> float:
    difference = result.differences["sparse", "shaped"]
    return difference.high - difference.low


def test_the_rounds_of_one_policy_are_no_independent_evidence() -> None:
    """Played again with the same outcome, 16 rounds say no more than 4: the interval does not shrink."""
    rng = np.random.default_rng(0)
    one, other = rng.normal(0.5, 0.1, 12), rng.normal(0.4, 0.1, 12)
    few, many = (
        ABResult.of({"sparse": dict.fromkeys(range(n), one), "shaped": dict.fromkeys(range(n), other)})
        for n in (4, 64)
    )
    assert width(many) == pytest.approx(width(few), rel=0.05)
    assert "not those between training runs" in many.covers


def test_twins_are_resampled_together() -> None:
    """Twins with the same outcome count once."""
    rng = np.random.default_rng(0)
    one, other = rng.normal(0.5, 0.1, 12), rng.normal(0.4, 0.1, 12)
    single = ABResult.of({"sparse": {0: one}, "shaped": {0: other}})
    doubled = {"sparse": {0: one.repeat(2)}, "shaped": {0: other.repeat(2)}}
    assert width(ABResult.of(doubled, twins=2)) == pytest.approx(width(single), rel=0.05)
    assert width(ABResult.of(doubled)) < 0.85 * width(single)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        interval = estimate(rng.normal(0.3, 1.0, 40))
        covered += interval.low <= 0.3 <= interval.high
    assert 180 <= covered <= 199


def test_pairing_takes_out_what_both_share() -> None:
    rng = np.random.default_rng(1)
    shared = rng.normal(0, 5, 60)
    one, other = shared + rng.normal(0.5, 0.5, 60), shared + rng.normal(0, 0.5, 60)
    assert paired(one, other).low > 0
    assert estimate(one).low < 0 < estimate(one).high
    with pytest.raises(EsperError, match="paired"):
        paired(one, other[:5])


def test_the_interquartile_mean_is_the_mean_of_the_middle_half() -> None:
    values = np.array([[100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -100.0]])
    assert interquartile_mean(values)[0] == pytest.approx(np.mean([2.0, 3.0, 4.0, 5.0]))
    odd = np.arange(5.0)[None]
    # A quarter of 5 is 1.25 samples: of the second and fourth only three quarters count.
    assert interquartile_mean(odd)[0] == pytest.approx((0.75 * 1 + 2 + 0.75 * 3) / 2.5)


def test_strata_keep_their_share() -> None:
    values, strata = [0.0] * 10 + [1.0] * 10, [0] * 10 + [1] * 10
    assert estimate(values, strata=strata).low == estimate(values, strata=strata).high == 0.5
    assert estimate(values).low < 0.5 < estimate(values).high


def test_what_belongs_together_is_no_more_evidence_for_being_there_twice() -> None:
    rng = np.random.default_rng(3)
    once = rng.normal(size=40)
    for statistic in (mean, interquartile_mean):
        alone, twice = (
            estimate(once, statistic=statistic),
            estimate(np.stack([once] * 2, 1), statistic=statistic),
        )
        assert (twice.low, twice.high) == pytest.approx((alone.low, alone.high), abs=0.01)
    apart = estimate(rng.normal(size=80))
    assert apart.high - apart.low < 0.8 * (estimate(once).high - estimate(once).low)
    with pytest.raises(EsperError, match="shape"):
        estimate(np.zeros((2, 2, 2)))
    with pytest.raises(EsperError, match="3 strata for 2"):
        estimate(np.zeros((2, 4)), strata=[0, 1, 1])
