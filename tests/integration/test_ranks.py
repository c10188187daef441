"""One run in several processes: the same weights, history and events as in one, to the last bit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.leyline import EsperError
from esper.nissa import TelemetryHub
from esper.proof.search import refine_schedules, search_schedules
from esper.runtime.tasks import parse_task
from esper.scripts.prove import prove
from esper.simic.agent.ppo import PPOAgent
from esper.simic.ranks import Ranks, current, for_all, joined
from esper.simic.training import vectorized
from esper.simic.training.probe import fit_probe
from esper.simic.training.sharded_envs import ShardedEnvs
from memory_output import StopAfter
from proof.worlds import policy_file
from rank_helpers import SEVERAL, end_of, on_ranks, start_ranks, train_here, train_on
from run_helpers import assert_same_run, last_checkpoint, train

TASKS = ("digits_shift:episode_length=5", "digits_mlp:episode_length=3")


def stop_here(_ranks: Ranks, directory: Path, changes: dict, at: tuple[int, int]) -> None:
    """A run that the first rank alone is asked to stop."""
    hub = TelemetryHub([StopAfter(*at)] if current().is_first else [])
    vectorized.get_hub = lambda: hub  # in this process only
    train(directory, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"telemetry": {"level": "debug"}, "rollout_length": 2},
        pytest.param(
            {"task": "digits_flops:budget_steps=6", "episode_length": None}, marks=pytest.mark.slow
        ),  # episodes end at different times
        pytest.param(
            {"twins": 4, "values_rounds": 1, "values": {"steps": 3, "hidden": 8}}, marks=pytest.mark.slow
        ),
        pytest.param(
            {
                "twins": 4,
                "granularity": "plans",
                "unlock_after": 1,
                "ppo": {
                    "gae_lambda": 1.0,
                    "advantage_scale": "returns",
                    "critic_steps": 3,
                    "fit_twins": True,
                },
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"twins": 4, "granularity": "plans", "distinct_twins": True}, marks=pytest.mark.slow),
        pytest.param({"policy": "heuristic"}, marks=pytest.mark.slow),
        pytest.param({"policy": "random"}, marks=pytest.mark.slow),
        pytest.param({"teacher": "heuristic", "teacher_rounds": 1}, marks=pytest.mark.slow),
        pytest.param({"twins": 2, "reward": {"mode": "escrow"}}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_what_one_process_gives(changes, tmp_path) -> None:
    changes = SEVERAL | changes
    train(tmp_path / "one", **changes)
    train_on(2, tmp_path / "two", **changes)
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_four_ranks_give_what_one_process_gives(tmp_path) -> None:
    changes = {**SEVERAL, "envs": 40}
    train(tmp_path / "one", **changes)
    train_on(4, tmp_path / "four", **changes)
    assert_same_run(tmp_path / "one", tmp_path / "four")


def test_several_tasks_on_ranks_that_have_one_of_them_each(tmp_path) -> None:
    changes = {**SEVERAL, "task": TASKS, "envs": 4, "episode_length": None, "rounds": 1}
    train(tmp_path / "one", **changes)
    train_on(2, tmp_path / "two", **changes)
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("at", [(1, 2), (1, 4)])
def test_several_tasks_stopped_on_two_ranks_go_on_in_one_process(at, tmp_path) -> None:
    changes = {**SEVERAL, "task": TASKS, "envs": 12, "episode_length": None}
    train(tmp_path / "one", **changes)
    assert on_ranks(2, stop_here, tmp_path / "cut", changes, at) == {0: None, 1: None}
    assert last_checkpoint(tmp_path / "cut")[1]["progress"]["epoch"] == at[1]
    train(tmp_path / "cut", **changes, resume="auto")
    assert_same_run(tmp_path / "one", tmp_path / "cut")


def test_a_run_stopped_on_two_ranks_goes_on_in_one_process(tmp_path) -> None:
    changes = {**SEVERAL, "rollout_length": 2}
    train(tmp_path / "one", **changes)
    assert on_ranks(2, stop_here, tmp_path / "cut", changes, (1, 3)) == {0: None, 1: None}
    assert last_checkpoint(tmp_path / "cut")[1]["progress"]["epoch"] == 3
    train(tmp_path / "cut", **changes, resume="auto")
    assert_same_run(tmp_path / "one", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 4), (1, 2), (4, 1)])
def test_a_run_goes_on_with_another_number_of_ranks(before, after, tmp_path) -> None:
    changes = {**SEVERAL, "envs": 32}
    train(tmp_path / "one", **changes)
    stopped = on_ranks(before, stop_here, tmp_path / "cut", changes, (1, 3))
    assert stopped == dict.fromkeys(range(before))
    train_on(after, tmp_path / "cut", **changes, resume="auto")
    assert_same_run(tmp_path / "one", tmp_path / "cut")


def count_copies(ranks: Ranks, directory: Path) -> None:
    """Copies to the host between the beginning of the round and its update."""
    copies, cpu, update, begin_round = [0], torch.Tensor.cpu, PPOAgent.update, ShardedEnvs.begin_round

    def begin(env, episode):
        begin_round(env, episode)
        torch.Tensor.cpu = counted

    def counted(tensor, *arguments, **options):
        copies[0] += 1
        return cpu(tensor, *arguments, **options)

    def uncounted(agent):
        torch.Tensor.cpu = cpu
        return update(agent)

    ShardedEnvs.begin_round, PPOAgent.update = begin, uncounted
    train(None, **SEVERAL, rounds=1)
    (directory / str(ranks.rank)).write_text(str(copies[0]))


def test_an_epoch_takes_two_more_copies_to_the_host_than_in_one_process(tmp_path) -> None:
    """Of the observation and of the masks: each rank packs its own for the others."""
    assert on_ranks(2, count_copies, tmp_path) == {0: None, 1: None}
    for rank in range(2):
        assert int((tmp_path / str(rank)).read_text()) == (5 + 2) * SEVERAL["episode_length"]


# -- comparisons ---------------------------------------------------------------------------------------------

WORLD = "digits_impaired:episode_length=5,steps_per_epoch=1,val_size=32,batch_size=8,population=8"


def search_here(ranks: Ranks, directory: Path) -> None:
    task = parse_task(WORLD)
    found = search_schedules(task, 300, candidates=7)
    refined = refine_schedules(task, found, population=8)
    probe = fit_probe(task, 20)
    (directory / f"{ranks.rank}.txt").write_text(f"{found}\n{refined}")
    np.save(directory / f"{ranks.rank}.npy", probe.weights)


@pytest.mark.slow
def test_the_search_and_the_probe_do_not_depend_on_the_ranks(tmp_path) -> None:
    for size in (1, 2):
        place = tmp_path / str(size)
        place.mkdir()
        assert on_ranks(size, search_here, place) == dict.fromkeys(range(size))
    texts = {path.read_text() for path in tmp_path.rglob("*.txt")}
    weights = [np.load(path) for path in tmp_path.rglob("*.npy")]
    assert len(texts) == 1
    assert len(weights) == 3
    assert all(np.array_equal(one, weights[0]) for one in weights)


def prove_here(_ranks: Ranks, directory: Path, policy: str) -> None:
    prove(WORLD, policy=(policy,), networks=12, out=directory, sample=True)


@pytest.mark.slow
def test_a_proof_does_not_depend_on_the_ranks(tmp_path) -> None:
    policy = policy_file(tmp_path / "policy.safetensors")
    for size in (1, 2):
        assert on_ranks(size, prove_here, tmp_path / str(size), policy) == dict.fromkeys(range(size))
    for name in ("proof.json", "report.html"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


# -- what goes wrong -----------------------------------------------------------------------------------------


def test_more_ranks_than_populations(tmp_path) -> None:
    messages = on_ranks(2, train_here, None, {**SEVERAL, "envs": 8})
    assert "2 ranks for 1 populations (digits_impaired 1); allowed: 1 to 1 ranks" in str(messages[0])


def differing(ranks: Ranks, settings: dict[int, dict]) -> None:
    ranks.check_same(settings[ranks.rank], "settings")


def test_ranks_with_different_settings_say_which() -> None:
    messages = on_ranks(2, differing, {0: {"envs": 8, "seed": 1}, 1: {"envs": 16, "seed": 1}})
    for message in messages.values():
        assert (
            message == ("settings must be the same on all ranks: envs is 8 on rank 0 and 16 on rank 1")
            or message == f"rank 0 failed: {messages[0]}"
        )


def failing(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise EsperError("no space left")
    ranks.any(False, "flags")


def test_a_rank_that_fails_tells_the_others_why() -> None:
    messages = on_ranks(2, failing)
    assert messages[0] == "rank 1 failed: no space left"


def dying(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.any(False, "flags")


def test_a_rank_that_is_killed_is_named() -> None:
    messages = on_ranks(2, dying)
    assert messages == {0: "rank 1 ended without a word, killed or out of memory, before it gave its flags"}


def sleeping(ranks: Ranks) -> None:
    if ranks.rank == 1:
        time.sleep(8)
    ranks.any(False, "flags")


def test_a_rank_that_sleeps_is_named_after_the_time_limit() -> None:
    processes, said = start_ranks(2, sleeping, limit=2.0)
    rank, message = said.get(timeout=60)
    for process in processes:
        process.kill()
    assert rank == 0
    assert message == (
        "rank 1 did not give its flags within 2 s: it hangs, or needs longer; ESPER_RANK_TIMEOUT sets the "
        "time limit in seconds"
    )
    end_of(processes, said)


def test_a_port_in_use_is_an_error_that_names_it(monkeypatch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(EsperError, match=f"rank 0 cannot open localhost:{port}"), joined({}):
            pass


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "two"}, "RANK is 'two', must be a number"),
        ({"RANK": "2"}, "RANK is 2 with WORLD_SIZE 2; allowed: 0 to 1"),
        ({"ESPER_RANK_TIMEOUT": "soon"}, "ESPER_RANK_TIMEOUT is 'soon', must be seconds"),
    ],
)
def test_an_environment_that_cannot_be(environment, words, monkeypatch) -> None:
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", **environment}
    for name, value in whole.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EsperError, match=words), joined({}):
        pass


@pytest.mark.parametrize("sizes", [[24], [64, 32], [64, 64, 1], [5, 7, 7, 3, 9]])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_progress_of_the_first_rank_ends_with_all_work(sizes: list[int], size: int) -> None:
    first = Ranks()
    first.size = size
    told: list[int] = []
    advance = for_all(told.append, sizes, first)
    for index in first.own(len(sizes)):
        for _ in range(sizes[index]):
            advance(1)
    assert sum(told) == sum(sizes)
    assert min(told) >= 0
