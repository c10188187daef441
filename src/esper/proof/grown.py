"""One network grown by a policy, kept in a directory: structure and weights, the plain module, and how it
came to be.

structure.json, weights.safetensors   the network, for `load_network`
plain.pt2                             the same without Esper, for `torch.export.load`
grown.json                            task, policy, seed, decisions, figures
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import torch

from esper._files import write_atomic
from esper.kasmina import FlopMeter, MorphogeneticModel, NetworkRow, load_network, save_network
from esper.leyline import EsperError, check_number
from esper.proof.episodes import Maker, Played, finish_round
from esper.proof.policies import Acting, simple_makers
from esper.runtime.data import test_batches
from esper.runtime.tasks import TaskSpec, parse_task
from esper.simic.training.evaluation import populations, split_of
from esper.tamiyo.shipped import load_policy

RECORD, PLAIN = "grown.json", "plain.pt2"


def grow(
    task: TaskSpec, policy: str, out: str | Path, *, seed: int = 0, sample: bool = False, advance: Any = None
) -> Played:
    """Train one network from this root seed under a policy (by name or file, or heuristic, random, wait) and
    keep it."""
    check_number("grow", "seed", seed, integer=True)
    makers = simple_makers(task, seed)
    make: Maker | None = (makers | {"wait": makers["static"]}).get(policy)
    if make is None:
        learned = load_policy(policy)
        make = lambda envs: Acting(learned, envs, task.episode_length, root_seed=seed, sample=sample)  # noqa: E731
    (env,) = populations(task, [0], root_seed=seed, size=1)
    env.begin_round(0)
    (played,) = finish_round(env, task, make([0]), FlopMeter(task.build_model(1, [0])), advance)
    model, directory = env.groups[0].model, Path(out)
    save_network(directory, model)
    export(model, directory / PLAIN)
    record = {"task": task.name, "policy": policy, "root_seed": seed, "sample": sample, **asdict(played)}
    write_atomic(
        directory / RECORD, orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )
    return played


def export(model: MorphogeneticModel, path: Path) -> None:
    """The network as a program of torch that takes any batch size; weights are raw bytes, the graph is
    JSON."""
    program = torch.export.export(
        NetworkRow(model).export(),
        (model.host.example_input(2),),
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )
    program.example_inputs = None  # the one part that would be stored as a pickled tensor
    torch.export.save(program, path)


def evaluate(directory: str | Path) -> tuple[dict[str, Any], float]:
    """What is on record of a grown network, and its accuracy on the test split as it is now, in percent."""
    path = Path(directory) / RECORD
    try:
        record = orjson.loads(path.read_bytes())
        task = parse_task(record["task"])
    except OSError as error:
        raise EsperError(f"{directory} holds no grown network: {RECORD}: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise EsperError(f"{path} is damaged: {error}") from error
    network, correct, total = NetworkRow(load_network(directory)[0]), 0, 0
    for batch in test_batches(split_of(task.dataset, task.val_size, task.block, 0), task.val_size):
        found = network(batch.x if network.model.layout.image else batch.x[0]).argmax(-1)
        correct += int((found == batch.y[0]).sum())
        total += batch.y.numel()
    return record, 100.0 * correct / total
