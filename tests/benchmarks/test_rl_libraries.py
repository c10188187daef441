"""The campaign with other libraries: small runs, saved curves, finished ones skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_helpers import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_curves_are_saved_and_finished_ones_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sb3_contrib")
    pytest.importorskip("torchrl")
    from benchmarks import rl_libraries

    monkeypatch.setattr(rl_libraries, "TASK", SMALL)
    monkeypatch.setattr(rl_libraries, "ENVS", 8)
    monkeypatch.setattr(rl_libraries, "FINAL", 8)
    command = ["--settings", "ours", "--seeds", "1", "--steps", "80", "--every", "40", "--out", str(tmp_path)]
    rl_libraries.main(command)
    assert capsys.readouterr().out.count("env-steps J - never") == 12
    curves = rl_libraries.load(tmp_path)
    assert sorted(curves) == [f"{name}-ours-1.json" for name in sorted(rl_libraries.ALGORITHMS)]
    for curve in curves.values():
        assert curve.finished
        assert [steps for steps, _, _ in curve.points] == [0, 40, 80]
        assert len(curve.final) == 8
    rl_libraries.main([*command, "--minutes", "0"])
    assert capsys.readouterr().out.count("env-steps J - never") == 0
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == len(rl_libraries.ALGORITHMS)
