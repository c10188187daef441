"""Files: written completely or not at all, and decoded strictly.

This module must not import torch: readers of run directories start without it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from esper._text import printable, shorten
from esper.leyline.errors import StructureError, allowed

PARTIAL = ".partial"
"""Suffix of a file while it is being written; a killed process may leave one behind."""

NEXT = ".next"
"""Suffix of a file that is complete, and takes its place once the file that names it is written."""

MAX_DEPTH = 100
"""Deepest nesting that `decode` accepts; recursive readers of decoded data stay far below Python's limit."""
MAX_VALUES = 10_000_000
"""Largest number of values that `decode` accepts; aliases in YAML can multiply a few lines beyond memory."""
MAX_INTEGER = 2**63
"""Integers must lie in [-MAX_INTEGER, MAX_INTEGER): tensors and Parquet columns hold 64 bits."""

T = TypeVar("T")


# -- writing -------------------------------------------------------------------------------------------------


def write_atomic(path: Path, data: Any) -> None:
    """Write bytes completely or not at all, also across a power cut."""
    replace_file(path, data)
    sync_directory(path.parent)


def replace_file(path: Path, data: Any) -> None:
    """Write bytes to a temporary file in the same directory, sync it and rename it. The rename itself is
    durable only after `sync_directory`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_pair(weights: Path, blob: bytes, structure: Path, content: bytes) -> None:
    """Write two files of which the second names the digest of the first. A process that is killed at any
    moment leaves the old pair or the new one, and `read_named` finds the weights that belong to the
    structure."""
    successor = weights.with_name(f"{weights.name}{NEXT}")
    write_atomic(successor, blob)
    write_atomic(structure, content)
    successor.replace(weights)
    sync_directory(weights.parent)


def read_named(weights: Path, digest: str) -> bytes:
    """The weights with this digest: those in place, or those that were to take their place. If none has it,
    the ones in place."""
    successor = weights.with_name(f"{weights.name}{NEXT}")
    if successor.is_file():
        blob = successor.read_bytes()
        if digest_of(blob) == digest:
            return blob
    return weights.read_bytes()


def digest_of(blob: bytes) -> str:
    """How a structure names its weights."""
    return blake2b(blob, digest_size=16).hexdigest()


def sync_directory(path: Path) -> None:
    """Make creations, renames and deletions in a directory durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# -- decoding ------------------------------------------------------------------------------------------------


def decode(kind: type[T], data: object, origin: object, *, complete: bool = False) -> T:
    """Decode `data` strictly into `kind`, a dataclass or another type that msgspec knows.

    `data` is JSON as bytes, or values that were decoded already. Nothing is coerced except an integer to a
    float, an enum's value to its member and a JSON key to the key type of a dict. Whatever is wrong is a
    StructureError that names `origin` (usually the file), the path of the field, its value and what is
    allowed. With `complete`, fields that have a default must be present too."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        data = _parse_json(bytes(data), origin)
    _check_limits(data, origin)
    try:
        value = msgspec.convert(data, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise StructureError(f"{origin}: {_explain(str(error), kind, data)}") from None
    _check_field_names(value, data, origin, "", complete=complete)
    return value


def decode_file(kind: type[T], path: Path, *, version: int) -> T:
    """Decode a JSON file strictly. Its field `version` must be at most `version`; a file without it has
    version 1."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StructureError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # a name that no file can have
        raise StructureError(f"cannot read {str(path)!r}: {error}") from None
    data = _parse_json(content, path)
    check_version(data, version, path)
    return decode(kind, data, path)


def check_version(data: object, newest: int, origin: object) -> None:
    """Refuse a format that is newer than this Esper before its fields are decoded."""
    version = data.get("version", 1) if isinstance(data, Mapping) else 1
    if isinstance(version, int) and version > newest:
        raise StructureError(
            f"{origin}: version is {shorten(version)}, written by a newer Esper; this one reads up to "
            f"version {newest}"
        )


def _parse_json(data: bytes, origin: object) -> object:
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise StructureError(f"{origin}: nested too deeply; at most {MAX_DEPTH} levels are allowed") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StructureError(f"{origin}: not valid JSON: {error}") from None


def _check_limits(data: object, origin: object) -> None:
    """Refuse what would break a decoder or whatever uses the values later. Iterative: the data may be nested
    without end."""
    stack: list[tuple[object, int]] = [(data, 0)]
    count = 0
    while stack:
        value, depth = stack.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise StructureError(f"{origin}: nested too deeply; at most {MAX_DEPTH} levels are allowed")
        if count > MAX_VALUES:
            raise StructureError(f"{origin}: too many values; at most {MAX_VALUES} are allowed")
        if isinstance(value, str):
            _check_text(value, origin)
        elif isinstance(value, int) and not -MAX_INTEGER <= value < MAX_INTEGER:
            raise StructureError(f"{origin}: {shorten(value)} does not fit into 64 bits")
        elif isinstance(value, Mapping):
            stack.extend((key, depth + 1) for key in value)
            stack.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            stack.extend((item, depth + 1) for item in value)


