"""The same config gives the same run: twice, stopped and resumed, with more envs beside it, at every
telemetry level."""

from __future__ import annotations

import pytest
import torch

from esper.nissa import TelemetryHub
from esper.runtime.data import SharedBatchIterator
from esper.simic import train_ppo_vectorized
from esper.simic.telemetry.telemetry_config import TelemetryConfig, TelemetryLevel
from esper.simic.training import vectorized
from memory_output import MemoryOutput
from run_helpers import SMALL, assert_same_run, assert_same_weights, last_checkpoint, rows, story, train

STOP_AT = ("train", "validate", "act", "update")


class Faulty(SharedBatchIterator):
    """Feeds env 0 a NaN in the third epoch of every round: the governor must roll it back."""

    stop_in: tuple[int, int] | None = None
    """Round and epoch in which a stop is requested while the networks train; a negative epoch: right after
    them."""
    epoch = 0

    def begin_episode(self, episode, **conditions):
        super().begin_episode(episode, **conditions)
        self.epoch = 0

    def load_state(self, state):
        super().load_state(state)
        self.epoch = state["step"] // self.steps_per_epoch

    def __iter__(self):
        self.epoch += 1
        for batches in super().__iter__():
            if self.epoch == 3:
                batches[0].x[:, 0] = float("nan")
            if self.stop_in == (self._episode, self.epoch):
                vectorized.request_stop()
            yield batches
        if self.stop_in == (self._episode, -self.epoch):
            vectorized.request_stop()


class StopOn(MemoryOutput):
    """Requests a stop at the first event of a kind in a round, from the given epoch on."""

    def __init__(self, kind: str, round_idx: int, epoch: int = 0) -> None:
        super().__init__()
        self.wanted = (kind, round_idx, epoch)

    def emit(self, seq, event):
        kind, round_idx, epoch = self.wanted
        if event.event_type == kind and event.round_idx == round_idx and (event.epoch or 99) >= epoch:
            vectorized.request_stop()


def eventful(**changes):
    """A run with rollbacks, open escrows and seeds that are half blended; its policy explores enough to meet
    them all."""
    return {
        "reward": {"mode": "escrow"},
        "rollout_length": 3,
        "ppo": {"epsilon": 1.0, "epsilon_end": 1.0},
        **changes,
    }


@pytest.fixture(scope="module", autouse=True)
def faulty():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectorized, "SharedBatchIterator", Faulty)
        yield Faulty


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "straight"
    train(directory, **eventful())
    return directory


def test_two_runs_are_bit_identical(straight, tmp_path) -> None:
    train(tmp_path / "again", **eventful())
    assert_same_run(straight, tmp_path / "again")


@pytest.mark.parametrize("phase", STOP_AT)
def test_a_stopped_and_resumed_run_equals_the_straight_one(
    phase, straight, faulty, tmp_path, monkeypatch
) -> None:
    hub = TelemetryHub()
    monkeypatch.setattr(vectorized, "get_hub", lambda: hub)
    if phase in ("train", "validate"):
        monkeypatch.setattr(faulty, "stop_in", (1, 6 if phase == "train" else -6))
    else:
        hub.add_output(
            StopOn("seed_lifecycle" if phase == "act" else "ppo_update", 1, 6 if phase == "act" else 0)
        )
    _, history = train(tmp_path / "cut", **eventful())
    assert len(history) == 1, "the run was to stop in its second round"
    meta = last_checkpoint(tmp_path / "cut")[1]
    assert meta["round"] is not None
    if phase != "update":
        seeds = [seed for env in meta["round"]["envs"] for seed in env["row"]["seeds"].values()]
        assert seeds, "a stop in the middle of growth"
        assert sum(env["values"]["rollbacks"] for env in meta["round"]["envs"]) == 1
    monkeypatch.setattr(faulty, "stop_in", None)
    monkeypatch.setattr(vectorized, "get_hub", TelemetryHub)
    train(tmp_path / "cut", **eventful(resume="auto"))
    assert_same_run(straight, tmp_path / "cut")


@pytest.mark.parametrize("policy", ["random", "heuristic"])
def test_a_scripted_policy_goes_on_within_a_round_and_between_rounds(
    policy, faulty, tmp_path, monkeypatch
) -> None:
    train(tmp_path / "straight", policy=policy)
    train(tmp_path / "between", policy=policy, rounds=1)
    train(tmp_path / "between", policy=policy, resume="auto")
    monkeypatch.setattr(faulty, "stop_in", (1, 4))
    train(tmp_path / "within", policy=policy)
    monkeypatch.undo()
    train(tmp_path / "within", policy=policy, resume="auto")
    wanted = decisions(tmp_path / "straight")
    assert decisions(tmp_path / "between") == decisions(tmp_path / "within") == wanted
    if policy == "random":
        assert wanted[:24] != wanted[24:], "another round, other draws"


def decisions(directory) -> list[tuple]:
    return [(row["epoch"], row["env_id"], row["op"], row["slot"]) for row in rows(directory, "steps")]


def test_a_run_goes_on_beyond_its_end(tmp_path) -> None:
    changes = eventful(anneal_fraction=0.0)
    train(tmp_path / "long", **changes)
    train(tmp_path / "short", **{**changes, "rounds": 1})
    train(tmp_path / "short", **{**changes, "resume": "auto"})
    assert_same_weights(last_checkpoint(tmp_path / "long")[0], last_checkpoint(tmp_path / "short")[0])


def test_one_env_does_not_depend_on_how_many_there_are(tmp_path) -> None:
    """Before the first update, when all policies are still the same one."""
    first_env = {}
    for envs in (1, 4, 16):
        train(
            tmp_path / f"{envs}",
            **{**eventful(rollout_length=None), "envs": envs, "rounds": 1, "population": 8},
        )
        steps = rows(tmp_path / f"{envs}", "steps")
        first_env[envs] = [
            {k: v for k, v in row.items() if k != "seq"} for row in steps if row["env_id"] == 0
        ]
    assert first_env[1] == first_env[4] == first_env[16]
    assert any(row["op"] == "GERMINATE" for row in first_env[1])


def test_what_is_recorded_changes_nothing(tmp_path) -> None:
    weights = {}
    for level in TelemetryLevel:
        agent, history = train(tmp_path / level.name, telemetry=TelemetryConfig(level=level))
        weights[level] = (agent.state()[0], history)
    reference, history = weights[TelemetryLevel.OFF]
    for tensors, other in weights.values():
        assert_same_weights(reference, tensors)
        assert history == other
    counts = [len(story(tmp_path / level.name)) for level in TelemetryLevel]
    assert counts[0] == 0
    assert counts == sorted(set(counts)), "each level records more than the one below it"
    unrecorded, _ = train_ppo_vectorized(**SMALL)
    assert_same_weights(reference, unrecorded.state()[0])
    assert all(torch.isfinite(tensor).all() for tensor in reference.values() if tensor.is_floating_point())
