"""Rounds that are played by plans: who plays what, what is learned from it, and exact resumption."""

from __future__ import annotations

import pytest
import torch

from esper.leyline import OP_GERMINATE, OP_WAIT, EsperError, TempoAction
from esper.simic.agent.plan_values import PlanValueLearner, ValuesConfig
from esper.simic.agent.rollout_buffer import RolloutBatch
from esper.simic.training import vectorized
from esper.simic.training.plan_learner import PlanLearner, PlanSpace, _without_replacement, worth_of_seeds
from run_helpers import assert_same_run, last_checkpoint, rows, story, train

VALUES = {"envs": 8, "twins": 4, "values_rounds": 2, "rounds": 3, "values": {"steps": 3, "hidden": 8}}


def planted(directory, round_idx: int) -> dict[int, tuple[tuple[int, str, str], ...]]:
    """(epoch, slot, blueprint) of the germinations of each env."""
    found: dict[int, list[tuple[int, str, str]]] = {}
    for row in rows(directory, "steps"):
        if row["round_idx"] == round_idx:
            own = found.setdefault(row["env_id"], [])
            if row["op"] == "GERMINATE":
                own.append((row["epoch"], row["slot"], row["blueprint"]))
    return {env: tuple(own) for env, own in found.items()}


def test_twins_play_different_plans_and_the_first_grows_nothing(tmp_path) -> None:
    train(tmp_path / "run", **VALUES)
    for round_idx in (0, 1):
        by_env = planted(tmp_path / "run", round_idx)
        for group in (range(4), range(4, 8)):
            mine = [by_env[env] for env in group]
            assert mine[0] == ()
            assert len(set(mine)) == 4
            assert all(epoch == 1 + i for plan in mine for i, (epoch, *_) in enumerate(plan)), (
                "one seed per epoch"
            )


def test_what_is_learned_is_the_difference_to_the_twin_that_grew_nothing(tmp_path) -> None:
    _, history = train(tmp_path / "run", **VALUES)
    tensors, _ = last_checkpoint(tmp_path / "run")
    objective = torch.tensor([h.objectives for h in history[:2]]).view(2, 2, 4)
    gain = (objective[..., 1:] - objective[..., :1]).flatten()
    torch.testing.assert_close(tensors["planner.replay.gain"], gain)
    for summary, gains in zip(history[:2], gain.view(2, 2, 3), strict=True):
        assert summary.plan_gain == pytest.approx(gains[:, 0].mean().item())
        assert summary.explored_gain == pytest.approx(gains[:, 1:].mean().item())
    assert history[2].plan_gain is None
    ended = [event["data"] for event in story(tmp_path / "run") if event["event_type"] == "batch_completed"]
    assert [event["plan_gain"] for event in ended] == [summary.plan_gain for summary in history]
    assert [event["value_error"] is None for event in ended] == [False, False, True]
    assert tensors["planner.replay.world"].tolist() == [w for w in range(4) for _ in range(3)]


def test_lessons_are_no_drift_of_log_probs(tmp_path) -> None:
    """They tell other actions than those that were taken, so the two log-probs have nothing in common."""
    train(tmp_path / "run", **VALUES)
    events = story(tmp_path / "run")
    updates = [event["data"] for event in events if event["event_type"] == "ppo_update"]
    assert [update["log_prob_drift"] == 0.0 for update in updates] == [True, True, False]
    assert not [event for event in events if event["event_type"] == "alert"]


@pytest.mark.parametrize("changes", [{}, {"final_lessons": 260}])
def test_a_run_stopped_among_plans_goes_on_the_same(tmp_path, monkeypatch, changes) -> None:
    settings = {**VALUES, "values": {**VALUES["values"], **changes}}
    train(tmp_path / "straight", **settings)
    for name, epochs in (("first", 3), ("second", 11)):
        calls = iter([False] * epochs + [True])
        monkeypatch.setattr(vectorized, "stop_requested", lambda calls=calls: next(calls, False))
        train(tmp_path / name, **settings)
        monkeypatch.undo()
        train(tmp_path / name, **settings, resume="auto")
        assert_same_run(tmp_path / "straight", tmp_path / name)


def test_several_tasks_are_planned_each_with_its_own_slots_and_blueprints(tmp_path) -> None:
    train(tmp_path / "run", **{**VALUES, "task": ("digits_impaired", "digits_mlp"), "rounds": 2})
    by_env = planted(tmp_path / "run", 1)
    assert len(by_env) == 16
    kinds = [{b for env in envs for *_, b in by_env[env]} for envs in (range(8), range(8, 16))]
    assert kinds[0] <= {"conv_light", "depthwise", "conv_small", "norm"}
    assert all(kind.startswith(("mlp", "linear", "low_rank", "norm")) for kind in kinds[1]), kinds[1]


