"""The entry point: its seams, what it refuses, and what it does when numbers go wrong."""

from __future__ import annotations

import ast
import gc
import inspect
import multiprocessing
from contextlib import nullcontext

import pytest
import torch

from esper.leyline import EsperError
from esper.nissa import TelemetryHub
from esper.runtime.data import SharedBatchIterator
from esper.simic import train_ppo_vectorized
from esper.simic.agent.normalization import RewardNormalizer
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training import vectorized, vectorized_trainer
from memory_output import MemoryOutput
from run_helpers import SMALL, assert_same_run, last_checkpoint, rows, story, train


def test_the_entry_point_is_one_flat_function() -> None:
    tree = ast.parse(inspect.getsource(vectorized))
    nested = [
        inner.name
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef)
        for inner in ast.walk(outer)
        if isinstance(inner, ast.FunctionDef) and inner is not outer
    ]
    assert not nested
    assert len(inspect.getsource(vectorized_trainer).splitlines()) < 600


def test_collaborators_are_looked_up_when_a_run_is_built(monkeypatch) -> None:
    seen: list[str] = []

    class Normalizer(RewardNormalizer):
        def __init__(self) -> None:
            seen.append("RewardNormalizer")
            super().__init__()

    class Batches(SharedBatchIterator):
        def __init__(self, *args, **kwargs) -> None:
            seen.append("SharedBatchIterator")
            super().__init__(*args, **kwargs)

    class Agent(PPOAgent):
        def __init__(self, *args, **kwargs) -> None:
            seen.append("PPOAgent")
            super().__init__(*args, **kwargs)

    def hub() -> TelemetryHub:
        seen.append("get_hub")
        return TelemetryHub([MemoryOutput()])

    def gradients(model):
        seen.append("collect_per_layer_gradients")
        return original(model)

    class Amp:
        @staticmethod
        def autocast(*args, **kwargs):
            seen.append("torch_amp.autocast")
            return nullcontext()

    original = vectorized.collect_per_layer_gradients
    for name, value in {
        "RewardNormalizer": Normalizer,
        "SharedBatchIterator": Batches,
        "PPOAgent": Agent,
        "get_hub": hub,
        "collect_per_layer_gradients": gradients,
        "torch_amp": Amp,
    }.items():
        monkeypatch.setattr(vectorized, name, value)
    agent, _ = train_ppo_vectorized(**{**SMALL, "rounds": 1, "amp": "bf16", "telemetry": {"level": "debug"}})
    assert set(seen) == {
        "RewardNormalizer",
        "SharedBatchIterator",
        "PPOAgent",
        "get_hub",
        "collect_per_layer_gradients",
        "torch_amp.autocast",
    }
    assert isinstance(agent, Agent)


def test_policies_that_do_not_learn_run_through_the_same_trainer(tmp_path) -> None:
    for policy in ("heuristic", "random", "wait"):
        agent, history = train(tmp_path / policy, policy=policy)
        assert agent is None
        assert len(history) == SMALL["rounds"]
        assert sum(history[0].action_counts.values()) == SMALL["envs"] * SMALL["episode_length"]
        assert not [e for e in story(tmp_path / policy) if e["event_type"] == "ppo_update"]
    assert history[0].action_counts["WAIT"] == sum(history[0].action_counts.values())


def test_every_phase_of_a_round_is_timed(tmp_path) -> None:
    from esper.nissa import RunDirectory

    train(tmp_path / "run")
    (first, _) = [
        e["data"]
        for e in RunDirectory.open(tmp_path / "run").events()
        if e["event_type"] == "batch_completed"
    ]
    phases = {name: value for name, value in first.items() if name.endswith("_seconds")}
    assert set(phases) == {
        f"{p}_seconds" for p in ("train", "validate", "sense", "decide", "act", "record", "update")
    }
    assert all(value > 0 for value in phases.values())
    assert sum(phases.values()) == pytest.approx(first["seconds"])


class Poisoned(SharedBatchIterator):
    """Gives env 1, or other channels of the fused images, NaN in one epoch of the first round."""

    epoch = 0
    at = 1
    channels = slice(1, 2)

    def begin_episode(self, episode, **conditions):
        super().begin_episode(episode, **conditions)
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        for batches in super().__iter__():
            if self._episode == 0 and self.epoch == self.at:
                batches[0].x[:, self.channels] = float("nan")
            yield batches


