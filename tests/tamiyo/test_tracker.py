"""Signals by hand computation: plateau, settling, best, and a peek that leaves no trace."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import EsperError, TimeLeft
from esper.tamiyo.tracker import SignalTracker

measures = st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 100)), min_size=1, max_size=14)


def feed(tracker: SignalTracker, epoch: int, loss: float, accuracy: float, *, peek: bool = False):
    call = tracker.peek if peek else tracker.update
    return call(
        TimeLeft.of_epochs(epoch, 20, 5),
        train_loss=1.0,
        train_accuracy=50.0,
        val_loss=loss,
        val_accuracy=accuracy,
    )


@given(measures)
def test_best_and_history(seen) -> None:
    tracker = SignalTracker()
    for epoch, (loss, accuracy) in enumerate(seen, 1):
        signals = feed(tracker, epoch, loss, accuracy)
    assert signals.best_accuracy == max(accuracy for _, accuracy in seen)
    assert signals.loss_history == tuple(loss for loss, _ in seen)
    assert signals.time == TimeLeft(len(seen), len(seen) / 20, 20 - len(seen), 5 * (20 - len(seen)))


@given(measures, st.floats(0.01, 10), st.floats(0, 100))
def test_peek_says_what_update_would_and_leaves_no_trace(seen, loss, accuracy) -> None:
    tracker = SignalTracker()
    for epoch, measure in enumerate(seen, 1):
        feed(tracker, epoch, *measure)
    before = tracker.state_dict()
    peeked = feed(tracker, 13, loss, accuracy, peek=True)
    assert tracker.state_dict() == before
    assert feed(tracker, 13, loss, accuracy) == peeked


def plateaus(accuracies: list[float]) -> list[int]:
    tracker = SignalTracker()
    return [feed(tracker, i, 1.0, a).plateau_epochs for i, a in enumerate(accuracies, 1)]


def test_plateau_counts_epochs_until_a_hundredth_of_the_error_is_gone() -> None:
    assert plateaus([10.0, 10.8, 11.0, 10.0, 11.8, 11.7]) == [0, 1, 0, 1, 2, 3]  # 0.9 points of 90, then 0.89
    assert plateaus([90.0, 90.05, 90.15, 90.2]) == [0, 1, 0, 1], "where less is left, less is a gain"


def test_small_gains_add_up_and_a_fall_must_be_made_good() -> None:
    assert plateaus([50.0, 50.3, 50.6, 50.9]) == [0, 1, 0, 1]
    assert plateaus([50.0, 40.0, 45.0, 50.4, 50.6]) == [0, 1, 2, 3, 0]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=14), st.integers(2, 100))
def test_the_plateau_does_not_depend_on_the_number_of_classes(relative, classes) -> None:
    """Accuracies at the same place between chance and 1; ties at the threshold aside."""
    chance = 1 / classes
    coarse = [round(50 * r) / 50 for r in relative]
    assert plateaus([100 * r for r in coarse]) == plateaus(
        [100 * (chance + r * (1 - chance)) for r in coarse]
    )


def test_an_unknown_horizon_is_not_a_number() -> None:
    time = TimeLeft.of_epochs(3, math.nan, 5)
    assert time.epoch == 3
    assert all(math.isnan(value) for value in (time.progress, time.epochs_left, time.steps_left))


@pytest.mark.parametrize(
    ("losses", "settled"),
    [
        ([2.0, 1.99, 1.98, 1.97], [False, False, False, True]),
        ([2.0, 1.85, 1.84, 1.81, 1.80], [False, False, False, False, True]),  # 9.5 % better is not stable
        (
            [2.0, 2.2, 2.21, 2.22, 2.23, 1.0],
            [False, False, False, False, True, True],
        ),  # 10 % worse is not; settled stays so
    ],
)
def test_settling(losses, settled) -> None:
    tracker = SignalTracker()
    assert [feed(tracker, i, loss, 50.0).host_stabilized for i, loss in enumerate(losses, 1)] == settled


@pytest.mark.parametrize(("exponent", "settles"), [(0.5, False), (0.25, True)])
def test_settling_takes_a_share_of_the_time(exponent: float, settles: bool) -> None:
    """On a power law the change per epoch always becomes small; the exponent says how fast it falls."""
    tracker = SignalTracker()
    settled = [feed(tracker, i, i**-exponent, 50.0).host_stabilized for i in range(1, 201)]
    assert settled[12:] == [settles] * 188


def test_a_loss_that_is_not_finite_is_not_stable() -> None:
    tracker = SignalTracker()
    losses = [1.0, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0, 1.0]
    settled = [feed(tracker, i, loss, 50.0).host_stabilized for i, loss in enumerate(losses, 1)]
    assert settled == [False] * 7 + [True]  # until the NaN is out of the window


def test_state_round_trip_and_reset() -> None:
    one, two = SignalTracker(), SignalTracker()
    for epoch in range(1, 5):
        feed(one, epoch, 1.0 / epoch, 10.0 * epoch)
    two.load_state_dict(one.state_dict())
    assert feed(one, 5, 0.1, 60.0) == feed(two, 5, 0.1, 60.0)
    one.reset()
    assert feed(one, 1, 1.0, 50.0) == feed(SignalTracker(), 1, 1.0, 50.0)
    with pytest.raises(EsperError, match="field accuracies is missing"):
        two.load_state_dict({"losses": []})
