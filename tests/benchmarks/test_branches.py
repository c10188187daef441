"""Branches at HOLDING: the regression finds what can be foretold, and the command runs."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import branches


def test_what_the_observation_tells_is_found_and_noise_is_not() -> None:
    rng = np.random.default_rng(1)
    features = rng.normal(size=(400, 5))
    told = features[:, 2] - 1.0
    gain, correlation = branches.foretold(features, told, 10.0)
    assert gain == pytest.approx(np.maximum(told, 0).mean(), rel=0.1)
    assert correlation > 0.99
    noise = rng.normal(size=400) - 1.0
    gain, correlation = branches.foretold(features, noise, 10.0)
    assert abs(gain) < 0.05
    assert abs(correlation) < 0.2


def test_the_command_says_what_pruning_did_at_each_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    task = "digits_shift:episode_length=5,steps_per_epoch=2,population=8"
    branches.main(["--task", task, "--policy", "digits_shift-1", "--networks", "16", "--epochs", "2", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{task}, digits_shift-1, 16 networks: J ")
    assert [line.split(":")[0] for line in lines if line.startswith("epoch")] == ["epoch 2", "epoch 4"]
