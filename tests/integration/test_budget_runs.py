"""Runs on tasks with a budget of FLOPs: networks that end at different times in one rollout, beside a task
that counts epochs, stopped and resumed; what the policy learns from; and what readers see."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from esper.karn.summary import open_run
from esper.leyline import EsperError
from esper.nissa import TelemetryHub
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.ppo_update import gae
from esper.simic.training import vectorized
from memory_output import StopAfter
from run_helpers import SMALL, assert_same_run, last_checkpoint, rows, story, train

EPOCHS, FLOPS = "digits_shift:episode_length=4", "digits_flops:budget_steps=24"
ENVS = 5
BOTH = {**SMALL, "task": (EPOCHS, FLOPS), "episode_length": None, "envs": ENVS}
GAMMA, LAMBDA = 0.9, 0.8


class Recorded(PPOAgent):
    """Keeps what each update learned from."""

    rollouts: list = []  # noqa: RUF012 (emptied by each test)

    def update(self, *args, **kwargs):
        batch = self.buffer.finish()
        names = ("valid", "terminal", "truncated", "reward", "value", "bootstrap")
        kept = {name: getattr(batch, name).clone() for name in names}
        self.rollouts.append((kept, [t.clone() for t in gae(batch, gamma=GAMMA, gae_lambda=LAMBDA)]))
        return super().update(*args, **kwargs)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Two rounds, each cut into rollouts of three epochs, and everything that was learned from."""
    directory = tmp_path_factory.mktemp("budgets") / "straight"
    Recorded.rollouts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectorized, "PPOAgent", Recorded)
        _, history = train(directory, **BOTH, rollout_length=3)
    return directory, history, Recorded.rollouts


def epochs_of(directory) -> list[dict[int, int]]:
    """By round: the length of each env's episode, as its one outcome says."""
    lengths: list[dict[int, int]] = [{}, {}]
    for event in story(directory):
        if event["event_type"] == "episode_outcome":
            assert event["env_id"] not in lengths[event["round_idx"]], "an outcome is written once"
            lengths[event["round_idx"]][event["env_id"]] = event["data"]["epochs"]
    return lengths


def test_outcomes_steps_and_history_have_each_networks_own_length(straight) -> None:
    directory, history, _ = straight
    lengths = epochs_of(directory)
    steps = Counter((row["round_idx"], row["env_id"]) for row in rows(directory, "steps"))
    for number, (summary, own) in enumerate(zip(history, lengths, strict=True)):
        assert sorted(own) == list(range(2 * ENVS))
        assert {own[env] for env in range(ENVS)} == {4}
        assert len({own[env] for env in range(ENVS, 2 * ENVS)}) > 1
        assert {env: steps[number, env] for env in own} == own
        assert sum(summary.action_counts.values()) == sum(own.values())
    assert history[1].env_steps == sum(sum(own.values()) for own in lengths)
    assert set(history[0].by_task) == {EPOCHS, FLOPS}


def test_views_hold_each_networks_own_steps(straight) -> None:
    directory, _, _ = straight
    views = open_run(directory)
    counted = views.rows(
        "SELECT round_idx, env_id, count(*) AS steps, max(epoch) AS last FROM steps GROUP BY ALL"
    )
    lengths = epochs_of(directory)
    assert len(counted) == 2 * 2 * ENVS
    for row in counted:
        assert row["steps"] == row["last"] == lengths[row["round_idx"]][row["env_id"]]


def own_returns(kept: dict[str, torch.Tensor], env: int) -> dict[int, float]:
    """Lambda returns of one env by their recursion, at its decisions: nothing follows a terminal step, and
    the value of the next state follows a cut."""
    returns, following = {}, 0.0
    next_value = 0.0
    for t in reversed(range(kept["valid"].shape[1])):
        if not kept["valid"][env, t]:
            continue
        if kept["terminal"][env, t]:
            following = next_value = 0.0
        elif kept["truncated"][env, t]:
            following = next_value = kept["bootstrap"][env, t].item()
        reward = kept["reward"][env, t].item()
        following = reward + GAMMA * ((1 - LAMBDA) * next_value + LAMBDA * following)
        returns[t], next_value = following, kept["value"][env, t].item()
    return returns


def test_returns_follow_from_each_networks_own_end(straight) -> None:
    """The rollouts of the run itself: three epochs each, the last one shorter."""
    directory, _, rollouts = straight
    lengths, number, began = epochs_of(directory), 0, 0
    cuts = 0
    for kept, (advantages, returns) in rollouts:
        columns = kept["valid"].shape[1]
        for env, length in lengths[number].items():
            decided = [began + t + 1 <= length for t in range(columns)]
            ended = [began + t + 1 == length for t in range(columns)]
            assert kept["valid"][env].tolist() == decided
            assert kept["terminal"][env].tolist() == ended
            cut = [t == columns - 1 == 2 and began + 3 < length for t in range(columns)]
            assert kept["truncated"][env].tolist() == cut
            cuts += sum(cut)
            for t, wanted in own_returns(kept, env).items():
                assert returns[env, t].item() == pytest.approx(wanted, abs=1e-5)
        assert not advantages[~kept["valid"]].any()
        began += columns
        if began >= max(lengths[number].values()):
            number, began = number + 1, 0
    assert number == 2
    assert cuts > 0


def test_a_run_stopped_while_some_networks_have_ended_goes_on_bit_for_bit(
    straight, tmp_path, monkeypatch
) -> None:
    whole = straight[0]
    ends = sorted(epochs_of(whole)[1].values())
    at = ends[-1] - 1
    assert ends[0] < at < ends[-1], "some have ended, others go on"
    settings = {**BOTH, "rollout_length": 3}
    hub = TelemetryHub([StopAfter(1, at)])
    monkeypatch.setattr(vectorized, "get_hub", lambda: hub)
    train(tmp_path / "run", **settings)
    meta = last_checkpoint(tmp_path / "run")[1]
    assert meta["progress"]["epoch"] == at
    assert sum(env["values"]["done"] for env in meta["round"]["envs"]) == sum(end <= at for end in ends)
    monkeypatch.setattr(vectorized, "get_hub", TelemetryHub)
    train(tmp_path / "run", **settings, resume="auto")
    assert_same_run(whole, tmp_path / "run")


def test_the_length_of_an_episode_cannot_be_set() -> None:
    with pytest.raises(EsperError, match=r"episode_length 8 .* digits_flops:budget_steps=NUMBER"):
        train(**{**SMALL, "task": "digits_flops"})
