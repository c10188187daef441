"""The table of plans, and episodes that are played on it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from benchmarks.family_schedule import best_first, by_place, plantings
from benchmarks.family_schedule import main as family_schedule
from benchmarks.plan_table import Family, OneTask, PlanTable, digest, finished_pieces, load_table, write_table
from benchmarks.table_env import TableEnv

from benchmarks import plan_table
from esper.leyline import (
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_PRUNE,
    EsperError,
    StructureError,
    blueprint_index,
)
from esper.runtime.tasks import parse_task
from esper.simic.agent.plan_values import Sight
from esper.simic.training.evaluation import TRAINING, open_env
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT_DIM
from esper.tamiyo.policy import check_masks
from esper.tamiyo.scripted import BLUEPRINT_HEAD, OP_HEAD, SLOT_HEAD, TEMPO_HEAD, waiting
from esper.tamiyo.shipped import shipped_schedules

SMALL = "digits_shift:episode_length=4,steps_per_epoch=2,population=8"


def made_table(worlds: int = 6, slots: int = 3, seed: int = 0) -> PlanTable:
    """Random figures of all plans with two blueprints."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    blueprints = ("conv_light", "norm")
    plans = tuple(product((None, *blueprints), repeat=slots))
    shape = (len(plans), worlds)
    sight = Sight(
        torch.randn(worlds, BASE_DIM, generator=generator),
        torch.randn(worlds, slots, SLOT_DIM, generator=generator),
        torch.rand(worlds, slots, len(blueprints), QUOTE_DIM, generator=generator) + 0.1,
        torch.ones(worlds, slots, dtype=torch.bool),
        torch.zeros(worlds, dtype=torch.int64),
    )
    crippled = rng.random((worlds, 2)) < 0.5
    figures = (rng.random(shape), rng.random(shape), rng.random(shape))
    return PlanTable("made", blueprints, plans, 0, 24, 0.02, *figures, sight, crippled)


def germinate(env: TableEnv, slot: int, blueprint: int, tempo: int = 3) -> torch.Tensor:
    actions = waiting(env.num_envs)
    actions[:, [SLOT_HEAD, BLUEPRINT_HEAD, TEMPO_HEAD, OP_HEAD]] = torch.tensor(
        [slot, blueprint, tempo, OP_GERMINATE]
    )
    return actions


def on_slot(env: TableEnv, op: int, slot: int) -> torch.Tensor:
    actions = waiting(env.num_envs)
    actions[:, [SLOT_HEAD, OP_HEAD]] = torch.tensor([slot, op])
    return actions


def test_a_table_of_some_blueprints() -> None:
    work = OneTask(parse_task(SMALL), 64, range(2), ["norm"])
    assert set(work.plans) == set(product((None, "norm"), repeat=3))
    with pytest.raises(EsperError, match="'attention' is no blueprint"):
        OneTask(parse_task(SMALL), 64, range(2), ["attention"])


def test_a_table_holds_figures_and_what_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_table, "TABLES", tmp_path)
    work = OneTask(parse_task(SMALL), 3, range(4, 7))
    assert [plan for plan in work.plans if not any(plan)] == [work.plans[0]]
    finished = {piece: work.measure(piece) for piece in range(3)}
    write_table(tmp_path / "small.safetensors", work, finished)
    table = load_table("small")
    assert table.plans == work.plans
    assert table.env_steps == 4
    assert table.first_world == 4
    assert table.objective.shape == (3, 3)
    assert table.objective[1] == pytest.approx(finished[1]["objective"])
    env = open_env(work.task, range(4, 7), root_seed=TRAINING, rows=8)
    env.begin_round(0)
    env.train_epoch(1)
    env.validate(1)
    obs, _ = env.observe(env.sense(1))
    assert torch.equal(table.sight.base, obs.base)
    assert torch.equal(table.sight.slots, obs.slots)
    offered = [blueprint_index(name) for name in table.blueprints]
    assert torch.equal(table.sight.quotes, obs.quotes[:, :, offered])
    assert table.crippled.shape == (3, 2)
    assert (table.rows()[0] == -1).all()
    with pytest.raises(EsperError, match="may choose any of 64"):
        TableEnv(table, range(3), envs=2, seed=0)


def test_finished_work_is_found_again_and_other_work_refused(tmp_path: Path) -> None:
    work = OneTask(parse_task(SMALL), 3, range(2))
    line = (
        b'{"number":1,"table":"'
        + digest(work).encode()
        + b'","piece":%s,"figures":{"objective":[0.5,0.25]}}\n'
    )
    name = tmp_path / f"{work.name}.0of1.jsonl"
    piece = str(work.pieces[1]).replace("'", '"').replace("None", "null").encode()
    name.write_bytes(line % piece + b'{"number":2')
    assert finished_pieces(tmp_path, work) == {1: {"objective": [0.5, 0.25]}}
    name.write_bytes(line % b'["norm","norm","norm"]')
    with pytest.raises(StructureError, match="piece of piece 1"):
        finished_pieces(tmp_path, work)
    name.write_bytes(line % piece)
    for other in (OneTask(work.task, 3, range(2, 4)), OneTask(work.task, 4, range(2))):
        with pytest.raises(StructureError, match="table of piece 1"):
            finished_pieces(tmp_path, other)


