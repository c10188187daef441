"""The hub: order, gap-free numbers, levels, and events that are never lost in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper import nissa
from esper.leyline import EsperError, TelemetryEvent, TelemetryEventType
from esper.nissa import JsonlOutput, TelemetryHub, get_hub, read_events
from esper.nissa.hub import TelemetryError
from memory_output import MemoryOutput

LOWEST_LEVEL = {
    "run_started": 1,
    "run_ended": 1,
    "batch_completed": 1,
    "ppo_update": 1,
    "action_distribution": 1,
    "episode_outcome": 1,
    "rollback": 1,
    "alert": 1,
    "checkpoint": 1,
    "mask_hit_rates": 2,
    "seed_lifecycle": 2,
    "attribution": 2,
    "cf_unavailable": 2,
    "last_action": 3,
    "reward_summary": 3,
    "throughput": 3,
}
STEPS = {"last_action", "reward_summary", "throughput"}
kinds = st.sampled_from(TelemetryEventType)


def event(kind: str = "ppo_update", **data: object) -> TelemetryEvent:
    return TelemetryEvent(event_type=TelemetryEventType(kind), data=data)


class Journal:
    """Writes every call of several outputs into one list."""

    def __init__(self, name: str, calls: list[tuple[object, ...]], *, failing: bool = False) -> None:
        self.name, self.calls, self.failing = name, calls, failing

    def __repr__(self) -> str:
        return f"Journal({self.name})"

    def note(self, *call: object) -> None:
        if self.failing:
            raise OSError(28, "No space left on device")
        self.calls.append((self.name, *call))

    def emit(self, seq: int, event: TelemetryEvent) -> None:
        self.note("emit", seq, event.data["i"])

    def flush(self) -> None:
        self.note("flush")

    def close(self) -> None:
        self.note("close")


@pytest.fixture
def calls() -> list[tuple[object, ...]]:
    return []


def test_fan_out_is_synchronous_and_ordered(calls: list[tuple[object, ...]]) -> None:
    hub = TelemetryHub([Journal("a", calls)])
    hub.add_output(Journal("b", calls))
    hub.emit(event(i=10))
    assert calls == [("a", "emit", 0, 10), ("b", "emit", 0, 10)]
    hub.emit(event(i=11))
    hub.flush()
    assert calls[2:] == [("a", "emit", 1, 11), ("b", "emit", 1, 11), ("a", "flush"), ("b", "flush")]


def test_a_hundred_thousand_events_without_a_gap() -> None:
    memory = MemoryOutput()
    hub = TelemetryHub([memory])
    events = [event(kind) for kind in LOWEST_LEVEL]
    sent = [events[i * 7 % len(events)] for i in range(100_000)]
    for one in sent:
        hub.emit(one)
    kept = [one for one in sent if LOWEST_LEVEL[one.event_type] <= 2]
    assert len(kept) > 80_000
    assert [seq for seq, _ in memory.events] == list(range(len(kept)))
    assert all(found is one for (_, found), one in zip(memory.events, kept, strict=True))


def test_every_event_type_has_a_level() -> None:
    assert set(LOWEST_LEVEL) == {kind.value for kind in TelemetryEventType}


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("kind", LOWEST_LEVEL)
def test_levels(kind: str, level: int) -> None:
    log, table = MemoryOutput(), MemoryOutput(wants_step_events=True)
    hub = TelemetryHub([log, table], level=level)
    hub.emit(event(kind))
    logged = LOWEST_LEVEL[kind] <= level
    assert len(log.events) == logged
    assert len(table.events) == (logged or (kind in STEPS and level == 2))
    assert hub.next_seq == logged


@given(st.lists(st.tuples(kinds, st.integers(0, 3)), max_size=60))
def test_numbers_have_no_gap_whatever_the_level_does(steps: list[tuple[TelemetryEventType, int]]) -> None:
    log, table = MemoryOutput(), MemoryOutput(wants_step_events=True)
    hub = TelemetryHub([log, table])
    for kind, level in steps:
        hub.level = level
        hub.emit(event(kind))
    assert [seq for seq, _ in log.events] == list(range(len(log.events)))
    assert hub.next_seq == len(log.events)


@pytest.mark.parametrize("level", [2, 3])
@given(before=st.lists(kinds, max_size=20), after=st.lists(kinds, max_size=20))
def test_a_checkpoint_cuts_log_and_tables_alike(
    level: int, before: list[TelemetryEventType], after: list[TelemetryEventType]
) -> None:
    table = MemoryOutput(wants_step_events=True)
    hub = TelemetryHub([table], level=level)
    for kind in before:
        hub.emit(event(kind))
    cut = hub.next_seq
    hub.emit(event("checkpoint"))
    for kind in after:
        hub.emit(event(kind))
    assert [one.event_type for seq, one in table.events if seq <= cut] == [
        *before,
        TelemetryEventType.CHECKPOINT,
    ]
    assert [one.event_type for seq, one in table.events if seq > cut] == after


@pytest.mark.parametrize("level", [-1, 4, "debug"])
def test_unknown_level(level: object) -> None:
    with pytest.raises(TelemetryError, match=f"{level!r}; allowed: 0, 1, 2, 3"):
        TelemetryHub(level=level)  # type: ignore[arg-type]


def test_without_outputs_no_number_is_taken() -> None:
    hub = TelemetryHub()
    hub.emit(event())
    memory = MemoryOutput()
    hub.add_output(memory)
    hub.emit(event())
    assert [seq for seq, _ in memory.events] == [0]


@pytest.mark.parametrize("position", [0, 1])
def test_failing_output(calls: list[tuple[object, ...]], position: int) -> None:
    outputs = [Journal("good", calls)]
    outputs.insert(position, Journal("bad", calls, failing=True))
    hub = TelemetryHub(outputs)
    message = r"event 0 \(ppo_update\) was not recorded: Journal\(bad\): OSError.*No space left"
    with pytest.raises(TelemetryError, match=message) as error:
        hub.emit(event(i=1))
    assert isinstance(error.value, EsperError)
    assert isinstance(error.value.__cause__, OSError)
    with pytest.raises(TelemetryError, match="event 1"):
        hub.emit(event(i=2))
    with pytest.raises(TelemetryError, match="flush failed"):
        hub.flush()
    assert calls == [("good", "emit", 0, 1), ("good", "emit", 1, 2), ("good", "flush")]


def test_every_failing_output_is_named(calls: list[tuple[object, ...]]) -> None:
    hub = TelemetryHub([Journal("one", calls, failing=True), Journal("two", calls, failing=True)])
    with pytest.raises(TelemetryError, match=r"Journal\(one\).*Journal\(two\)"):
        hub.emit(event(i=1))


def test_failing_step_output_is_heard() -> None:
    class Table(Journal):
        wants_step_events = True

    hub = TelemetryHub([Table("table", [], failing=True)])
    with pytest.raises(TelemetryError, match=r"last_action.*Journal\(table\)"):
        hub.emit(event("last_action"))


def test_the_hub_of_the_process() -> None:
    memory = MemoryOutput()
    with get_hub().attached(memory):
        nissa.get_hub().emit(event(i=1))
    get_hub().emit(event(i=2))
    assert [one for _, one in memory.events] == [event(i=1)]


def test_the_round_under_way_is_stamped_on_events_that_name_none() -> None:
    memory = MemoryOutput()
    hub = TelemetryHub([memory])
    hub.emit(event(i=0))
    hub.round_idx = 3
    hub.emit(event(i=1))
    hub.emit(TelemetryEvent(event_type=TelemetryEventType.ALERT, round_idx=7))
    assert [one.round_idx for _, one in memory.events] == [None, 3, 7]
    assert memory.events[1][1] == TelemetryEvent(
        event_type=TelemetryEventType.PPO_UPDATE, data={"i": 1}, round_idx=3
    )


def test_outputs_of_one_run(tmp_path: Path) -> None:
    """Two runs through one hub: each has its own log from 0, and what was there before sees both."""
    memory = MemoryOutput()
    hub = TelemetryHub([memory])
    for name, count in (("a", 3), ("b", 2)):
        log = JsonlOutput(tmp_path / name)
        with hub.attached(log, MemoryOutput(wants_step_events=True)) as attached:
            assert attached is hub
            hub.round_idx = 5
            for _ in range(count):
                hub.emit(event())
        assert hub.round_idx is None
        assert [line["seq"] for line in read_events(tmp_path / name)] == list(range(count))
        hub.emit(event())
        assert len(list(read_events(tmp_path / name))) == count
    assert [seq for seq, _ in memory.events] == [0, 1, 2, 3, 0, 1, 2]


def test_a_resumed_log_goes_on(tmp_path: Path) -> None:
    for total in (2, 4):
        with TelemetryHub().attached(JsonlOutput(tmp_path / "log")) as hub:
            hub.emit(event())
            hub.emit(event())
        assert [line["seq"] for line in read_events(tmp_path / "log")] == list(range(total))


def test_a_failing_run_still_closes_its_outputs(calls: list[tuple[object, ...]]) -> None:
    hub = TelemetryHub()
    with pytest.raises(ZeroDivisionError), hub.attached(Journal("a", calls)):
        _ = 1 / 0
    hub.emit(event(i=2))
    assert calls == [("a", "close")]
    with (
        pytest.raises(TelemetryError, match=r"close failed: Journal\(bad\)"),
        hub.attached(Journal("bad", calls, failing=True), Journal("b", calls)),
    ):
        pass
    assert calls[-1] == ("b", "close")


def test_exports() -> None:
    for name in nissa.__all__:
        assert getattr(nissa, name).__name__ == name
    assert {"get_hub", "JsonlOutput", "ParquetOutput", "RunDirectory", "BlueprintAnalytics"} <= set(
        nissa.__all__
    )
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = nissa.no_such_name
