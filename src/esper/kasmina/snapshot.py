"""Structure and weights of grown networks: snapshots of one row in memory, and directories on disk.

A snapshot lists the seeds apart from their weights, so loading rebuilds the network first and then loads the
weights strictly. Files are JSON and safetensors, written atomically; loading executes nothing from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from esper._archive import check_tensors
from esper._files import check_version, decode, digest_of, read_named, replace_pair
from esper.kasmina.hosts import build_host
from esper.kasmina.layers import PopulationLayer
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optim import OptimizerConfig, PopulationOptimizer, load_row
from esper.kasmina.seed import Seed
from esper.leyline import (
    EsperError,
    GateConfig,
    Incubation,
    Pacing,
    SeedStage,
    StructureError,
)

VERSION = 3
"""Of the directory's format. Files without a field `version` name it in a field `format` instead."""
STRUCTURE, WEIGHTS = "structure.json", "weights.safetensors"


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """One network: its seeds as plain values, and every tensor of its row, host buffers included."""

    seeds: dict[str, dict[str, Any]]
    germinations: int
    tensors: dict[str, Tensor]


def snapshot_row(model: MorphogeneticModel, row: int = 0, *, committed_only: bool = False) -> RowSnapshot:
    """Copy the row; with `committed_only` only its host and fossilized seeds, which a rollback must keep."""
    model.check_row(row)
    seeds: dict[str, Seed] = {}
    for slot in model.slots():
        seed = slot.seeds[row]
        if seed is not None and (seed.stage is SeedStage.FOSSILIZED or not committed_only):
            seeds[slot.slot_id] = seed
    banks = {bank for bank in model.live_banks(row) if bank == "host" or bank.split(".")[0] in seeds}
    tensors = {name: tensor[row].detach().clone() for name, tensor in _row_places(model, banks).items()}
    return RowSnapshot(
        {slot_id: seed.to_dict() for slot_id, seed in seeds.items()}, model.germinations[row], tensors
    )


def restore_row(
    model: MorphogeneticModel, snapshot: RowSnapshot, row: int = 0, *, committed_only: bool = False
) -> None:
    """Set the row to the snapshot and its optimizer state to zero. Everything is checked first: a snapshot
    that does not fit changes nothing. With `committed_only` slots that the snapshot does not name keep their
    cooldown, and the count of germinations stays."""
    model.check_row(row)
    if snapshot.germinations < 0:
        raise StructureError(f"germinations is {snapshot.germinations}, must be 0 or more")
    seeds = {slot_id: Seed.from_dict(data, f"seed in {slot_id}") for slot_id, data in snapshot.seeds.items()}
    _check_fit(model, seeds, snapshot.tensors)
    for slot in model.slots():
        now = slot.seeds[row]
        cooling = now if committed_only and now is not None and not now.is_present else None
        slot.adopt(row, seeds.get(slot.slot_id, cooling))
    if not committed_only:
        model.germinations[row] = snapshot.germinations
    model.host_births[row] += 1
    load_row(_row_places(model, model.live_banks(row)), snapshot.tensors, row, label="network")
    for module in model.modules():
        if isinstance(module, PopulationLayer):
            module.row_changed()
    model.changed()


def _row_places(model: MorphogeneticModel, banks: set[str]) -> dict[str, Tensor]:
    """Every `[P, …]` tensor of the named banks ("host" or "slot.bank"), by stable names."""
    modules: dict[str, nn.Module] = {"host": model.host}
    modules |= {f"{slot.slot_id}.{name}": bank for slot in model.slots() for name, bank in slot.banks.items()}
    return {
        f"{bank}.{name}": tensor for bank in sorted(banks) for name, tensor in _tensors(modules[bank]).items()
    }


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _check_fit(model: MorphogeneticModel, seeds: Mapping[str, Seed], tensors: Mapping[str, Tensor]) -> None:
    wanted = {f"host.{name}": tensor[0] for name, tensor in _tensors(model.host).items()}
    dtype = next(model.host.parameters()).dtype
    for slot_id, seed in seeds.items():
        slot = model.slot(slot_id)
        for name in seed.bank_names:
            bank = slot.build_bank(name, 1)  # a cooling seed has no weights, but its blueprint must exist
            if seed.is_present:
                bank.to(dtype)
                wanted |= {f"{slot_id}.{name}.{p}": t[0] for p, t in _tensors(bank).items()}
    check_tensors("weights do not fit the structure", wanted, tensors)


# -- directories ---------------------------------------------------------------------------------------------