def test_pieces_of_a_family_with_other_blueprints_are_refused(tmp_path: Path) -> None:
    work, other = (
        Family("worlds_small", 64, range(10, 12), ["norm", name]) for name in ("residual", "conv_light")
    )
    record = {"number": 0, "table": digest(work), "piece": work.pieces[0], "figures": {"objective": [0.5]}}
    (tmp_path / "worlds_small.0of1.jsonl").write_bytes(orjson.dumps(record) + b"\n")
    assert finished_pieces(tmp_path, work) == {0: {"objective": [0.5]}}
    with pytest.raises(StructureError, match="table of piece 0"):
        finished_pieces(tmp_path, other)


@pytest.mark.slow
def test_worlds_of_a_family_are_measured_with_all_plans_at_once() -> None:
    work = Family("worlds_small", 4, range(10, 12))
    figures = [work.measure(piece) for piece in range(2)]
    assert all(len(one["objective"]) == 4 for one in figures)
    assert work.figures(dict(enumerate(figures)))["objective"].shape == (4, 2)
    alone = OneTask(parse_task("worlds_small:11"), 4, range(1))
    assert alone.plans == work.plans
    assert torch.equal(alone.sight().base, work.sight().base[1:])
    assert figures[1]["objective"][2] == alone.measure(2)["objective"][0]


def test_j_of_the_plan_that_was_planted_is_paid_once() -> None:
    table = made_table()
    env = TableEnv(table, range(6), envs=4, twins=2, seed=3)
    env.begin_round(0)
    assert env.world[0] == env.world[1] != env.world[2] == env.world[3]
    paid = torch.zeros(4)
    for actions in (germinate(env, 2, 1), waiting(4)):
        _obs, masks = env.observe()
        check_masks(masks)
        step = env.act(actions)
        paid += step.reward
    assert step.terminal.all()
    assert env.done.all()
    number = table.plans.index((None, None, "norm"))
    assert paid.tolist() == pytest.approx(table.objective[number, env.world.numpy()].tolist())
    again = env.act(germinate(env, 0, 0))
    assert not again.valid.any()
    assert not again.reward.any()
    assert env.objectives().tolist() == pytest.approx(paid.tolist())


def test_an_env_without_a_free_slot_is_done_after_its_last_seed() -> None:
    env = TableEnv(made_table(), range(6), envs=2, seed=0)
    env.begin_round(1)
    for slot in (1, 0, 2):
        _obs, masks = env.observe()
        assert masks.slot_by_op[0, OP_GERMINATE, slot]
        step = env.act(germinate(env, slot, 0))
    assert step.terminal.all()
    assert not env.observe()[1].op[:, OP_GERMINATE].any()


def test_what_was_planted_is_seen() -> None:
    env = TableEnv(made_table(), range(6), envs=2, seed=0)
    env.begin_round(0)
    before = env.observe()[0]
    env.act(germinate(env, 1, 0))
    light = env.observe()[0]
    env.begin_round(0)
    env.act(germinate(env, 1, 1))
    norm = env.observe()[0]
    assert torch.equal(before.slots[:, 0], light.slots[:, 0])
    assert not torch.equal(before.slots[:, 1], light.slots[:, 1])
    assert not torch.equal(norm.slots[:, 1], light.slots[:, 1])
    assert light.blueprints[:, 1].tolist() == [0, 0]


def test_dead_ends_cost_what_waste_costs() -> None:
    table = made_table()
    env = TableEnv(table, range(6), envs=2, seed=0, dead_ends=True)
    env.begin_round(0)
    played = [germinate(env, 0, 0, tempo=0), germinate(env, 1, 1, tempo=2), germinate(env, 2, 1, tempo=0)]
    played += [on_slot(env, OP_FOSSILIZE, 0), on_slot(env, OP_PRUNE, 2)]
    for actions in played:
        check_masks(env.observe()[1])
        env.act(actions)
    masks = env.observe()[1]
    assert not masks.op[:, OP_FOSSILIZE].any(), "slot 1 is stuck"
    assert masks.slot_by_op[0, OP_PRUNE].tolist() == [False, True, False]
    for _ in range(env.steps - len(played)):
        step = env.act(waiting(2))
    kept = table.objective[table.plans.index(("conv_light", None, None)), env.world.numpy()]
    assert step.terminal.all()
    assert step.reward.tolist() == pytest.approx((kept - 2 * 0.02).tolist())


def test_the_schedule_of_a_family_names_slots_in_the_order_of_execution() -> None:
    """The slots of world 2 are (r0c0, r0c1, r1c0), and activations pass r1c0 before r0c1."""
    table = replace(made_table(worlds=3), task="worlds_small")
    plan, objective = (None, "norm", "conv_light"), np.zeros_like(table.objective)
    objective[table.plans.index(plan), :2] = 0.5
    objective[table.plans.index((None, "conv_light", "norm")), 2] = 0.5
    table = replace(table, objective=objective)
    by_execution = by_place(table)
    assert by_execution[plan].tolist() == [0.5, 0.5, 0.5]
    assert best_first(by_execution)[0] == plan
    assert [(one.place, one.share, one.blueprint) for one in plantings(plan)] == [
        (2, 0.0, "norm"),
        (3, 0.0, "conv_light"),
    ]


def test_the_schedule_that_ships_is_that_of_the_table(tmp_path) -> None:
    family_schedule(["worlds_small", "--out", str(tmp_path / "schedule.json")])
    assert (tmp_path / "schedule.json").read_text() == shipped_schedules("worlds_small").read_text()
