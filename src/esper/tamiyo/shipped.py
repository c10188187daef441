"""What ships with the package, in `esper/policies`: trained policies, schedules and tuned thresholds.

Beside the weights of each policy lies a JSON file with the command, settings, random seed and commit that
produced them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

import esper
from esper._archive import read_archive
from esper._files import decode, decode_file
from esper.leyline import EsperError, StructureError, allowed
from esper.tamiyo.features import schema
from esper.tamiyo.heuristic import HeuristicConfig
from esper.tamiyo.policy import RecurrentPolicy

SHIPPED = Path(esper.__file__).parent / "policies"
WEIGHTS, SCHEDULE, THRESHOLDS = ".safetensors", ".schedule.json", ".heuristic.json"
THRESHOLDS_VERSION = 2
GENERAL = "general"
"""The policies for any network, and the thresholds that were tuned on all embedded tasks together."""
NETWORK = "agent.network."
"""Prefix of the policy's tensors in a run's checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedThresholds:
    """The file that `python -m benchmarks.tune_heuristic` writes for a task, or for all tasks together."""

    task: str
    command: str
    envs: int
    gain: float
    """Mean J minus that of never growing, in points; of all tasks together their mean."""
    config: HeuristicConfig
    version: Annotated[int, Meta(ge=1)] = 1


def shipped_policies() -> list[str]:
    return sorted(path.name.removesuffix(WEIGHTS) for path in SHIPPED.glob(f"*{WEIGHTS}"))


def shipped_policy(name: str) -> Path | None:
    """The file of a policy that ships, if there is one. A name without its number means the first: general
    is general-1."""
    found = next((n for n in (name, f"{name}-1") if n in shipped_policies()), None)
    return None if found is None else SHIPPED / f"{found}{WEIGHTS}"


def default_policies(task_name: str, *, images: bool) -> list[str]:
    """The policies to use where none is named: those of the task that ship, else on images the general ones.
    On vectors and text these are not shown to be of use."""
    own = re.escape(task_name.partition(":")[0].lower())
    mine = [name for name in shipped_policies() if re.fullmatch(rf"{own}-\d+", name)]
    general = [name for name in shipped_policies() if re.fullmatch(rf"{GENERAL}-\d+", name)]
    return mine or (general if images else [])


def shipped_schedules(task_name: str) -> Path:
    """The file of the schedules for a task; it may not exist."""
    return SHIPPED / f"{task_name}{SCHEDULE}"


def tuned_thresholds(task_name: str = GENERAL) -> HeuristicConfig:
    """The heuristic's thresholds that ship for a task, else the general ones."""
    shipped = {path.name: path for path in SHIPPED.glob(f"*{THRESHOLDS}")}
    path = shipped.get(f"{task_name.lower()}{THRESHOLDS}", SHIPPED / f"{GENERAL}{THRESHOLDS}")
    return decode_file(TunedThresholds, path, version=THRESHOLDS_VERSION).config


def load_policy(name_or_path: str | Path) -> RecurrentPolicy:
    """A policy that ships, by name; the policy in a policy file or in a checkpoint; or the policy in the
    newest checkpoint of a run directory."""
    path = _find(name_or_path)
    tensors, meta = read_archive(path, kind=("policy", "run"))
    if meta["kind"] == "policy":
        return RecurrentPolicy.from_archive(tensors, meta, origin=path, feature_schema=schema())
    if "agent" not in meta:
        raise StructureError(f"{path}: field agent is missing")
    agent = decode(dict[str, Any] | None, meta["agent"], f"{path}, field agent")  # type: ignore[arg-type]
    if agent is None:
        raise EsperError(f"{path}: the policy of this run does not learn, so there is none to load")
    return RecurrentPolicy.rebuild(
        {name.removeprefix(NETWORK): t for name, t in tensors.items() if name.startswith(NETWORK)},
        agent.get("schema"),
        origin=path,
        feature_schema=schema(),
    )


def _find(name_or_path: str | Path) -> Path:
    path, ships = Path(name_or_path), shipped_policy(str(name_or_path))
    if ships is not None:
        return ships
    if path.is_dir():
        return newest_checkpoint(path)
    if not path.is_file():
        raise EsperError(
            f"policy {str(name_or_path)!r} is neither a file nor one that ships; "
            + allowed([*shipped_policies(), "a run's directory", "the path of a policy or checkpoint"])
        )
    return path


def newest_checkpoint(run_directory: str | Path) -> Path:
    """The newest checkpoint file of a run; names sort by round and epoch."""
    directory = Path(run_directory) / "checkpoints"
    checkpoints = sorted(directory.glob("round-*.safetensors"))
    if not checkpoints:
        raise EsperError(f"{run_directory} is not a run with a policy: {directory} holds no checkpoint")
    return checkpoints[-1]
