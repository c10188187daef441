"""Gymnasium's layout of `info` for many envs: one array per key, and under `_key` which envs have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = slice | npt.NDArray[np.int64]


def put(infos: dict[str, Any], rows: Rows, values: Mapping[str, Any], num_envs: int) -> None:
    """Enter arrays, or dicts of arrays, of the envs in `rows`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            put(infos.setdefault(key, {}), rows, value, num_envs)
        else:
            if key not in infos:
                fill = None if value.dtype == object else 0
                infos[key] = np.full((num_envs, *value.shape[1:]), fill, value.dtype)
            infos[key][rows] = value
        has: npt.NDArray[np.bool_] = infos.setdefault(f"_{key}", np.zeros(num_envs, bool))
        has[rows] = True


def of_env(infos: Mapping[str, Any], env: int) -> dict[str, Any]:
    """The info of one env as plain values."""
    info = {}
    for key, value in infos.items():
        if key.startswith("_") or not infos[f"_{key}"][env]:
            continue
        if isinstance(value, Mapping):
            info[key] = of_env(value, env)
        else:
            entry = value[env]
            info[key] = entry.item() if isinstance(entry, np.generic) else entry
    return info
