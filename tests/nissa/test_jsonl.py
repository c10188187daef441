"""The event log: what a line holds, what survives a kill, and what a reader refuses."""

from __future__ import annotations

import enum
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import EsperError, LifecycleOp, SeedStage, TelemetryEvent, TelemetryEventType
from esper.nissa import JsonlOutput, TelemetryHub
from esper.nissa.hub import TelemetryError
from esper.nissa.outputs import read_events


def event(kind: str = "ppo_update", **data: object) -> TelemetryEvent:
    return TelemetryEvent(event_type=TelemetryEventType(kind), data=data)


def written(path: Path, *events: TelemetryEvent, level: int = 2) -> list[dict[str, Any]]:
    with TelemetryHub(level=level).attached(JsonlOutput(path)) as hub:
        for one in events:
            hub.emit(one)
    return list(read_events(path))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_a_line(log: Path) -> None:
    before = time.time()
    written(
        log,
        TelemetryEvent(
            event_type=TelemetryEventType.SEED_LIFECYCLE,
            data={"alpha": 0.25, "note": "π"},
            env_id=0,
            epoch=7,
            slot_id="r0c1",
        ),
        event("run_ended"),
    )
    first, second = (orjson.loads(line) for line in log.read_bytes().splitlines())
    assert before <= first.pop("t_wall") <= second.pop("t_wall") <= time.time()
    assert first == {
        "seq": 0,
        "event_type": "seed_lifecycle",
        "env_id": 0,
        "epoch": 7,
        "slot_id": "r0c1",
        "data": {"alpha": 0.25, "note": "π"},
    }
    assert second == {"seq": 1, "event_type": "run_ended", "data": {}}


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.int64(-3), -3),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(2.5), 2.5),
        (SeedStage.HOLDING, 6),
        (TelemetryEventType.ALERT, "alert"),
        (Colour.RED, "red"),
        ({LifecycleOp.PRUNE: 2}, {"3": 2}),
        ({TelemetryEventType.ALERT: 1}, {"alert": 1}),
        ({7: "x"}, {"7": "x"}),
        (None, None),
        (True, True),
        (2**63, 2**63),
        ([1, [2, (3,)]], [1, [2, [3]]]),
    ],
)
def test_values(log: Path, value: object, expected: object) -> None:
    (line,) = written(log, event(value=value))
    assert line["data"] == {"value": expected}
    assert type(line["data"]["value"]) is type(expected)
    assert "nonfinite" not in line


def test_nonfinite_floats_are_null_and_named(log: Path) -> None:
    (line,) = written(
        log,
        event(
            loss=math.nan,
            fine=1.0,
            missing=None,
            layers=[{"norm": math.inf}, {"norm": 2.0}],
            limits=(-math.inf,),
            array=np.array([1.0, math.nan]),
            scalar=np.float32("inf"),
        ),
    )
    assert line["data"] == {
        "loss": None,
        "fine": 1.0,
        "missing": None,
        "layers": [{"norm": None}, {"norm": 2.0}],
        "limits": [None],
        "array": [1.0, None],
        "scalar": None,
    }
    assert line["nonfinite"] == [
        "data.loss",
        "data.layers.0.norm",
        "data.limits.0",
        "data.array.1",
        "data.scalar",
    ]


trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=4)
    ),
)


def bad_leaves(value: object, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in bad_leaves(item, (*path, key))]
    if isinstance(value, list):
        return [leaf for i, item in enumerate(value) for leaf in bad_leaves(item, (*path, str(i)))]
    return [path] if isinstance(value, float) and not math.isfinite(value) else []


def agrees(sent: object, found: object) -> bool:
    if isinstance(sent, dict):
        return (
            isinstance(found, dict)
            and sent.keys() == found.keys()
            and all(agrees(sent[k], found[k]) for k in sent)
        )
    if isinstance(sent, list):
        return isinstance(found, list) and len(sent) == len(found) and all(map(agrees, sent, found))
    if isinstance(sent, float) and not math.isfinite(sent):
        return found is None
    return type(sent) is type(found) and sent == found


