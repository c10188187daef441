"""SQL over a run: every recorded number is there, joined ones are right, and a query reaches nothing else."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from esper.karn import Views
from esper.karn.summary import open_run
from esper.karn.views import EVENT_VIEWS, VIEWS
from esper.leyline import EVENTS, METRICS, STEP_TABLES, EsperError, SeedStage, TelemetryEventType

from .conftest import Write


@pytest.fixture(scope="module")
def views(run_path: Path) -> Views:
    return open_run(run_path)


def log(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


def test_every_event_type_and_metric_is_in_a_view() -> None:
    assert set(EVENT_VIEWS) == set(TelemetryEventType)
    shown = {
        f"{kind.value}.{column.name}" for kind, name in EVENT_VIEWS.items() for column in VIEWS[name].columns
    }
    shown |= {f"round.{column.name}" for column in VIEWS["health"].columns}
    assert METRICS.keys() <= shown
    assert all(column.meaning.endswith(".") for view in VIEWS.values() for column in view.columns)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_the_columns_that_its_description_names(name: str, views: Views) -> None:
    assert views.query(f"SELECT * FROM {name}")[0] == [column.name for column in VIEWS[name].columns]


@pytest.mark.parametrize("kind", [kind for kind in EVENTS if kind not in STEP_TABLES])
def test_a_view_holds_every_event_of_its_kind(kind: TelemetryEventType, views: Views, run_path: Path) -> None:
    events = [event for event in log(run_path) if event["event_type"] == kind.value]
    rows = views.rows(f"SELECT * FROM {EVENT_VIEWS[kind]} ORDER BY seq")
    assert len(rows) == len(events)
    for row, event in zip(rows, events, strict=True):
        assert row["seq"] == event["seq"]
        assert {field.name: row[field.name] for field in EVENTS[kind].fields} == {
            field.name: event["data"].get(field.name) for field in EVENTS[kind].fields
        }


@pytest.mark.parametrize("table", STEP_TABLES.values())
def test_a_view_of_steps_holds_the_table_files(table: str, views: Views, run_path: Path) -> None:
    files = sorted((run_path / "tables").glob(f"{table}-*.parquet"))
    stored = [row for file in files for row in pq.read_table(file).to_pylist(maps_as_pydicts="strict")]
    assert len(stored) == 2 * 4 * 6
    stored.sort(key=lambda row: (row["seq"], row["env_id"]))
    assert views.rows(f"SELECT * FROM {table} ORDER BY seq, env_id") == stored


def test_slots_follow_each_seed(views: Views) -> None:
    births: dict[tuple, dict[int, str]] = defaultdict(dict)
    for row in views.rows("SELECT * FROM lifecycle WHERE kind = 'germinated'"):
        births[row["round_idx"], row["env_id"], row["slot_id"]][row["epoch"]] = row["blueprint_id"]
    expected = []
    for step in views.rows("SELECT * FROM steps"):
        for slot, stage in step["stages"].items():
            born = births[step["round_idx"], step["env_id"], slot]
            expected.append(
                (
                    step["round_idx"],
                    step["env_id"],
                    step["epoch"],
                    slot,
                    SeedStage(stage).name,
                    born[max(epoch for epoch in born if epoch <= step["epoch"])],
                    step["alphas"][slot],
                    step["contributions"].get(slot),
                )
            )
    assert expected
    assert sorted(map(str, expected)) == sorted(str(row) for row in views.query("SELECT * FROM slots")[1])


def test_terms_add_up_to_the_rewards(views: Views) -> None:
    sums = views.rows("SELECT round_idx, env_id, epoch, sum(amount) AS paid FROM terms GROUP BY ALL")
    totals = {
        (r["round_idx"], r["env_id"], r["epoch"]): r["total_reward"]
        for r in views.rows("SELECT * FROM rewards")
    }
    assert {(r["round_idx"], r["env_id"], r["epoch"]): r["paid"] for r in sums} == pytest.approx(
        totals, abs=1e-12
    )


def test_shares_are_the_attributions(views: Views) -> None:
    expected = [
        (event["round_idx"], event["env_id"], slot, event["leave_one_out"][slot], event["shapley"][slot])
        for event in views.rows("SELECT * FROM attribution")
        for slot in event["slots"]
    ]
    assert expected
    assert views.query("SELECT round_idx, env_id, slot, leave_one_out, shapley FROM shares")[1] == sorted(
        expected
    )
    assert None not in {row["blueprint"] for row in views.rows("SELECT blueprint FROM shares")}


def seed(
    kind: str, blueprint: str, *, contribution: float | None = None, params: int = 100, age: int = 5
) -> tuple:
    return "seed_lifecycle", {
        "kind": kind,
        "blueprint_id": blueprint,
        "params": params,
        "epochs_total": age,
        "contribution": contribution,
    }


def test_blueprints_against_hand_counts(write_run: Write) -> None:
    path = write_run(
        [
            *[seed("germinated", "norm")] * 3,
            *[seed("germinated", "conv_light")] * 4,
            seed("germinated", "lora"),
            seed("stage_changed", "conv_light"),
            seed("gate_refused", "conv_light"),
            seed("fossilized", "conv_light", contribution=4.0, params=156, age=8),
            seed("fossilized", "conv_light", contribution=2.0, params=144, age=10),
            seed("fossilized", "conv_light", params=156, age=12),
            seed("pruned", "conv_light", contribution=-1.5),
            seed("pruned", "norm"),
            ("alert", {"code": "pruned"}),
        ]
    )
    names, rows = open_run(path).query("SELECT * FROM blueprints")
    assert names == [
        "blueprint_id",
        "germinated",
        "fossilized",
        "pruned",
        "survival",
        "mean_contribution",
        "mean_pruned_contribution",
        "mean_params",
        "mean_age",
    ]
    assert rows == [
        ("conv_light", 4, 3, 1, 0.75, 3.0, -1.5, 152.0, 10.0),
        ("norm", 3, 0, 1, 0.0, None, None, None, None),
        ("lora", 1, 0, 0, None, None, None, None, None),
    ]


def round_events(
    i: int,
    reward: float | None,
    *,
    counts: dict[str, int],
    done: dict[str, int],
    germinated: int = 0,
    ended: int = 0,
    rollbacks: int = 0,
    loss: float = 1.0,
) -> list[tuple]:
    at = {"round_idx": i, "env_id": 0, "epoch": 6}
    outcome = {"episode_idx": i, "germinated": germinated, "fossilized": ended, "pruned": 0}
    return [
        *[("rollback", {"reason": "divergence"}, at)] * rollbacks,
        ("ppo_update", {"policy_loss": loss, "head_entropy": {"op": loss}}, {"round_idx": i}),
        *[("episode_outcome", outcome, at | {"env_id": env}) for env in range(2)],
        ("action_distribution", {"action_counts": counts, "action_successes": done}, {"round_idx": i}),
        ("batch_completed", {"round_idx": i, "avg_reward": reward}, {"round_idx": i}),
    ]


def test_health_against_hand_counts(write_run: Write) -> None:
    """Each figure of the alert rules, worked out by hand for rounds that differ in one thing each."""
    acts = {"WAIT": 6, "GERMINATE": 3, "PRUNE": 1}
    rewards = [1.0, -2.0, None, 0.5, 8.0, *[0.0] * 10, 3.0]
    rounds: list[tuple] = []
    for i, reward in enumerate(rewards):
        faults: dict = {1: {"rollbacks": 3}, 2: {"germinated": 4, "ended": 1}, 3: {"loss": float("nan")}}.get(
            i, {}
        )
        done = {"WAIT": 6, "GERMINATE": 2, "PRUNE": 1} if i == 4 else acts
        rounds += round_events(
            i, reward, counts={"WAIT": 5} if i == 5 else acts, done={"WAIT": 5} if i == 5 else done, **faults
        )
    health = open_run(write_run(rounds)).rows("SELECT * FROM health ORDER BY round_idx")
    assert [row["round_idx"] for row in health] == list(range(16))
    assert [row["wait_share"] for row in health[:6]] == pytest.approx([0.6] * 5 + [1.0])
    assert [row["top_op_share"] for row in health[4:6]] == [pytest.approx(0.25), None]
    assert [row["failure_rate"] for row in health[3:6]] == [pytest.approx(0.0), pytest.approx(0.25), None]
    assert [row["rollbacks_per_episode"] for row in health[:3]] == pytest.approx([0.0, 1.5, 0.0])
    assert [row["unfinished_share"] for row in health[1:3]] == [None, pytest.approx(0.75)]
    assert [row["nonfinite_metrics"] for row in health[2:5]] == [
        0,
        1,
        0,
    ]  # the map's entry is no number of its own
    # Measured rewards only: 1, −2, .5 come before 8; the last one is compared with ten zeros, 8 having left
    # the window.
    jumps = [row["reward_jump"] for row in health[:6]]
    assert (jumps[0], jumps[2]) == (None, None)
    assert [jumps[i] for i in (1, 3, 4, 5)] == pytest.approx([2.0, 0.25, 4.0, 0.0])
    assert health[-1]["reward_jump"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_text('{secret}')",
        "COPY rounds TO '{secret}.csv'",
        "ATTACH '{secret}.db'",
        "SET enable_external_access = true",
        "SELECT * FROM views",
        "SELEC 1",
    ],
)
def test_a_query_reaches_nothing_but_the_views(query: str, views: Views, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    with pytest.raises(EsperError, match="query"):
        views.query(query.format(secret=secret))
    assert list(tmp_path.iterdir()) == [secret]


def test_fields_unknown_to_the_registry_are_named(write_run: Write) -> None:
    path = write_run([("checkpoint", {"path": "a", "weight": 3})])
    assert open_run(path).unknown == {"checkpoint.weight"}
