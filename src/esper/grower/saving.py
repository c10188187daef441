"""A grown model in a directory: `structure.json` and `weights.safetensors`.

Loading rebuilds the structure on a fresh model first, then loads the weights strictly. Nothing in the files
is executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import orjson
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from esper._archive import check_tensors
from esper._files import check_version, decode, digest_of, read_named, replace_pair
from esper.grower.body import Body
from esper.grower.places import ESPER, Place
from esper.leyline import StructureError, format_slot_id

VERSION = 2
"""Of the files. In version 1 the kernels of seeds on `[B, C, L]` were as high as wide."""
KIND = "esper-grown-model"
STRUCTURE, WEIGHTS = "structure.json", "weights.safetensors"
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownFile:
    """The content of structure.json."""

    kind: str
    version: Annotated[int, msgspec.Meta(ge=1)]
    slots: list[Place]
    seeds: dict[str, dict[str, Any]]
    germinations: Annotated[int, msgspec.Meta(ge=0)]
    history: list[dict[str, Any]]
    weights: str
    """Digest of the weights' file."""


def save_grown(path: str | Path, model: nn.Module, body: Body, history: Sequence[Mapping[str, Any]]) -> None:
    directory = Path(path)
    tensors = model_tensors(model)
    # Tied weights share memory, which the format does not know: each name gets a copy.
    blob = save_safetensors({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    content = {
        "kind": KIND,
        "version": VERSION,
        **body.structure(),
        "history": list(history),
        "weights": digest_of(blob),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text = orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        replace_pair(directory / WEIGHTS, blob, directory / STRUCTURE, text)
    except OSError as error:
        raise StructureError(f"cannot write the grown model to {directory}: {error.strerror}") from error


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict, which must hold tensors only."""
    state = model.state_dict()
    others = sorted(name for name, value in state.items() if not isinstance(value, Tensor))
    if others:
        raise StructureError(f"state_dict: {', '.join(others[:4])} are no tensors and cannot be saved here")
    return state


def read_grown(path: str | Path) -> tuple[GrownFile, dict[str, Tensor]]:
    """Structure and weights of a directory, checked against each other."""
    directory = Path(path)
    structure = _read(directory / STRUCTURE, Path.read_bytes)
    data = decode(dict[str, Any], structure, directory / STRUCTURE)
    if data.get("kind") != KIND:
        raise StructureError(
            f"{directory / STRUCTURE}: kind is {data.get('kind')!r}, not {KIND!r}; esper.load reads what "
            "grower.save has written"
        )
    check_version(data, VERSION, directory / STRUCTURE)
    content = decode(GrownFile, data, directory / STRUCTURE, complete=True)
    blob = _read(directory / WEIGHTS, lambda path: read_named(path, content.weights))
    if digest_of(blob) != content.weights:
        raise StructureError(f"{directory / WEIGHTS} is damaged or belongs to another structure")
    try:
        tensors = load_safetensors(blob)
    except SafetensorError as error:
        raise StructureError(f"{directory / WEIGHTS} is damaged: {error}") from error
    if content.version == 1:
        _flatten_kernels(content.slots, tensors)
    return content, tensors


def _flatten_kernels(slots: Sequence[Place], tensors: dict[str, Tensor]) -> None:
    """Keep the middle row of kernels on `[B, C, L]`: the others only ever saw padding."""
    for index, place in enumerate(slots):
        if place.shape != "BCL":
            continue
        prefix = f"{ESPER}.seed_slots.{format_slot_id(0, index)}."
        for name, tensor in tensors.items():
            if name.startswith(prefix) and tensor.dim() == 4 and tensor.shape[2] == tensor.shape[3] > 1:
                middle = tensor.shape[2] // 2
                tensors[name] = tensor[:, :, middle : middle + 1].clone()


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], origin: object) -> None:
    """Strict: same names, shapes and types, or nothing changes."""
    check_tensors(origin, model_tensors(model), tensors)
    model.load_state_dict(tensors)


def as_result(kind: type[R], entry: object) -> R:
    return decode(kind, entry, "grower state: history")


def _read(path: Path, read: Callable[[Path], bytes]) -> bytes:
    try:
        return read(path)
    except OSError as error:
        raise StructureError(f"cannot read {path}: {error.strerror}") from error
