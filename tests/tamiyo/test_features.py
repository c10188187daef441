"""Observations from real environments: the docs are current, nothing is NaN, unmeasured is marked, and a few
by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from env_helpers import RandomValid, make_env, small_task
from esper.leyline import COOLDOWN_STAGES, EsperError, SeedStage
from esper.tamiyo.features import (
    BASE,
    BASE_DIM,
    SLOT,
    SLOT_DIM,
    Normaliser,
    Source,
    batch_obs_to_features,
    first_columns,
    schema,
    sensor_feature,
    stack_inputs,
    width,
)

DOCS = Path(__file__).parents[2] / "docs" / "observations.md"


def observe(env, epoch: int, *, sensors=None):
    env.train_epoch(epoch)
    env.validate(epoch)
    seen = env.sense(epoch)
    inputs = stack_inputs(
        seen.signals,
        seen.table,
        seen.sensors if sensors is None else sensors,
        depths=env.envs[0].model.model.slot_depths,
        last_op=[e.last_op for e in env.envs],
        last_success=[e.last_success for e in env.envs],
    )
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
        "A policy sees one row of numbers per network and one per slot. Each raw number is normalised:",
        "clip(curve(raw) / unit, low, high). A feature with a *validity bit* takes two columns: its value,",
        "and 1 where it was measured. Without a measurement both are 0. A policy file stores a hash of",
        "names, sources, normalisers and validity bits, and is refused where the hash differs.",
        "",
        "Sensors of your own add columns to each slot: see [extending](extending.md).",
        "",
    ]
    for title, table in (("The whole network", BASE), ("Each slot", SLOT)):
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


def test_names_are_unique_in_both_tables_together() -> None:
    assert len({f.name for f in (*BASE, *SLOT)}) == len(BASE) + len(SLOT)


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


def test_the_schema_covers_the_built_in_normalisers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = schema()
    wider = replace(SLOT[-1], normaliser=replace(SLOT[-1].normaliser, unit=8.0))
    monkeypatch.setattr("esper.tamiyo.features.SLOT", (*SLOT[:-1], wider))
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
        assert obs.blueprints.shape == (8, slots)
        assert obs.base.isfinite().all()
        assert obs.slots.isfinite().all()
        assert max(obs.base.abs().max(), obs.slots.abs().max()) <= 4
        assert ((obs.blueprints == -1) == torch.from_numpy(~seen.table["occupied"])).all()


def test_by_hand(played) -> None:
    seen, _, obs = played[5]
    signals = seen.signals
    assert obs.base[:, column(BASE, "progress")].flatten().tolist() == pytest.approx([6 / 12] * 8)
    assert obs.base[:, column(BASE, "val_accuracy")].flatten().tolist() == pytest.approx(
        [s.val_accuracy / 100 for s in signals]
    )
    slope = obs.base[:, column(BASE, "accuracy_slope_3")]
    wanted = [np.clip((s.accuracy_history[-1] - s.accuracy_history[-4]) / 30, -3, 3) for s in signals]
    assert slope[:, 0].tolist() == pytest.approx(wanted, abs=1e-6)
    assert slope[:, 1].tolist() == [1.0] * 8
    for env in range(8):
        for slot in range(seen.table.shape[1]):
            record = seen.table[env, slot]
            for stage in (SeedStage.DORMANT, SeedStage.TRAINING, SeedStage.BLENDING):
                bit = obs.slots[env, slot, column(SLOT, f"stage_{stage.name.lower()}")]
                assert bit.item() == (record["stage"] == stage)
            value, measured = obs.slots[env, slot, column(SLOT, "contribution")].tolist()
            assert measured == (not math.isnan(record["contribution"]))
            assert value == pytest.approx(
                np.clip(record["contribution"] / 10, -3, 3) if measured else 0.0, abs=1e-6
            )


def test_what_is_gone_pays_no_rent(played) -> None:
    """Random play prunes often; a seed that was removed has a size no more."""
    gone = 0
    for seen, _, obs in played:
        table = seen.table
        there = np.where(np.isin(table["stage"], tuple(COOLDOWN_STAGES)), 0, table["params"])
        gone += int((there != table["params"]).sum())
        share = there / max(table["host_params"].max(), 1)
        assert obs.base[:, column(BASE, "rent")].flatten().tolist() == pytest.approx(
            np.log1p(share.sum(1)).tolist(), abs=1e-6
        )
        size = obs.slots[..., column(SLOT, "size")].flatten().tolist()
        assert size == pytest.approx(np.log1p(share).ravel().tolist(), abs=1e-6)
    assert gone


def test_slopes_are_unmeasured_before_there_is_history(played) -> None:
    _, _, first = played[0]
    assert first.base[:, column(BASE, "accuracy_slope_1")].eq(0).all()
    assert first.base[:, column(BASE, "accuracy_slope_8")].eq(0).all()
    _, _, second = played[1]
    assert second.base[:, column(BASE, "accuracy_slope_1")][:, 1].eq(1).all()


def test_dormant_slots_are_sensed_and_their_seeds_are_not(played) -> None:
    seen, _, obs = played[0]
    assert not seen.table["occupied"].any()
    for name in ("boundary_norm", "growth_score", "feature_rank", "tap_ratio"):
        assert obs.slots[..., column(SLOT, name)][..., 1].eq(1).all(), name
    for name in ("contribution", "gradient_norm", "gradient_health"):
        assert obs.slots[..., column(SLOT, name)].eq(0).all(), name


def test_what_is_not_finite_is_unmeasured_and_stays_in_its_env(played) -> None:
    seen, inputs, clean = played[3]
    sensors = {name: values.copy() for name, values in seen.sensors.items()}
    for values in sensors.values():
        values[2] = math.nan
    sensors["boundary_norm"][3, 1] = math.inf
    obs = batch_obs_to_features(
        stack_inputs(
            seen.signals,
            seen.table,
            sensors,
            depths=inputs.depths,
            last_op=[0] * 8,
            last_success=[True] * 8,
        )
    )
    at = column(SLOT, "boundary_norm")
    assert obs.slots[2][:, at].eq(0).all()
    assert obs.slots[3, 1, at].eq(0).all()
    assert obs.slots.isfinite().all()
    others = [0, 1, 4, 5, 6, 7]
    assert torch.equal(obs.slots[others], clean.slots[others])


def test_hosts_without_taps_have_an_unmeasured_ratio(played) -> None:
    seen, before, _ = played[3]
    rest = {"depths": before.depths, "last_op": [0] * 8, "last_success": [True] * 8}
    without = {name: values for name, values in seen.sensors.items() if name != "tap_ratio"}
    inputs = stack_inputs(seen.signals, seen.table, without, **rest)
    assert batch_obs_to_features(inputs).slots[..., column(SLOT, "tap_ratio")].eq(0).all()
    with pytest.raises(EsperError, match=r"sensors: tap_ratio has shape \(4, 3\), must have \(8, 3\)"):
        stack_inputs(
            seen.signals, seen.table, {**seen.sensors, "tap_ratio": seen.sensors["tap_ratio"][:4]}, **rest
        )
    with pytest.raises(EsperError, match="sensors: growth_score is missing"):
        stack_inputs(seen.signals, seen.table, {"boundary_norm": seen.sensors["boundary_norm"]}, **rest)


def test_depth_is_the_place_in_the_order_of_execution(played) -> None:
    """Rows first in a report, blocks first in the network: a host of two rows goes r0c0, r1c0, r0c1, r1c1."""
    seen, _, obs = played[0]
    assert obs.slots[0, :, column(SLOT, "depth")].flatten().tolist() == [0.0, 1.0, 0.5]  # r0c0, r0c1, r1c0
    task = small_task("digits_shift", slots=("r0c0", "r0c1", "r1c0", "r1c1"))
    env = make_env(task, 1, population=8)
    env.begin_round(0)
    _, inputs, obs = observe(env, 1)
    depths = dict(zip(task.slots, obs.slots[0, :, column(SLOT, "depth")].flatten().tolist(), strict=True))
    assert sorted(depths, key=depths.__getitem__) == ["r0c0", "r1c0", "r0c1", "r1c1"]
    with pytest.raises(EsperError, match="depths: 3 numbers, must be 4"):
        stack_inputs(
            seen.signals[:1],
            inputs.table,
            inputs.sensors,
            depths=[0.0, 0.5, 1.0],
            last_op=[0],
            last_success=[True],
        )


if __name__ == "__main__":
    DOCS.write_text(described())
