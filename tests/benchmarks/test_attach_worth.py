"""A user's network grown by rules, beside its ladder at equal FLOPs."""

from __future__ import annotations

import json

import pytest
from benchmarks.attach_worth import PROBLEMS, Result, best_rung, ladder, main, table

from esper.grower import Grower


def result(variant: str, seed: int, score: float) -> Result:
    return Result(variant, seed, score, 1, 1, 1.0, (), 0, (), 0.0)


def test_the_best_rung_is_chosen_on_other_random_seeds() -> None:
    scores = {"nothing": (5.0, 1.0, 2.0), "light all": (0.0, 4.0, 4.0)}
    results = [result(rung, seed, score) for rung, own in scores.items() for seed, score in enumerate(own)]
    # Means of the others: 1.5 and 4; 3.5 and 2; 3 and 2.
    assert best_rung(results, list(scores), 1) == {0: 0.0, 1: 1.0, 2: 2.0}
    assert best_rung(results, list(scores), -1) == {0: 5.0, 1: 4.0, 2: 4.0}
    assert best_rung(results[:1], list(scores), 1) == {}


def test_a_ladder_has_light_and_heavy_rungs_in_each_slot_and_in_all() -> None:
    rungs = ladder(PROBLEMS["text"]())
    assert list(rungs) == [
        "nothing",
        *("light 1", "light 2", "light all"),
        *("heavy 1", "heavy 2", "heavy all"),
    ]
    assert rungs["heavy all"] == (("blocks.0", "transformer_block"), ("blocks.1", "transformer_block"))


def test_every_variant_spends_the_same_flops_and_a_finished_run_is_not_repeated(
    tmp_path, capsys, monkeypatch
) -> None:
    out = tmp_path / "runs.json"
    sizes = ["--seeds", "2", "--steps", "60", "--epochs", "4", "--out", str(out)]
    command = ["text", "--variants", "nothing", "heavy all", "periodic", *sizes]
    main(command)
    printed = capsys.readouterr().out
    results = [Result(**run) for run in json.loads(out.read_text())["results"]]
    by_variant = {r.variant: r for r in results if r.seed == 0}
    assert len(results) == 6
    assert all(1.0 <= r.flops < 1.05 for r in results)
    nothing, largest, grown = (by_variant[name] for name in ("nothing", "heavy all", "periodic"))
    assert nothing.parameters < grown.parameters < largest.parameters
    assert nothing.steps == 60 > grown.steps > largest.steps
    assert (len(nothing.grown), len(grown.grown)) == (0, 2)
    assert "| `periodic` |" in printed
    with monkeypatch.context() as patch:
        patch.delattr(Grower, "step")
        main(command)
    assert "| `periodic` |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has runs with"):
        main([*command, "--steps", "61"])
    for unknown in ("light 9", "light 1@0", "light 1@24", "light 1@x", "periodic@2"):
        with pytest.raises(SystemExit, match=rf"unknown variant '{unknown}'; allowed: nothing, light 1"):
            main(["text", "--variants", unknown])


def test_a_rung_can_be_planted_after_some_epochs(tmp_path) -> None:
    out = tmp_path / "runs.json"
    sizes = ["--seeds", "1", "--steps", "40", "--epochs", "4", "--out", str(out)]
    main(["text", "--variants", "heavy all", "heavy all@2", *sizes])
    at_once, late = (Result(**run) for run in json.loads(out.read_text())["results"])
    assert late.parameters == at_once.parameters
    assert late.steps > at_once.steps
    assert 1.0 <= late.flops < 1.05


def test_the_final_network_of_a_policy_has_its_seeds_from_the_start(tmp_path, capsys) -> None:
    out = tmp_path / "runs.json"
    sizes = ["--seeds", "1", "--steps", "48", "--epochs", "8", "--out", str(out)]
    main(["text", "--variants", "nothing", "--policy", "periodic", *sizes])
    nothing, grown, final = (Result(**run) for run in json.loads(out.read_text())["results"])
    assert (grown.variant, final.variant) == ("periodic", "final of periodic")
    assert sorted(entry.split()[1:] for entry in grown.grown) == grown.kept == final.kept != []
    assert nothing.kept == []
    assert final.parameters == grown.parameters
    assert final.steps < grown.steps
    assert "final of periodic" in capsys.readouterr().out


def test_the_table_has_the_difference_to_the_own_final_network() -> None:
    scores = {"general": (3.0, 5.0), "final of general": (2.0, 3.0)}
    results = [result(name, seed, score) for name, own in scores.items() for seed, score in enumerate(own)]
    row = next(line for line in table(results, PROBLEMS["text"]()) if line.startswith("| `general`"))
    assert "+1.500 [" in row


def test_several_policies_have_a_row_of_their_mean_in_each_random_seed() -> None:
    scores = {"nothing": (1.0, 2.0), "a": (3.0, 5.0), "b": (4.0, 8.0), "final of a": (1.0, 1.0)}
    results = [result(name, seed, score) for name, own in scores.items() for seed, score in enumerate(own)]
    rows = table([*results, result("a", 2, 9.0)], PROBLEMS["text"](), ["a", "b"])
    mean = next(line for line in rows if line.startswith("| mean of the policies"))
    # 3.5 − 1 and 6.5 − 2; random seed 2 lacks b.
    assert mean.startswith("| mean of the policies | 5.000 | +3.500 [")
    assert mean.endswith(" 2 |")
    assert not any("final networks" in line for line in rows)


def test_runs_of_several_processes_make_one_table(tmp_path, capsys) -> None:
    sizes = ["text", "--variants", "nothing", "--seeds", "1", "--steps", "8", "--epochs", "4"]
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    main([*sizes, "--out", str(first)])
    main([*sizes, "--first-seed", "1", "--out", str(second)])
    capsys.readouterr()
    main([*sizes, "--seeds", "0", "--runs", str(first), str(second)])
    assert capsys.readouterr().out.strip().endswith(" 2 |")
    with pytest.raises(SystemExit, match="has runs with"):
        main([*sizes, "--steps", "9", "--runs", str(first)])