def test_plans_are_given_without_replacement() -> None:
    generator = torch.Generator().manual_seed(0)
    gains = torch.randn(3, 5, 9, generator=generator)
    gains[:, :, 0] = 0
    mean = gains.mean(0)
    for informed in (False, True):
        chosen = _without_replacement(gains, mean, 6, generator, informed=informed)
        assert chosen.shape == (5, 6)
        assert (chosen[:, 0] == 0).all()
        assert all(len(set(row)) == 6 for row in chosen.tolist())
    assert (chosen[:, 1] == mean[:, 1:].argmax(1) + 1).all()
    for informed in (False, True):  # more twins than plans: the last ones share a plan
        chosen = _without_replacement(gains, mean, 11, generator, informed=informed)
        assert all(sorted(row[:9]) == [*range(9)] and len(set(row[8:])) == 1 for row in chosen.tolist())


def test_too_many_plans_are_a_random_choice_with_nothing_first() -> None:
    space = PlanSpace(slice(0, 8), slots=8, blueprints=(1, 3, 4), tempo=TempoAction.INSTANT)
    plans = space.plans(9, torch.Generator().manual_seed(0))
    assert plans.shape[1] == 9
    assert 4000 < len(plans) <= 8192
    assert (plans[0] == -1).all()
    assert (plans[:, 8] == -1).all()
    assert set(plans.unique().tolist()) == {-1, 1, 3, 4}
    assert len(plans.unique(dim=0)) == len(plans)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"twins": 2}, "at least 3 are needed"),
        ({"teacher": "heuristic", "teacher_rounds": 1}, "one of them decides first"),
        ({"policy": "random"}, "action values need policy ppo"),
        ({"values": {"members": 0}}, "members is 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(fields, words) -> None:
    with pytest.raises(EsperError, match=words):
        train(**{**VALUES, **fields})


def test_twins_need_a_nothing_to_compare_with() -> None:
    learner = PlanValueLearner(ValuesConfig(), 1, 1, 1, seed=0)
    with pytest.raises(EsperError, match="values_rounds with twins 1"):
        PlanLearner(learner, [], twins=1, num_slots=1, seen=(torch.ones(1),) * 3)


def test_a_seed_is_worth_the_best_plan_that_begins_with_it() -> None:
    generator = torch.Generator().manual_seed(1)
    plans = PlanSpace(slice(0, 8), slots=3, blueprints=(2, 5), tempo=TempoAction.INSTANT).plans(3, generator)
    grown = plans[torch.randint(len(plans), (40,), generator=generator)]
    values = torch.randn(40, len(plans), generator=generator)
    worth = worth_of_seeds(grown, values, plans, (2, 5))
    assert worth.shape == (40, 3, 2)
    for own, found, each in zip(grown.tolist(), worth, values, strict=True):
        expected = torch.full((3, 2), -torch.inf)
        for plan, value in zip(plans.tolist(), each, strict=True):
            if all(g in (-1, p) for g, p in zip(own, plan, strict=True)):
                slot = next((s for s in range(3) if own[s] < 0 <= plan[s]), None)
                if slot is not None:
                    kind = (2, 5).index(plan[slot])
                    expected[slot, kind] = max(expected[slot, kind], value)
        assert torch.equal(found, expected)


def stop_after_two_of_three_rounds(directory, monkeypatch, **values) -> None:
    """Within the rounds of plans: after the last one the episodes are no longer kept."""
    calls = iter([False] * 15 + [True])
    monkeypatch.setattr(vectorized, "stop_requested", lambda: next(calls, False))
    train(directory, **{**VALUES, "values_rounds": 3, "values": {"steps": 3, "hidden": 8, **values}})


def stored_planner(directory, **values) -> PlanLearner:
    """The planner of the newest checkpoint of such a run."""
    tensors, meta = last_checkpoint(directory)
    own = {n.removeprefix("planner."): t for n, t in tensors.items() if n.startswith("planner.")}
    sizes = tuple(own[f"replay.{name}"].shape[-1] for name in ("base", "slots", "quotes"))
    config = ValuesConfig(steps=3, hidden=8, **values)
    offered = tuple(sorted(set(own["replay.plan"].flatten().tolist()) - {-1}))
    space = PlanSpace(slice(0, 8), slots=3, blueprints=offered, tempo=TempoAction.INSTANT)
    learner = PlanValueLearner(config, *sizes, seed=0)
    planner = PlanLearner(learner, [space], twins=4, num_slots=3, seen=tuple(torch.ones(n) for n in sizes))
    planner.load_state(own, meta["planner"])
    return planner


def test_the_learning_rate_falls_to_nothing_over_the_final_lessons(tmp_path, monkeypatch) -> None:
    stop_after_two_of_three_rounds(tmp_path / "run", monkeypatch)
    planner = stored_planner(tmp_path / "run", final_lessons=600)
    lessons = [*planner.final_lessons()]
    assert [share for *_, share in lessons] == pytest.approx([1, 350 / 600, 100 / 600])
    assert [len(weights) // 8 for _, weights, _ in lessons] == [250, 250, 100]
    assert not torch.equal(lessons[0][0].actions[:800], lessons[2][0].actions)
    assert not [*stored_planner(tmp_path / "run").final_lessons()]


@pytest.mark.parametrize("temperature", [0.0, 100.0])
def test_lessons_say_what_the_values_of_now_would_have_done(tmp_path, monkeypatch, temperature) -> None:
    """Every step of a lesson against an enumeration of all plans. At a high temperature any seed that some
    plan begins with may be taught."""
    stop_after_two_of_three_rounds(tmp_path / "run", monkeypatch)
    tensors, meta = last_checkpoint(tmp_path / "run")
    planner_tensors = {n.removeprefix("planner."): t for n, t in tensors.items() if n.startswith("planner.")}
    kept = {n.removeprefix("kept."): t for n, t in planner_tensors.items() if n.startswith("kept.")}
    assert kept["world"].tolist() == [w for w in range(4) for _ in range(4)]
    offered = tuple(kept["mask.blueprint"].flatten(0, 1).any(0).nonzero().flatten().tolist())
    sizes = (kept["base"].shape[-1], kept["slots"].shape[-1], kept["quotes"].shape[-1])
    config = ValuesConfig(steps=3, hidden=8, lessons=2, temperature=temperature)
    space = PlanSpace(slice(0, 8), slots=3, blueprints=offered, tempo=TempoAction.INSTANT)
    learner = PlanValueLearner(config, *sizes, seed=0)
    planner = PlanLearner(learner, [space], twins=4, num_slots=3, seen=tuple(torch.ones(n) for n in sizes))
    planner.load_state(planner_tensors, meta["planner"])
    quotes = torch.zeros(*kept["quotes"].shape[:-2], kept["mask.blueprint"].shape[-1], sizes[2])
    quotes[..., list(offered), :] = kept["quotes"]
    newest = RolloutBatch.of({**kept, "quotes": quotes}).rows(torch.arange(8, 16))
    lesson, weights = planner.lesson(newest, newest.reward.shape[1])
    assert lesson.reward.shape == (2 * 8, newest.reward.shape[1])
    plans = space.plans(3, torch.Generator())
    sight = learner.replay.sight()
    gains = learner.values.gains(sight, plans).mean(0)
    assert weights.eq(1.0).all()
    planted, over = 0, 0
    for n in range(len(lesson.reward)):
        world = next(
            w
            for w in range(4)
            if torch.equal(sight.quotes[w], lesson.obs.quotes[n, 0])
            and torch.equal(sight.base[w], lesson.obs.base[n, 0])
        )
        worth = {tuple(p): v for p, v in zip(plans.tolist(), gains[world].tolist(), strict=True)}
        ended = False
        for t in range(lesson.reward.shape[1]):
            own = tuple(lesson.obs.blueprints[n, t].tolist())
            more = {
                plan: value
                for plan, value in worth.items()
                if plan != own and all(g in (-1, p) for g, p in zip(own, plan, strict=True))
            }
            slot, blueprint, *_, op = lesson.actions[n, t].tolist()
            germinates = lesson.masks.slot_by_op[n, t, OP_GERMINATE]
            if ended or not more:
                assert op == OP_WAIT
                over += ended and bool(more)
            elif temperature == 0.0:
                best = max(more, key=more.get)
                first = next(s for s in range(3) if own[s] < 0 <= best[s])
                in_time = lesson.masks.tempo[n, t, TempoAction.INSTANT]
                if more[best] > worth[own] and germinates[first] and in_time:
                    assert (op, slot, blueprint) == (OP_GERMINATE, first, best[first])
                    planted += 1
                else:
                    assert op == OP_WAIT
            elif op == OP_GERMINATE:
                assert own[slot] == -1
                assert blueprint in offered
                planted += 1
            if germinates.any() and t + 1 < lesson.reward.shape[1]:
                ended = ended or own == tuple(lesson.obs.blueprints[n, t + 1].tolist())
    assert planted > 0
    assert over > 0


def test_only_the_newest_episodes_are_kept_and_none_after_the_last_lesson(tmp_path, monkeypatch) -> None:
    stop_after_two_of_three_rounds(tmp_path / "cut", monkeypatch, keep=12)
    tensors, _ = last_checkpoint(tmp_path / "cut")
    assert tensors["planner.kept.world"].tolist() == [1] * 4 + [2] * 4 + [3] * 4
    monkeypatch.undo()
    train(tmp_path / "whole", **VALUES)
    tensors, _ = last_checkpoint(tmp_path / "whole")
    assert not [name for name in tensors if name.startswith("planner.kept.")]
