"""Helpers that the agent's tests share; one torch thread, as the command line sets it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def toys() -> ModuleType:
    """The module toys.py beside this file (tests are not a package, so it cannot be imported by name)."""
    name = "esper_agent_toys"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("toys.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
