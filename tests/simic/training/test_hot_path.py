"""The hot path keeps its fences: no hidden synchronisation in the source, and streams used in the right
order.

There is no GPU here, so streams are stand-ins that record what is asked of them."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import esper.simic.training
from env_helpers import make_env, small_task, wait

FENCED = (
    "batch_ops.py",
    "counterfactual_eval.py",
    "action_execution.py",
    "vector_env.py",
    "vectorized_trainer.py",
)
FOLDER = Path(esper.simic.training.__file__).parent
SYNCING = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize"}
PER_ENV = ("env", "group", "member", "row", "slot", "batch")


def loops(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            yield node, ast.unparse(node.target) + " " + ast.unparse(node.iter)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            yield node, " ".join(ast.unparse(g.target) + " " + ast.unparse(g.iter) for g in node.generators)


@pytest.mark.parametrize("name", [name for name in FENCED if (FOLDER / name).is_file()])
def test_no_transfer_inside_a_per_env_loop(name) -> None:
    tree = ast.parse((FOLDER / name).read_text())
    found = []
    for loop, header in loops(tree):
        if any(word in header.lower() for word in PER_ENV):
            calls = [
                n for n in ast.walk(loop) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
            ]
            # One wait per stream at the end of a phase is the fence itself.
            allowed = {"synchronize"} if ast.unparse(loop).strip().endswith("group.synchronize()") else set()
            found += [
                f"{name}:{c.lineno} .{c.func.attr}()" for c in calls if c.func.attr in SYNCING - allowed
            ]
    assert not found


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"{self.name} synchronize")


@pytest.fixture
def streams(monkeypatch):
    """Two groups on two recording streams; every kernel that a test counts runs under the stream that is
    current."""
    log: list[str] = []
    default = Stream("default", log)
    current = [default]

    @contextmanager
    def use(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: default)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"tensor kept for {stream.name}")
    )
    env = make_env(small_task("digits_impaired", epochs=3), 16, population=8)
    for i, group in enumerate(env.groups):
        group.stream = Stream(f"s{i}", log)
    original = type(env.groups[0].model).losses

    def losses(model, *args, **options):
        log.append(f"train on {current[-1].name}")
        return original(model, *args, **options)

    monkeypatch.setattr(type(env.groups[0].model), "losses", losses)
    env.begin_round(0)
    return env, log


def test_training_waits_before_each_batch_and_synchronizes_once(streams) -> None:
    env, log = streams
    log.clear()
    env.train_epoch(1)
    batch = [
        entry
        for i in range(2)
        for entry in (
            f"s{i} waits for default",
            f"tensor kept for s{i}",
            f"tensor kept for s{i}",
            f"train on s{i}",
        )
    ]
    # Batch first: every group takes its part of a batch before any takes the next.
    assert log == batch * env.task.steps_per_epoch + ["s0 synchronize", "s1 synchronize"]


def test_validation_waits_and_synchronizes_once(streams) -> None:
    env, log = streams
    env.train_epoch(1)
    log.clear()
    env.validate(1)
    assert log.count("s0 synchronize") == log.count("s1 synchronize") == 1
    assert log[-2:] == ["s0 synchronize", "s1 synchronize"]
    assert log[0] == "s0 waits for default"


def test_two_synchronizes_per_stream_per_epoch(streams) -> None:
    env, log = streams
    log.clear()
    env.step(1, wait)
    env.step(2, wait)
    assert log.count("s0 synchronize") == log.count("s1 synchronize") == 4


def test_an_epoch_takes_three_copies_to_decide_and_record_and_one_for_each_phase_before(monkeypatch) -> None:
    """Through the whole trainer, with its recorder at work: actions, probabilities of operations, confidences
    of heads."""
    from esper.nissa import TelemetryHub
    from esper.simic import train_ppo_vectorized
    from esper.simic.agent.ppo import PPOAgent
    from esper.simic.training import vectorized
    from memory_output import MemoryOutput
    from run_helpers import SMALL

    copies, counting = [], [False]
    cpu, update, begin_round = torch.Tensor.cpu, PPOAgent.update, vectorized.VectorEnv.begin_round

    def begin(env, episode):
        begin_round(env, episode)
        counting[0] = True

    def counted(tensor, *args, **kwargs):
        if counting[0]:
            copies.append(tuple(tensor.shape))
        return cpu(tensor, *args, **kwargs)

    def uncounted(agent):
        counting[0] = False
        return update(agent)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    monkeypatch.setattr(PPOAgent, "update", uncounted)
    monkeypatch.setattr(vectorized.VectorEnv, "begin_round", begin)
    monkeypatch.setattr(vectorized, "get_hub", lambda: TelemetryHub([MemoryOutput(wants_step_events=True)]))
    envs, epochs = 4, 5
    train_ppo_vectorized(**{**SMALL, "rounds": 1, "envs": envs, "episode_length": epochs})
    policy_side = [shape for shape in copies if shape in {(envs, 8), (envs, 6), (envs, 10)}]
    assert policy_side == [(envs, 8), (envs, 6), (envs, 10)] * epochs
    assert len(copies) == 5 * epochs, "and one transfer each at the end of training and of validation"