@settings(deadline=None)  # every example waits for the disk
@given(st.dictionaries(st.text("xyz", min_size=1, max_size=3), trees, max_size=4))
def test_any_data_comes_back(data: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (line,) = written(
            Path(folder) / "events.jsonl", TelemetryEvent(event_type=TelemetryEventType.ALERT, data=data)
        )
    assert agrees(data, line["data"])
    assert line.get("nonfinite", []) == [".".join(path) for path in bad_leaves(data, ("data",))]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"loss": object()}, "data.loss is a object"),
        ({"a": [{"b": 1j}]}, "data.a.0.b is a complex"),
        ({"a": {("x", "y"): 1}}, "key"),
        ({"a": 2**70}, "64-bit"),
    ],
)
def test_values_the_log_cannot_hold(log: Path, data: dict[str, Any], message: str) -> None:
    output = JsonlOutput(log)
    hub = TelemetryHub([output])
    hub.emit(event())
    with pytest.raises(
        TelemetryError, match=rf"event 1 \(alert\) was not recorded: .*events.jsonl.*{message}"
    ):
        hub.emit(TelemetryEvent(event_type=TelemetryEventType.ALERT, data=data))
    with pytest.raises(TelemetryError, match="expected event 1, got 2"):
        hub.emit(event())
    output.close()
    assert [line["seq"] for line in read_events(log)] == [0]


def test_step_events_enter_the_log_only_at_debug(log: Path, tmp_path: Path) -> None:
    sent = [
        event(kind)
        for kind in ("run_started", "last_action", "throughput", "ppo_update", "reward_summary", "run_ended")
    ]
    assert [line["event_type"] for line in written(log, *sent)] == ["run_started", "ppo_update", "run_ended"]
    assert [line["event_type"] for line in written(tmp_path / "debug.jsonl", *sent, level=3)] == [
        one.event_type for one in sent
    ]


def test_a_hundred_thousand_lines_without_a_gap(log: Path) -> None:
    with TelemetryHub().attached(JsonlOutput(log)) as hub:
        for i in range(100_000):
            hub.emit(event(i=i))
    for i, line in enumerate(read_events(log)):
        assert (line["seq"], line["data"]["i"]) == (i, i)
    assert i == 99_999


def test_flush_reaches_the_file_and_then_the_disk(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd).st_ino, os.fstat(fd).st_size)))
    with TelemetryHub().attached(JsonlOutput(log)) as hub:
        hub.emit(event())
        hub.flush()
        assert len(list(read_events(log))) == 1
        assert synced == [(log.stat().st_ino, log.stat().st_size)]
        hub.emit(event())
    assert synced[1:] == [(log.stat().st_ino, log.stat().st_size)]


def test_reopening_continues(log: Path) -> None:
    written(log, event(i=0), event(i=1))
    lines = written(log, event(i=2))
    assert [(line["seq"], line["data"]["i"]) for line in lines] == [(0, 0), (1, 1), (2, 2)]


def test_a_log_cut_at_any_byte_is_read_and_continued(log: Path) -> None:
    written(log, event(i=0), event(i=1))
    whole = log.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(len(whole) + 1):
        complete = (size >= first) + (size == len(whole))
        log.write_bytes(whole[:size])
        assert [line["data"]["i"] for line in read_events(log)] == list(range(complete))
        output = JsonlOutput(log)
        assert output.next_seq == complete
        output.emit(complete, event(i=complete))
        output.close()
        assert [line["data"]["i"] for line in read_events(log)] == list(range(complete + 1))
        assert log.read_bytes().startswith(whole[:first] if complete else b'{"seq":0')


KILLED = """
import sys
from itertools import count
from esper.leyline import TelemetryEvent, TelemetryEventType
from esper.nissa import JsonlOutput, TelemetryHub

hub = TelemetryHub([JsonlOutput(sys.argv[1])])
for i in count():
    hub.emit(TelemetryEvent(event_type=TelemetryEventType.ALERT, data={"i": i, "text": "x" * (i % 300)}))
    if i == 999:
        hub.flush()
        print("flushed", flush=True)
"""


