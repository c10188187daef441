"""Observations from real environments: the docs are current, nothing is NaN, unmeasured is marked, and a few
by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from env_helpers import RandomValid, make_env, small_task, stacked
from esper.leyline import (
    COOLDOWN_STAGES,
    PRESENT_STAGES,
    EsperError,
    ObjectiveConfig,
    SeedStage,
    TimeLeft,
    objective,
)
from esper.tamiyo.columns import Normaliser, Source, first_columns, width
from esper.tamiyo.features import (
    BASE,
    BASE_DIM,
    QUOTE,
    QUOTE_DIM,
    SLOT,
    SLOT_DIM,
    batch_obs_to_features,
    schema,
    sensor_feature,
)
from esper.tamiyo.inputs import stack_inputs

DOCS = Path(__file__).parents[2] / "docs" / "observations.md"


def observe(env, epoch: int):
    env.train_epoch(epoch)
    env.validate(epoch)
    seen = env.sense(epoch)
    inputs = stacked(env, seen)
    return seen, inputs, batch_obs_to_features(inputs)


def column(features, name: str) -> slice:
    at = 0
    for feature in features:
        if feature.name == name:
            return slice(at, at + feature.width)
        at += feature.width
    raise AssertionError(name)


@pytest.fixture(scope="module")
def played():
    env = make_env(small_task("digits_shift", epochs=12), 8)
    env.begin_round(0)
    decide = RandomValid(4)
    steps = []
    for epoch in range(1, 9):
        seen, inputs, obs = observe(env, epoch)
        steps.append((seen, inputs, obs))
        env.act(seen, decide(seen))
    return steps


def described() -> str:
    """docs/observations.md as the tables in tamiyo/features.py make it."""
    lines = [
        "# Observations",
        "",
        "This page is generated from the tables in `tamiyo/features.py`. After changing them, run",
        "`PYTHONPATH=tests python tests/tamiyo/test_features.py`; a test checks that the page is current.",
        "",
        "A policy sees one row of numbers per network, one per slot, and one *quote* per slot and blueprint:",
        "what that blueprint would cost and do there. Blueprints are known by their quotes alone, so a",
        "policy can use one that was registered after it was trained.",
        "",
        "Nothing depends on the units of one task. Accuracies are relative to chance, 1/classes; where the",
        "number of classes is unknown, chance counts as 0 in differences and prices, and levels are",
        "unmeasured. Losses are relative to guessing, sizes and FLOPs to the host, times to the budget, and",
        "gradients to other gradients. The number of optimizer steps that are left is the one exception.",
        "",
        "Each raw number is normalised: clip(curve(raw) / unit, low, high). A feature with a *validity bit*",
        "takes two columns: its value, and 1 where it was measured. Without a measurement both are 0. A",
        "policy file stores a hash of names, sources, normalisers and validity bits, and is refused where",
        "the hash differs. Names of blueprints are no part of it.",
        "",
        "Sensors of your own add columns to each slot: see [extending](extending.md).",
        "",
    ]
    tables = (("The whole network", BASE), ("Each slot", SLOT), ("Each quote", QUOTE))
    for title, table in tables:
        lines += [
            f"## {title}: {width(table)} columns",
            "",
            "| column | name | meaning | normalised | validity bit |",
            "|---|---|---|---|---|",
        ]
        first = first_columns(table)
        lines += [
            f"| {first[f.name]} | `{f.name}` | {f.meaning} | {formula(f.normaliser)} | "
            f"{'yes' if f.optional else ''} |"
            for f in table
        ]
        lines.append("")
    return "\n".join(lines)


def formula(normaliser: Normaliser) -> str:
    text = {"linear": "raw", "log": "ln raw", "log1p": "ln(1 + raw)"}[normaliser.curve]
    if normaliser.unit != 1:
        text += f" / {normaliser.unit:g}"
    if normaliser.low > -math.inf:
        text += f", at least {normaliser.low:g}"
    if normaliser.high < math.inf:
        text += f", at most {normaliser.high:g}"
    return text


def test_the_docs_are_current() -> None:
    assert DOCS.read_text() == described()


def test_names_are_unique_in_all_tables_together() -> None:
    assert len({f.name for f in (*BASE, *SLOT, *QUOTE)}) == len(BASE) + len(SLOT) + len(QUOTE)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"source": Source("another source", lambda x: x.sensors["feature_rank"])},
        {"normaliser": Normaliser("linear", unit=2.0, low=-3.0, high=3.0)},
        {"normaliser": Normaliser("log", unit=1.0, low=-3.0, high=3.0)},
        {"normaliser": Normaliser("linear", unit=1.0, low=-2.0, high=3.0)},
        {"optional": False},
    ],
)
def test_the_schema_covers_name_source_normaliser_and_validity(change) -> None:
    feature = sensor_feature("mine", "a sensor", Normaliser("linear", unit=1.0, low=-3.0, high=3.0))
    assert schema([feature]) == schema([replace(feature, meaning="other words")])
    assert schema([feature]).split("+")[0] != schema([replace(feature, **change)]).split("+")[0]
    assert schema([feature]).endswith("+mine")
    assert "+" not in schema()


@pytest.mark.parametrize("name", ["BASE", "SLOT", "QUOTE"])
def test_the_schema_covers_the_built_in_normalisers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before, table = schema(), {"BASE": BASE, "SLOT": SLOT, "QUOTE": QUOTE}[name]
    wider = replace(table[-1], normaliser=replace(table[-1].normaliser, unit=8.0))
    monkeypatch.setattr(f"esper.tamiyo.features.{name}", (*table[:-1], wider))
    assert schema() != before


@pytest.mark.parametrize("curve", ["linear", "log", "log1p"])
def test_normalisers_scale_clip_and_give_back_their_curve(curve) -> None:
    normaliser = Normaliser(curve, unit=2.0, low=-1.0, high=1.5)
    raw = np.array([0.5, 1.0, 1e9])
    wanted = {"linear": raw, "log": np.log(raw), "log1p": np.log1p(raw)}[curve]
    values = normaliser(raw)
    assert values == pytest.approx(np.clip(wanted / 2, -1.0, 1.5))
    assert normaliser.curved(values)[:2] == pytest.approx(wanted[:2])
    assert normaliser.curved(values)[2] == 3.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"curve": "cube"}, "'cube'; allowed: linear, log, log1p"),
        ({"unit": 0.0}, "unit 0"),
        ({"unit": math.inf}, "unit inf"),
        ({"low": 1.0, "high": 1.0}, "low below high"),
    ],
)
def test_a_normaliser_that_cannot_work_is_refused(fields, words) -> None:
    with pytest.raises(EsperError, match=words):
        Normaliser(**fields)


def test_shapes_and_finite_values_in_every_epoch(played) -> None:
    for seen, _, obs in played:
        slots = seen.table.shape[1]
        assert obs.base.shape == (8, BASE_DIM)
        assert obs.slots.shape == (8, slots, SLOT_DIM)
        assert obs.quotes.shape == (8, slots, seen.masks.blueprint.shape[1], QUOTE_DIM)
        assert obs.blueprints.shape == (8, slots)
        for part in (obs.base, obs.slots, obs.quotes):
            assert part.isfinite().all()
            assert part.abs().max() <= 3
        assert ((obs.blueprints == -1) == torch.from_numpy(~seen.table["occupied"])).all()


def value(obs, name: str, env: int, slot: int | None = None) -> float:
    if slot is None:
        return obs.base[env, column(BASE, name)][0].item()
    return obs.slots[env, slot, column(SLOT, name)][0].item()


def test_by_hand(played) -> None:
    """Each kind of source, computed in another way."""
    seen, inputs, obs = played[5]
    host, price = inputs.setting.facts.params, 0.4
    for env, s in enumerate(seen.signals):
        accuracy, then = (a / 100 for a in (s.val_accuracy, s.accuracy_history[-3]))
        noise = math.sqrt(accuracy * (1 - accuracy) / 48)
        wanted = {
            "progress": 6 / 12,
            "steps_left": math.log(1 + 6 * 2) / 8,
            "time_needed": 1 / 6,
            "val_accuracy": (accuracy - 0.1) / 0.9,
            "train_accuracy": (s.train_accuracy / 100 - 0.1) / 0.9,
            "below_best": np.clip((s.best_accuracy / 100 - accuracy) / 0.9 / 0.1, -3, 3),
            "generalisation_gap": np.clip((s.train_accuracy / 100 - accuracy) / 0.9 / 0.1, -3, 3),
            "val_noise": min(noise / 0.9 / 0.03, 3.0),
            "val_loss": math.log1p(s.val_loss / math.log(10)),
            "accuracy_change_third": np.clip((accuracy - then) / (math.sqrt(2) * noise) / 2, -3, 3),
            "accuracy_slope_third": np.clip((accuracy - then) / 2 * 6 / (1 - accuracy), -3, 3),
            "loss_slope_last": np.clip(math.log(s.val_loss / s.loss_history[-2]) / math.log(6 / 5), -3, 3),
            "loss_slope_third": np.clip(math.log(s.val_loss / s.loss_history[-3]) / math.log(6 / 4), -3, 3),
            "plateau": s.plateau_epochs / 12,
            "plateau_so_far": s.plateau_epochs / 6,
            "size_price": math.log1p(400 / 0.9) / 7,
            "waste_price": math.log1p(20 / 0.9) / 7,
        }
        for name, number in wanted.items():
            assert value(obs, name, env) == pytest.approx(number, abs=1e-6), name
        slope, _ = np.polyfit(np.log(np.arange(1, 7)), np.array(s.accuracy_history) / 100, 1)
        end = accuracy + slope * math.log(12 / 6)
        assert value(obs, "expected_end", env) == pytest.approx(np.clip((end - 0.1) / 0.9, -1, 1.5), abs=1e-5)
        for slot in range(seen.table.shape[1]):
            record = seen.table[env, slot]
            for stage in (SeedStage.DORMANT, SeedStage.TRAINING, SeedStage.BLENDING):
                assert value(obs, f"stage_{stage.name.lower()}", env, slot) == (record["stage"] == stage)
            others = sum(
                r["params"]
                for i, r in enumerate(seen.table[env])
                if i != slot and r["stage"] in PRESENT_STAGES
            )
            rise = math.log(1 + (others + record["params"]) / host) - math.log(1 + others / host)
            _, measured = obs.slots[env, slot, column(SLOT, "contribution")].tolist()
            assert measured == (not math.isnan(record["contribution"]))
            if measured and record["stage"] in PRESENT_STAGES:
                share = record["contribution"] / 100
                assert value(obs, "contribution", env, slot) == pytest.approx(
                    np.clip(share / 0.9 / 0.1, -3, 3), abs=1e-6
                )
                assert value(obs, "contribution_deviations", env, slot) == pytest.approx(
                    np.clip(share / (math.sqrt(2) * noise) / 2, -3, 3), abs=1e-6
                )
                for name, points in (
                    ("contribution_net", share),
                    ("first_net", record["first_contribution"] / 100),
                ):
                    net = (points - price * rise) / 0.9
                    assert value(obs, name, env, slot) == pytest.approx(np.clip(net / 0.1, -3, 3), abs=1e-5)


def test_quotes_by_hand(played) -> None:
    """What is offered is quoted at what J would charge, everything else is zeros."""
    seen, inputs, obs = played[5]
    facts, offered = inputs.setting.facts, seen.masks.blueprint[0]
    assert obs.quotes[:, :, ~offered].eq(0).all()
    first = first_columns(QUOTE)
    for env, slot in np.ndindex(*seen.table.shape):
        there = [r["params"] for r in seen.table[env] if r["stage"] in PRESENT_STAGES]
        for blueprint in offered.nonzero().flatten().tolist():
            quote = obs.quotes[env, slot, blueprint]
            params = facts.seed_params[slot, blueprint]

            def price(added: float) -> float:
                config = ObjectiveConfig(size_price=0.4)
                return -objective(
                    config,
                    committed_accuracy=0.0,
                    added_params=added,
                    host_params=facts.params,
                    wasted_seeds=0,
                    rollbacks=0,
                )

            rise = price(sum(there) + params) - price(sum(there))
            assert quote[first["offered"]] == 1
            assert quote[first["price"]] == pytest.approx(min(rise / 0.9 / 0.1, 3), abs=1e-5)
            assert quote[first["params"]] == pytest.approx(math.log(params / facts.params) / 3, abs=1e-5)
            assert quote[first["mixes_space"]] == facts.traits[slot, blueprint, 1]


def test_what_is_gone_has_no_size(played) -> None:
    """Random play prunes often; a seed that was removed has a size no more."""
    gone = 0
    for seen, inputs, obs in played:
        table = seen.table
        there = np.where(np.isin(table["stage"], tuple(COOLDOWN_STAGES)), 0, table["params"])
        gone += int((there != table["params"]).sum())
        share = there / inputs.setting.facts.params
        assert obs.base[:, column(BASE, "added")].flatten().tolist() == pytest.approx(
            np.log1p(share.sum(1)).tolist(), abs=1e-6
        )
        size, measured = obs.slots[..., column(SLOT, "seed_size")].unbind(-1)
        assert torch.equal(measured > 0, torch.from_numpy(share > 0))
        assert size[measured > 0].tolist() == pytest.approx((np.log(share[share > 0]) / 3).tolist(), abs=1e-6)
    assert gone


def test_what_is_not_known_is_unmeasured_and_the_rest_stays(played) -> None:
    """Without a horizon, classes, validation size and rate: no number is made up."""
    seen, inputs, known = played[5]
    facts = replace(inputs.setting.facts, classes=None, val_samples=None, flops=math.nan)
    signals = [replace(s, time=TimeLeft.of_epochs(6, math.nan, 2)) for s in seen.signals]
    obs = batch_obs_to_features(
        stack_inputs(
            signals,
            seen.table,
            seen.sensors,
            setting=replace(inputs.setting, facts=facts),
            prices=[ObjectiveConfig()] * 8,
            learning_rate=[math.nan] * 8,
            last_op=[0] * 8,
            last_success=[True] * 8,
        )
    )
    unknown = ("progress", "steps_left", "time_needed", "val_accuracy", "train_accuracy", "val_noise")
    unknown += ("val_loss", "accuracy_change_last", "accuracy_slope_last", "expected_end", "plateau")
    unknown += ("learning_rate",)
    for name in unknown:
        assert obs.base[:, column(BASE, name)].eq(0).all(), name
    for name in ("stage_age", "tempo", "contribution_deviations", "seed_flops"):
        assert obs.slots[..., column(SLOT, name)].eq(0).all(), name
    for name in ("contribution", "contribution_net", "seed_size", "tap_ratio"):
        measured = obs.slots[..., column(SLOT, name)][..., 1]
        assert torch.equal(measured, known.slots[..., column(SLOT, name)][..., 1]), name
    assert obs.quotes[..., column(QUOTE, "flops")].eq(0).all()
    assert obs.quotes[..., column(QUOTE, "price")].gt(0).any()
    assert all(part.isfinite().all() for part in (obs.base, obs.slots, obs.quotes))


def test_changes_are_unmeasured_before_there_is_history(played) -> None:
    _, _, first = played[0]
    for name in ("accuracy_change_last", "accuracy_slope_third", "loss_slope_eighth", "expected_end"):
        assert first.base[:, column(BASE, name)].eq(0).all(), name
        assert played[1][2].base[:, column(BASE, name)][:, 1].eq(1).all(), name


def test_dormant_slots_are_sensed_and_their_seeds_are_not(played) -> None:
    seen, _, obs = played[0]
    assert not seen.table["occupied"].any()
    for name in ("boundary_norm_relative", "growth_score", "feature_rank", "tap_ratio"):
        assert obs.slots[..., column(SLOT, name)][..., 1].eq(1).all(), name
    for name in ("contribution", "gradient_ratio", "gradient_health", "seed_size", "seed_flops"):
        assert obs.slots[..., column(SLOT, name)].eq(0).all(), name


def again(seen, inputs, **changes):
    """The same decision with some parts replaced."""
    parts = {
        "setting": inputs.setting,
        "prices": [ObjectiveConfig(size_price=0.4, waste_price=0.02)] * 8,
        "learning_rate": inputs.learning_rate,
        "last_op": inputs.last_op,
        "last_success": inputs.last_success,
        "sensors": seen.sensors,
    }
    return stack_inputs(seen.signals, seen.table, **(parts | changes))


def test_what_is_not_finite_is_unmeasured_and_stays_in_its_env(played) -> None:
    seen, inputs, clean = played[3]
    sensors = {name: values.copy() for name, values in seen.sensors.items()}
    for values in sensors.values():
        values[2] = math.nan
    sensors["growth_score"][3, 1] = math.inf
    obs = batch_obs_to_features(again(seen, inputs, sensors=sensors))
    at = column(SLOT, "growth_score")
    assert obs.slots[2][:, at].eq(0).all()
    assert obs.slots[3, 1, at].eq(0).all()
    assert obs.slots.isfinite().all()
    others = [0, 1, 4, 5, 6, 7]
    assert torch.equal(obs.slots[others], clean.slots[others])


def test_hosts_without_taps_have_an_unmeasured_ratio(played) -> None:
    seen, inputs, _ = played[3]
    without = {name: values for name, values in seen.sensors.items() if name != "tap_ratio"}
    obs = batch_obs_to_features(again(seen, inputs, sensors=without))
    assert obs.slots[..., column(SLOT, "tap_ratio")].eq(0).all()
    with pytest.raises(EsperError, match=r"sensors: tap_ratio has shape \(4, 3\), must have \(8, 3\)"):
        again(seen, inputs, sensors={**seen.sensors, "tap_ratio": seen.sensors["tap_ratio"][:4]})
    with pytest.raises(EsperError, match="sensors: growth_score is missing"):
        again(seen, inputs, sensors={"boundary_norm": seen.sensors["boundary_norm"]})


def test_facts_of_another_host_are_refused(played) -> None:
    seen, inputs, _ = played[3]
    facts, setting = inputs.setting.facts, inputs.setting
    fewer = replace(facts, seed_params=facts.seed_params[:2])
    with pytest.raises(EsperError, match="facts: of 2 slots, the reports have 3"):
        again(seen, inputs, setting=replace(setting, facts=fewer))
    with pytest.raises(EsperError, match="blueprints, 4 are registered"):
        again(seen, inputs, setting=replace(setting, offered=setting.offered[:4]))
    early = replace(facts, seed_params=facts.seed_params[:, :1])
    with pytest.raises(EsperError, match="but a seed has index"):
        again(seen, inputs, setting=replace(setting, facts=early, offered=setting.offered[:1]))


def test_depth_is_the_place_in_the_order_of_execution(played) -> None:
    """Rows first in a report, blocks first in the network: a host of two rows goes r0c0, r1c0, r0c1, r1c1."""
    _, _, obs = played[0]
    assert obs.slots[0, :, column(SLOT, "depth")].flatten().tolist() == [0.0, 1.0, 0.5]  # r0c0, r0c1, r1c0
    task = small_task("digits_shift", slots=("r0c0", "r0c1", "r1c0", "r1c1"))
    env = make_env(task, 1, population=8)
    env.begin_round(0)
    _, _, obs = observe(env, 1)
    depths = dict(zip(task.slots, obs.slots[0, :, column(SLOT, "depth")].flatten().tolist(), strict=True))
    assert sorted(depths, key=depths.__getitem__) == ["r0c0", "r1c0", "r0c1", "r1c1"]


if __name__ == "__main__":
    DOCS.write_text(described())
