"""Ways of growing the same seeds: what each does to the seeds, what it costs, and what is reported."""

from __future__ import annotations

import json

import pytest
from benchmarks.graft import Plan, Study, Way

from benchmarks import graft

TINY = Study("digits_mlp:episode_length=12,steps_per_epoch=2,population=8", 8, (("r0c0", "mlp_small"),))


def test_ways_differ_in_isolation_and_ramp_only(monkeypatch) -> None:
    alphas: dict[Way, list[tuple[str, float]]] = {}
    tick = graft.MorphogeneticModel.step_epoch

    def watched(model) -> None:
        tick(model)
        for report in model.reports().values():
            alphas[way].append((report.stage.name, round(report.alpha, 1)))

    monkeypatch.setattr(graft.MorphogeneticModel, "step_epoch", watched)
    task, split = graft.open_task(TINY)
    for way in graft.GROWING:
        alphas[way] = []
        graft.run(task, split, TINY, Plan(way, 1, 14))
    isolated, full = [("TRAINING", 0.0)] * 2, ("HOLDING", 1.0)
    ramp = [("BLENDING", 0.1), ("BLENDING", 0.9), ("BLENDING", 1.0)]
    assert alphas[Way.GRAFT] == [full] * 7
    assert alphas[Way.LIFECYCLE] == [*isolated, *ramp, *[full] * 2]
    assert alphas[Way.INCUBATE] == [*isolated, ("BLENDING", 1.0), *[full] * 4]
    assert alphas[Way.RAMP] == [*ramp, *[full] * 4]


def test_a_seed_that_has_not_arrived_is_waste() -> None:
    task, split = graft.open_task(TINY)
    outcome = graft.run(task, split, TINY, Plan(Way.LIFECYCLE, 1, 8))
    assert [score.wasted for score in outcome.scores] == [1] * 8


@pytest.mark.parametrize(
    ("budget", "steps"), [(0.0, 0), (38.0, 4), (56.0, 5), (72.0, 6), (100.0, 8), (500.0, 10)]
)
def test_steps_that_come_nearest_to_a_budget(budget, steps) -> None:
    assert graft.steps_for([10.0, 10.0, 20.0, 10.0, 10.0], budget, 2) == steps


def test_the_whole_comparison_and_its_tables(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(graft, "STUDIES", {"tiny": TINY})
    out = tmp_path / "graft.json"
    graft.main(["--tasks", "tiny", "--out", str(out)])
    found = json.loads(out.read_text())["tasks"]["tiny"]
    for moment, epoch in (("early", 1), ("middle", 3), ("late", 6)):
        equal, shorter = found["equal steps"][moment], found["equal FLOPs"][moment]
        budget = equal[Way.GRAFT]["total_flops"]
        assert equal[Way.GRAFT]["plan"]["epoch"] == epoch
        assert shorter[Way.RAMP] == equal[Way.RAMP]
        for way in graft.DEARER:
            assert equal[way]["total_flops"] > budget
            step = max(equal[way]["flops"])
            assert abs(shorter[way]["total_flops"] - budget) <= step
    printed = capsys.readouterr().out
    assert "J in points, graft minus the others, at equal FLOPs:" in printed
    assert printed.count("| `tiny` |") == 3 * 5


def test_one_operation_per_epoch_is_the_lifecycle_for_one_seed() -> None:
    study = Study(
        "digits_impaired:episode_length=16,steps_per_epoch=1,population=8", 8, (("r0c0", "conv_light"),)
    )
    task, split = graft.open_task(study)
    serial = graft.one_operation(study)["middle"]
    outcome = graft.run(task, split, study, Plan(Way.LIFECYCLE, 4, 16))
    assert serial == pytest.approx(outcome.series("objective"), abs=1e-9)


def test_warmups_are_compared_on_the_same_networks(monkeypatch, capsys) -> None:
    monkeypatch.setattr(graft, "STUDIES", {"tiny": TINY})
    graft.main(["--tasks", "tiny", "--warmup", "0", "4"])
    assert "| 4 − 0 |" in capsys.readouterr().out
