"""What can be seen and what can be learned from it: crippled blocks from observations, the heuristic's rules
by imitation."""

from __future__ import annotations

import pytest

from benchmarks import imitation, probe
from esper.runtime.tasks import get_task_spec


@pytest.mark.slow
def test_a_linear_probe_finds_the_crippled_blocks_after_three_epochs() -> None:
    features, crippled = probe.collect([3], episodes=24)
    for right, majority in probe.accuracies(features[3], crippled):
        assert majority < 0.6
        assert right.mean() >= 0.88


@pytest.mark.slow
def test_the_network_imitates_the_heuristic() -> None:
    task = get_task_spec("digits_impaired")
    policy = imitation.fit(imitation.record(task, range(10)), 700)
    recall, slots = imitation.agreement(policy, imitation.record(task, range(10, 13)))
    assert {"WAIT", "GERMINATE", "PRUNE", "FOSSILIZE"} <= set(recall)
    for op, (share, count) in recall.items():
        assert count > 20, (op, count)
        assert share >= 0.9, (op, share, count)
    assert slots >= 0.9
