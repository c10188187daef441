"""Slot ids, their numeric order, and the errors of slot configurations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import EsperError, InjectionSpec, SlotConfig, SlotIdError, format_slot_id, parse_slot_id

positions = st.tuples(st.integers(0, 10_000), st.integers(0, 10_000))


@given(positions)
def test_round_trip(position: tuple[int, int]) -> None:
    assert parse_slot_id(format_slot_id(*position)) == position


def test_format() -> None:
    assert format_slot_id(0, 1) == "r0c1"
    assert format_slot_id(12, 345) == "r12c345"


@pytest.mark.parametrize(
    "slot_id",
    ["", "r0", "c0", "r0c", "rc0", "0c0", "r-1c0", "R0C0", "r0c0 ", " r0c0", "r0c0\n", "r0c0x", "r0.5c1"],
)
def test_malformed_ids(slot_id: str) -> None:
    with pytest.raises(SlotIdError) as error:
        parse_slot_id(slot_id)
    assert repr(slot_id) in str(error.value)


@pytest.mark.parametrize("position", [(-1, 0), (0, -1)])
def test_negative_positions(position: tuple[int, int]) -> None:
    with pytest.raises(SlotIdError, match="-1"):
        format_slot_id(*position)


@given(st.sets(positions, min_size=1, max_size=30), st.randoms())
def test_from_ids_sorts_row_major_by_number(chosen: set[tuple[int, int]], random: object) -> None:
    ids = [format_slot_id(*position) for position in sorted(chosen)]
    shuffled = list(ids)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert SlotConfig.from_ids(shuffled).slot_ids == tuple(ids)


def test_ten_comes_after_two() -> None:
    assert SlotConfig.from_ids(["r0c10", "r10c0", "r0c2", "r2c0"]).slot_ids == (
        "r0c2",
        "r0c10",
        "r2c0",
        "r10c0",
    )


@given(st.sets(positions, min_size=1, max_size=30))
def test_indices_round_trip(chosen: set[tuple[int, int]]) -> None:
    slots = SlotConfig.from_ids(format_slot_id(*position) for position in chosen)
    assert slots.num_slots == len(chosen)
    for index, slot_id in enumerate(slots.slot_ids):
        assert slots.slot_id_for_index(index) == slot_id
        assert slots.index_for_slot_id(slot_id) == index


def test_no_slots() -> None:
    with pytest.raises(SlotIdError, match="at least one"):
        SlotConfig(())


def test_duplicate_slots() -> None:
    with pytest.raises(SlotIdError, match="not unique"):
        SlotConfig(("r0c0", "r0c1", "r0c0"))


def test_malformed_slot_in_a_config() -> None:
    with pytest.raises(SlotIdError, match="'early'"):
        SlotConfig(("r0c0", "early"))
    with pytest.raises(SlotIdError, match="'early'"):
        SlotConfig.from_ids(["r0c0", "early"])


@pytest.mark.parametrize("index", [-1, 2])
def test_index_out_of_range(index: int) -> None:
    with pytest.raises(SlotIdError, match=f"slot index {index} .*allowed: 0, 1$"):
        SlotConfig(("r0c0", "r0c1")).slot_id_for_index(index)


def test_unknown_slot() -> None:
    with pytest.raises(SlotIdError, match="'r9c9' is unknown; allowed: r0c0, r0c1"):
        SlotConfig(("r0c0", "r0c1")).index_for_slot_id("r9c9")


def test_injection_spec() -> None:
    with pytest.raises(EsperError, match="r0c0: channels is 0"):
        InjectionSpec("r0c0", 0)
    with pytest.raises(SlotIdError, match="'x'"):
        InjectionSpec("x", 16)