def save_network(
    directory: str | Path, model: MorphogeneticModel, optimizer: PopulationOptimizer | None = None
) -> None:
    """Write `structure.json` and `weights.safetensors`; with an optimizer, training can continue exactly."""
    path = Path(directory)
    rows: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for row in range(model.population):
        snapshot = snapshot_row(model, row)
        rows.append({"seeds": snapshot.seeds, "germinations": snapshot.germinations})
        tensors |= {f"rows.{row}.{name}": tensor for name, tensor in snapshot.tensors.items()}
        if optimizer is not None:
            tensors |= {
                f"optimizer.{row}.{name}": tensor for name, tensor in optimizer.row_state(row).items()
            }
    blob = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    structure = {
        "version": VERSION,
        "host": model.host.spec(),
        "population": model.population,
        "slots": list(model.slot_config.slot_ids),
        "dtype": str(next(model.host.parameters()).dtype).removeprefix("torch."),
        "gates": msgspec.to_builtins(model.gate_config),
        "pacing": msgspec.to_builtins(model.pacing, order="deterministic"),
        "incubation": model.incubation.name.lower(),
        "rows": rows,
        "optimizer": None if optimizer is None else msgspec.to_builtins(optimizer.config),
        "weights": digest_of(blob),
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        text = orjson.dumps(structure, option=orjson.OPT_INDENT_2)
        replace_pair(path / WEIGHTS, blob, path / STRUCTURE, text)
    except OSError as error:
        raise StructureError(f"cannot write the network to {path}: {error.strerror}") from error


def load_network(directory: str | Path) -> tuple[MorphogeneticModel, PopulationOptimizer | None]:
    """Rebuild the network that `save_network` wrote, with its optimizer if it was saved."""
    path = Path(directory)
    structure = _read_structure(path / STRUCTURE)
    tensors = _read_weights(path / WEIGHTS, structure.weights)
    try:
        return _rebuild(structure, tensors)
    except EsperError as error:
        raise StructureError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        # The host's specification is the host's own, and sizes may exceed the memory.
        raise StructureError(f"{path / STRUCTURE}: host or population cannot be built: {error}") from error


def _rebuild(
    structure: _Structure, tensors: dict[str, Tensor]
) -> tuple[MorphogeneticModel, PopulationOptimizer | None]:
    if len(structure.rows) != structure.population:
        raise StructureError(f"{len(structure.rows)} rows for a population of {structure.population}")
    model = MorphogeneticModel(
        build_host(structure.host, structure.population),
        structure.slots,
        gates=structure.gates,
        pacing=structure.pacing,
        incubation=Incubation[structure.incubation.upper()],
    ).to(getattr(torch, structure.dtype))
    optimizer = None
    if structure.optimizer is not None:
        optimizer = PopulationOptimizer(model, structure.optimizer)
    for row, data in enumerate(structure.rows):
        snapshot = RowSnapshot(data.seeds, data.germinations, _under(tensors, f"rows.{row}."))
        restore_row(model, snapshot, row)
        if optimizer is not None:
            optimizer.load_row_state(row, _under(tensors, f"optimizer.{row}."))
    if tensors:
        raise StructureError(f"weights: unknown tensors {sorted(tensors)[:4]}")
    return model, optimizer


@dataclass(frozen=True, slots=True)
class _Row:
    seeds: dict[str, dict[str, Any]]
    germinations: int


@dataclass(frozen=True, slots=True)
class _Structure:
    """The content of structure.json."""

    version: int
    host: dict[str, Any]
    population: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    slots: list[str]
    dtype: Literal["float32", "float64", "bfloat16", "float16"]
    gates: GateConfig
    pacing: Pacing
    incubation: Literal["shadow", "ste"]
    rows: list[_Row]
    optimizer: OptimizerConfig | None
    weights: str


def _read_structure(path: Path) -> _Structure:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StructureError(f"cannot read {path}: {error.strerror}") from error
    content = decode(dict[str, Any], data, path)
    if content.get("format") == "esper-network-2":
        del content["format"]
        content["version"] = 2
    check_version(content, VERSION, path)
    if content.get("version") == 2:
        _upgrade(content)
    if content.get("version") != VERSION:
        raise StructureError(
            f"{path}: format is {content.get('format')!r} and version {content.get('version')!r}; this Esper "
            f"reads versions 2 and {VERSION}. Load the network with the Esper that wrote it"
        )
    return decode(_Structure, content, path, complete=True)


def _upgrade(content: dict[str, Any]) -> None:
    """Version 2 stored a target of each seed's first alpha ramp, which is always 1 now, and its optimizers
    had no warm-up. What is not as expected stays, and the decoder names it."""
    content["version"] = 3
    if isinstance(content.get("optimizer"), dict):
        content["optimizer"].setdefault("newborn_warmup", 0)
    rows = content.get("rows")
    for row in rows if isinstance(rows, list) else ():
        seeds = row.get("seeds") if isinstance(row, dict) else None
        for seed in seeds.values() if isinstance(seeds, dict) else ():
            if isinstance(seed, dict):
                seed.pop("alpha_target", None)


def _read_weights(path: Path, digest: str) -> dict[str, Tensor]:
    try:
        blob = read_named(path, digest)
    except OSError as error:
        raise StructureError(f"cannot read {path}: {error.strerror}") from error
    actual = digest_of(blob)
    if actual != digest:
        raise StructureError(
            f"{path} is damaged or belongs to another structure: digest {actual}, wanted {digest}"
        )
    try:
        return load(blob)
    except SafetensorError as error:
        raise StructureError(f"{path} is damaged: {error}") from error


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove the tensors with this prefix from `tensors` and return them without it."""
    return {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
