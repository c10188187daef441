"""What ranks exchange, as bytes and back: data, and nothing that runs.

The bytes are a pickle, because that is exact and fast for records of any shape. But a pickle can name any
function, and whoever reads it would call it. So the reader here knows data only: numbers, text, bytes, their
containers, tensors, arrays, paths, and the dataclasses, enums and named tuples of Esper. Whatever else a
message names is refused before anything is called."""

from __future__ import annotations

import io
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import PosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline import EsperError

OWN = "esper."
"""Modules whose records may travel."""


class WireError(EsperError):
    """A message that holds something other than data."""


def dumps(value: object) -> bytes:
    """A value as bytes. Code does not travel: a function or an object of a foreign class is refused by the
    reader."""
    buffer = io.BytesIO()
    _Writer(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def loads(data: bytes | memoryview) -> Any:
    """The value of `dumps`."""
    try:
        return _Reader(io.BytesIO(data)).load()
    except WireError:
        raise
    except Exception as error:  # damaged bytes may raise anything
        raise WireError(f"ranks: a message cannot be read: {type(error).__name__}: {error}") from error


class _Writer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Tensors and enum members by functions of this module; everything else as usual."""
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return tensor, (value.dtype, tuple(value.shape), flat.numpy().tobytes())
        if isinstance(value, Enum):
            return member, (type(value), value.value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return array, (value.dtype.str, value.shape, value.tobytes())
        if isinstance(value, np.generic):
            return scalar, (value.dtype.str, value.tobytes())
        return NotImplemented


def tensor(dtype: torch.dtype, shape: Sequence[int], data: bytes) -> Tensor:
    """A tensor on the host."""
    if not data:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(tuple(shape))


def array(dtype: str, shape: Sequence[int], data: bytes) -> np.ndarray[Any, Any]:
    """An array of plain numbers."""
    return np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(tuple(shape))


def scalar(dtype: str, data: bytes) -> Any:
    """One number of numpy."""
    return np.frombuffer(data, np.dtype(dtype))[0]


def member(kind: type[Enum], value: object) -> Enum:
    """A member of an enum."""
    return kind(value)


_KNOWN: dict[tuple[str, str], Any] = {
    **{(__name__, function.__name__): function for function in (tensor, array, scalar, member)},
    **{(kind.__module__, kind.__name__): kind for kind in (PosixPath, OrderedDict, Counter, torch.Size)},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What a message may name."""
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith(OWN) and "." not in name:
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type) and kind.__module__ == module and _is_record(kind):
                return kind
        raise WireError(
            f"ranks: a message names {module}.{name}, which is no data; allowed: tensors, arrays, paths, and "
            "the dataclasses, enums and named tuples of Esper"
        )


def _is_record(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, Enum) or hasattr(kind, "_fields")