def test_kill_leaves_a_valid_prefix(log: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(log)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "flushed\n"
        size, deadline = log.stat().st_size, time.monotonic() + 30
        while log.stat().st_size < size + 100_000:  # well into lines that were never flushed
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    lines = list(read_events(log))
    assert len(lines) >= 1000
    assert [(line["seq"], line["data"]) for line in lines] == [
        (i, {"i": i, "text": "x" * (i % 300)}) for i in range(len(lines))
    ]
    assert len(written(log, event())) == len(lines) + 1


def test_what_was_flushed_survives_a_kill(log: Path) -> None:
    code = KILLED.replace('print("flushed", flush=True)', "import os; os.kill(os.getpid(), 9)")
    assert subprocess.run([sys.executable, "-c", code, str(log)], check=False).returncode == -signal.SIGKILL
    assert len(list(read_events(log))) == 1000


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [lines[0], b"garbage\n", *lines[2:]], "line 2: not JSON"),
        (lambda lines: [lines[0], lines[1][:-9] + b"\n", *lines[2:]], "line 2: not JSON"),
        (lambda lines: [*lines[:2], b"\0" * 20 + b"\n"], "line 3: not JSON"),
        (lambda lines: [lines[0], b"\n", *lines[1:]], "line 2: not JSON"),
        (lambda lines: [lines[0], b"[1]\n", *lines[2:]], r"line 2: .*\[1\].* is not an event"),
        (lambda lines: [lines[0], b'{"a":1}\n', *lines[2:]], "line 2: .* is not an event"),
        (lambda lines: [lines[0], lines[2]], "line 2: event 2 where event 1 was expected"),
        (lambda lines: [lines[0], lines[0]], "line 2: event 0 where event 1 was expected"),
        (lambda lines: lines[1:], "line 1: event 1 where event 0 was expected"),
    ],
)
def test_damage_is_an_error_with_its_line(log: Path, damage: Any, message: str) -> None:
    written(log, event(), event(), event())
    log.write_bytes(b"".join(damage(log.read_bytes().splitlines(keepends=True))))
    with pytest.raises(EsperError, match=f"events.jsonl, {message}"):
        list(read_events(log))


@pytest.mark.parametrize(
    "content", [b"a poem\nof mine\n", b"no newline at all", b'{"seq":0}\nhandwritten', b'{"other":1}']
)
def test_a_foreign_file_is_left_alone(log: Path, content: bytes) -> None:
    log.write_bytes(content)
    with pytest.raises(TelemetryError, match=r"events\.jsonl"):
        JsonlOutput(log)
    assert log.read_bytes() == content


@pytest.mark.parametrize("place", ["missing/events.jsonl", "file/events.jsonl", "folder"])
def test_unwritable_path(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(TelemetryError) as error:
        JsonlOutput(tmp_path / place)
    assert isinstance(error.value, EsperError)
    assert str(tmp_path / place) in str(error.value)


def test_missing_log(log: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"events\.jsonl"):
        list(read_events(log))


def test_a_gap_is_refused(log: Path) -> None:
    output = JsonlOutput(log)
    hub = TelemetryHub([output])
    hub.next_seq = 5
    with pytest.raises(TelemetryError, match="expected event 0, got 5"):
        hub.emit(event())
    output.close()
    assert log.read_bytes() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_heard() -> None:
    output = JsonlOutput("/dev/full")
    hub = TelemetryHub([output])
    hub.emit(event())
    with pytest.raises(
        TelemetryError, match=r"flush failed: JsonlOutput\('/dev/full'\): OSError.*No space left"
    ):
        hub.flush()
    with pytest.raises(TelemetryError, match=r"event 1 .*No space left"):
        hub.emit(event(text="x" * 100_000))
    with pytest.raises(OSError, match="No space left"):
        output.close()
    output.close()
