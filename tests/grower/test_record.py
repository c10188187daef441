"""A recorded model is a run like any other: watch, report, sql and compare read it, and a resumed one goes on
without a gap."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.grower import Grower
from esper.karn.summary import open_run, summarize
from esper.leyline import EsperError
from esper.scripts import compare, report, sql
from frozen import data_of
from grower_helpers import SmallCNN, accuracy, attach, make, same, train_epoch

SCHEDULE = [(1, "layer2", "conv_light"), (3, "layer1", "norm")]


def recorded(path: Path, *, epochs: int = 5, stop: int = 5, state: Any = None, policy: Any = SCHEDULE) -> Any:
    model = make(lambda: SmallCNN(4))
    grower = attach(model, policy=policy, epochs=epochs, record=path, evaluate=lambda: accuracy(model))
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    if state is not None:
        grower.load_state_dict(state["grower"])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    while grower.epoch < stop:
        train_epoch(model, optimizer)
        grower.step()
    parts = {"grower": grower, "model": model, "optimizer": optimizer}
    return grower, copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


def test_every_reader_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grower, _ = recorded(tmp_path / "a")
    recorded(tmp_path / "b", policy=None)
    views = open_run(tmp_path / "a")
    summary = summarize(views)
    assert (summary.status, summary.task, summary.envs, summary.rounds_done) == ("finished", "SmallCNN", 1, 1)
    kinds = [
        (row["slot_id"], row["kind"])
        for row in views.rows("SELECT slot_id, kind FROM lifecycle ORDER BY seq")
    ]
    assert ("layer2", "germinated") in kinds
    assert ("layer2", "fossilized") in kinds
    steps = views.rows("SELECT epoch, op, accuracy FROM steps ORDER BY epoch")
    assert [row["epoch"] for row in steps] == [1, 2, 3, 4, 5]
    assert [row["accuracy"] for row in steps] == pytest.approx(grower.accuracies)
    assert report.main([str(tmp_path / "a")]) == 0
    page = (tmp_path / "a" / "report.html").read_text()
    assert "conv_light" in str(data_of(page)["rounds"])
    assert sql.main([str(tmp_path / "a"), "SELECT germinated, fossilized FROM episodes"]) == 0
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "final_accuracy" in capsys.readouterr().out


def test_watch_shows_it(tmp_path: Path) -> None:
    textual = pytest.importorskip("textual")
    assert textual
    from esper.karn.watch import WatchApp

    recorded(tmp_path / "a")

    async def look() -> None:
        app = WatchApp(open_run(tmp_path / "a"))
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause()

    asyncio.run(look())


def test_a_resumed_run_has_every_epoch_once(tmp_path: Path) -> None:
    whole, state = recorded(tmp_path / "whole")
    assert isinstance(whole, Grower)
    stopped, half = recorded(tmp_path / "run", stop=2)
    train_epoch(stopped.model)
    stopped.step()  # lost with its process: recorded after the state was saved
    stopped._recorder._stack.close()  # as the end of the process does
    again, end = recorded(tmp_path / "run", state=half)
    again.close()
    views = open_run(tmp_path / "run")
    assert [r["epoch"] for r in views.rows("SELECT epoch FROM steps ORDER BY epoch")] == [1, 2, 3, 4, 5]
    assert len(views.rows("SELECT seq FROM starts")) == 1
    for part in ("model", "optimizer"):
        assert same(end[part], state[part])


@pytest.mark.parametrize("resumed", [False, True])
def test_epochs_after_the_last_one_are_recorded(resumed: bool, tmp_path: Path) -> None:
    """The record ends after each of them, so that none needs `close`."""
    path, hand = tmp_path / "run", {"epochs": 2, "policy": None}
    grower, state = recorded(path, stop=2, **hand)
    (end,) = open_run(path).rows("SELECT max(seq) AS seq FROM ends")
    if resumed:
        grower, _ = recorded(path, stop=2, state=state, **hand)
    assert open_run(path).rows("SELECT max(seq) AS seq FROM ends") == [end], "no epoch has come yet"
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    for epoch in (3, 4, 5):
        train_epoch(grower.model, optimizer)
        if epoch == 5:
            grower.germinate("layer2", "conv_light")
        grower.step()
        views = open_run(path)
        assert [row["epoch"] for row in views.rows("SELECT epoch FROM steps ORDER BY epoch")] == list(
            range(1, epoch + 1)
        )
        assert summarize(views).status == "finished"
    grower.close()
    views = open_run(path)
    assert [tuple(row.values()) for row in views.rows("SELECT kind, epoch FROM lifecycle")] == [
        ("germinated", 5)
    ]
    assert views.rows("SELECT epochs, germinated FROM episodes") == [{"epochs": 5, "germinated": 1}]
    for table in ("starts", "ends", "rounds", "episodes"):
        assert len(views.rows(f"SELECT seq FROM {table}")) == 1, table
    assert report.main([str(path)]) == 0


def test_a_closed_record_goes_on_with_the_next_epoch(tmp_path: Path) -> None:
    model = make(lambda: SmallCNN(4))
    grower = attach(model, record=tmp_path / "a")
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    for _ in range(2):
        train_epoch(model, optimizer)
        grower.step(0.5)
        grower.close()
        grower.close()
    views = open_run(tmp_path / "a")
    assert [row["epoch"] for row in views.rows("SELECT epoch FROM steps ORDER BY epoch")] == [1, 2]
    assert len(views.rows("SELECT seq FROM ends")) == 1
    assert summarize(views).status == "finished"


@pytest.mark.parametrize("measures", [False, True])
def test_the_outcome_of_a_run_that_ends_with_a_prune_is_that_of_the_network_after_it(
    measures: bool, tmp_path: Path
) -> None:
    def policy(grower: Grower) -> Any:
        return {0: ("germinate", "layer1", "conv_light"), 1: ("prune", "layer1")}.get(grower.epoch)

    model = make(lambda: SmallCNN(4))
    evaluate = (lambda: accuracy(model)) if measures else None
    grower = attach(model, policy=policy, epochs=2, record=tmp_path / "a", evaluate=evaluate)
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.05))
    for _ in range(2):
        train_epoch(model, optimizer)
        last = accuracy(model)
        grower.step(last)
    assert last != accuracy(model)
    (row,) = open_run(tmp_path / "a").rows("SELECT committed_accuracy, objective, pruned FROM episodes")
    assert row["pruned"] == 1
    if measures:
        assert row["committed_accuracy"] == pytest.approx(100 * accuracy(model))
    else:
        assert row["committed_accuracy"] is None
        assert row["objective"] is None


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    recorded(tmp_path / "a")
    with pytest.raises(EsperError, match="holds a run; continue it with"):
        recorded(tmp_path / "a")


@pytest.mark.parametrize("killed", ["before its first epoch", "while it was created"])
def test_a_run_that_was_killed_before_it_recorded_an_epoch_is_begun_anew(killed: str, tmp_path: Path) -> None:
    attach(make(lambda: SmallCNN(4)), record=tmp_path / "a")._recorder._stack.close()  # as its end does
    if killed == "while it was created":
        (tmp_path / "a" / "run.json").unlink()
        (tmp_path / "a" / "events.jsonl").write_bytes(b"")
    grower, _ = recorded(tmp_path / "a", stop=2)
    grower.close()
    views = open_run(tmp_path / "a")
    assert [row["epoch"] for row in views.rows("SELECT epoch FROM steps ORDER BY epoch")] == [1, 2]
    assert len(views.rows("SELECT seq FROM starts")) == 1


def test_recording_changes_no_weight(tmp_path: Path) -> None:
    def run(path: Path | None) -> dict[str, torch.Tensor]:
        model = make(lambda: SmallCNN(4))
        grower = attach(model, policy=SCHEDULE, record=path)
        optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
        for _ in range(3):
            train_epoch(model, optimizer)
            grower.step(accuracy(model))
        grower.close()
        return model.state_dict()

    assert same(run(None), run(tmp_path / "a"))
