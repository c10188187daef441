"""Pins the action space. The literals here are written by hand: a change of the contract must be made twice,
on purpose."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper import leyline
from esper.leyline import AlphaAlgorithm, AlphaCurve, AlphaMode, BlueprintError, FactoredAction

HEADS = {
    "slot": None,
    "blueprint": None,
    "style": ["LINEAR_ADD", "LINEAR_MULTIPLY", "SIGMOID_ADD", "GATED_GATE"],
    "tempo": ["FAST", "STANDARD", "SLOW", "INSTANT"],
    "alpha_target": ["HALF", "SEVENTY", "FULL"],
    "alpha_speed": ["INSTANT", "FAST", "MEDIUM", "SLOW"],
    "alpha_curve": ["LINEAR", "COSINE", "SIGMOID_GENTLE", "SIGMOID", "SIGMOID_SHARP"],
    "op": ["WAIT", "GERMINATE", "SET_ALPHA_TARGET", "PRUNE", "FOSSILIZE", "ADVANCE"],
}
BLUEPRINTS = (
    "noop",
    "conv_light",
    "attention",
    "norm",
    "depthwise",
    "bottleneck",
    "conv_small",
    "conv_heavy",
    "lora",
    "lora_large",
    "mlp_small",
    "mlp",
    "flex_attention",
    "residual",
    "transformer_block",
    "conv_1d",
)
RELEVANT_HEADS = {
    "WAIT": {"op"},
    "GERMINATE": {"op", "slot", "blueprint", "style", "tempo"},
    "SET_ALPHA_TARGET": {"op", "slot", "style", "alpha_target", "alpha_speed", "alpha_curve"},
    "PRUNE": {"op", "slot", "alpha_speed", "alpha_curve"},
    "FOSSILIZE": {"op", "slot"},
    "ADVANCE": {"op", "slot"},
}
SIZES_WITH_THREE_SLOTS = (3, 16, 4, 4, 3, 4, 5, 6)
indices = st.tuples(*(st.integers(0, size - 1) for size in SIZES_WITH_THREE_SLOTS))


def test_head_order_and_sizes() -> None:
    assert leyline.HEAD_NAMES == (
        "slot",
        "blueprint",
        "style",
        "tempo",
        "alpha_target",
        "alpha_speed",
        "alpha_curve",
        "op",
    )
    assert leyline.NUM_HEADS == 8
    assert leyline.head_sizes(3) == SIZES_WITH_THREE_SLOTS
    assert leyline.head_sizes(50) == (50, 16, 4, 4, 3, 4, 5, 6)


@pytest.mark.parametrize("head", HEADS)
def test_enum_members_and_values(head: str) -> None:
    enum = leyline.HEAD_ENUMS[list(HEADS).index(head)]
    names = HEADS[head]
    if names is None:
        assert enum is None
    else:
        assert enum is not None
        assert [(member.name, member.value) for member in enum] == [(name, i) for i, name in enumerate(names)]


@pytest.mark.parametrize("op", RELEVANT_HEADS)
def test_relevance_table(op: str) -> None:
    row = leyline.RELEVANCE[HEADS["op"].index(op)]
    assert len(row) == 8
    assert {head for head, relevant in zip(HEADS, row, strict=True) if relevant} == RELEVANT_HEADS[op]


def test_relevance_has_one_row_per_op() -> None:
    assert len(leyline.RELEVANCE) == 6


def test_op_constants_and_names() -> None:
    assert (
        leyline.OP_WAIT,
        leyline.OP_GERMINATE,
        leyline.OP_SET_ALPHA_TARGET,
        leyline.OP_PRUNE,
        leyline.OP_FOSSILIZE,
        leyline.OP_ADVANCE,
    ) == (0, 1, 2, 3, 4, 5)
    assert leyline.OP_NAMES == ("WAIT", "GERMINATE", "SET_ALPHA_TARGET", "PRUNE", "FOSSILIZE", "ADVANCE")


def test_lookup_tables() -> None:
    assert leyline.STYLE_BLEND_IDS == ("linear", "linear", "sigmoid", "gated")
    assert leyline.STYLE_ALPHA_ALGORITHMS == (
        AlphaAlgorithm.ADD,
        AlphaAlgorithm.MULTIPLY,
        AlphaAlgorithm.ADD,
        AlphaAlgorithm.GATE,
    )
    assert leyline.STYLE_CURVES == (
        AlphaCurve.LINEAR,
        AlphaCurve.LINEAR,
        AlphaCurve.SIGMOID,
        AlphaCurve.LINEAR,
    )
    assert leyline.TEMPO_EPOCHS == (3, 5, 8, 0)
    assert leyline.ALPHA_TARGET_VALUES == (0.5, 0.7, 1.0)
    assert leyline.ALPHA_SPEED_EPOCHS == (0, 3, 5, 8)
    assert leyline.ALPHA_CURVE_VALUES == (
        AlphaCurve.LINEAR,
        AlphaCurve.COSINE,
        AlphaCurve.SIGMOID,
        AlphaCurve.SIGMOID,
        AlphaCurve.SIGMOID,
    )
    assert leyline.ALPHA_CURVE_STEEPNESS == (12.0, 12.0, 6.0, 12.0, 24.0)


@pytest.mark.parametrize(
    ("table", "head"),
    [
        ("OP_NAMES", "op"),
        ("STYLE_BLEND_IDS", "style"),
        ("STYLE_ALPHA_ALGORITHMS", "style"),
        ("STYLE_CURVES", "style"),
        ("TEMPO_EPOCHS", "tempo"),
        ("ALPHA_TARGET_VALUES", "alpha_target"),
        ("ALPHA_SPEED_EPOCHS", "alpha_speed"),
        ("ALPHA_CURVE_VALUES", "alpha_curve"),
        ("ALPHA_CURVE_STEEPNESS", "alpha_curve"),
    ],
)
def test_lookup_tables_cover_their_enum(table: str, head: str) -> None:
    enum = leyline.HEAD_ENUMS[leyline.HEAD_NAMES.index(head)]
    assert enum is not None
    assert len(getattr(leyline, table)) == len(enum)


@pytest.mark.parametrize(
    ("enum", "values"),
    [
        (AlphaMode, {"HOLD": 0, "UP": 1, "DOWN": 2}),
        (AlphaCurve, {"LINEAR": 1, "COSINE": 2, "SIGMOID": 3}),
        (AlphaAlgorithm, {"ADD": 1, "MULTIPLY": 2, "GATE": 3}),
    ],
)
def test_alpha_enums(enum: type, values: dict[str, int]) -> None:
    assert {member.name: member.value for member in enum} == values


def test_blueprints_that_ship_keep_their_indices() -> None:
    assert leyline.blueprint_ids() == BLUEPRINTS
    assert [leyline.blueprint_index(name) for name in BLUEPRINTS] == list(range(16))
    assert [leyline.blueprint_id(index) for index in range(16)] == list(BLUEPRINTS)
    assert leyline.NOOP == 0


def test_a_declared_blueprint_keeps_its_index() -> None:
    assert leyline.declare_blueprint("norm") == 3
    assert leyline.blueprint_ids() == BLUEPRINTS


def test_unknown_blueprints_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        BlueprintError, match=r"'conv_ligth' is unknown \(did you mean conv_light\?\); allowed"
    ):
        leyline.blueprint_index("conv_ligth")
    for index in (-1, 16):
        with pytest.raises(BlueprintError, match=f"index {index} is out of range; allowed: 0 to 15"):
            leyline.blueprint_id(index)


def test_irrelevant_values() -> None:
    assert tuple(int(v) for v in leyline.IRRELEVANT_VALUES) == (0, 0, 2, 3, 2, 0, 0, 0)
    for value, enum in zip(leyline.IRRELEVANT_VALUES, leyline.HEAD_ENUMS, strict=True):
        assert type(value) is (enum or int)


def test_wait_holds_the_irrelevant_values() -> None:
    assert FactoredAction.wait().to_indices() == (0, 0, 2, 3, 2, 0, 0, 0)


@given(indices)
def test_round_trip(values: tuple[int, ...]) -> None:
    action = FactoredAction.from_indices(*values)
    assert action.to_indices() == values
    assert all(type(v) is int for v in action.to_indices())
    assert FactoredAction.from_indices(*action.to_indices()) == action


@given(indices)
def test_fields_are_in_head_order_and_typed(values: tuple[int, ...]) -> None:
    action = FactoredAction.from_indices(*values)
    assert [f.name for f in fields(action)] == ["slot_idx", *list(HEADS)[1:]]
    assert (action.slot_idx, action.blueprint) == values[:2]
    for head, names, value in zip(list(HEADS)[2:], list(HEADS.values())[2:], values[2:], strict=True):
        assert getattr(action, head).name == names[value]


@pytest.mark.parametrize("position", range(1, 8))
@pytest.mark.parametrize("outside", [-1, 0])
def test_index_outside_its_head_is_rejected(position: int, outside: int) -> None:
    values = [0] * 8
    values[position] = outside if outside < 0 else SIZES_WITH_THREE_SLOTS[position]
    with pytest.raises(ValueError, match=str(values[position])):
        FactoredAction.from_indices(*values)


def test_actions_are_immutable_and_hashable() -> None:
    action = FactoredAction.wait()
    with pytest.raises(FrozenInstanceError):
        action.slot_idx = 1  # type: ignore[misc]
    assert len({action, FactoredAction.wait()}) == 1
