"""Imitation before learning: a policy that watched a teacher does what it did, and such a run can be stopped
anywhere."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import product

import pytest
import torch

from esper.leyline import EsperError, LifecycleOp
from esper.nissa import TelemetryHub
from esper.proof.policies import simple_makers
from esper.runtime.tasks import get_task_spec
from esper.simic.training import vectorized
from esper.simic.training.config import TrainingConfig
from esper.simic.training.probe import ProbePolicy
from esper.tamiyo import FixedSchedule, Planting, RandomValid
from esper.tamiyo.heuristic import Heuristic, HeuristicConfig
from esper.tamiyo.schedules import ScheduleResult, Schedules, save_schedules
from esper.tamiyo.shipped import tuned_thresholds
from run_helpers import SMALL, assert_same_run, rows, story, train

PLAN = (Planting(1, 0, "conv_light"), Planting(2, 1, "norm"))


@pytest.fixture
def schedules(tmp_path):
    def write(task: str = SMALL["task"], plan=PLAN, patterns=()) -> str:
        best, nothing = (
            ScheduleResult(schedule=p, objective=0.5, gain=0.1, networks=1, env_steps=1) for p in (plan, ())
        )
        path = tmp_path / "schedule.json"
        stored = Schedules(
            task=task,
            root_seed=0,
            candidates=1,
            best=best,
            by_pattern={pattern: best if any(pattern) else nothing for pattern in patterns},
        )
        save_schedules(path, stored, get_task_spec(task).slots, "")
        return str(path)

    return write


def test_a_policy_learns_to_do_what_its_teacher_did(tmp_path, schedules) -> None:
    """Three rounds of watching; in the fourth the policy is on its own, without exploration."""
    train(
        tmp_path / "run",
        teacher=schedules(),
        teacher_rounds=3,
        teacher_updates=8,
        rounds=4,
        envs=8,
        hidden=32,
        ppo={"epsilon": 0.0, "entropy_coef": 0.0},
    )
    steps = rows(tmp_path / "run", "steps")
    by_round = [
        [row for row in steps if row["round_idx"] == r and row["op"] == "GERMINATE"] for r in range(4)
    ]
    wanted = {(1, "r0c0", "conv_light"), (2, "r0c1", "norm")}
    for taught in by_round[:3]:
        assert {(row["epoch"], row["slot"], row["blueprint"]) for row in taught} == wanted
        assert len(taught) == 16
    alone = [(row["epoch"], row["slot"], row["blueprint"]) for row in by_round[3]]
    assert sum(step in wanted for step in alone) >= 12, alone


@pytest.mark.parametrize("teacher", ["heuristic", "schedule", "probe"])
def test_a_run_stopped_under_its_teacher_goes_on_the_same(teacher, tmp_path, monkeypatch, schedules) -> None:
    task = "digits_shift" if teacher == "probe" else SMALL["task"]
    patterns = tuple(product((False, True), repeat=2)) if teacher == "probe" else ()
    fields = {
        "task": task,
        "teacher": "heuristic" if teacher == "heuristic" else schedules(task, patterns=patterns),
        "teacher_rounds": 1,
        "heuristic": {"max_rank": 1.0, "blind_ratio": 0.0, "min_contribution": 0.015, "max_progress": 1.0},
    }
    train(tmp_path / "straight", **fields)
    calls = iter([False] * 4 + [True])
    monkeypatch.setattr(vectorized, "stop_requested", lambda: next(calls, False))
    _, history = train(tmp_path / "cut", **fields)
    assert not history, "it stops in its first round"
    monkeypatch.undo()
    train(tmp_path / "cut", **fields, resume="auto")
    assert_same_run(tmp_path / "straight", tmp_path / "cut")


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda: Heuristic(None, 2), {"pruned": [["conv_light", "norm"], []]}),
        (lambda: RandomValid(0, range(2)), {"episode": 3, "epoch": 7}),
        (lambda: FixedSchedule([PLAN, PLAN[1:]]), {"epoch": 3, "open": [[1], []]}),
    ],
)
def test_what_a_policy_remembers_within_an_episode_survives(make, state) -> None:
    policy = make()
    assert policy.state() != state
    policy.load_state(json.loads(json.dumps(state)))
    assert policy.state() == state


def test_a_probe_policy_has_a_state_from_the_start() -> None:
    fresh, other = (ProbePolicy(None, {(True,): PLAN}) for _ in range(2))
    other.load_state(json.loads(json.dumps(fresh.state())))
    assert other.state() == fresh.state()
    other.load_state({"seen": [[True]], "following": {"epoch": 3, "open": [[1]]}})
    assert other.state() == {"seen": [[True]], "following": {"epoch": 3, "open": [[1]]}}
    other.begin(1)
    assert other.state() == fresh.state()


def test_given_actions_are_judged_not_chosen() -> None:
    """The step that a policy makes of somebody else's actions has their log-probs and its own value and
    memory."""
    config = TrainingConfig(**SMALL)
    with vectorized.open_trainer(
        config, vectorized.resolve_task(config, get_task_spec(config.task)), TelemetryHub()
    ) as trainer:
        trainer.begin_round()
        env, policy = trainer.env, trainer.agent.policy
        env.train_epoch(1)
        env.validate(1)
        seen = env.sense(1)
        obs = seen.obs
    own = policy.act(obs, None, seen.masks, deterministic=True)
    given = policy.act(obs, None, seen.masks, given=own.actions)
    assert torch.equal(given.log_prob, own.log_prob)
    assert torch.equal(given.value, own.value)
    waiting = own.actions.clone()
    waiting[:] = FixedSchedule([()] * len(obs.base)).act(obs, None, seen.masks).actions
    waited = policy.act(obs, None, seen.masks, given=waiting)
    assert torch.allclose(waited.log_prob.exp(), own.op_probs[:, LifecycleOp.WAIT])
    assert torch.equal(waited.hidden[0], own.hidden[0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"teacher": "heuristic"}, "set both or neither"),
        ({"teacher_rounds": 1}, "set both or neither"),
        ({"teacher": "heuristic", "teacher_rounds": 1, "policy": "random"}, "is not trained"),
        ({"teacher": "nowhere.json", "teacher_rounds": 1}, "cannot read nowhere.json"),
    ],
)
def test_what_cannot_be_taught_is_refused(fields, words) -> None:
    with pytest.raises(EsperError, match=words):
        train(**fields)


def test_schedules_for_other_patterns_are_refused(schedules) -> None:
    path = schedules("digits_shift", patterns=[(False, False), (True, True)])
    with pytest.raises(EsperError, match="by_pattern has 00, 11; task 'digits_shift' draws 00, 01, 10, 11"):
        train(task="digits_shift", teacher=path, teacher_rounds=1)


def test_schedules_of_another_task_are_refused(schedules) -> None:
    with pytest.raises(EsperError, match="for task 'digits_shift'"):
        train(teacher=schedules("digits_shift", ()), teacher_rounds=1)


def test_imitation_sounds_no_alarm_about_what_the_policy_saw(tmp_path, schedules) -> None:
    """Several updates from one rollout: only the first can tell whether acting and learning see the same."""
    train(tmp_path / "run", teacher=schedules(), teacher_rounds=1, teacher_updates=4, rounds=1)
    updates = [event["data"] for event in story(tmp_path / "run") if event["event_type"] == "ppo_update"]
    assert [update["log_prob_drift"] < 1e-4 for update in updates] == [True]
    assert updates[0]["approx_kl"] == 0.0


def test_the_heuristic_of_a_run_and_of_its_teacher_is_the_one_that_prove_plays():
    task = get_task_spec("digits_shift")
    proven = simple_makers(task, 0)["heuristic"]([0, 1]).config
    assert proven != tuned_thresholds(), "tuned thresholds ship for this task"
    alone = TrainingConfig(task="digits_shift", policy="heuristic", envs=2)
    taught = TrainingConfig(task="digits_shift", teacher="heuristic", teacher_rounds=1, envs=2)
    assert vectorized.build_policy(alone).config == proven
    assert vectorized.build_teacher(taught, task).config == proven
    other = alone.replace(task="digits_shift:base=8", heuristic={})
    assert vectorized.build_policy(other).config == tuned_thresholds(), "the general ones"


def test_a_threshold_that_is_given_counts_even_if_it_is_the_default():
    tuned = TrainingConfig(task="digits_shift").heuristic
    name, default = next(
        (name, value) for name, value in asdict(HeuristicConfig()).items() if getattr(tuned, name) != value
    )
    given = TrainingConfig(task="digits_shift", policy="heuristic", heuristic={name: default})
    assert vectorized.build_policy(given).config == replace(tuned, **{name: default})
    assert TrainingConfig.from_json(given.to_json()).replace(rounds=3).heuristic == given.heuristic
    whole = TrainingConfig(task="digits_shift", heuristic=HeuristicConfig())
    assert whole.heuristic == HeuristicConfig()
