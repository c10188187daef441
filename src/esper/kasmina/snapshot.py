"""Structure and weights of grown networks: snapshots of one row in memory, and directories on disk.

A snapshot says which seeds there are before it says what their weights are, so loading rebuilds the network
first and then loads strictly. Files are JSON and safetensors, written atomically; nothing is executed from
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from esper._files import write_atomic
from esper.kasmina.hosts import build_host
from esper.kasmina.layers import PopulationLayer
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optim import OptimizerConfig, PopulationOptimizer, check_tensors, load_row
from esper.kasmina.seed import Seed, check_fields
from esper.leyline import (
    EsperError,
    GateConfig,
    GateLevel,
    Incubation,
    Pacing,
    SeedStage,
    StructureError,
    allowed,
)

FORMAT = "esper-network-2"
STRUCTURE, WEIGHTS = "structure.json", "weights.safetensors"


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """One network: its seeds (plain values) and every tensor of its row, host buffers included."""

    seeds: dict[str, dict[str, Any]]
    germinations: int
    tensors: dict[str, Tensor]


def snapshot_row(model: MorphogeneticModel, row: int = 0, *, committed_only: bool = False) -> RowSnapshot:
    """The row as it is; with `committed_only` its host and fossilized seeds, what a rollback may not lose."""
    seeds = {
        slot.slot_id: seed
        for slot in model.slots()
        if (seed := slot.seeds[model.check_row(row)]) is not None
        and (seed.stage is SeedStage.FOSSILIZED or not committed_only)
    }
    banks = {bank for bank in model.live_banks(row) if bank == "host" or bank.split(".")[0] in seeds}
    tensors = {name: tensor[row].detach().clone() for name, tensor in _row_places(model, banks).items()}
    return RowSnapshot(
        {slot_id: seed.to_dict() for slot_id, seed in seeds.items()}, model.germinations[row], tensors
    )


def restore_row(
    model: MorphogeneticModel, snapshot: RowSnapshot, row: int = 0, *, committed_only: bool = False
) -> None:
    """Make the row exactly what the snapshot holds, its optimizer state zero. Everything is checked first: a
    snapshot that does not fit changes nothing. With `committed_only` time does not run backwards: slots that
    the snapshot does not name go on with their cooldown, and germinations go on counting."""
    model.check_row(row)
    if snapshot.germinations < 0:
        raise StructureError(f"germinations is {snapshot.germinations}, must be 0 or more")
    seeds = {slot_id: Seed.from_dict(data) for slot_id, data in snapshot.seeds.items()}
    _check_fit(model, seeds, snapshot.tensors)
    for slot in model.slots():
        now = slot.seeds[row]
        cooling = now if committed_only and now is not None and not now.is_present else None
        slot.adopt(row, seeds.get(slot.slot_id, cooling))
    if not committed_only:
        model.germinations[row] = snapshot.germinations
    model.host_births[row] += 1
    load_row(_row_places(model, model.live_banks(row)), snapshot.tensors, row, what="network")
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
    wanted = {f"host.{name}": tensor.shape[1:] for name, tensor in _tensors(model.host).items()}
    for slot_id, seed in seeds.items():
        slot = model.slot(slot_id)
        for name in seed.bank_names:
            bank = slot.build_bank(
                name, 1
            )  # also where a cooling seed has no weights: its blueprint must exist
            wanted |= (
                {f"{slot_id}.{name}.{p}": t.shape[1:] for p, t in _tensors(bank).items()}
                if seed.is_present
                else {}
            )
    check_tensors(wanted, tensors, what="weights do not fit the structure")


# -- directories ---------------------------------------------------------------------------------------------


def save_network(
    directory: str | Path, model: MorphogeneticModel, optimizer: PopulationOptimizer | None = None
) -> None:
    """Write `structure.json` and `weights.safetensors`; with an optimizer, training goes on exactly where it
    stopped."""
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
    pacing = asdict(model.pacing) | {
        "auto_forward_gates": sorted(int(g) for g in model.pacing.auto_forward_gates)
    }
    structure = {
        "format": FORMAT,
        "host": model.host.spec(),
        "population": model.population,
        "slots": list(model.slot_config.slot_ids),
        "dtype": str(next(model.host.parameters()).dtype).removeprefix("torch."),
        "gates": asdict(model.gate_config),
        "pacing": pacing,
        "incubation": model.incubation.name.lower(),
        "rows": rows,
        "optimizer": None if optimizer is None else asdict(optimizer.config),
        "weights": blake2b(blob, digest_size=16).hexdigest(),
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Weights first: a structure file always names weights that are there.
        write_atomic(path / WEIGHTS, blob)
        write_atomic(path / STRUCTURE, orjson.dumps(structure, option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise StructureError(f"cannot write the network to {path}: {error.strerror}") from error


def load_network(directory: str | Path) -> tuple[MorphogeneticModel, PopulationOptimizer | None]:
    """Rebuild what `save_network` wrote."""
    path = Path(directory)
    structure = _read_structure(path / STRUCTURE)
    tensors = _read_weights(path / WEIGHTS, structure["weights"])
    try:
        check_fields("gates", structure["gates"], GateConfig)
        check_fields("pacing", structure["pacing"], Pacing)
        auto = frozenset(GateLevel(g) for g in structure["pacing"]["auto_forward_gates"])
        dtype = getattr(torch, structure["dtype"])
        model = MorphogeneticModel(
            build_host(structure["host"], structure["population"]),
            structure["slots"],
            gates=GateConfig(**structure["gates"]),
            pacing=Pacing(**structure["pacing"] | {"auto_forward_gates": auto}),
            incubation=Incubation[structure["incubation"].upper()],
        ).to(dtype)
        optimizer = None
        if structure["optimizer"] is not None:
            check_fields("optimizer", structure["optimizer"], OptimizerConfig)
            optimizer = PopulationOptimizer(model, OptimizerConfig(**structure["optimizer"]))
        rows = structure["rows"]
        if len(rows) != model.population:
            raise StructureError(f"{len(rows)} rows for a population of {model.population}")
        for name, tensor in tensors.items():
            if tensor.dtype != dtype:
                raise StructureError(f"weights: {name} is {tensor.dtype}, wanted {dtype}")
        for row, data in enumerate(rows):
            check_fields(f"row {row}", data, _Row)
            restore_row(
                model, RowSnapshot(data["seeds"], data["germinations"], _under(tensors, f"rows.{row}.")), row
            )
            if optimizer is not None:
                optimizer.load_row_state(row, _under(tensors, f"optimizer.{row}."))
        if tensors:
            raise StructureError(f"weights: unknown tensors {sorted(tensors)[:4]}")
    except EsperError as error:
        raise StructureError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise StructureError(
            f"{path / STRUCTURE}: a value is missing or of the wrong kind: {error}"
        ) from error
    return model, optimizer


@dataclass(frozen=True, slots=True)
class _Row:
    seeds: dict[str, Any]
    germinations: int


@dataclass(frozen=True, slots=True)
class _Structure:
    format: str
    host: dict[str, Any]
    population: int
    slots: list[str]
    dtype: str
    gates: dict[str, Any]
    pacing: dict[str, Any]
    incubation: str
    rows: list[Any]
    optimizer: dict[str, Any] | None
    weights: str


def _read_structure(path: Path) -> dict[str, Any]:
    try:
        structure = orjson.loads(path.read_bytes())
    except OSError as error:
        raise StructureError(f"cannot read {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise StructureError(f"{path} is damaged: {error}") from error
    if not isinstance(structure, dict) or structure.get("format") != FORMAT:
        found = structure.get("format") if isinstance(structure, dict) else type(structure).__name__
        raise StructureError(f"{path} has format {found!r}; {allowed([FORMAT])}")
    check_fields(str(path), structure, _Structure)
    return structure


def _read_weights(path: Path, digest: str) -> dict[str, Tensor]:
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise StructureError(f"cannot read {path}: {error.strerror}") from error
    found = blake2b(blob, digest_size=16).hexdigest()
    if found != digest:
        raise StructureError(
            f"{path} is damaged or belongs to another structure: digest {found}, wanted {digest}"
        )
    try:
        return load(blob)
    except SafetensorError as error:
        raise StructureError(f"{path} is damaged: {error}") from error


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take the tensors under a prefix out of the rest."""
    return {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