def _check_text(text: str, origin: object) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise StructureError(f"{origin}: text {shorten(text)} is not valid Unicode") from None


_MESSAGE = re.compile(r"(?P<reason>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_PATH_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")
_MISSING = re.compile(r"Object missing required field `(.*)`")


def _explain(message: str, kind: Any, data: Any) -> str:
    """Complete msgspec's message, which has neither the value, nor keys of dicts, nor the allowed values."""
    match = _MESSAGE.fullmatch(message)
    assert match is not None  # the pattern accepts any text
    reason, path, hint, value = match["reason"], "", kind, data
    for step in _PATH_STEP.finditer(match["path"] or ""):
        if step["name"] is not None:
            path, hint, value = f"{path}.{step['name']}", _field_type(hint, step["name"]), value[step["name"]]
        elif step["index"] == "...":
            key = _wrong_key(hint, value)
            path, hint, value = f"{path}.{key}", _value_type(hint), value[key]
        else:
            index = int(step["index"])
            path, hint, value = f"{path}[{index}]", _item_type(hint, index), list(value)[index]
    if match["key"] is not None:
        path, value, hint = f"a key of {_place(path)}", _wrong_key(hint, value), None
    missing = _MISSING.fullmatch(reason)
    if missing is not None:
        return f"field {_place(path + '.' + missing[1])} is missing; {allowed(_field_names(hint))}"
    legal = _legal_values(hint)
    choice = "" if legal is None else f"; {allowed(legal)}"
    return f"{_place(path)} is {_as_json(value)}: {reason[:1].lower() + reason[1:]}{choice}"


def _place(path: str) -> str:
    """Keys come from the file: no escape sequence of theirs may reach a terminal."""
    shown = printable(path.removeprefix(".")) or "the content"
    return shown if len(shown) <= 200 else f"{shown[:200]}…"


def _as_json(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shorten(value)


def _members(hint: Any) -> Iterator[Any]:
    """The alternatives of a type, annotations removed."""
    if get_origin(hint) is Annotated:
        yield from _members(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _members(member)
    else:
        yield hint


def _hints(member: Any) -> dict[str, Any]:
    """Types of the fields of a class with annotated fields; empty for any other type."""
    own = get_origin(member) or member
    if not isinstance(own, type) or not (is_dataclass(own) or hasattr(own, "__annotations__")):
        return {}
    return get_type_hints(own, include_extras=True)


def _field_type(hint: Any, name: str) -> Any:
    for member in _members(hint):
        hints = _hints(member)
        if name in hints:
            return hints[name]
    return None


def _field_names(hint: Any) -> list[str]:
    return [name for member in _members(hint) for name in _hints(member)]


def _value_type(hint: Any) -> Any:
    for member in _members(hint):
        if isinstance(get_origin(member), type) and issubclass(get_origin(member), Mapping):
            return get_args(member)[1]
    return None


def _item_type(hint: Any, index: int) -> Any:
    for member in _members(hint):
        arguments = get_args(member)
        if get_origin(member) is tuple and Ellipsis not in arguments and index < len(arguments):
            return arguments[index]
        if get_origin(member) in (list, tuple, set, frozenset):
            return arguments[0]
    return None


def _wrong_key(hint: Any, data: Mapping[Any, Any]) -> Any:
    """The first key whose entry does not fit."""
    for key, value in data.items():
        try:
            msgspec.convert({key: value}, hint, strict=True, str_keys=True)
        except msgspec.ValidationError:
            return key
    return next(iter(data))


def _legal_values(hint: Any) -> list[object] | None:
    """The values that an enum or a Literal allows; None for other types."""
    legal: list[object] = []
    for member in _members(hint):
        if get_origin(member) is Literal:
            legal.extend(get_args(member))
        elif isinstance(member, type) and issubclass(member, Enum):
            legal.extend(option.value for option in member)
    return legal or None


def _check_field_names(value: Any, data: Any, origin: object, path: str, *, complete: bool) -> None:
    """msgspec ignores fields that a dataclass does not have, and fills in defaults; here the first is an
    error, and the second too where the data must be `complete`."""
    if is_dataclass(value) and isinstance(data, Mapping):
        names = [field.name for field in fields(value)]
        for name in data:
            if name not in names:
                place = _place(f"{path}.{name}")
                raise StructureError(f"{origin}: field {place} is unknown; {allowed(names)}")
            _check_field_names(getattr(value, name), data[name], origin, f"{path}.{name}", complete=complete)
        for name in names:
            if complete and name not in data:
                raise StructureError(f"{origin}: field {_place(f'{path}.{name}')} is missing")
    elif isinstance(value, Mapping) and isinstance(data, Mapping):
        if len(value) != len(data):
            raise StructureError(f"{origin}: {_place(path)} has keys that mean the same")
        for (key, part), item in zip(value.items(), data.values(), strict=True):
            _check_field_names(part, item, origin, f"{path}.{key}", complete=complete)
    elif isinstance(value, (list, tuple)) and isinstance(data, (list, tuple)):
        for index, (part, item) in enumerate(zip(value, data, strict=True)):
            _check_field_names(part, item, origin, f"{path}[{index}]", complete=complete)