@pytest.mark.parametrize("epoch", [1, 2, 5, 8])
def test_a_host_that_blows_up_is_rolled_back_and_pays_once(epoch, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(vectorized, "SharedBatchIterator", Poisoned)
    monkeypatch.setattr(Poisoned, "at", epoch)
    buffers = []
    update = PPOAgent.update

    def look(agent):
        buffers.append(
            {name: column[:, : agent.buffer.length].clone() for name, column in agent.buffer.columns.items()}
        )
        return update(agent)

    monkeypatch.setattr(PPOAgent, "update", look)
    agent, history = train(tmp_path / "run", reward={"mode": "sparse"}, normalize_rewards=False)
    assert history[0].rollbacks == 1
    assert history[1].rollbacks == 0
    events = story(tmp_path / "run")
    (rollback,) = [e for e in events if e["event_type"] == "rollback"]
    assert (rollback["env_id"], rollback["epoch"]) == (1, epoch)
    outcomes = [e for e in events if e["event_type"] == "episode_outcome" and e["round_idx"] == 0]
    assert sorted(e["env_id"] for e in outcomes) == list(range(SMALL["envs"])), "one outcome each"
    first = buffers[0]
    assert not first["valid"][1, epoch - 1]
    assert first["valid"].sum() == first["valid"].numel() - 1
    price = -rollback["data"]["amount"]
    assert price > 0
    if epoch == 1:
        assert not first["terminal"][1, :-1].any(), "nothing was stored yet that could pay"
    else:
        assert first["reward"][1, epoch - 2].item() == pytest.approx(-price)
        assert first["truncated"][1, epoch - 2], "the episode goes on, without the memory"
        assert not first["terminal"][1, epoch - 2]
    if epoch < SMALL["episode_length"]:
        assert first["reset"][1, epoch]
    assert all(torch.isfinite(t).all() for t in agent.state()[0].values() if t.is_floating_point())


def test_a_policy_loss_that_is_not_finite_is_skipped_and_reported(tmp_path, monkeypatch) -> None:
    from esper.simic.agent import ppo

    calls = []
    original = ppo.gae

    def spoiled(batch, **kwargs):
        advantages, returns = original(batch, **kwargs)
        calls.append(None)
        return (torch.full_like(advantages, torch.inf), returns) if len(calls) == 1 else (advantages, returns)

    monkeypatch.setattr(ppo, "gae", spoiled)
    agent, history = train(tmp_path / "run", ppo={"epochs": 1, "minibatches": 1})
    assert len(history) == SMALL["rounds"]
    events = story(tmp_path / "run")
    first, second = [e["data"] for e in events if e["event_type"] == "ppo_update"]
    assert (first["skipped_steps"], second["skipped_steps"]) == (1, 0)
    assert [
        e["data"]["code"]
        for e in events
        if e["event_type"] == "alert" and e["data"]["code"] == "skipped_steps"
    ]
    assert all(torch.isfinite(p).all() for p in agent.policy.network.parameters())


def test_an_anomaly_raises_the_level_of_the_rounds_after_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(vectorized, "SharedBatchIterator", Poisoned)
    monkeypatch.setattr(Poisoned, "at", 4)
    monkeypatch.setattr(Poisoned, "channels", slice(None))
    train(tmp_path / "run", rounds=4, telemetry={"escalation_rounds": 2})
    levels = [
        e["data"]["telemetry_level"] for e in story(tmp_path / "run") if e["event_type"] == "batch_completed"
    ]
    assert levels[0] == "normal"
    assert levels[1] == "debug"
    assert len(rows(tmp_path / "run", "steps")) == 4 * SMALL["envs"] * SMALL["episode_length"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "digits_of_pi"}, "digits_of_pi.*digits_shift"),
        ({"slots": ["r9c9"]}, "r9c9.*r0c0"),
        ({"reward": {"mode": "generous"}}, "generous.*sparse"),
        ({"colour": "red"}, "colour"),
        ({"rollout_length": 99}, "rollout_length 99"),
        ({"val_size": 5000}, "5000"),
        ({"devices": ["cuda:7"]}, "cuda:7.*cpu"),
        ({"devices": ["abacus"]}, "abacus.*cpu"),
        ({"population": 5}, "5"),
        ({"amp": "fp16"}, "fp16"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes, message) -> None:
    with pytest.raises((EsperError, TypeError), match=message):
        train_ppo_vectorized(**{**SMALL, **changes})


