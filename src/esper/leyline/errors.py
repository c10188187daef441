"""Typed errors and checks of numbers. Each message shows the offending value and the allowed ones. All errors
are ValueErrors, so that callers can also catch bad input in the usual way."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any


class EsperError(ValueError):
    """Base of every error that Esper raises on bad input."""


class SlotIdError(EsperError):
    """A slot id that is malformed or unknown to the network."""


class BlueprintError(EsperError):
    """A blueprint that does not exist for this topology."""


class TransitionError(EsperError):
    """A lifecycle operation that the seed's stage does not allow."""


class ShapeError(EsperError):
    """A tensor whose shape does not fit the network."""


class PopulationError(EsperError):
    """A population size or row index that is not allowed."""


class StructureError(EsperError):
    """A structure or weight file that is damaged, foreign or does not fit."""


def check_number(owner: str, name: str, value: object, *, low: float = 0.0, integer: bool = False) -> None:
    """A config's number: finite, of its kind, not below `low`, and, if whole, not beyond 64 bits."""
    kind = int if integer else (int, float)
    high = 2**63 if integer else math.inf
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value < high:
        whole = "whole " if integer else ""
        limit = "below 2**63" if isinstance(value, int) and value >= high else f"from {low:g} up"
        raise EsperError(f"{owner}: {name} is {value!r}, must be a {whole}number {limit}")


def check_numbers(owner: str, config: Any, *, signed: Collection[str] = ()) -> None:
    """Every number of a config, by the type of its field: 0 or more, and whole where that is an int. The
    fields in `signed` may be negative."""
    for field in fields(config):
        if field.type in ("int", "float"):
            low = -sys.float_info.max if field.name in signed else 0.0
            value = getattr(config, field.name)
            check_number(owner, field.name, value, low=low, integer=field.type == "int")


def near(word: object, known: Iterable[str]) -> str:
    """A parenthesis that suggests the known word nearest to this one; empty if none is similar."""
    matches = difflib.get_close_matches(str(word)[:80].lower(), list(known), n=1, cutoff=0.7)
    return f" (did you mean {matches[0]}?)" if matches else ""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> EsperError:
    """An error for a name that is not registered: the name, the closest known one and all of them."""
    known = sorted(known)
    options = allowed(known or ["none is registered"])
    return EsperError(f"{kind} {name!r} is unknown{near(name, known)}; {options}")


def allowed(values: Iterable[object]) -> str:
    """The tail of an error message: the legal values, in a stable order."""
    return "allowed: " + ", ".join(str(v) for v in values)
