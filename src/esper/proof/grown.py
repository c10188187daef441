"""One network grown by a policy, kept in a directory: structure and weights, the plain module, and a record.

structure.json, weights.safetensors   the network, for `load_network`
plain.pt2                             the same network without Esper, for `torch.export.load`
grown.json                            task, policy, random seed, number of the network, decisions, figures
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
import torch
from msgspec import Meta

from esper._files import check_version, decode, write_atomic
from esper.kasmina import FlopMeter, MorphogeneticModel, NetworkRow, load_network, save_network
from esper.leyline import EsperError, check_number
from esper.proof.episodes import Maker, Played, finish_round
from esper.proof.policies import Acting, rule_makers, simple_makers
from esper.runtime.data import test_batches
from esper.runtime.tasks import TaskSpec, draw_condition, parse_task
from esper.simic.training.evaluation import open_env, split_of
from esper.tamiyo.shipped import load_policy

RECORD, PLAIN = "grown.json", "plain.pt2"
VERSION = 2
SEARCHED = 1000
"""Networks among which `network_to_grow` looks for a crippled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownNetwork(Played):
    """The record of a grown network."""

    task: str
    policy: str
    root_seed: int
    sample: bool
    version: Annotated[int, Meta(ge=1)] = VERSION


def network_to_grow(task: TaskSpec, root_seed: int) -> int:
    """The number of the first network with a crippled block, which can use a seed; 0 if there is none."""
    for network in range(SEARCHED):
        if any(draw_condition(task, root_seed, 0, network).crippled):
            return network
    return 0


def grow(
    task: TaskSpec,
    policy: str,
    out: str | Path,
    *,
    root_seed: int = 0,
    network: int | None = None,
    sample: bool = False,
    advance: Callable[[int], None] | None = None,
) -> Played:
    """Train one network under a policy (by name or file, or heuristic, periodic, plateau,
    random, wait) and keep it in a new or
    empty directory. By default it is the network that `network_to_grow` chooses."""
    check_number("grow", "seed", root_seed, integer=True)
    if network is None:
        network = network_to_grow(task, root_seed)
    check_number("grow", "network", network, integer=True)
    directory = check_empty(Path(out))
    make = _maker(task, policy, root_seed, sample)
    env = open_env(task, [network], root_seed=root_seed, rows=1)
    if policy == "wait":
        env.budget = env.budget.without_measuring()
    env.begin_round(0)
    (played,) = finish_round(env, task, make([network]), FlopMeter(task.build_model(1, [0])), advance)
    model = env.groups[0].model
    save_network(directory, model)
    export(model, directory / PLAIN)
    record = asdict(played) | {
        "task": task.name,
        "policy": policy,
        "root_seed": root_seed,
        "sample": sample,
        "version": VERSION,
    }
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    write_atomic(directory / RECORD, orjson.dumps(record, option=options))
    return played


def check_empty(directory: Path) -> Path:
    """Refuse a directory with files: it may be a run or another network."""
    try:
        names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    except OSError as error:
        raise EsperError(f"cannot write to {directory}: {error.strerror}") from error
    if names:
        content = "a grown network" if RECORD in names else "a run" if "run.json" in names else names[0]
        raise EsperError(
            f"{directory} is not empty, it holds {content}; choose a directory that is new or empty"
        )
    return directory


def _maker(task: TaskSpec, policy: str, root_seed: int, sample: bool) -> Maker:
    makers = simple_makers(task, root_seed) | rule_makers(task)
    if policy == "wait":
        return makers["static"]
    if policy in makers:
        return makers[policy]
    learned = load_policy(policy)
    return lambda networks: Acting(learned, networks, task.episode_length, root_seed=root_seed, sample=sample)


def export(model: MorphogeneticModel, path: Path) -> None:
    """The network as a torch program for any batch size; weights are raw bytes, the graph is JSON."""
    program = torch.export.export(
        NetworkRow(model).export(),
        (model.host.example_input(2),),
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )
    program.example_inputs = None  # the one part that would be stored as a pickled tensor
    torch.export.save(program, path)


def read_record(directory: str | Path) -> GrownNetwork:
    """The record of a grown network, decoded strictly."""
    path = Path(directory) / RECORD
    try:
        data = decode(dict[str, Any], path.read_bytes(), path)
    except (OSError, ValueError) as error:
        if isinstance(error, EsperError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise EsperError(f"{directory} holds no grown network: {RECORD}: {reason}") from None
    check_version(data, VERSION, path)
    if data.get("version", 1) == 1 and "seed" in data:
        data["network"] = data.pop("seed")  # version 1 called the number of the network so
    return decode(GrownNetwork, data, path)


def evaluate(directory: str | Path) -> tuple[GrownNetwork, float]:
    """The record of a grown network, and its accuracy on the test split as it is now, in percent."""
    record = read_record(directory)
    try:
        task = parse_task(record.task)
    except EsperError as error:
        raise EsperError(f"{Path(directory) / RECORD}: {error}") from error
    network, correct, total = NetworkRow(load_network(directory)[0]), 0, 0
    for batch in test_batches(split_of(task, 0), task.val_size):
        predicted = network(batch.x if network.model.layout.image else batch.x[0]).argmax(-1)
        correct += int((predicted == batch.y[0]).sum())
        total += batch.y.numel()
    return record, 100.0 * correct / total
