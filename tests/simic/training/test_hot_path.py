"""The hot path does not wait for the device by accident: no hidden synchronisation in the source, and streams
are used in the right order.

There is no GPU here, so streams are stand-ins that record the calls."""

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
    "task_envs.py",
    "stacking.py",
    "sharded_envs.py",
    "../ranks.py",
)
FOLDER = Path(esper.simic.training.__file__).parent
SYNCING = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize"}
"""Methods that wait for the device."""
CONVERTING = {"float", "int", "bool", "complex"}
"""Builtins that wait for the device if their argument is a tensor."""
FENCE = "group.synchronize()"
"""Allowed as the only statement of a loop: one wait per stream at the end of a phase."""
ALLOWED = {
    ("batch_ops.py", "part.reshape(tensor.shape).tolist()"): "a numpy array, after the one copy of its phase",
    ("vectorized_trainer.py", "step.actions.cpu().tolist()"): "one of the three copies of an epoch",
    ("vectorized_trainer.py", "step.actions.cpu()"): "the same",
}
"""Calls inside loops that look like transfers and are none, or are one that belongs there: (file, source) →
reason."""


class Transfers(ast.NodeVisitor):
    """Collects the calls that may wait for the device and run once per pass of some loop."""

    def __init__(self) -> None:
        self.calls: list[ast.Call] = []
        self.depth = 0

    def repeated(self, *nodes: ast.AST) -> None:
        self.depth += 1
        for node in nodes:
            self.visit(node)
        self.depth -= 1

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)  # runs once
        if [ast.unparse(statement) for statement in node.body] != [FENCE]:
            self.repeated(*node.body)
        for statement in node.orelse:
            self.visit(statement)

    def visit_While(self, node: ast.While) -> None:
        self.repeated(node.test, *node.body)

    def visit_comprehension_of(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> None:
        first, *rest = node.generators
        self.visit(first.iter)  # runs once
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self.repeated(*results, *first.ifs, *rest)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_comprehension_of

    def visit_Call(self, node: ast.Call) -> None:
        if self.depth and may_wait(node):
            self.calls.append(node)
        self.generic_visit(node)


def may_wait(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        to_host = call.func.attr == "to" and any(
            isinstance(argument, ast.Constant) and argument.value == "cpu" for argument in call.args
        )
        return to_host or call.func.attr in SYNCING
    if isinstance(call.func, ast.Name) and call.func.id in CONVERTING and call.args:
        return not is_python_number(call.args[0])
    return False


def is_python_number(node: ast.expr) -> bool:
    """Whether the source alone shows that this is no tensor."""
    if isinstance(node, ast.Constant):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def transfers_in_loops(source: str) -> list[tuple[int, str]]:
    """Line and source of every suspect call inside a loop."""
    visitor = Transfers()
    visitor.visit(ast.parse(source))
    return [(call.lineno, ast.unparse(call)) for call in visitor.calls]


@pytest.mark.parametrize("name", FENCED)
def test_no_transfer_inside_a_loop(name) -> None:
    suspects = transfers_in_loops((FOLDER / name).read_text())
    assert [(line, call) for line, call in suspects if (name, call) not in ALLOWED] == []


def test_every_exception_is_in_use() -> None:
    in_use = {(name, call) for name in FENCED for _, call in transfers_in_loops((FOLDER / name).read_text())}
    assert set(ALLOWED) - in_use == set()


@pytest.mark.parametrize(
    "planted",
    [
        "for env in envs:\n    total += env.loss.item()",
        "for env in envs:\n    total += float(env.loss)",
        "for env in envs:\n    count += int(env.correct.sum())",
        "for slot in slots:\n    if bool(mask[slot]):\n        pass",
        "for t in anything:\n    host = t.cpu()",
        "for t in anything:\n    host = t.to('cpu')",
        "while True:\n    value = float(loss)",
        "values = [float(t) for t in tensors]",
        "values = {slot: t.tolist() for slot, t in tensors.items()}",
        "total = sum(float(t) for t in tensors)",
        "values = [x for x in tensors if int(x)]",
        "values = [x for t in tensors for x in t.tolist()]",
        "for group in groups:\n    group.synchronize()\n    float(group.loss)",
        "for group in groups:\n    work(group)\n    group.synchronize()",
        "def f():\n    for a in b:\n        for c in d:\n            g(c.numpy())",
    ],
)
def test_the_lint_finds_planted_transfers(planted) -> None:
    assert transfers_in_loops(planted)


@pytest.mark.parametrize(
    "clean",
    [
        "value = float(loss)",
        "for value in tensor.tolist():\n    total += value",
        "values = [2 * value for value in tensor.tolist()]",
        "for group in groups:\n    group.synchronize()",
        "for env in envs:\n    limit = float('inf')",
        "for env in envs:\n    share = float(len(env.slots))",
        "for env in envs:\n    x = env.x.to(device)",
    ],
)
def test_the_lint_lets_clean_loops_pass(clean) -> None:
    assert transfers_in_loops(clean) == []


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
    """Through the whole trainer, with its recorder at work: actions, probabilities with the observation,
    confidences of heads."""
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
    policy_side = [shape for shape in copies if len(shape) == 2 and shape[0] == envs]
    assert len(policy_side) == 3 * epochs
    assert policy_side[0::3] == [(envs, 8)] * epochs
    assert policy_side[2::3] == [(envs, 10)] * epochs
    assert len(copies) == 5 * epochs, "and one transfer each at the end of training and of validation"
