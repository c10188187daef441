"""Strict decoding: every wrong input is a StructureError that says where, what and what is allowed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper._files import MAX_DEPTH, decode, write_atomic
from esper.leyline import EsperError, StructureError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    size: Annotated[int, msgspec.Meta(ge=0)]
    colour: Colour = Colour.RED
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.share > 1:
            raise EsperError(f"share is {self.share}, must not exceed 1")


@dataclass(frozen=True, slots=True)
class Whole:
    name: str
    parts: dict[str, Part]
    pair: tuple[int, str] = (1, "a")
    sizes: list[int] = field(default_factory=list)
    mode: Literal["on", "off"] = "on"
    by_number: dict[int, float] = field(default_factory=dict)
    nested: Part | None = None
    rest: Any = None


GOOD = b"""{"name": "n", "parts": {"a": {"size": 3, "colour": "blue", "share": 1}}, "pair": [2, "b"],
    "sizes": [1, 2], "mode": "off", "by_number": {"4": 0.25}, "nested": {"size": 0}, "rest": [{"x": null}]}"""
WHOLE = Whole(
    "n",
    {"a": Part(size=3, colour=Colour.BLUE, share=1.0)},
    (2, "b"),
    [1, 2],
    "off",
    {4: 0.25},
    Part(size=0),
    [{"x": None}],
)


def test_json_and_decoded_data_give_the_same() -> None:
    assert decode(Whole, GOOD, "f") == WHOLE
    assert decode(Whole, msgspec.json.decode(GOOD), "f") == WHOLE
    assert decode(dict[str, int], b'{"a": 1}', "f") == {"a": 1}


def wrong(**changes: Any) -> dict[str, Any]:
    return msgspec.json.decode(GOOD) | changes


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (wrong(name=3), ["name is 3", "expected `str`"]),
        (wrong(parts={"a": {"size": 1}, "b": {"size": "x"}}), ["parts.b.size is 'x'", "expected `int`"]),
        (wrong(parts={"a": {"size": 1.5}}), ["parts.a.size is 1.5", "expected `int`"]),
        (wrong(parts={"a": {"size": True}}), ["parts.a.size is true", "expected `int`"]),
        (wrong(parts={"a": {"size": -1}}), ["parts.a.size is -1", ">= 0"]),
        (wrong(parts={"a": {}}), ["parts.a.size is missing", "size, colour, share"]),
        (wrong(parts={"a": {"size": 1, "colour": "green"}}), ["parts.a.colour is 'green'", "red, blue"]),
        (wrong(parts={"a": {"size": 1, "share": 2.0}}), ["parts.a", "share is 2.0, must not exceed 1"]),
        (wrong(parts={"a": {"size": 1, "weight": 2}}), ["parts.a.weight is unknown", "size, colour, share"]),
        (wrong(parts=[]), ["parts is []", "expected `object`"]),
        (wrong(pair=[1]), ["pair is [1]", "length 2"]),
        (wrong(pair=[1, 2]), ["pair[1] is 2", "expected `str`"]),
        (wrong(sizes=[1, None]), ["sizes[1] is null", "expected `int`"]),
        (wrong(mode="half"), ["mode is 'half'", "on, off"]),
        (wrong(by_number={"x": 1.0}), ["a key of by_number is 'x'", "expected `int`"]),
        (wrong(by_number={"1": "x"}), ["by_number.1 is 'x'", "expected `float`"]),
        (wrong(nested={"size": 1, "colour": 7}), ["nested.colour is 7", "red, blue"]),
        (wrong(extra=1), ["extra is unknown", "name, parts"]),
        ({}, ["name is missing"]),
        ([1], ["the content is [1]", "expected `object`"]),
        (None, ["the content is null", "expected `object`"]),
        ("text", ["the content is 'text'"]),
        (wrong(name="\ud800"), ["not valid Unicode"]),
        (wrong(parts={"\ud800": {"size": 1}}), ["not valid Unicode"]),
        (wrong(rest=10**20), ["64 bits"]),
        (wrong(parts={"a": {"size": 10**30}}), ["64 bits"]),
        (wrong(rest=10**5000), ["a whole number of 16,610 bits does not fit into 64 bits"]),
        (b"", ["not valid JSON"]),
        (b"[1", ["not valid JSON"]),
        (b"\xff\xfe", ["not valid JSON"]),
        (b'{"name": "\\ud800"}', ["not valid JSON"]),
        (b'{"name": NaN}', ["not valid JSON"]),
        (b'{"rest": 123456789012345678901}', ["64 bits"]),
        (b"[" * 5000 + b"]" * 5000, ["nested too deeply", str(MAX_DEPTH)]),
        (b'{"rest": ' + b"[" * 300 + b"]" * 300 + b"}", ["nested too deeply"]),
    ],
)
def test_wrong_input_names_field_value_and_choice(data: Any, words: list[str]) -> None:
    with pytest.raises(StructureError) as caught:
        decode(Whole, data, "/some/file.json")
    message = str(caught.value)
    assert message.startswith("/some/file.json: ")
    for word in words:
        assert word in message
    assert len(message) < 400


def test_complete_data_has_every_field() -> None:
    assert decode(Whole, GOOD, "f").nested == Part(size=0)
    with pytest.raises(StructureError, match=r"field nested\.colour is missing"):
        decode(Whole, GOOD, "f", complete=True)
    part = {"size": 1, "colour": "red", "share": 0.0}
    assert decode(Part, part, "f", complete=True) == Part(size=1, share=0.0)


def test_endless_data_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    bomb: list[Any] = ["x"] * 10
    for _ in range(9):
        bomb = [bomb] * 10
    for data, word in ((cycle, "nested too deeply"), (bomb, "too many values")):
        with pytest.raises(StructureError, match=word):
            decode(Whole, {"name": "n", "parts": {}, "rest": data}, "f")
        with pytest.raises(StructureError, match=word):
            decode(Whole, {"name": data, "parts": {}}, "f")


def test_a_message_carries_no_terminal_escape() -> None:
    with pytest.raises(StructureError) as caught:
        decode(Whole, {"name": "n", "parts": {"\x1b[31m": {"size": "\x1b[31m"}}}, "f")
    assert "\x1b" not in str(caught.value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(["red", "on"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "parts", "pair", "size", "nested", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_data_decodes_or_is_a_structure_error(data: Any) -> None:
    with contextlib.suppress(StructureError):
        decode(Whole, data, "f")


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_a_structure_error(data: bytes) -> None:
    with contextlib.suppress(StructureError):
        decode(dict[str, Any], data, "f")


def test_decoding_does_not_load_torch() -> None:
    code = "import esper._files, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "esper._files" in loaded
    assert "torch" not in loaded


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Any) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_atomic(path, "text, not bytes")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
