"""Observations from real environments: the docs are current, nothing is NaN, unmeasured is marked, and a few
by hand."""

from __future__ import annotations

import math
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
    batch_obs_to_features,
    first_columns,
    schema,
    stack_inputs,
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
    """docs/observations.md as the tables make it. After a change of them: `DOCS.write_text(described())`."""
    lines = [
        "# Observations",
        "",
        "Made from the table in `tamiyo/features.py`; a test keeps it current. A feature marked *bit* takes two columns:",
        "its value, and whether it was measured.",
        "",
    ]
    for title, table in (("Of the whole network", BASE), ("Of each slot", SLOT)):
        lines += [
            f"## {title}: {sum(f.width for f in table)} columns",
            "",
            "| column | name | meaning | |",
            "|---|---|---|---|",
        ]
        first = first_columns(table)
        lines += [
            f"| {first[f.name]} | `{f.name}` | {f.meaning} | {'bit' if f.optional else ''} |" for f in table
        ]
        lines.append("")
    return "\n".join(lines)


def test_the_docs_are_current() -> None:
    assert DOCS.read_text() == described()


def test_names_are_unique_and_the_schema_follows_the_layout() -> None:
    for table in (BASE, SLOT):
        assert len({f.name for f in table}) == len(table)
    assert schema() == schema()
    assert len(schema()) == 16


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
    seen, _, clean = played[3]
    sensors = seen.sensors.copy()
    sensors[2] = math.nan
    sensors[3, 0, 1] = math.inf
    obs = batch_obs_to_features(
        stack_inputs(seen.signals, seen.table, sensors, last_op=[0] * 8, last_success=[True] * 8)
    )
    at = column(SLOT, "boundary_norm")
    assert obs.slots[2][:, at].eq(0).all()
    assert obs.slots[3, 1, at].eq(0).all()
    assert obs.slots.isfinite().all()
    others = [0, 1, 4, 5, 6, 7]
    assert torch.equal(obs.slots[others], clean.slots[others])


def test_hosts_without_taps_have_an_unmeasured_ratio(played) -> None:
    seen, _, _ = played[3]
    inputs = stack_inputs(
        seen.signals, seen.table, seen.sensors[:, :3], last_op=[0] * 8, last_success=[True] * 8
    )
    assert batch_obs_to_features(inputs).slots[..., column(SLOT, "tap_ratio")].eq(0).all()
    with pytest.raises(EsperError, match="sensors"):
        stack_inputs(seen.signals, seen.table, seen.sensors[:4], last_op=[0] * 8, last_success=[True] * 8)
