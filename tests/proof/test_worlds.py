"""The comparison over worlds: figures against plain arithmetic, worlds that are kept, and the command."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import numpy as np
import orjson
import pytest

from esper.leyline import EsperError
from esper.proof.compare import Cohorts, ProofConfig
from esper.proof.worlds import (
    PROFILE,
    WorldRecord,
    WorldsConfig,
    best_single_rung,
    figures,
    gaps,
    halving_multiple,
    improvement,
    play_worlds,
    profiles,
)
from esper.scripts.cli import main
from frozen import assert_sealed, data_of
from proof.worlds import FIRST, TINY, played, policy_file


def record(
    number: int, cohorts: dict[str, list[list[float]]], *, price: float = 0.0, **flops: int
) -> WorldRecord:
    return WorldRecord(
        number=number,
        settings={},
        dataset="digits",
        host_params=50,
        size_price=price,
        waste_price=0.0,
        episodes={
            name: [[played(n, j, flops=flops.get(name, 100)) for n, j in enumerate(row)] for row in strata]
            for name, strata in cohorts.items()
        },
        absent={},
    )


LEARNED = ([[0.5, 0.7], [0.6, 0.6]], [[0.3, 0.3], [0.3, 0.3]], [[0.9, 0.8], [0.7, 0.8]])
"""J of two policies on two networks of three worlds."""
NEVER = ([[0.5, 0.5]], [[0.3, 0.3]], [[0.9, 0.9]])
LIGHT = ([[0.6, 0.7]], [[0.2, 0.2]], [[0.7, 0.7]])


def three(**more: tuple[list[list[float]], ...]) -> list[WorldRecord]:
    cohorts = {"static": NEVER, "rung light 1": LIGHT, "ladder_hindsight": LIGHT, "learned": LEARNED, **more}
    return [record(n, {name: worlds[n] for name, worlds in cohorts.items()}) for n in range(3)]


def test_differences_are_paired_network_by_network_with_equal_weight_of_policies() -> None:
    found = gaps(three(), "learned", "static")
    expected = [
        [[a - b for a, b in zip(LEARNED[w][p], NEVER[w][0], strict=True)] for w in range(3)] for p in range(2)
    ]
    assert found == pytest.approx(np.array(expected))


def test_figures_over_all_worlds() -> None:
    result = figures(three(), WorldsConfig(num_worlds=3), ["one", "two"])
    never, learned = result["cohorts"]["static"]["J"], result["cohorts"]["learned"]["J"]
    assert never.value == pytest.approx(fmean(j for (row,) in NEVER for j in row))
    assert learned.value == pytest.approx(fmean(j for world in LEARNED for row in world for j in row))
    difference = result["learned_minus"]["static"]
    assert difference["J"].value == pytest.approx(learned.value - never.value)
    assert fmean(one.value for one in difference["by_policy"]) == pytest.approx(difference["J"].value)
    assert difference["improvement"].value == pytest.approx((1 + 0.5 + 0) / 3)
    light = fmean(j for (row,) in LIGHT for j in row)
    assert result["regret"].value == pytest.approx(light - learned.value)
    assert [row["regret"] for row in result["by_world"]] == pytest.approx([0.65 - 0.6, 0.2 - 0.3, 0.7 - 0.8])
    assert result["best_single_rung"] == "static"
    assert result["learned_minus"]["best_single_rung"] == difference


def test_the_share_of_worlds_counts_ties_half_and_knows_only_worlds() -> None:
    found = improvement(np.array([[1.0, 1.0], [0.0, 0.0], [-9.0, 1.0], [-1.0, 2.0]]))
    assert found.value == pytest.approx(2.5 / 4)
    assert 0 <= found.low < found.value < found.high <= 1
    certain = improvement(np.ones((5, 2)))
    assert (certain.value, certain.low, certain.high) == (1.0, 1.0, 1.0)


def test_the_best_single_rung_has_the_highest_mean_over_all_worlds() -> None:
    better = ([[0.9, 0.9]], [[0.9, 0.9]], [[0.1, 0.1]])
    records = three(**{"rung heavy all": better})
    assert best_single_rung(records) == "rung heavy all"


def test_profiles_are_shares_of_worlds_above_each_score() -> None:
    # Scores of learned: worst and best rung are .5 and .65, .2 and .3, .7 and .9.
    scores = [(0.6 - 0.5) / 0.15, 1.0, (0.8 - 0.7) / 0.2]
    found = profiles(three(), ["learned"])["learned"]
    for tau, share in zip(PROFILE, found, strict=True):
        if all(abs(tau - score) > 1e-6 for score in scores):
            assert share == pytest.approx(sum(score >= tau for score in scores) / 3)


@pytest.mark.parametrize(
    ("learned", "multiple", "why"),
    [(0.5, 2.0, None), (0.55, 4.0, None), (0.3, None, "ahead with 1.00"), (0.9, None, "behind with 8.00")],
)
def test_halving_draws_level_between_its_budgets(learned, multiple, why) -> None:
    cohorts = {"learned": [[learned] * 2], "halving": [[0.45] * 2], "halving_8x": [[0.6] * 2]}
    alone = {"learned": [[0.0] * 2]}
    records = [*(record(n, cohorts, halving_8x=800) for n in range(2)), record(2, alone)]
    found = halving_multiple(records)
    assert found["worlds"] == 2, "only worlds that have both"
    if multiple is None:
        assert found["multiple"] is None
        assert why in found["why"]
    else:
        share = (learned - 0.45) / 0.15
        assert found["multiple"] == pytest.approx(math.exp(share * math.log(8)))
        assert found["multiple"] == pytest.approx(multiple)


def test_growth_is_told_by_price() -> None:
    records = [
        record(
            n, {"static": [[0.5] * 2], "ladder_hindsight": [[0.5] * 2], "learned": [[0.5] * 2]}, price=price
        )
        for n, price in enumerate((0.0, 0.01, 0.02, 0.03, 0.04))
    ]
    found = figures(records, WorldsConfig(num_worlds=5), ["one"])
    for grown in (found["growth_by_price"], found["size_by_price"]):
        assert [(row["size_price"], row["worlds"]) for row in grown] == [
            ("0", 1),
            ("up to 0.0250", 2),
            ("above 0.0250", 2),
        ]
    parameters = [p.outcome.added_params for r in records for row in r.episodes["learned"] for p in row]
    (only, *_) = found["size_by_price"]
    assert only["learned"].value == pytest.approx(math.log(1 + parameters[0] / 50))


# -- settings and files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"family": "worlds_large"}, "'worlds_large' is unknown.*worlds_small"),
        ({"num_worlds": 1}, "num_worlds is 1"),
        ({"networks": 1}, "networks is 1"),
        ({"first_world": 19_990}, "19,990 to 20,085 are not of one use; allowed: 0 to 9,999 .training."),
    ],
)
def test_bad_settings(settings, told) -> None:
    with pytest.raises(EsperError, match=told):
        WorldsConfig(**settings)


def test_worlds_are_kept_and_only_missing_ones_are_played(tmp_path: Path) -> None:
    config, asked = WorldsConfig(family=TINY, first_world=FIRST, num_worlds=2), []

    def play(task) -> Cohorts:
        asked.append(task.name.split(",")[0])
        cohorts = Cohorts(task, ProofConfig(networks=2), lambda _name, _steps: lambda _: None)
        cohorts.played["static"] = [[played(0, 0.1 + 0.2), played(1, 1 / 3)]]
        cohorts.absent["halving"] = "too small"
        return cohorts

    first = play_worlds(config, play, {"networks": 2, "policies": ["a"]}, tmp_path)
    assert asked == [f"worlds_small:{FIRST}", f"worlds_small:{FIRST + 1}"]
    assert play_worlds(config, play, {"networks": 2, "policies": ["a"]}, tmp_path) == first
    assert len(asked) == 2
    (tmp_path / f"{FIRST + 1}.json").unlink()
    assert play_worlds(config, play, {"networks": 2, "policies": ["a"]}, tmp_path) == first
    assert asked[2:] == [f"worlds_small:{FIRST + 1}"]
    with pytest.raises(EsperError, match=rf"{FIRST}.json.*policies is \['a'\] there and \['b'\] now"):
        play_worlds(config, play, {"networks": 2, "policies": ["b"]}, tmp_path)
    (tmp_path / f"{FIRST}.json").write_bytes(b'{"number": 1')
    with pytest.raises(EsperError, match=rf"{FIRST}.json: not valid JSON"):
        play_worlds(config, play, {"networks": 2, "policies": ["a"]}, tmp_path)


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proof(tmp_path_factory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("worlds")
    entry = {"place": 2, "share": 0.1, "blueprint": "conv_light"}
    schedule = {"kind": "esper-family-schedule", "family": "worlds_small", "command": "", "schedule": [entry]}
    (root / "s.json").write_bytes(orjson.dumps(schedule))
    command = ["prove", "--worlds", TINY, "--first-world", str(FIRST), "--num-worlds", "2", "--falsifiers"]
    command += ["--policy", policy_file(root / "a.safetensors"), "--schedule", str(root / "s.json")]
    assert main([*command, "--out", str(root / "one")]) == 0
    return root, command


def test_the_command_plays_every_cohort_in_every_world(proof) -> None:
    content = orjson.loads((proof[0] / "one" / "proof.json").read_bytes())
    assert content["version"] == 1
    expected = {"static", "random", "heuristic", "periodic", "plateau", "last_slot_first", "fixed_schedule"}
    expected |= {
        "ladder_hindsight",
        "halving",
        "halving_8x",
        "learned",
        "learned_sampled",
        "learned_shuffled",
    }
    expected |= {"random_placement", "learned_hidden_quotes", "learned_reversed_prices", "best_single_rung"}
    assert expected <= content["cohorts"].keys()
    assert all(row["worlds"] == 2 for row in content["cohorts"].values())
    assert [row["world"] for row in content["by_world"]] == [FIRST, FIRST + 1]
    assert sorted(path.name for path in (proof[0] / "one" / "worlds").iterdir()) == [
        f"{FIRST}.json",
        f"{FIRST + 1}.json",
    ]
    text = (proof[0] / "one" / "report.html").read_text(encoding="utf-8")
    assert_sealed(text)
    assert data_of(text)["proof"] == content["page"]


def test_random_placement_plants_the_learned_amount(proof) -> None:
    moved = 0
    for path in (proof[0] / "one" / "worlds").iterdir():
        episodes = orjson.loads(path.read_bytes())["episodes"]
        (learned,), (control,) = episodes["learned"], episodes["random_placement"]
        for ours, theirs in zip(learned, control, strict=True):
            seeds = [{f["slot"]: f["blueprint"] for f in one["fossils"]} for one in (ours, theirs)]
            assert len(theirs["fossils"]) == len(seeds[1]) <= len(seeds[0])
            assert set(seeds[1].values()) <= set(seeds[0].values())
            planted = [d for d in theirs["decisions"] if d["op"] == "GERMINATE"]
            assert sorted(d["blueprint"] for d in planted) == sorted(seeds[0].values())
            kept = [d for d in ours["decisions"] if d["op"] == "GERMINATE" and d["slot"] in seeds[0]]
            moved += [d["slot"] for d in planted] != [d["slot"] for d in kept]
    assert moved, "no seed was placed elsewhere"


def test_again_goes_on_from_what_is_kept_and_gives_the_same_bytes(proof) -> None:
    root, command = proof
    kept = root / "one" / "worlds" / f"{FIRST}.json"
    before = kept.stat().st_mtime_ns
    content = (root / "one" / "proof.json").read_bytes()
    assert main([*command, "--out", str(root / "one")]) == 0
    assert kept.stat().st_mtime_ns == before
    assert (root / "one" / "proof.json").read_bytes() == content


@pytest.mark.slow
def test_processes_share_the_worlds_and_change_nothing(proof) -> None:
    root, command = proof
    assert main([*command, "--out", str(root / "two"), "--processes", "2"]) == 0
    assert (root / "two" / "proof.json").read_bytes() == (root / "one" / "proof.json").read_bytes()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "give either --task or --worlds"),
        ("--task digits_shift --worlds worlds_small", "give either --task or --worlds"),
        ("--worlds worlds_small --search 5", "--search needs --task"),
        ("--task digits_shift --falsifiers", "need --worlds"),
        ("--worlds worlds_small --schedule S", "for the family 'other', not for 'worlds_small'"),
    ],
)
def test_what_does_not_fit_together_is_refused(words, told, tmp_path, capsys) -> None:
    schedule = {"kind": "esper-family-schedule", "family": "other", "command": "", "schedule": []}
    (tmp_path / "s.json").write_bytes(orjson.dumps(schedule))
    arguments = [str(tmp_path / "s.json") if word == "S" else word for word in words.split()]
    assert main(["prove", *arguments, "--out", str(tmp_path / "out")]) != 0
    assert told in " ".join(capsys.readouterr().err.split())
