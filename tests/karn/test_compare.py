"""Comparison of runs: what is paired with what, and the figures against plain arithmetic."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from esper.karn import compare_runs
from esper.karn.summary import open_run
from esper.leyline import EsperError
from esper.scripts.cli import main

from .conftest import Write


def outcomes(objectives: dict[tuple[int, int], float], *, task: str = "t", seed: int = 1) -> list[tuple]:
    """A run whose episodes {(episode, env): J} are told in reverse, because order must not matter."""
    zeros = dict.fromkeys(
        (
            "final_accuracy",
            "committed_accuracy",
            "total_reward",
            "added_params",
            "germinated",
            "fossilized",
            "pruned",
            "rollbacks",
        ),
        0,
    )
    return [
        ("run_started", {"task": task, "seed": seed}),
        *[
            (
                "episode_outcome",
                {**zeros, "episode_idx": episode, "objective": j},
                {"round_idx": episode, "env_id": env},
            )
            for (episode, env), j in reversed(objectives.items())
        ],
    ]


FIRST = {(0, 0): 0.1, (0, 1): 0.9, (1, 0): 0.3, (1, 1): 0.5}
OTHER = {key: j + 0.25 for key, j in FIRST.items()}


def test_pairs_are_episodes_of_an_env(write_run: Write) -> None:
    """A constant gain on every pair has no spread, however much the episodes differ: unpaired, it would have
    drowned."""
    found = compare_runs(
        [open_run(write_run(outcomes(FIRST), "a")), open_run(write_run(outcomes(OTHER | {(2, 0): 9.0}), "b"))]
    )
    row = next(row for row in found.rows if row.metric.name == "objective")
    assert found.units == 4
    assert found.paired
    assert [run.value for run in row.runs] == pytest.approx([fmean(FIRST.values()), fmean(OTHER.values())])
    assert row.runs[0].low < row.runs[0].value - 0.1
    difference = row.differences[0]
    assert [difference.value, difference.low, difference.high] == pytest.approx([0.25] * 3)


def test_rounds_as_observations_and_the_last_of_them(write_run: Write) -> None:
    runs = [open_run(write_run(outcomes(FIRST), "a")), open_run(write_run(outcomes(OTHER), "b"))]
    by_round = compare_runs(runs, by="round")
    assert by_round.units == 2
    assert next(r for r in by_round.rows if r.metric.name == "objective").differences[
        0
    ].value == pytest.approx(0.25)
    last = compare_runs(runs, last=1)
    assert last.units == 2
    assert next(r for r in last.rows if r.metric.name == "objective").runs[0].value == pytest.approx(
        fmean([0.3, 0.5])
    )


def test_other_seeds_are_not_paired(write_run: Write) -> None:
    found = compare_runs(
        [open_run(write_run(outcomes(FIRST), "a")), open_run(write_run(outcomes(OTHER, seed=2), "b"))]
    )
    assert not found.paired
    assert all(row.differences == () for row in found.rows)


def test_envs_of_other_worlds_are_not_paired(write_run: Write) -> None:
    runs = [
        open_run(write_run(outcomes(FIRST), name, twins=twins))
        for name, twins in (("a", 1), ("b", 2), ("c", 2))
    ]
    assert not compare_runs(runs[:2]).paired
    assert compare_runs(runs[1:]).paired


@pytest.mark.parametrize(
    ("other", "by", "named"),
    [
        (outcomes(OTHER, task="u"), "episode", "tasks are t, u"),
        (outcomes({(7, 0): 1.0}), "episode", "0 episodes"),
        ([], "episode", "has not started"),
        (outcomes(OTHER), "env", "'env'"),
    ],
)
def test_what_cannot_be_compared(other: list[tuple], by: str, named: str, write_run: Write) -> None:
    runs = [open_run(write_run(outcomes(FIRST), "a")), open_run(write_run(other, "b"))]
    with pytest.raises(EsperError, match=named):
        compare_runs(runs, by=by)


def test_a_run_does_not_differ_from_itself(run_path: Path) -> None:
    found = compare_runs([open_run(run_path), open_run(run_path)])
    assert found.notes == ()
    assert len(found.rows) == 9
    assert {(d.value, d.low, d.high) for row in found.rows for d in row.differences} == {(0.0, 0.0, 0.0)}


def test_the_command_says_what_differs_and_which_is_better(
    run_path: Path, random_path: Path, write_run: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(run_path), str(random_path)]) == 0
    shown = capsys.readouterr().out
    assert "config.policy: ppo | random" in shown
    assert "8 episodes" in shown
    assert main(["compare", str(write_run(outcomes(FIRST), "a")), str(write_run(outcomes(OTHER), "b"))]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["objective"])
    assert line.rstrip().endswith("0.25 [0.25, 0.25] better")
