"""The structured array of reports against the dataclasses it is generated from."""

from __future__ import annotations

from dataclasses import asdict, fields
from math import isnan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import (
    REPORT_DTYPE,
    AlphaAlgorithm,
    AlphaMode,
    LifecycleOp,
    SeedMetrics,
    SeedStage,
    SeedStateReport,
    SlotConfig,
    SlotIdError,
    Veto,
    stack_reports,
)

SLOTS = SlotConfig(("r0c0", "r0c1", "r1c0"))
NOT_NUMBERS = {"slot_id", "seed_id", "blueprint_id", "metrics", "vetoes"}

small_ints = st.integers(0, 2**31 - 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
by_type = {
    "int": small_ints,
    "bool": st.booleans(),
    "float | None": st.none() | numbers,
    "int | None": st.none() | small_ints,
}
metrics = st.builds(SeedMetrics, **{f.name: by_type[str(f.type)] for f in fields(SeedMetrics)})


reports = st.builds(
    SeedStateReport,
    slot_id=st.just("r0c0"),
    seed_id=st.just("s"),
    blueprint_id=st.just("norm"),
    blueprint_index=st.integers(0, 12),
    stage=st.sampled_from(SeedStage),
    alpha=numbers,
    alpha_target=numbers,
    alpha_mode=st.sampled_from(AlphaMode),
    alpha_steps_total=small_ints,
    alpha_steps_done=small_ints,
    alpha_velocity=numbers,
    alpha_algorithm=st.sampled_from(AlphaAlgorithm),
    tempo_epochs=small_ints,
    vetoes=st.dictionaries(st.sampled_from(LifecycleOp), st.sampled_from(Veto)),
    metrics=metrics,
)


def test_every_number_of_both_dataclasses_has_a_column() -> None:
    wanted = ({f.name for f in fields(SeedStateReport)} | {f.name for f in fields(SeedMetrics)}) - NOT_NUMBERS
    assert set(REPORT_DTYPE.names or ()) == wanted | {"occupied", "legal"}


@settings(deadline=None)
@given(reports)
def test_columns_round_trip(report: SeedStateReport) -> None:
    record = stack_reports([{"r0c0": report}], SLOTS)[0, 0]
    values = asdict(report)
    values |= values.pop("metrics")
    assert record["occupied"]
    assert record["legal"].tolist() == [op not in report.vetoes for op in LifecycleOp]
    for name in set(REPORT_DTYPE.names) - {"occupied", "legal"}:
        if values[name] is None:
            assert isnan(record[name])
        else:
            assert record[name].item() == values[name], name


@given(st.lists(st.sets(st.sampled_from(SLOTS.slot_ids)), max_size=4))
def test_each_report_lands_in_its_env_and_slot(occupied: list[set[str]]) -> None:
    table = stack_reports(
        [
            {
                s: example(SeedMetrics(params=10 * env + i + 1), s)
                for i, s in enumerate(SLOTS.slot_ids)
                if s in chosen
            }
            for env, chosen in enumerate(occupied)
        ],
        SLOTS,
    )
    assert table.shape == (len(occupied), 3)
    for env, chosen in enumerate(occupied):
        assert table["occupied"][env].tolist() == [slot_id in chosen for slot_id in SLOTS.slot_ids]
        assert table["params"][env].tolist() == [
            10 * env + i + 1 if s in chosen else 0 for i, s in enumerate(SLOTS.slot_ids)
        ]


def test_an_empty_slot_is_dormant_unmeasured_and_else_zero() -> None:
    record = stack_reports([{}], SLOTS)[0, 1]
    assert record["stage"] == 1
    assert record["blueprint_index"] == -1
    optional = {f.name for f in fields(SeedMetrics) if "None" in str(f.type)}
    assert "contribution" in optional
    for name in optional:
        assert isnan(record[name]), name
    legal = {op for op in LifecycleOp if record["legal"][op]}
    assert legal == {LifecycleOp.WAIT, LifecycleOp.GERMINATE}
    for name in set(REPORT_DTYPE.names) - {"stage", "blueprint_index", "legal"} - optional:
        assert record[name].item() == 0, name


def test_unmeasured_is_nan_and_zero_is_zero() -> None:
    fresh = example(SeedMetrics())
    zero = example(SeedMetrics(contribution=0.0, contribution_age=0), "r0c1")
    table = stack_reports([{"r0c0": fresh, "r0c1": zero}], SLOTS)
    assert np.isnan(table["contribution"][0, 0])
    assert np.isnan(table["contribution_age"][0, 0])
    assert table["contribution"][0, 1] == 0
    assert table["contribution_age"][0, 1] == 0


def test_no_networks() -> None:
    assert stack_reports([], SLOTS).shape == (0, 3)


def test_unknown_slot_is_an_error() -> None:
    with pytest.raises(SlotIdError, match="r9c9"):
        stack_reports([{"r9c9": example(SeedMetrics())}], SLOTS)


@pytest.mark.parametrize(("total", "done", "left"), [(5, 0, 5), (5, 3, 2), (5, 5, 0), (0, 0, 0), (3, 5, 0)])
def test_time_to_target(total: int, done: int, left: int) -> None:
    assert example(SeedMetrics(), total=total, done=done).time_to_target == left


def example(seed: SeedMetrics, slot_id: str = "r0c0", *, total: int = 0, done: int = 0) -> SeedStateReport:
    return SeedStateReport(
        slot_id=slot_id,
        seed_id="s",
        blueprint_id="norm",
        blueprint_index=3,
        stage=SeedStage.TRAINING,
        alpha=0.0,
        alpha_target=1.0,
        alpha_mode=AlphaMode.HOLD,
        alpha_steps_total=total,
        alpha_steps_done=done,
        alpha_velocity=0.0,
        alpha_algorithm=AlphaAlgorithm.ADD,
        tempo_epochs=5,
        vetoes={},
        metrics=seed,
    )
