"""Episodes of numbered networks: paired, exact, and recorded as they were."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from esper.kasmina import FlopMeter
from esper.leyline import AlphaTargetAction, EsperError, FactoredAction, LifecycleOp, SeedStage
from esper.proof import play
from esper.proof.episodes import finish_round
from esper.runtime.data import load_dataset
from esper.runtime.tasks import draw_condition, get_task_spec, parse_task
from esper.simic.training.config import TrainingConfig
from esper.simic.training.evaluation import HELD_OUT, TRAINING, open_env
from esper.tamiyo import AlwaysWait, FixedSchedule, Planting, RandomValid
from proof.worlds import IMPAIRED, SHIFT

MAKERS = {
    "wait": lambda envs: AlwaysWait(),
    "random": lambda envs: RandomValid(0, envs),
    "schedule": lambda envs: FixedSchedule(
        [[Planting(1, 0, "conv_light"), Planting(2, 1, "norm")]] * len(envs)
    ),
}


class Watching:
    """Notes what a policy was shown."""

    def __init__(self, policy) -> None:
        self.policy, self.seen = policy, []

    def initial_hidden(self, num_envs):
        return self.policy.initial_hidden(num_envs)

    def begin(self, num_envs):
        self.policy.begin(num_envs)

    def act(self, obs, hidden, masks, *, deterministic=False):
        self.seen.append(obs)
        return self.policy.act(obs, hidden, masks)


class Doubtful(FixedSchedule):
    """Takes the second seed back to half its strength as soon as it is planted, so that it stays alive."""

    def act(self, obs, hidden, masks, *, deterministic=False):
        step = super().act(obs, hidden, masks)
        for env in range(len(step.actions)):
            if masks.slot_by_op[env, LifecycleOp.SET_ALPHA_TARGET, 1] and self._epoch == 11:
                half = replace(
                    FactoredAction.wait(),
                    op=LifecycleOp.SET_ALPHA_TARGET,
                    slot_idx=1,
                    alpha_target=AlphaTargetAction.HALF,
                )
                step.actions[env] = torch.tensor(half.to_indices())
        return step


@pytest.mark.parametrize("name", MAKERS)
def test_a_network_does_not_depend_on_its_company(name):
    task = parse_task(SHIFT)
    many = play(task, MAKERS[name], root_seed=HELD_OUT, networks=range(10), population=16)
    assert [p.network for p in many] == list(range(10))
    few = play(task, MAKERS[name], root_seed=HELD_OUT, networks=[7, 2], population=8)
    assert few == [many[2], many[7]]


def test_all_policies_meet_the_same_networks_and_data():
    task, first = parse_task(SHIFT), {}
    for name, make in MAKERS.items():
        watching = []
        play(
            task,
            lambda envs, make=make, watching=watching: watching.append(Watching(make(envs))) or watching[-1],
            root_seed=HELD_OUT,
            networks=range(3),
        )
        first[name] = watching[0].seen[0]
    for other in ("random", "schedule"):
        assert torch.equal(first["wait"].base, first[other].base)
        assert torch.equal(first["wait"].slots, first[other].slots)
    assert not torch.equal(first["wait"].base[0], first["wait"].base[1])


def test_roots_have_nothing_in_common():
    task = parse_task(SHIFT)
    held_out, training = (
        play(task, MAKERS["wait"], root_seed=root, networks=range(3)) for root in (HELD_OUT, TRAINING)
    )
    assert [p.outcome.objective for p in held_out] != [p.outcome.objective for p in training]
    with pytest.raises(EsperError):
        TrainingConfig(seed=HELD_OUT)


def test_the_record_is_what_happened():
    task = parse_task(SHIFT.replace("episode_length=8", "episode_length=14"))
    for played in play(task, MAKERS["schedule"], root_seed=HELD_OUT, networks=range(3)):
        ops = Counter(decision.op for decision in played.decisions)
        assert ops["GERMINATE"] == played.outcome.germinated == 2
        assert ops["FOSSILIZE"] == 1, "the other one by the clock, while the second was planted"
        assert played.outcome.fossilized == len(played.fossils) == 2
        assert [(d.epoch, d.slot, d.blueprint) for d in played.decisions if d.op == "GERMINATE"] == [
            (1, "r0c0", "conv_light"),
            (2, "r0c1", "norm"),
        ]
        assert {(f.slot, f.blueprint) for f in played.fossils} == {("r0c0", "conv_light"), ("r0c1", "norm")}
        assert played.condition == draw_condition(task, HELD_OUT, 0, played.network)
    for played in play(task, MAKERS["random"], root_seed=HELD_OUT, networks=range(3)):
        assert Counter(d.op for d in played.decisions)["GERMINATE"] == played.outcome.germinated


def test_flops_are_those_of_every_epoch():
    task = parse_task(IMPAIRED)
    (played,) = play(task, MAKERS["wait"], root_seed=HELD_OUT, networks=[0], population=1)
    assert played.flops == FlopMeter(task.build_model(1, [0])).per_sample({}) * 8 * 2 * 16
    assert played.condition is None


def test_accuracy_is_that_of_the_committed_network_on_the_test_images():
    """One seed fossilized, one alive at the end: the plain module, with the first alone, on images normalised
    here."""
    task = parse_task(IMPAIRED.replace("episode_length=8", "episode_length=12"))
    env = open_env(task, [0, 1], root_seed=HELD_OUT, rows=8)
    env.begin_round(0)
    policy = Doubtful([[Planting(1, 0, "conv_light"), Planting(10, 1, "conv_light")]] * 2)
    played = finish_round(env, task, policy, FlopMeter(task.build_model(1, [0])))
    data = load_dataset("digits")
    images = (data.test_x.float() / data.scale - data.mean[0]) / data.std[0]
    for member, one in zip(env.envs, played, strict=True):
        assert [r.stage for r in member.model.reports().values() if r.stage is SeedStage.FOSSILIZED] == [
            SeedStage.FOSSILIZED
        ]
        assert member.model.reports()["r0c1"].stage is SeedStage.PRUNED, "it was not yet permanent"
        found = member.model.export()(images).argmax(-1) == data.test_y
        assert one.test_accuracy == pytest.approx(100 * found.double().mean().item(), abs=1e-9)
        assert one.outcome.germinated == 2
        assert len(one.fossils) == 1


def test_tasks_with_other_sizes():
    task = parse_task("digits_shift:base=8,episode_length=12")
    assert (task.host["base"], task.episode_length, task.name) == (
        8,
        12,
        "digits_shift:base=8,episode_length=12",
    )
    assert parse_task(task.name) == task
    assert parse_task("digits_shift") is get_task_spec("digits_shift")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("digits_nothing", "digits_shift"),
        ("digits_shift:width=3", "'width=3'.*base"),
        ("digits_shift:base=wide", "'base=wide'"),
        ("digits_shift:base", "'base'"),
        ("digits_shift:population=3", "population"),
        ("digits_shift:val_size=0", "val_size is 0"),
    ],
)
def test_tasks_that_cannot_be(text, told):
    with pytest.raises(EsperError, match=told):
        parse_task(text)