def test_a_directory_that_cannot_be_written_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EsperError, match="file"):
        train(tmp_path / "file" / "run")
    train(tmp_path / "run", rounds=1)
    with pytest.raises(EsperError, match="not empty"):
        train(tmp_path / "run", rounds=1)


class TestResume:
    """What must not be resumed says why."""

    @pytest.fixture(scope="class")
    @classmethod
    def finished(cls, tmp_path_factory):
        directory = tmp_path_factory.mktemp("runs") / "run"
        train(directory, rounds=1)
        return directory

    def copy(self, finished, tmp_path):
        import shutil

        return shutil.copytree(finished, tmp_path / "run")

    def test_another_task(self, finished) -> None:
        with pytest.raises(
            EsperError, match="task is 'digits_impaired' in the checkpoint and 'digits_scale'"
        ):
            train(finished, task="digits_scale", resume="auto")

    def test_another_slot_layout(self, finished) -> None:
        with pytest.raises(EsperError, match="slots is None in the checkpoint and"):
            train(finished, slots=["r0c0"], resume="auto")

    def test_a_deep_difference_is_named(self, finished) -> None:
        with pytest.raises(EsperError, match=r"ppo\.lr is 0\.001 in the checkpoint and 0\.01"):
            train(finished, ppo={"lr": 0.01}, resume="auto")

    def test_a_truncated_checkpoint(self, finished, tmp_path) -> None:
        directory = self.copy(finished, tmp_path)
        (checkpoint,) = (directory / "checkpoints").glob("round-*")
        checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
        log = (directory / "events.jsonl").read_bytes()
        with pytest.raises(EsperError, match="safetensors"):
            train(directory, rounds=2, resume="auto")
        assert (directory / "events.jsonl").read_bytes() == log, "a refused resume loses nothing"

    def test_a_foreign_file(self, finished, tmp_path) -> None:
        directory = self.copy(finished, tmp_path)
        agent, _ = train(rounds=1)
        agent.save(tmp_path / "agent.safetensors")
        with pytest.raises(EsperError, match="kind is 'agent' in the file and 'run' here"):
            train(directory, rounds=2, resume=str(tmp_path / "agent.safetensors"))

    def test_nothing_there(self, tmp_path) -> None:
        with pytest.raises(EsperError, match="no file"):
            train(tmp_path / "nowhere", resume="checkpoint.safetensors")
        assert not (tmp_path / "nowhere").exists()
        train(tmp_path / "new", resume="auto")  # a script can always say so
        train(tmp_path / "run")
        assert_same_run(tmp_path / "run", tmp_path / "new")

    def test_only_the_last_few_and_the_best_are_kept(self, tmp_path) -> None:
        train(tmp_path / "run", rounds=5, keep_last=2, episode_length=4)
        names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
        assert names == [
            "best.safetensors",
            "round-000004-epoch-0000.safetensors",
            "round-000005-epoch-0000.safetensors",
        ]
        assert last_checkpoint(tmp_path / "run")[1]["progress"]["round_idx"] == 5


def count_objects(results) -> None:
    """Objects and tensors after each round of a run."""
    counts = []

    class Counter(MemoryOutput):
        def emit(self, seq, event):
            if event.event_type == "batch_completed":
                gc.collect()
                objects = gc.get_objects()
                counts.append((len(objects), sum(issubclass(type(o), torch.Tensor) for o in objects)))

    with vectorized.get_hub().attached(Counter()):
        train_ppo_vectorized(**{**SMALL, "rounds": 20})
    results.put(counts)


@pytest.mark.slow
def test_memory_does_not_grow_with_rounds() -> None:
    spawn = multiprocessing.get_context("spawn")  # what earlier tests left behind would be counted too
    results = spawn.Queue()
    process = spawn.Process(target=count_objects, args=(results,))
    process.start()
    counts = results.get(timeout=600)
    process.join()
    tensors = [tensors for _, tensors in counts]
    assert max(tensors[10:]) <= max(tensors[2:10])
    # A summary of each round is kept; beyond that nothing may pile up.
    assert counts[-1][0] - counts[9][0] < 10 * 60
