"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
"""How a file is called while it is being written; a killed process may leave one behind."""


def write_atomic(path: Path, data: Any) -> None:
    """Write bytes all or nothing, also across a power cut."""
    replace_file(path, data)
    sync_directory(path.parent)


def replace_file(path: Path, data: Any) -> None:
    """Write bytes beside their place, sync and rename; `sync_directory` makes it last."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Make creations, renames and deletions in a directory last."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
