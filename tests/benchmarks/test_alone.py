"""The analysis of proofs: verdicts on hypotheses, and the command on a real proof."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.alone import ABOVE_ZERO, WITHIN_ONE, in_points, main, verdicts

from esper._statistics import Estimate
from esper.runtime.tasks import draw_condition, get_task_spec
from esper.scripts import prove, train
from esper.simic.training.evaluation import HELD_OUT


def test_a_hypothesis_is_about_the_lower_bound() -> None:
    good, bad = Estimate(0.02, 0.001, 0.04), Estimate(0.02, -0.001, 0.04)
    assert verdicts("digits_shift", "heuristic", [good, good]) == "> 0: holds"
    assert "1 of 2" in verdicts("digits_shift", "heuristic", [good, bad])
    close, far = Estimate(-0.001, -0.01, 0.01), Estimate(-0.001, -0.0101, 0.01)
    assert verdicts("digits_shift", "probe", [close]) == "≥ −1.0: holds"
    assert "0 of 1" in verdicts("digits_shift", "probe", [far])
    assert verdicts("digits_shift", "periodic", [good]) == ""
    assert in_points(good) == "2.0 [0.1, 4.0]"


def test_the_table_of_a_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--task", "digits_shift", "--policy", "digits_shift-1", "digits_shift-2", "--networks", "2"]
    assert prove.main([*arguments, "--probe-networks", "64", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    main(["proof", str(tmp_path / "proof.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("`digits_shift`, 2 networks from 0")
    row = next(line for line in lines if line.startswith("| `heuristic`"))
    assert row.count("|") == 7
    assert "> 0:" in row
    main(["policy", "digits_shift-1", "--proof", str(tmp_path / "proof.json")])
    rows = capsys.readouterr().out.splitlines()
    # It is one of the two policies of the proof, on the same networks.
    proof = json.loads((tmp_path / "proof.json").read_bytes())
    (own, _) = proof["learned_minus"]["heuristic"]["J"]["by_policy"]
    assert f"| `heuristic` | {in_points(Estimate(**own['mean']))} |" in rows


def test_a_policy_beside_its_own_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with a plan for each network leaves values, which choose another plan for another network."""
    run = str(tmp_path / "run")
    size = ["--envs", "8", "--rounds", "2", "--values-rounds", "1", "--episode-length", "4"]
    assert train.main(["ppo", "--preset", "digits_shift", *size, "--telemetry-dir", run]) == 0
    capsys.readouterr()
    main(["values", run, "--networks", "4"])
    (row,) = capsys.readouterr().out.splitlines()[2:]
    _, name, values, policy, difference, *seeds, _ = [cell.strip() for cell in row.split("|")]
    by_values, by_policy, both = (float(cell.split()[0]) for cell in (values, policy, difference))
    assert name == run
    assert both == pytest.approx(by_policy - by_values, abs=0.11)
    assert all(0 <= float(count) <= 3 for count in seeds)


@pytest.mark.slow
def test_policies_on_fresh_networks_and_their_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--networks", "2", "--first-network", "50"]
    main(["fresh", "--policy", "digits_shift-1", *size])
    rows, summary, patterns = capsys.readouterr().out.strip().split("\n\n")
    rivals = [row.split("|")[1].strip(" `") for row in rows.splitlines()[2:]]
    assert rivals == [*ABOVE_ZERO["digits_shift"], *WITHIN_ONE["digits_shift"], "learned_sampled"]
    assert summary.startswith("`digits_shift`, 2 networks from 50: J ")
    task = get_task_spec("digits_shift")
    conditions = [draw_condition(task, HELD_OUT, 0, network).crippled for network in (50, 51)]
    counts = [int(row.split("|")[2]) for row in patterns.splitlines()[2:]]
    assert sorted(counts) == sorted(Counter(conditions).values())
    main(["teacher", "--tasks", "digits_impaired", *size])
    assert capsys.readouterr().out.splitlines()[2].startswith("| `digits_impaired` |")
