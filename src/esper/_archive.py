"""Archives: tensors and JSON in one safetensors file, written completely or not at all, checked on reading.

An archive names its `kind`, so that a reader does not depend on the file's name or directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from esper._files import decode, write_atomic
from esper.leyline import StructureError

HEADER = ""
"""Among the digests of an archive: that of the header's other fields. No tensor has an empty name."""


def require_equal(origin: object, name: str, stored: object, ours: object) -> None:
    if stored != ours:
        raise StructureError(f"{origin}: {name} is {stored!r} in the file and {ours!r} here")


def check_tensors(origin: object, targets: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Names, shapes and types of stored tensors must be those of the targets."""
    missing = sorted(targets.keys() - stored.keys())
    unknown = sorted(stored.keys() - targets.keys())
    if missing or unknown:
        raise StructureError(f"{origin}: missing tensors {missing[:4]}, unknown tensors {unknown[:4]}")
    for name, target in targets.items():
        tensor = stored[name]
        if tensor.shape != target.shape:
            raise StructureError(
                f"{origin}: {name} has shape {tuple(tensor.shape)}, wanted {tuple(target.shape)}"
            )
        if tensor.dtype != target.dtype:
            raise StructureError(f"{origin}: {name} is {tensor.dtype}, wanted {target.dtype}")


def load_tensors(origin: object, targets: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Copy each stored tensor onto the target of its name, once `check_tensors` has passed."""
    check_tensors(origin, targets, stored)
    for name, target in targets.items():
        target.data.copy_(stored[name])


def write_archive(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    """Write one safetensors file with JSON in its header, completely or not at all."""
    path = Path(path)
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    digests = {name: _digest(t) for name, t in tensors.items()} | {HEADER: _header_digest(meta)}
    header = orjson.dumps({**meta, "digests": digests}, option=orjson.OPT_SORT_KEYS).decode()
    data = safetensors.torch.save(tensors, metadata={"esper": header})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)


def read_archive(
    path: str | os.PathLike[str], *, kind: str | tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON of a file from `write_archive`; damage is reported with the name of the tensor it
    hit."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise StructureError(f"{path}: not a readable safetensors file ({error})") from error
    if "esper" not in header:
        raise StructureError(f"{path}: the header has no field 'esper'; this file was not written by Esper")
    meta = decode(dict[str, Any], header["esper"].encode(), f"{path}, header")
    kinds = (kind,) if isinstance(kind, str) else kind
    if meta.get("kind") not in kinds:
        wanted = " or ".join(repr(name) for name in kinds)
        raise StructureError(f"{path}: kind is {meta.get('kind')!r} in the file and {wanted} here")
    digests = decode(dict[str, str], meta.pop("digests", {}), f"{path}, field digests")
    # Older files have no digest of the header.
    if HEADER in digests and digests.pop(HEADER) != _header_digest(meta):
        raise StructureError(f"{path}: the header is damaged (its digest does not match)")
    for name in sorted(tensors.keys() | digests.keys()):
        if name not in tensors or _digest(tensors[name]) != digests.get(name):
            raise StructureError(f"{path}: tensor {name!r} is missing or damaged (its digest does not match)")
    return tensors, meta


def _digest(tensor: Tensor) -> str:
    return blake2b(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def _header_digest(meta: Mapping[str, Any]) -> str:
    return blake2b(orjson.dumps(meta, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()
